"""How rows choose tokens: their draws, the selection a draft group binds, and constraints."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import mlx.core as mx
    from attrs import Attribute

__all__ = [
    "Greedy",
    "Listed",
    "RowConstraints",
    "RowSampling",
    "Sampled",
    "Selection",
    "VocabularySubset",
]


class VocabularySubset(Protocol):
    """Part of the target's vocabulary that a drafter scores alone."""

    @property
    def ids(self) -> Sequence[int]:
        """Ascending full-vocabulary ids, N of them."""

    def project(self, hidden: mx.array, /) -> mx.array:
        """Logits ``[..., N]`` of the listed ids for hidden states ``[..., H]``.

        May be a ``RowTable``, as a target's ``logits``.
        """


@frozen
class Sampled:
    """Each row's own draw over the whole head: call ``RowSampling.sample``."""


@frozen
class Greedy:
    """Every row drafts by argmax. A fused argmax over raw logits may be used for drafts."""


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


def _ascending(
    _instance: object, _attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]
) -> None:
    if not value or any(b <= a for a, b in pairwise(value)) or value[0] < 0:
        raise OptionError("a listed draft vocabulary needs ascending, unique ids of 0 or more")


@frozen(eq=False)
class Listed:
    """Rows draft over a listed part of the vocabulary.

    Bound only where every row drafts the same on the subset as on the whole vocabulary, if what it
    drafts there is in the subset: rows without filters. A row with filters that joins a group
    where this was bound is drawn without them.

    Attributes:
        ids: ascending full-vocabulary ids, N of them.
        sample: ``(logits [B, N], steps [B]) -> full-vocabulary ids [B]``, on the device.
        log_distribution: the same arguments ``-> [B, N]`` float32, the log-probabilities that
            ``sample`` draws from, normalised over ``ids``.
    """

    ids: tuple[int, ...] = field(converter=_ids, validator=_ascending)
    sample: Callable[[mx.array, Sequence[int]], mx.array]
    log_distribution: Callable[[mx.array, Sequence[int]], mx.array]


Selection: TypeAlias = Sampled | Greedy | Listed


class RowSampling(Protocol):
    """The draws of a group's rows, as drafters see them.

    A draw depends on the row's ``(seed, step)`` and the scores, and on nothing else: not on the
    batch, the row's place, the width, or what was drafted. A drafter that samples uses the same
    noise as the target's draw at that position, so its drafts are accepted far more often. Only
    rows that chose rejection sampling also depend on their drafts, on the target's side.

    Drafts follow each row's draft policy: a request may ask for drafts of another temperature, or
    without its filters. A drafter need not know of it.
    """

    @property
    def selection(self) -> Selection:
        """How every row of the group selects its drafts now.

        While a group is opened these are the rows that it is opened with. A drafter may read it
        once, there: a row that joins later and selects otherwise gets fewer of its drafts
        accepted, and the same text.
        """

    @property
    def rejecting(self) -> bool:
        """Whether a row judges its drafts by rejection sampling now; to be read in each round.

        Only then is a declared distribution looked at; else a drafter need not compute it.
        """

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Draw each row's next draft, on the device.

        Args:
            logprobs: ``[B, V]`` log-probabilities at temperature 1, before filters.
            steps: B ints, samples drawn so far per row at the drafted position.

        Returns:
            ``[B]`` ids.
        """

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """The distribution that :meth:`sample` draws from, for drafts that declare theirs.

        Whether a position gets a draft must not depend on the draft that it would get: a draft
        that was drawn and then left out makes the distribution another one than is declared.

        Args:
            logprobs: as for :meth:`sample`.
            steps: as for :meth:`sample`.

        Returns:
            ``[B, V]`` float32 log-probabilities after filters and temperature, normalised. For
            greedy drafts 0 at the argmax and ``-inf`` elsewhere.
        """


class RowConstraints(Protocol):
    """Continuations that a request's constraints already force; known without a model."""

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        """Up to ``max_tokens`` forced ids for a row; changes no state. May be empty."""
