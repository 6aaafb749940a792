"""Many blocks of a window at once: what they hold, what they see, and what they are to say.

A drafter is used one block a row; in training one window gives many, each from a random anchor. The
network is the drafter's own. Only what stands in for the context differs: keys of the window's
positions and of all its blocks lie side by side, and a mask leaves each block the positions before
its anchor and its own columns.

Shapes: B windows, L tokens, N blocks a window, W columns of a block, S = W - 1 slots that draft, D
features of a head, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import HiddenTaps
    from specdec.drafting import KeysAndValues
    from specdec_dflash.model import BlockModel
    from specdec_dflash.training.settings import TrainSettings
    from specdec_dflash.training.teacher import Reading

__all__ = [
    "Blocks",
    "Lesson",
    "WindowContext",
    "block_hidden",
    "block_loss",
    "draw_blocks",
    "lesson",
]

_OFF_PATH = 0.2  # weight of a slot that drafting never reaches with this text before it


@frozen(eq=False)
class Blocks:
    """Blocks of B windows.

    Attributes:
        anchors: ``[B, N]`` positions of their first columns.
        sizes: ``[B, N]`` columns in use of each, 2 to ``width``.
        width: W.
    """

    anchors: mx.array
    sizes: mx.array
    width: int

    @property
    def visible(self) -> mx.array:
        """``[B, N, W]`` whether a column is in use."""
        return mx.arange(self.width) < self.sizes[..., None]


def draw_blocks(shape: tuple[int, int], length: int, width: int, key: mx.array) -> Blocks:
    """Random anchors. Half of the blocks are cut to a random size, since short ones are used too.

    Args:
        shape: B and N.
        length: L, more than ``width``.
        width: W.
        key: of the draw.
    """
    keys = mx.random.split(key, 3)
    anchors = mx.random.randint(1, length - width + 1, shape, key=keys[0])
    cut = mx.random.randint(2, width + 1, shape, key=keys[1])
    whole = mx.random.bernoulli(0.5, shape, key=keys[2])
    return Blocks(anchors, mx.where(whole, width, cut), width)


class WindowContext:
    """Stands for the ``BlockContext`` of B·N rows, which are blocks of B windows.

    Args:
        projected: per layer, of the windows, ``[B, heads, L, D]``.
        blocks: which.

    Attributes:
        positions: ``[B·N]`` of the blocks' first columns.
        width: W.
    """

    def __init__(self, projected: Sequence[KeysAndValues], blocks: Blocks) -> None:
        self._projected = projected
        self.positions = blocks.anchors.reshape(-1)
        self.width = blocks.width
        rows, count = blocks.anchors.shape
        length, columns = projected[0][0].shape[2], count * blocks.width
        before = mx.arange(length) < blocks.anchors[..., None, None]
        before = mx.broadcast_to(before, (rows, count, blocks.width, length))
        block = mx.arange(columns) // blocks.width
        own = (block[:, None] == block) & blocks.visible.reshape(rows, 1, columns)
        self._mask = mx.concatenate([before.reshape(rows, columns, length), own], -1)[:, None]

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        causal: bool = False,
    ) -> mx.array:
        """As ``BlockContext.attend``, for all blocks of each window in one call."""
        assert not causal, "a column of a drafter in training sees its whole block"
        rows = self._mask.shape[0]
        before = self._projected[layer]
        every_key, every_value = (
            mx.concatenate([window, _side_by_side(own, rows)], axis=2)
            for window, own in zip(before, (keys, values), strict=True)
        )
        attended: mx.array = mx.fast.scaled_dot_product_attention(
            _side_by_side(queries, rows), every_key, every_value, scale=scale, mask=self._mask
        )
        heads, size = attended.shape[1], attended.shape[3]
        apart = attended.reshape(rows, heads, -1, self.width, size).swapaxes(1, 2)
        return apart.reshape(-1, heads, self.width, size)


def _side_by_side(each: mx.array, rows: int) -> mx.array:
    """``[B·N, heads, W, D]`` as ``[B, heads, N·W, D]``."""
    _, heads, width, size = each.shape
    return each.reshape(rows, -1, heads, width, size).swapaxes(1, 2).reshape(rows, heads, -1, size)


def block_hidden(model: BlockModel, taps: mx.array, embedded: mx.array, blocks: Blocks) -> mx.array:
    """Hidden states ``[B·N, S, H]`` of the slots of every block.

    Args:
        model: the drafter's network.
        taps: ``[B, L, m·H]`` of the windows.
        embedded: ``[B·N, W, H]`` the blocks' anchors and masks.
        blocks: where they stand.
    """
    context: Any = WindowContext(model.project(taps, 0), blocks)
    return model(embedded, context, 1)


@frozen(eq=False)
class Lesson:
    """What blocks are given and what they are to say.

    Attributes:
        blocks: where they stand.
        taps: ``[B, L, m·H]``.
        embedded: ``[B·N, W, H]``.
        logits: ``[B·N, S, V]`` the target's, of the tokens of the slots.
        expected: ``[B·N, S]`` the target's first choices.
        text: ``[B·N, S]`` the text's own tokens.
        on_path: ``[B·N, S]`` 1 where the target would have written the text's slots before.
        weights: ``[B·N, S]`` of the slots in the loss.
    """

    blocks: Blocks
    taps: mx.array
    embedded: mx.array
    logits: mx.array
    expected: mx.array
    text: mx.array
    on_path: mx.array
    weights: mx.array


def lesson(
    reading: Reading, blocks: Blocks, port: HiddenTaps, mask_token: int, decay: float
) -> Lesson:
    """Set up blocks over what the target has read.

    Slot s stands s positions behind its anchor. It counts for less the further back it stands, and
    for less where the target would not have written the text up to it: a draft is only of use
    behind drafts that were right.

    Args:
        reading: of the windows.
        blocks: in them.
        port: embeds.
        mask_token: fills a block behind its anchor.
        decay: slots after which the weight has fallen to 1/e.
    """
    (rows, length), width = reading.ids.shape, blocks.width
    first = blocks.anchors + mx.arange(rows)[:, None] * length  # in the windows end to end
    at = first.reshape(-1, 1) + mx.arange(1, width)
    ids = reading.ids.reshape(-1)
    choices = mx.argmax(reading.logits, axis=-1).reshape(-1)
    expected, text = choices[at - 1], ids[at]
    would = (expected == text).astype(mx.float32)
    reached = mx.concatenate([mx.ones_like(would[:, :1]), would[:, :-1]], axis=1)
    used = blocks.visible.reshape(-1, width)[:, 1:]
    on_path = mx.cumprod(reached, axis=1) * used
    fading = mx.exp(-mx.arange(width - 1) / decay)
    masks = mx.full((at.shape[0], width - 1), mask_token, ids.dtype)
    given = mx.concatenate([ids[first.reshape(-1, 1)], masks], axis=1)
    return Lesson(
        blocks=blocks,
        taps=reading.taps,
        embedded=port.embed(given),
        logits=reading.logits.reshape(rows * length, -1)[at - 1],
        expected=expected,
        text=text,
        on_path=on_path,
        weights=fading * (_OFF_PATH * used + (1 - _OFF_PATH) * on_path),
    )


def block_loss(
    model: BlockModel, given: Lesson, port: HiddenTaps, settings: TrainSettings
) -> tuple[mx.array, mx.array]:
    """The loss, and per slot how many of the blocks on the path expect what the target does.

    Args:
        model: the drafter's network.
        given: see :func:`lesson`.
        port: the target's head.
        settings: tells the labels.

    Returns:
        The mean cross entropy in nats, weighted; and ``[S]`` counts.
    """
    hidden = block_hidden(model, given.taps, given.embedded, given.blocks)
    logits = port.logits(hidden).astype(mx.float32)
    if settings.labels == "text":
        true = mx.take_along_axis(logits, given.text[..., None], axis=-1)[..., 0]
    else:
        wanted = mx.softmax(given.logits.astype(mx.float32), axis=-1)
        true = (wanted * logits).sum(-1)
    each = mx.logsumexp(logits, axis=-1) - true
    loss = (each * given.weights).sum() / given.weights.sum()
    agrees = (mx.argmax(logits, axis=-1) == given.expected) * given.on_path
    return loss, agrees.sum(0)
