"""A tokenizer as the grammar engine reads it, made once per tokenizer and set of end tokens.

The engine's vocabulary and the model's differ: logits are often wider than the tokenizer, and some
models have fewer. What the engine allows is brought to the model's vocabulary here.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from llguidance import LLTokenizer
    from numpy.typing import NDArray

__all__ = ["Bits", "Vocabulary", "fast_tokenizer", "read_vocabulary"]

Bits: TypeAlias = "NDArray[np.int32]"
"""``[positions, words]``: one bit per id, the lowest bit of a word first."""

_Key: TypeAlias = tuple[int, frozenset[int], int]

_known: WeakKeyDictionary[Any, dict[_Key, Vocabulary]] = WeakKeyDictionary()
_lock = Lock()


@frozen(eq=False)
class Vocabulary:
    """One model's vocabulary, for the grammar engine.

    Attributes:
        engine: the tokenizer in the engine's form.
        size: V, the width of the model's logits.
        end_tokens: the ids under V that end an output.
        engine_end: an id by which the engine says that the output may end.
        text: ``[words]``, the ids under V that the tokenizer knows and that end nothing.
        ends: ``[words]``, the end tokens.
    """

    engine: LLTokenizer = field(repr=False)
    size: int
    end_tokens: frozenset[int]
    engine_end: int
    text: NDArray[np.int32] = field(repr=False)
    ends: NDArray[np.int32] = field(repr=False)

    @property
    def words(self) -> int:
        """How many words of 32 bits one position's mask has."""
        return len(self.text)

    def readable(self, draft: Sequence[int]) -> list[int]:
        """The draft up to its first id that the model does not have."""
        for place, token in enumerate(draft):
            if not 0 <= token < self.size:
                return list(draft[:place])
        return list(draft)

    def restrict(self, bits: Bits) -> None:
        """Bring what the engine allows to this vocabulary, in place."""
        may_end = (bits[:, self.engine_end >> 5] >> (self.engine_end & 31)) & 1
        bits &= self.text
        bits[may_end == 1] |= self.ends

    def on_device(self, bits: Bits) -> mx.array:
        """Bits as bool ``[positions, V]``; no position is looked at on the host."""
        octets = mx.array(bits.view(np.uint8))[..., None]
        flags = (octets >> mx.arange(8, dtype=mx.uint8)) & 1
        return flags.reshape(len(bits), -1)[:, : self.size].astype(mx.bool_)


def fast_tokenizer(tokenizer: Any) -> PreTrainedTokenizerFast:
    """The transformers tokenizer inside mlx-lm's wrapper, or the one that was given.

    Raises:
        OptionError: it is no fast tokenizer.
    """
    inner = tokenizer
    # A fast tokenizer has a ``_tokenizer`` too, which is the Rust one and not wanted here.
    while not isinstance(inner, PreTrainedTokenizerFast) and "_tokenizer" in vars_of(inner):
        inner = vars_of(inner)["_tokenizer"]
    if not isinstance(inner, PreTrainedTokenizerFast):
        raise OptionError(
            f"a grammar cannot read a tokenizer of type {type(inner).__name__}; "
            "give a fast tokenizer of transformers, or mlx-lm's wrapper of one"
        )
    return inner


def vars_of(thing: object) -> dict[str, Any]:
    """A thing's own attributes, without asking its ``__getattr__``."""
    return getattr(thing, "__dict__", {})


def read_vocabulary(tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> Vocabulary:
    """The vocabulary of a tokenizer and a model, kept as long as the tokenizer lives.

    Args:
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
        vocab_size: V, the width of the model's logits.
        end_tokens: the ids that end an output; those outside the vocabulary are left out.

    Raises:
        OptionError: a tokenizer that the engine cannot read, or a size that is none.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise OptionError(f"vocab_size is {vocab_size!r}; give the width of the model's logits")
    fast = fast_tokenizer(tokenizer)
    ends = frozenset(int(token) for token in end_tokens if 0 <= token < vocab_size)
    key = (vocab_size, ends, len(fast))  # tokens can be added to a tokenizer
    with _lock:
        of_tokenizer = _known.setdefault(fast, {})
        if key not in of_tokenizer:
            of_tokenizer[key] = _build(fast, vocab_size, ends)
        return of_tokenizer[key]


def _build(tokenizer: PreTrainedTokenizerFast, size: int, ends: frozenset[int]) -> Vocabulary:
    known = max(tokenizer.get_vocab().values(), default=-1) + 1
    width = max(size, known)
    # The engine needs an end token of the tokenizer's; an id of padding is none for it.
    engine_ends = sorted(token for token in ends if token < known)
    if not engine_ends and tokenizer.eos_token_id is not None:
        engine_ends = [int(tokenizer.eos_token_id)]
    if not engine_ends:
        raise OptionError(
            f"neither the end tokens {sorted(ends)} nor the tokenizer name an id of the tokenizer "
            "that ends an output; a grammar needs one"
        )
    try:
        engine = from_tokenizer(tokenizer, n_vocab=width, eos_token=engine_ends)
    except Exception as error:
        raise OptionError(
            f"llguidance cannot read this {type(tokenizer).__name__}: {one_line(error)}; "
            "generate without a grammar"
        ) from error
    text = set(range(min(size, known))) - ends - set(engine_ends)
    return Vocabulary(
        engine=engine,
        size=size,
        end_tokens=ends,
        engine_end=engine_ends[0],
        text=_bits_of(text, width),
        ends=_bits_of(ends, width),
    )


def _bits_of(ids: Iterable[int], width: int) -> NDArray[np.int32]:
    flags = np.zeros((width + 31) // 32 * 32, dtype=np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
