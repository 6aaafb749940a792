"""A chain as a provider: its members' weights, and groups that are made of theirs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.chain.attachment import namespace_of, split
from specdec.chain.members import shared_by
from specdec.chain.rounds import OpenMember
from specdec.chain.rows import ChainRows, call_all
from specdec.contract import (
    DeclaresRowBytes,
    DeclaresVocabulary,
    Listed,
    Sampled,
    SupportsConsume,
)
from specdec.errors import CheckpointError, OptionError, blamed_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.chain.members import ChainMember, Shared
    from specdec.contract import (
        RowCheckpoint,
        RowConstraints,
        RowSampling,
        Selection,
        TargetView,
    )

__all__ = ["ChainGroups", "ChainProvider"]


class ChainGroups:
    """Makes groups of a chain's rows.

    Args:
        members: two or more, in the order in which they are asked.
    """

    def __init__(self, members: Sequence[ChainMember]) -> None:
        self._members = tuple(members)
        self._bound: tuple[object, Shared] | None = None

    @property
    def checkpoint_namespace(self) -> str:
        """The layout's name and the members' namespaces, in order."""
        return namespace_of([each.provider.grouped.checkpoint_namespace for each in self._members])

    @property
    def supports_adapters(self) -> bool:
        """Whether every member does."""
        return all(each.provider.grouped.supports_adapters for each in self._members)

    def target_tap_layers(self, target: TargetView, /) -> tuple[int, ...]:
        """The layers that any member reads.

        Raises:
            TargetLacksError: members read different hidden states, and the target has no taps.
        """
        return self._shared(target).taps

    def draft_vocabulary(self, target: TargetView, /) -> tuple[int, ...] | None:
        """The one vocabulary that members declare; ``None`` if none does, or several differ."""
        listed = {ids for ids in self._vocabularies(target) if ids is not None}
        return listed.pop() if len(listed) == 1 else None

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """What the members' rows take together at so many tokens."""
        grouped = [each.provider.grouped for each in self._members]
        return sum(g.row_bytes(target, tokens) for g in grouped if isinstance(g, DeclaresRowBytes))

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> ChainRows:
        """A group that reads prompts, for all members.

        Args:
            target: the bound target.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            TargetLacksError: it lacks what a member reads.
            CheckpointError: a checkpoint does not fit.
        """

        def make(member: ChainMember, own: list[Any], ids: tuple[int, ...] | None) -> Any:
            del ids
            return member.provider.grouped.open_prefill(target=target, checkpoints=own)

        return self._open(target, checkpoints, None, make)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> ChainRows:
        """A group that decodes.

        Args:
            target: the bound target.
            sampling: the rows' draws.
            checkpoints: one per row, borrowed.
            constraints: forced continuations of the rows' requests, if any.

        Raises:
            OptionError: a member's rows cannot follow where another's proposal is taken.
            TargetLacksError: it lacks what a member reads.
            CheckpointError: a checkpoint does not fit.
        """
        if None in checkpoints:
            raise CheckpointError("a cold row cannot decode; read its prompt first")
        declared = self.draft_vocabulary(target)

        def make(member: ChainMember, own: list[Any], ids: tuple[int, ...] | None) -> Any:
            lists = declared is None or ids is not None
            group = member.provider.grouped.open(
                target=target,
                sampling=sampling if lists else _WholeVocabulary(sampling),
                checkpoints=own,
                constraints=constraints,
            )
            if not isinstance(group, SupportsConsume):
                group.close()
                raise OptionError(
                    f"drafter {member.name} cannot stand in a chain: its rows take no tokens that "
                    "others chose (consume)"
                )
            return group

        return self._open(target, checkpoints, sampling, make)

    def _open(
        self,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint | None],
        sampling: RowSampling | None,
        make: Callable[[ChainMember, list[Any], tuple[int, ...] | None], Any],
    ) -> ChainRows:
        shared, namespace = self._shared(target), self.checkpoint_namespace
        names = [each.provider.grouped.checkpoint_namespace for each in self._members]
        own = split(checkpoints, namespace, names)
        opened: list[OpenMember] = []
        try:
            vocabularies = self._vocabularies(target)
            for member, rows, ids in zip(self._members, own, vocabularies, strict=True):
                listed = None if ids is None else mx.array(list(ids), mx.int32)
                with blamed_on(member.name):
                    group = make(member, rows, ids)
                opened.append(OpenMember(member.name, group, member.width, listed))
        except BaseException:
            with suppress(Exception):  # the cause is raised
                call_all([each.group.close for each in opened])
            raise
        return ChainRows(
            namespace=namespace,
            shared=shared,
            members=opened,
            vocab_size=target.vocab_size,
            sampling=sampling,
        )

    def _shared(self, target: TargetView) -> Shared:
        if self._bound is None or self._bound[0] is not target.identity:
            self._bound = target.identity, shared_by(self._members, target)
        return self._bound[1]

    def _vocabularies(self, target: TargetView) -> list[tuple[int, ...] | None]:
        grouped = [each.provider.grouped for each in self._members]
        listed = [
            g.draft_vocabulary(target) if isinstance(g, DeclaresVocabulary) else None
            for g in grouped
        ]
        return [None if ids is None else tuple(ids) for ids in listed]


class ChainProvider:
    """Several drafters as one.

    Args:
        members: two or more, in the order in which they are asked. The chain owns them from now on.
    """

    def __init__(self, members: Sequence[ChainMember]) -> None:
        self._members = tuple(members)
        self._grouped = ChainGroups(members)

    @property
    def id(self) -> str:
        """The members' own, in order."""
        return ",".join(each.provider.id for each in self._members)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all members' weights."""
        return sum(each.provider.weight_bytes for each in self._members)

    @property
    def grouped(self) -> ChainGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Close every member, also where one of them raises."""
        call_all([each.provider.close for each in self._members])


class _WholeVocabulary:
    """The rows' draws for a member that lists no ids, beside one that does."""

    def __init__(self, sampling: RowSampling) -> None:
        self._sampling = sampling

    @property
    def selection(self) -> Selection:
        selection = self._sampling.selection
        return Sampled() if isinstance(selection, Listed) else selection

    @property
    def rejecting(self) -> bool:
        return self._sampling.rejecting

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        return self._sampling.sample(logprobs, steps)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        return self._sampling.log_distribution(logprobs, steps)
