"""A request's sampling options, checked before any graph is built."""

from __future__ import annotations

import operator
import secrets
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsIndex, cast

from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx
    from attrs import Attribute

__all__ = ["DrawKey", "SamplingOptions"]


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


def _at_least_one(_instance: object, attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{attribute.name} is {value!r}; give a whole number of 1 or more")


def _ids(_instance: object, attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    if not isinstance(value, tuple):
        raise OptionError(f"{attribute.name} is {value!r}; give a list of token ids")
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise OptionError(f"{attribute.name} has {token!r}; ids are whole numbers from 0")


def _as_tuple(value: object) -> tuple[int, ...]:
    # What is no list is left to the validator, which names it.
    return cast("tuple[int, ...]", tuple(value) if isinstance(value, list) else value)


def _acceptance(_instance: object, attribute: Attribute[str], value: str) -> None:
    if value not in ("match", "rejection"):
        raise OptionError(f"{attribute.name} is {value!r}; give 'match' or 'rejection'")


def _or_none(
    check: Callable[[object, Attribute[float], float], None],
) -> Callable[[object, Attribute[float | None], float | None], None]:
    def check_given(
        instance: object, attribute: Attribute[float | None], value: float | None
    ) -> None:
        if value is not None:
            check(instance, cast("Attribute[float]", attribute), value)

    return check_given


def _flag(_instance: object, attribute: Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{attribute.name} is {value!r}; give True or False")


def _whole(value: object) -> int | None:
    """Whole numbers of any kind as ints; what is none is left to the check."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return cast("int | None", value)
    return operator.index(cast("SupportsIndex", value))


def _seed(_instance: object, _attribute: Attribute[int | None], value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"seed is {value!r}; give a whole number, or none for a new seed")


class DrawKey(NamedTuple):
    """What rows must share to be drawn in one operation; neutral where an option has no effect.

    Attributes:
        temp: temperature; 0 for rows with a sampler callable.
        top_p: nucleus mass; 0 for none.
        min_p: share of the top probability, and the number of tokens that stay in any case.
        xtc: probability, threshold and special ids of XTC; ``None`` without it.
        top_k: tokens to keep; 0 for all.
        rejection: whether drafts are judged by rejection sampling.
    """

    temp: float
    top_p: float
    min_p: tuple[float, int]
    xtc: tuple[float, float, tuple[int, ...]] | None
    top_k: int
    rejection: bool

    @property
    def bare(self) -> DrawKey:
        """The temperature alone: what draws the same token on part of the vocabulary."""
        return DrawKey(self.temp, 0.0, (0.0, 1), None, 0, rejection=False)


@frozen(kw_only=True, eq=False)
class SamplingOptions:
    """How one request draws its tokens.

    Attributes:
        temp: temperature; 0 is greedy.
        top_p: nucleus mass; 0 or 1 keeps all tokens, as in mlx-lm.
        min_p: share of the top probability; 0 keeps all tokens.
        min_tokens_to_keep: tokens that ``min_p`` leaves in any case, the most probable ones.
        xtc_probability: share of the positions at which XTC applies; 0 is never.
        xtc_threshold: probability that makes a token one of XTC's top choices, from 0 to 0.5.
        xtc_special_tokens: ids that XTC never leaves out.
        top_k: tokens to keep; 0, or a number that is at least the vocabulary, keeps all.
        seed: the request's seed; ``None`` takes a new random one.
        sampler: a callable of the user's, ``[1, V] log-probabilities -> [1] ids`` as in mlx-lm;
            it is called once per position in the order of emission, and the seed is his matter.
        acceptance: ``"match"``: a draft is accepted where the target draws the same token, and
            the text is that of the seed, with any drafter and without one. ``"rejection"``: by
            rejection sampling (:mod:`~specdec.sampling.rejection`): as many drafts as can be
            are accepted, the text has the target's distribution, and depends on the drafter.
        draft_temp: the temperature that drafts are drawn at, with the noise of the target's draws;
            0 for the most probable ones; ``None`` to draft as the request draws, and greedily
            where it has a sampler. This and ``draft_filters`` change what is drafted and nothing
            else: by match the text stays the seed's, by rejection it keeps its distribution.
        draft_filters: whether drafts are drawn with the request's top-p, min-p, XTC and top-k.

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
    min_tokens_to_keep: int = field(default=1, validator=_at_least_one)
    xtc_probability: float = field(
        default=0.0, validator=_number(0, 1, "give a number from 0 to 1")
    )
    xtc_threshold: float = field(
        default=0.1, validator=_number(0, 0.5, "give a number from 0 to 0.5")
    )
    xtc_special_tokens: tuple[int, ...] = field(default=(), converter=_as_tuple, validator=_ids)
    top_k: int = field(default=0, validator=_count)
    seed: int | None = field(default=None, converter=_whole, validator=_seed)
    sampler: Callable[[mx.array], mx.array] | None = None
    acceptance: Literal["match", "rejection"] = field(default="match", validator=_acceptance)
    draft_temp: float | None = field(
        default=None,
        validator=_or_none(
            _number(
                _COLDEST,
                _HOTTEST,
                f"give 0 (greedy drafts), a number from {_COLDEST:g} to {_HOTTEST:g}, or none to "
                "draft as the request draws",
                or_zero=True,
            )
        ),
    )
    draft_filters: bool = field(default=True, validator=_flag)

    def __attrs_post_init__(self) -> None:
        if self.sampler is None:
            return
        if self.temp or self.top_p or self.min_p or self.top_k or self.xtc_probability:
            raise OptionError(
                "sampler was given with temp, top_p, min_p, top_k or xtc_probability; "
                "give one or the other"
            )
        if self.acceptance == "rejection":
            raise OptionError(
                "acceptance is 'rejection' with a sampler, whose distribution is not known; "
                "give temp and filters in its place, or acceptance='match'"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temp == 0 and self.sampler is None

    @property
    def draw_key(self) -> DrawKey | None:
        """What rows must share to be drawn in one operation; ``None`` for greedy rows.

        Greedy rows need no acceptance rule: where one token is certain, both rules give it.
        """
        return None if self.greedy else self._key(self.temp)

    @property
    def draft_key(self) -> DrawKey | None:
        """What rows must share to be drafted in one operation; ``None`` for greedy drafts.

        Either acceptance rule drafts alike.
        """
        temp = self.temp if self.draft_temp is None else self.draft_temp
        if temp == 0:
            return None
        key = self._key(temp)
        return key._replace(rejection=False) if self.draft_filters else key.bare

    def _key(self, temp: float) -> DrawKey:
        xtc = (self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens)
        return DrawKey(
            temp,
            self.top_p if self.top_p < 1 else 0.0,
            (self.min_p, self.min_tokens_to_keep) if self.min_p else (0.0, 1),
            xtc if self.xtc_probability else None,
            self.top_k,
            self.acceptance == "rejection",
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the ids against a model's vocabulary, once it is known.

        Args:
            vocab_size: V.

        Raises:
            OptionError: an id of V or more in ``xtc_special_tokens``.
        """
        for token in self.xtc_special_tokens:
            if token >= vocab_size:
                raise OptionError(
                    f"xtc_special_tokens has {token}; this model's ids are 0 to {vocab_size - 1}"
                )

    def resolved_seed(self) -> int:
        """The seed, or a new 64-bit one."""
        return secrets.randbits(64) if self.seed is None else self.seed
