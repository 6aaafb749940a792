"""A request's sampling options, checked before any graph is built."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx
    from attrs import Attribute

__all__ = ["SamplingOptions"]


# Beyond these, scores divided by the temperature leave float32, and filtered tokens come back.
_COLDEST, _HOTTEST = 1e-30, 1e30


def _number(
    low: float, high: float, hint: str, *, or_zero: bool = False
) -> Callable[[object, Attribute[float], float], None]:
    def check(_instance: object, attribute: Attribute[float], value: float) -> None:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not (low <= value <= high or (or_zero and value == 0)):
            raise OptionError(f"{attribute.name} is {value!r}; {hint}")

    return check


def _count(_instance: object, attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(
            f"{attribute.name} is {value!r}; give a whole number, 0 to keep all tokens"
        )


def _seed(_instance: object, _attribute: Attribute[int | None], value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"seed is {value!r}; give a whole number, or none for a new seed")


@frozen(kw_only=True, eq=False)
class SamplingOptions:
    """How one request draws its tokens.

    Attributes:
        temp: temperature; 0 is greedy.
        top_p: nucleus mass; 0 or 1 keeps all tokens, as in mlx-lm.
        min_p: share of the top probability; 0 keeps all tokens.
        top_k: tokens to keep; 0, or a number that is at least the vocabulary, keeps all.
        seed: the request's seed; ``None`` takes a new random one.
        sampler: a callable of the user's, ``[1, V] log-probabilities -> [1] ids`` as in mlx-lm;
            it is called once per position in the order of emission, and the seed is his matter.

    Raises:
        OptionError: a value out of range; names it.
    """

    temp: float = field(
        default=0.0,
        validator=_number(
            _COLDEST,
            _HOTTEST,
            f"give 0 (greedy) or a number from {_COLDEST:g} to {_HOTTEST:g}",
            or_zero=True,
        ),
    )
    top_p: float = field(default=0.0, validator=_number(0, 1, "give a number from 0 to 1"))
    min_p: float = field(default=0.0, validator=_number(0, 1, "give a number from 0 to 1"))
    top_k: int = field(default=0, validator=_count)
    seed: int | None = field(default=None, validator=_seed)
    sampler: Callable[[mx.array], mx.array] | None = None

    def __attrs_post_init__(self) -> None:
        if self.sampler is not None and (self.temp or self.top_p or self.min_p or self.top_k):
            raise OptionError(
                "sampler was given with temp, top_p, min_p or top_k; give one or the other"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temp == 0 and self.sampler is None

    @property
    def filters(self) -> tuple[float, float, float, int]:
        """What rows must share to be drawn in one operation."""
        return (self.temp, self.top_p if self.top_p < 1 else 0.0, self.min_p, self.top_k)

    def resolved_seed(self) -> int:
        """The seed, or a new 64-bit one."""
        return secrets.randbits(64) if self.seed is None else self.seed
