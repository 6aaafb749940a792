"""A head as a provider: it owns the head's weights, and makes row groups over a target."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import frozen

from specdec.checkpoints import weights_identity
from specdec.contract import ContextKind, require_port
from specdec.drafting.modules import parameters_of
from specdec.drafting.row_arrays import leaves
from specdec.errors import ClosedError, TargetLacksError
from specdec.state import room_for
from specdec_mtp.attachment import RowLayout
from specdec_mtp.find import HeadKind
from specdec_mtp.live import Chain, HeadSettings
from specdec_mtp.rows import HeadRows
from specdec_mtp.select import HeadChooser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import (
        RecurrentMtp,
        RowCheckpoint,
        RowConstraints,
        RowSampling,
        TargetView,
        VocabularySubset,
    )
    from specdec_mtp.heads import HeadModule

__all__ = ["SCHEMAS", "HeadGroups", "HeadProvider", "Reading"]

SCHEMAS: Final = {HeadKind.MTP: "mtp-rows-v1", HeadKind.NEXTN: "nextn-rows-v1"}
"""Persistent names of the layouts of rows."""


@frozen(kw_only=True)
class Reading:
    """How a head is read; none of it changes a token of the text.

    Attributes:
        context: the target's hidden states that it is given: before or after the final norm.
        chain: what is kept of the steps that go on from its own output.
        feeds_raw: whether those steps are given the output before the head's own norm.
        reads_prompt: whether it reads the prompt too.
    """

    context: ContextKind = ContextKind.POST_NORM
    chain: Chain = Chain.TRUE
    feeds_raw: bool = False
    reads_prompt: bool = True

    def __str__(self) -> str:
        fed = "raw" if self.feeds_raw else "normed"
        history = "prompt" if self.reads_prompt else "own"
        return f"{self.context}:{self.chain}:{fed}:{history}"


class HeadGroups:
    """Makes groups of one head's rows.

    Args:
        kind: of the head.
        module: the head.
        hidden_size: H.
        reading: how it is read.
        ids: the draft vocabulary, ascending, or ``None``.
    """

    supports_adapters = False  # it reads hidden states of the weights it was trained with

    def __init__(
        self,
        kind: HeadKind,
        module: HeadModule,
        hidden_size: int,
        *,
        reading: Reading,
        ids: tuple[int, ...] | None,
    ) -> None:
        self._kind = kind
        self._module: HeadModule | None = module
        self._hidden_size = hidden_size
        self.reading = reading
        self._ids = ids
        self._settings: dict[mx.Dtype, HeadSettings] = {}
        self._subset: tuple[object, VocabularySubset | None] | None = None

    @cached_property
    def checkpoint_namespace(self) -> str:
        """The layout's name, the head's weights, and how they are read."""
        return f"{SCHEMAS[self._kind]}:{weights_identity(self._head)}:{self.reading}"

    @property
    def _head(self) -> HeadModule:
        if self._module is None:
            raise ClosedError("open")
        return self._module

    def release(self) -> None:
        """Let the weights go; groups that are open keep theirs until they are closed."""
        self._module = self._subset = None
        self._settings = {}

    def draft_vocabulary(self, target: TargetView, /) -> tuple[int, ...] | None:
        """The listed ids, where the target's head can be cut to them."""
        if self._ids is None or self._subset_of(target) is None:
            return None
        return self._ids

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """Bytes that the keys and values of one row take at so many tokens, by their shapes."""
        layout = self._settings_for(self._port(target)).layout
        one = sum(prod(shape) * dtype.size for shape, dtype in layout.arrays.values())
        return one * room_for(tokens)

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> HeadRows:
        """A group that reads prompts.

        Args:
            target: the bound target.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            TargetLacksError: it has no embedding and head to share, or of another size.
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, None)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002  what is forced is the core's
    ) -> HeadRows:
        """A group that decodes.

        Args:
            target: the bound target.
            sampling: the rows' draws.
            checkpoints: one per row, borrowed.
            constraints: not used.

        Raises:
            TargetLacksError: it has no embedding and head to share, or of another size.
            CheckpointError: a checkpoint does not fit.
        """
        subset = self._subset_of(target)
        choose = HeadChooser(self._port(target), sampling, target.vocab_size, subset)
        return self._open(target, checkpoints, choose)

    def _open(
        self,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint | None],
        choose: HeadChooser | None,
    ) -> HeadRows:
        port = self._port(target)
        rows = HeadRows(self._settings_for(port), port, target.vocab_size, choose)
        rows.prepare_append(checkpoints).commit()
        return rows

    def _port(self, target: TargetView) -> RecurrentMtp:
        port: RecurrentMtp = require_port(target, "recurrent_mtp", f"the {self._kind} head")
        if port.hidden_size != self._hidden_size:
            raise TargetLacksError(
                f"recurrent_mtp of hidden size {self._hidden_size}", f"the {self._kind} head"
            )
        return port

    def _subset_of(self, target: TargetView) -> VocabularySubset | None:
        """The target's head over the listed ids, copied once for each target."""
        if self._ids is None:
            return None
        if self._subset is None or self._subset[0] is not target.identity:
            self._subset = target.identity, self._port(target).subset(self._ids)
        return self._subset[1]

    def _settings_for(self, port: RecurrentMtp) -> HeadSettings:
        """What rows over this target need to know; their arrays are of the type it computes in."""
        dtype = port.embed(mx.zeros((1, 1), mx.int32)).dtype
        if dtype not in self._settings:
            self._settings[dtype] = HeadSettings(
                module=self._head,
                namespace=self.checkpoint_namespace,
                layout=self._layout(dtype),
                context=self.reading.context,
                chain=self.reading.chain,
                feeds_raw=self.reading.feeds_raw,
                reads_prompt=self.reading.reads_prompt,
            )
        return self._settings[dtype]

    def _layout(self, dtype: mx.Dtype) -> RowLayout:
        """What the head's caches hold, from one call that is built and never evaluated."""
        head = self._head
        caches = list(head.family.caches())
        pair = mx.zeros((1, 1, self._hidden_size), dtype)
        head(pair, pair, caches)
        arrays = {}
        for number, cache in enumerate(leaves(caches)):
            for name in ("keys", "values"):
                array = getattr(cache, name)
                arrays[f"{number}.{name}"] = ((*array.shape[:2], 1, array.shape[3]), array.dtype)
        return RowLayout(
            schema=SCHEMAS[self._kind],
            arrays=arrays,
            hidden_size=self._hidden_size,
            reads_all=self.reading.reads_prompt,
        )


class HeadProvider:
    """A head as a drafter.

    Args:
        name: for people.
        kind: of the head.
        module: the head, with its weights.
        hidden_size: H.
        reading: how it is read.
        ids: the draft vocabulary, ascending, or ``None`` for all of the target's.
    """

    def __init__(
        self,
        name: str,
        kind: HeadKind,
        module: HeadModule,
        hidden_size: int,
        *,
        reading: Reading,
        ids: tuple[int, ...] | None = None,
    ) -> None:
        self._name = name
        self.module: HeadModule | None = module
        self.weight_bytes = sum(array.nbytes for array in parameters_of(module).values())
        self._grouped = HeadGroups(kind, module, hidden_size, reading=reading, ids=ids)

    @property
    def id(self) -> str:
        """What the head was loaded from."""
        return self._name

    @property
    def grouped(self) -> HeadGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Let the weights go."""
        self.module = None
        self._grouped.release()
