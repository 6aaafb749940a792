"""Biases and penalties, over a whole window at once, with mlx-lm's bits.

Each gives at every position exactly what mlx-lm's processor of the same name gives for that
position's tokens, in each float dtype: the arithmetic is the same operation on the same numbers,
and only the looking up of ids differs. The graph does not grow with the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import field, frozen

from specdec.errors import OptionError
from specdec.sampling.masks import check_within, token_id, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import Attribute

    from specdec.sampling.processors import WindowProcessor, WindowView

__all__ = [
    "FrequencyPenalty",
    "LogitBias",
    "PresencePenalty",
    "RepetitionPenalty",
    "make_logits_processors",
]

_FLOAT32 = 3.4e38
# float16's normal numbers: a penalty outside would become 0 or infinite there, and logits NaN.
_WEAKEST, _STRONGEST = 2.0**-14, 65504.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _biases(values: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise OptionError(f"logit_bias is {values!r}; give a mapping of ids to numbers")
    for key, bias in values.items():
        if not _is_number(bias) or not (abs(bias) <= _FLOAT32 or bias == -math.inf):
            raise OptionError(
                f"logit_bias of id {key!r} is {bias!r}; give a finite number, or -inf to ban it"
            )
    return {token_id(key, "logit_bias"): float(bias) for key, bias in values.items()}


def _factor(_instance: object, _attribute: Attribute[float], value: float) -> None:
    if not _is_number(value) or not _WEAKEST <= value <= _STRONGEST:
        raise OptionError(
            f"repetition_penalty is {value!r}; give a number from {_WEAKEST:.2g} to "
            f"{_STRONGEST:.0f}, or 1.0 or None to leave it out"
        )


def _amount(what: str) -> Callable[[object, Attribute[float], float], None]:
    def check(_instance: object, _attribute: Attribute[float], value: float) -> None:
        if not _is_number(value) or not abs(value) <= _FLOAT32:
            raise OptionError(f"{what} is {value!r}; give a finite number, or None to leave it out")

    return check


@frozen(eq=False)
class LogitBias:
    """Adds a number to the logits of some tokens.

    Attributes:
        biases: ids and what is added; ``-inf`` bans a token.

    Raises:
        OptionError: a value that makes no sense; later, an id that is not in the vocabulary.
    """

    biases: Mapping[int, float] = field(converter=_biases)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``OptionError`` for an id at or above the vocabulary."""
        check_within(self.biases, vocab_size, "logit_bias")

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:  # noqa: ARG002
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        self.check_vocabulary(logits.shape[-1])
        if not self.biases:
            return logits
        ids = mx.array(list(self.biases), mx.uint32)
        return logits.at[:, ids].add(mx.array(list(self.biases.values()), mx.float32))


@frozen(eq=False)
class RepetitionPenalty:
    """Divides positive and multiplies negative logits of tokens in the context.

    Keskar et al. 2019, arXiv 1909.05858. A token is penalised once, however often it occurs.

    Attributes:
        penalty: above 1 discourages, below 1 encourages, 1 changes nothing.
        context_size: tokens to look back, 1 or more.

    Raises:
        OptionError: a value out of range; names it.
    """

    penalty: float = field(validator=_factor)
    context_size: int = field(default=20, validator=whole_number("repetition_context_size", 1))

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        ids, _ = view.context(self.context_size)
        held = mx.take_along_axis(logits, ids, axis=1)
        held = mx.where(held < 0, held * self.penalty, held / self.penalty)
        return mx.put_along_axis(logits, ids, held, axis=1)


@frozen(eq=False)
class PresencePenalty:
    """Subtracts a number from the logits of tokens in the context, once per token.

    Attributes:
        penalty: what is subtracted; below 0 encourages.
        context_size: tokens to look back, 1 or more.

    Raises:
        OptionError: a value out of range; names it.
    """

    penalty: float = field(validator=_amount("presence_penalty"))
    context_size: int = field(default=20, validator=whole_number("presence_context_size", 1))

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        ids, _ = view.context(self.context_size)
        held = mx.take_along_axis(logits, ids, axis=1)
        return mx.put_along_axis(logits, ids, held - self.penalty, axis=1)


@frozen(eq=False)
class FrequencyPenalty:
    """Subtracts a number from the logits of tokens in the context, once per occurrence.

    Attributes:
        penalty: what is subtracted; below 0 encourages.
        context_size: tokens to look back, 1 or more.

    Raises:
        OptionError: a value out of range; names it.
    """

    penalty: float = field(validator=_amount("frequency_penalty"))
    context_size: int = field(default=20, validator=whole_number("frequency_context_size", 1))

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        ids, real = view.context(self.context_size)
        step = -mx.array(self.penalty, logits.dtype)
        if real is not None:
            # Adding -0.0 changes no number, not even a zero of either sign; +0.0 would.
            step = mx.where(real, step, mx.array(-0.0, logits.dtype))
        rows = mx.arange(view.width)[:, None]
        # In 16 bits each occurrence is rounded, as in mlx-lm: a product would differ.
        return logits.at[rows, ids].add(step)


def make_logits_processors(  # noqa: PLR0917 (mlx-lm's signature)
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[WindowProcessor]:
    """Processors by mlx-lm's options, in mlx-lm's order.

    As in mlx-lm, ``None``, an empty bias and a presence or frequency penalty of 0 are left out.
    Unlike there, a repetition penalty of 0 is refused: it would divide by zero, and mlx-lm leaves
    it out without a word.

    A context size is the number of tokens to look back. The classes in this module say the rest.

    Raises:
        OptionError: a value that makes no sense; names it.
    """
    chain: list[WindowProcessor] = []
    if logit_bias is not None and logit_bias != {}:
        chain.append(LogitBias(logit_bias))
    if repetition_penalty is not None:
        chain.append(RepetitionPenalty(repetition_penalty, repetition_context_size))
    if presence_penalty is not None and presence_penalty != 0:
        chain.append(PresencePenalty(presence_penalty, presence_context_size))
    if frequency_penalty is not None and frequency_penalty != 0:
        chain.append(FrequencyPenalty(frequency_penalty, frequency_context_size))
    return chain
