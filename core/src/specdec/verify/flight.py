"""A verify window on its way: built and submitted, not read yet.

Everything of it is lazy or already computing on the device. ``land`` is the round's one host read:
samples, device drafts and their lengths come back in one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen

from specdec.verify.drafts import Drafts
from specdec.verify.draws import Draw
from specdec.verify.pacing import AS_ASKED, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import DeviceProposal
    from specdec.verify.logprobs import HostLogprobs

__all__ = ["Flight", "Landed", "host_read", "host_reads", "pack", "window_tokens"]


def host_read(array: mx.array) -> Any:
    """Bring an array to the host. The only place in a round where the host waits."""
    return array.tolist()


def host_reads(*arrays: mx.array) -> list[Any]:
    """Bring several arrays to the host, with one wait for all of them."""
    mx.eval(*arrays)
    return [host_read(array) for array in arrays]


def pack(samples: mx.array, device: DeviceProposal) -> mx.array:
    """Samples, device drafts and their lengths in one array ``[B, W + d (+ 1)]``."""
    parts = [samples.astype(mx.int64), device.tokens.astype(mx.int64)]
    if device.lengths is not None:
        parts.append(device.lengths.astype(mx.int64)[:, None])
    return mx.concatenate(parts, axis=1)


def window_tokens(
    pending: Sequence[int],
    drafts: Sequence[Sequence[int]],
    device: mx.array | None,
    *,
    vocab: int,
    width: int,
) -> mx.array:
    """The window ``[B, W]``: pending token, drafts, and padding that is never sampled nor kept.

    Args:
        pending: B ids.
        drafts: B lists of valid host drafts; ignored where ``device`` is given.
        device: ``[B, d]`` drafts on the device.
        vocab: ids must be below it. Device ids are not known yet and are brought into range, so
            that a wrong one cannot read outside the embedding; it is cut after the host read.
        width: positions of a window of host drafts, 1 + the longest of them or more.
    """
    if device is not None:
        heads = mx.array(list(pending), mx.int32)[:, None]
        return mx.concatenate([heads, mx.clip(device.astype(mx.int32), 0, vocab - 1)], axis=1)
    # Padding repeats the pending token: any valid id would do.
    rows = [
        [token, *draft, *[token] * (width - 1 - len(draft))]
        for token, draft in zip(pending, drafts, strict=True)
    ]
    return mx.array(rows, mx.int32)


@frozen
class Landed:
    """A flight on the host.

    Attributes:
        samples: B lists of W ids, the target's own token at each position.
        device: B lists of d ids, the device drafts.
        lengths: B ints that cut the device drafts.
        reports: log-probabilities to report, where a request asks for them.
    """

    samples: list[list[int]]
    device: list[list[int]] | None = None
    lengths: list[int] | None = None
    reports: HostLogprobs | None = None


@define(eq=False)
class Flight:
    """One window that was submitted.

    Attributes:
        draw: samples ``[B, W]``, log-probabilities ``[B, W, V]``, and what came with them.
        context: ``[B, W, ·]`` for the drafter, or ``None``.
        proposed: the drafts, on the host or on the device.
        packed: the samples, with device drafts and their lengths beside them in the same array.
        logits: ``[B, W, V]`` as the target gave them, where rows are drawn position by position.
        masks: what constraints allow, by row: ``[n, V]`` of the first n positions.
        drafted: whether the drafter's round is open with it; it ends with the window.
        settled: whether the target's rows have already kept the window.
        missed: ``[B, W]`` ids of a plain window that a drafter at rest reads later; else ``None``.
        plan: what the round was to be.
    """

    draw: Draw
    context: mx.array | None
    proposed: Drafts
    packed: mx.array
    logits: mx.array | None = None
    masks: Mapping[int, mx.array | None] = field(factory=dict)
    drafted: bool = False
    settled: bool = False
    missed: mx.array | None = None
    plan: Plan = AS_ASKED

    @property
    def row_count(self) -> int:
        """Rows of the window, B; rows that joined since are not in it."""
        return self.draw.samples.shape[0]

    @property
    def width(self) -> int:
        """Positions of the window, W."""
        return self.draw.samples.shape[1]

    @property
    def plain(self) -> bool:
        """Whether each row's pending token is all that it verifies."""
        return self.proposed.device is None and not any(self.proposed.rows)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that the host reads of it."""
        return self.packed, *self.draw.arrays[1:]

    def land(self) -> Landed:
        """Wait for the window: one host read."""
        reports, device = self.draw.reports, self.proposed.device
        if reports is None:
            read, reported = host_read(self.packed), None
        else:
            read, *rest = host_reads(*self.arrays)
            reported = reports.on_host(rest)
        if device is None:
            return Landed(read, reports=reported)
        width, drafted = self.width, device.tokens.shape[1]
        return Landed(
            [row[:width] for row in read],
            [row[width : width + drafted] for row in read],
            [row[-1] for row in read] if device.lengths is not None else None,
            reported,
        )

    def take(self, keep: Sequence[int]) -> None:
        """Keep and reorder the rows of a settled flight without drafts."""
        index = mx.array(list(keep), mx.int32)
        draw, proposed = self.draw, self.proposed
        self.draw = Draw(
            draw.samples[index],
            draw.logprobs[index],
            None if draw.reports is None else draw.reports.take(index),
            {new: draw.errors[k] for new, k in enumerate(keep) if k in draw.errors},
        )
        self.packed = self.draw.samples
        self.proposed = Drafts([proposed.rows[k] for k in keep], [proposed.depths[k] for k in keep])
