"""A verify window on its way: built and submitted, not read yet.

Everything of it is lazy or already computing on the device. ``land`` is the round's one host read:
samples, device drafts and their lengths come back in one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DeviceProposal

__all__ = ["Flight", "Landed", "host_read", "pack", "window_tokens"]


def host_read(array: mx.array) -> Any:
    """Bring an array to the host. The only place in a round where the host waits."""
    return array.tolist()


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
    """

    samples: list[list[int]]
    device: list[list[int]] | None = None
    lengths: list[int] | None = None


@define(eq=False)
class Flight:
    """One window that was submitted.

    Attributes:
        samples: ``[B, W]``.
        logprobs: ``[B, W, V]``.
        context: ``[B, W, ·]`` for the drafter, or ``None``.
        drafts: B lists of host drafts.
        depths: B ints that the drafter was asked for.
        device: device drafts, if the drafter left them there.
        places: the rows that they were drafted for; ``None`` for all.
        packed: what ``land`` reads: ``samples``, with the device drafts and their lengths beside
            them in the same array.
        settled: whether the target's rows have already kept the window.
        errors: what a row's own sampler raised, by row; the row ends when the flight lands.
    """

    samples: mx.array
    logprobs: mx.array
    context: mx.array | None
    drafts: Sequence[Sequence[int]]
    depths: Sequence[int]
    device: DeviceProposal | None
    packed: mx.array
    places: Sequence[int] | None = None
    settled: bool = False
    errors: dict[int, Exception] = field(factory=dict)

    @property
    def row_count(self) -> int:
        """Rows of the window, B; rows that joined since are not in it."""
        return self.samples.shape[0]

    @property
    def width(self) -> int:
        """Positions of the window, W."""
        return self.samples.shape[1]

    def land(self) -> Landed:
        """Wait for the window: one host read."""
        read = host_read(self.packed)
        if self.device is None:
            return Landed(read)
        width, drafted = self.width, self.device.tokens.shape[1]
        return Landed(
            [row[:width] for row in read],
            [row[width : width + drafted] for row in read],
            [row[-1] for row in read] if self.device.lengths is not None else None,
        )

    def take(self, keep: Sequence[int]) -> None:
        """Keep and reorder the rows of a settled flight without drafts."""
        index = mx.array(list(keep), mx.int32)
        self.samples = self.packed = self.samples[index]
        self.logprobs = self.logprobs[index]
        self.drafts = [self.drafts[k] for k in keep]
        self.depths = [self.depths[k] for k in keep]
        self.errors = {new: self.errors[k] for new, k in enumerate(keep) if k in self.errors}
