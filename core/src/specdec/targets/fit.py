"""How a model's code may be driven, found by trying it once.

Some models read ``cache.offset`` or the number of keys as a position, or broadcast the mask over
the wrong axis: rows of different length in one call raise, or give other logits without a word.
Some give other logits for a window than for its positions one by one. So a few windows are
computed both ways. A model is tried once, however often it is bound.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx_lm.models.cache import make_prompt_cache

from specdec.errors import RollbackError, UnsupportedModelError, one_line
from specdec.state import RowBatch, Together, types_without_row_form
from specdec.state.kernels import plans_by_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Fit", "does_not_run", "fit_of", "positions_of"]

_MANY = 11  # rows; a number of heads that no model has
_LONG, _SHORT, _WIDTH = 24, 5, 4  # positions read, and those of the window behind them
# Of the logits' spread. A CPU gives a position nearly the same bits in any window; on a GPU
# rounding in 16 bits alone came to 0.1 with random weights, so only gross differences tell there.
_MARGIN_CPU, _MARGIN_GPU = 0.01, 0.3
_RAISED = (ValueError, TypeError, IndexError, RollbackError)  # what shapes and offsets make of it

# What a GPU or a short text does not show. Their code takes the number of keys for the position of
# the last one, or adds a mask of booleans to its scores, so that a window is not causal.
_COUNT_KEYS = {"mlx_lm.models.afm7", "mlx_lm.models.minimax_m3_vl"}
_NOT_CAUSAL = {"mlx_lm.models.phi3small"}


@frozen
class Fit:
    """What may go through a model in one call.

    Attributes:
        together: which rows.
        reason: why windows of several positions may not; ``None`` where they may.
        exact_keys: whether it must never be given more keys than there are positions.
    """

    together: Together
    reason: str | None = None
    exact_keys: bool = False


# With the classes of the model's modules, in case somebody replaces some.
_known: dict[int, tuple[list[type[Any]], Fit]] = {}


def fit_of(model: Any, vocab_size: int) -> Fit:
    """How a model may be driven.

    Args:
        model: the model, whose cache types all have row forms.
        vocab_size: V.

    Raises:
        UnsupportedModelError: it does not run on this machine.
    """
    key, classes = id(model), [type(module) for module in model.modules()]
    if key not in _known:
        weakref.finalize(model, _known.pop, key, None).atexit = False
    elif _known[key][0] == classes:
        return _known[key][1]
    try:
        _known[key] = classes, _try(model, vocab_size)
    except RuntimeError as error:  # from a kernel, such as of experts in 16 bits on a CPU
        raise does_not_run(model, error) from error
    return _known[key][1]


def does_not_run(model: Any, error: Exception) -> UnsupportedModelError:
    """The error for a model whose call raised something."""
    return UnsupportedModelError(
        f"{_name(model)}: calling the model raised {one_line(error)}; it does not run on this "
        "machine"
    )


def positions_of(model: Any, caches: Sequence[Any]) -> set[int]:
    """Where a row's caches stand; those that the model's code never writes are left out.

    Args:
        model: the model.
        caches: one row's, one per layer.
    """
    offsets = [getattr(cache, "offset", None) for cache in caches]
    stand = {offset for offset in offsets if isinstance(offset, int)}
    if 0 not in stand or len(stand) == 1:
        return stand
    fresh = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.uint32), cache=fresh)  # built, never evaluated
    idle = [getattr(cache, "offset", None) == 0 for cache in fresh]
    pairs = zip(offsets, idle, strict=True)
    return {offset for offset, unused in pairs if isinstance(offset, int) and not unused}


def _try(model: Any, vocab_size: int) -> Fit:
    if types_without_row_form(make_prompt_cache(model)):
        return Fit(Together.ALONE)
    if type(model).__module__ not in _COUNT_KEYS:
        fit = _try_keys(model, vocab_size, exact=False)
        if fit.reason is None or not plans_by_shape():
            return fit
    # On some backends keys are read a little further than there are (state/kernels.py).
    return evolve(_try_keys(model, vocab_size, exact=True), exact_keys=True)


def _try_keys(model: Any, vocab_size: int, *, exact: bool) -> Fit:
    ids = mx.random.randint(
        0, vocab_size, (2, _LONG + _WIDTH), dtype=mx.uint32, key=mx.random.key(0)
    )
    long, like, short = ids[:1], ids[1:], ids[1:, _LONG - _SHORT :]
    rows = [_read(model, row[:, :-_WIDTH], exact) for row in (long, like, short)]
    windows = [row[:, -_WIDTH:] for row in (long, like, short)]
    try:
        alone = [_window(model, batch, w) for batch, w in zip(rows, windows, strict=True)]
    except _RAISED as error:
        return Fit(Together.ALONE, f"{_name(model)} cannot take windows ({type(error).__name__})")
    steps = _one_by_one(model, _read(model, long[:, :-_WIDTH], exact), windows[0])
    if type(model).__module__ in _NOT_CAUSAL or _differ(alone[0], steps):
        return Fit(
            Together.ALONE,
            f"{_name(model)} gives other logits for a window than for its positions one by one",
        )

    def fits(parts: Sequence[int]) -> bool:
        many = [(rows[parts[0]], [0]), (rows[parts[1]], [0] * (_MANY - 1))]
        both = mx.concatenate([windows[part] for part in parts])
        try:
            shape = _window(model, RowBatch.of(many), mx.repeat(both[:1], _MANY, axis=0)).shape
            logits = _window(model, RowBatch.of([(rows[part], [0]) for part in parts]), both)
        except _RAISED:
            return False
        return shape == (_MANY, _WIDTH, vocab_size) and not any(
            _differ(logits[place : place + 1], alone[part]) for place, part in enumerate(parts)
        )

    if type(model).__module__ not in _COUNT_KEYS and fits([0, 2]):
        return Fit(Together.ANY)
    return Fit(Together.EQUAL if fits([0, 1]) else Together.ALONE)


def _read(model: Any, ids: mx.array, exact: bool) -> RowBatch:
    batch = RowBatch(make_prompt_cache(model), exact_keys=exact)
    batch.begin(ids.shape[1], reading=True)
    model(ids, cache=batch.caches)
    batch.finish(None)
    return batch


def _window(model: Any, batch: RowBatch, ids: mx.array) -> mx.array:
    """Logits of a window that is dropped again."""
    batch.begin(ids.shape[1], reading=False)
    logits: mx.array = model(ids, cache=batch.caches)
    batch.finish([0] * batch.row_count)
    return logits


def _one_by_one(model: Any, batch: RowBatch, ids: mx.array) -> mx.array:
    logits = []
    for position in range(ids.shape[1]):
        batch.begin(1, reading=False)
        logits.append(model(ids[:, position : position + 1], cache=batch.caches))
        batch.finish(None)
    return mx.concatenate(logits, axis=1)


def _differ(got: mx.array, want: mx.array) -> bool:
    """Whether most positions have other logits; an expert that flips changes one or another."""
    # Some models give ids that nobody may draw no finite logit.
    drawn = mx.isfinite(want)
    got, want = (mx.where(drawn, each.astype(mx.float32), 0.0) for each in (got, want))
    off = mx.sqrt(mx.mean((got - want) ** 2, axis=-1)) / (mx.std(want, axis=-1) + 1e-9)
    second: Any = mx.sort(off.flatten())[1].item()
    on_cpu = mx.default_device().type == mx.cpu
    return not second <= (_MARGIN_CPU if on_cpu else _MARGIN_GPU)


def _name(model: Any) -> str:
    return type(model).__module__
