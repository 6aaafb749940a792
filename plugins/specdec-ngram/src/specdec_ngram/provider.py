"""The n-gram drafter as a provider: no weights, no ports, one setting pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec_ngram.attachment import SCHEMA
from specdec_ngram.history import DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM, check_sizes
from specdec_ngram.rows import NgramRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, RowConstraints, RowSampling, TargetView

__all__ = ["NgramGroups", "NgramProvider"]


@frozen(kw_only=True)
class NgramGroups:
    """Makes groups of n-gram rows, for any target.

    Attributes:
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.

    Raises:
        OptionError: sizes that make no sense.
    """

    max_ngram: int = field(default=DEFAULT_MAX_NGRAM)
    min_ngram: int = field(default=DEFAULT_MIN_NGRAM)

    def __attrs_post_init__(self) -> None:
        check_sizes(self.max_ngram, self.min_ngram)

    @property
    def checkpoint_namespace(self) -> str:
        """Identity of stored rows: the schema and both sizes."""
        return f"{SCHEMA}:max{self.max_ngram}:min{self.min_ngram}"

    @property
    def supports_adapters(self) -> bool:
        """Always: the state is made of tokens alone, whatever weights chose them."""
        return True

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> NgramRows:
        """A group that reads prompts.

        Args:
            target: the bound target; only its ``vocab_size`` is read.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, cold_rows=True)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,  # noqa: ARG002  a copy is not drawn
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002
    ) -> NgramRows:
        """A group that decodes.

        Args:
            target: the bound target; only its ``vocab_size`` is read.
            sampling: not used: a copied token is certain.
            checkpoints: one per row, from ``capture``; borrowed.
            constraints: not used.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, cold_rows=False)

    def _open(
        self, target: TargetView, checkpoints: Sequence[RowCheckpoint | None], *, cold_rows: bool
    ) -> NgramRows:
        rows = NgramRows(
            namespace=self.checkpoint_namespace,
            vocab_size=target.vocab_size,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            cold_rows=cold_rows,
        )
        rows.prepare_append(checkpoints).commit()
        return rows


class NgramProvider:
    """The n-gram drafter.

    Args:
        max_ngram: longest n-gram that is looked up, 1 or more.
        min_ngram: shortest n-gram that is looked up, 1 to ``max_ngram``.

    Raises:
        OptionError: sizes that make no sense.
    """

    def __init__(
        self, *, max_ngram: int = DEFAULT_MAX_NGRAM, min_ngram: int = DEFAULT_MIN_NGRAM
    ) -> None:
        self._grouped = NgramGroups(max_ngram=max_ngram, min_ngram=min_ngram)

    @property
    def id(self) -> str:
        """``"ngram"``: there is no artifact to name it after."""
        return "ngram"

    @property
    def weight_bytes(self) -> int:
        """0: there are no weights."""
        return 0

    @property
    def grouped(self) -> NgramGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Nothing to release; any number of times."""
