"""The frozen target: what it makes of windows of text, and the sizes a drafter of it has.

It is bound as for generation, so every target that can be tapped can be trained for.

Shapes: B windows, L tokens, m taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec.contract import ContextKind, require_port
from specdec.drafters import bind_target
from specdec.errors import OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import HiddenTaps

__all__ = ["Reading", "Teacher", "find_mask_token", "spread_taps"]

_MASKS = ("<|mask|>", "<mask>", "[MASK]")


@frozen(eq=False)
class Reading:
    """What the target made of windows.

    Attributes:
        ids: ``[B, L]``.
        taps: ``[B, L, m·H]``.
        logits: ``[B, L, V]``; those at p are of the token at p + 1.
    """

    ids: mx.array
    taps: mx.array
    logits: mx.array


class Teacher:
    """The target of a drafter in training.

    Args:
        model: what ``mlx_lm.load`` returned first; it is not changed.
        tokenizer: what it returned second.

    Attributes:
        target: the bound model.
        tokenizer: its tokenizer, or ``None``.
        port: of its hidden states.
        vocab_size: V.

    Raises:
        TargetLacksError: it cannot be tapped.
        UnsupportedModelError: it cannot be driven, or decodes one position at a time anyway.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.target = bind_target(model, tokenizer)
        self.tokenizer = tokenizer
        self.port: HiddenTaps = require_port(self.target, "hidden_taps", "a DFlash drafter")
        self.vocab_size = self.target.vocab_size
        reason = self.target.no_speculation_reason
        if reason is not None:
            raise UnsupportedModelError(f"a drafter for this target would not be used: {reason}")

    @property
    def args(self) -> Any | None:
        """What the target's layers were made with, where that is known."""
        port = self.target.recurrent_mtp
        return None if port is None else port.args

    @property
    def dtype(self) -> str:
        """Of its hidden states."""
        first = self.port.embed(mx.zeros((1, 1), mx.int32))  # never evaluated
        return str(first.dtype).removeprefix("mlx.core.")

    def check_taps(self, taps: Sequence[int]) -> None:
        """Check that the target can be tapped so.

        Raises:
            OptionError: it cannot; names the taps and the layers.
        """
        if not taps or not self.target.can_tap(taps):
            raise OptionError(
                f"taps is {','.join(map(str, taps)) or 'empty'}; give different layers of 0 to "
                f"{self.port.layer_count}, the last of which is the state after the final norm"
            )

    def read(self, ids: mx.array, taps: Sequence[int]) -> Reading:
        """What the target makes of windows ``[B, L]``, evaluated.

        Each is read as a prompt's chunk is, by a row of its own: so every kind of cache reads it.
        """
        taken, logits = [], []
        for row in range(ids.shape[0]):
            state = self.target.new_state()
            state.begin_round(ids.shape[1], reading=True)
            one = ids[row : row + 1]
            window = self.target.forward(one, state, ContextKind.TAPS, tuple(taps))
            assert window.context is not None, "asked for"
            taken.append(window.context)
            logits.append(window.logits)
        reading = Reading(ids, mx.concatenate(taken), mx.concatenate(logits))
        mx.eval(reading.taps, reading.logits)
        return reading


def spread_taps(layers: int) -> tuple[int, ...]:
    """Five taps from the second layer to the last but two, evenly, as published drafters have.

    Of a target of fewer than 8 layers, all from the second to the last but one.

    Args:
        layers: of the target.
    """
    if layers < 8:
        return tuple(range(1, layers - 1)) or (0,)
    last = layers - 3
    return tuple(round(1 + at * (last - 1) / 4) for at in range(5))


def find_mask_token(tokenizer: Any, vocab_size: int, given: int | None) -> int:
    """The id that fills a block's columns.

    By default the tokenizer's own mask, else the first id behind its tokens: embeddings usually
    have a few rows more than there are tokens.

    Args:
        tokenizer: the target's.
        vocab_size: V.
        given: by the user, or ``None``.

    Raises:
        OptionError: an id that the target does not have, or none is spare.
    """
    if given is not None:
        if not 0 <= given < vocab_size:
            raise OptionError(f"mask_token is {given}; give an id of 0 to {vocab_size - 1}")
        return given
    own = getattr(tokenizer, "mask_token_id", None)
    if isinstance(own, int) and 0 <= own < vocab_size:
        return own
    known: dict[str, int] = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    for name in _MASKS:
        if known.get(name, vocab_size) < vocab_size:
            return known[name]
    spare = max(known.values(), default=vocab_size) + 1
    if spare >= vocab_size:
        raise OptionError(
            "the tokenizer has no mask token, and the target no spare id; give mask_token, the id "
            "of a token that no text has"
        )
    return spare
