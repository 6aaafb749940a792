"""What specdec can do with a model, tried on it: caches, ports, drafters, exactness, rollback."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec.drafters import bind_target, load_drafter
from specdec.errors import OptionError, PluginError, SpecdecError, one_line
from specdec.plugins import DeclaresNativeDraft, default_registry
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from specdec.state import RowState
    from specdec.targets import Target

__all__ = ["DrafterFit", "Flip", "ModelReport", "WidthReport", "check_model"]

WIDTHS = (1, 2, 3, 5, 9)
_READ, _TEXT = 16, 46  # positions that are read first, and those that are compared
_TEXT_SHOWN = """\
The library of a small town keeps a ledger of every book that was lent and returned. A clerk copies
each line twice: once into the ledger, and once onto a card that goes with the book. When the card
and the ledger disagree, the clerk reads both again, line by line, from the last place where they
agreed:

def agree(ledger, card):
    for place, (line, copy) in enumerate(zip(ledger, card)):
        if line != copy:
            return place
    return min(len(ledger), len(card))
"""


@frozen
class Flip:
    """A position at which another token is the best one.

    Attributes:
        position: in the text.
        margin: how far the best token was ahead of the next one at width 1, in logits.
    """

    position: int
    margin: float


@frozen
class WidthReport:
    """Logits of one text, read in one way, against those of one position at a time.

    Attributes:
        name: the way.
        difference: the largest difference of any logit.
        flips: where the best token is another one.
    """

    name: str
    difference: float
    flips: tuple[Flip, ...]


@frozen
class DrafterFit:
    """Whether a drafter fits.

    Attributes:
        kind: its kind.
        fits: whether it can be loaded; ``None`` where it was not tried.
        message: why not, or what it takes.
    """

    kind: str
    fits: bool | None
    message: str = ""


@frozen
class ModelReport:
    """What was found.

    Attributes:
        model_type: the module of the model's class.
        vocab_size: V.
        caches: how many caches there are of each type.
        reason: why the model is not speculated with; ``None`` where it is.
        together: which rows go through it in one call.
        recurrent: modules that update recurrent state, and how a part of a window is dropped.
        ports: what drafters may read of it, with its sizes; ``None`` where it is missing.
        drafters: the installed ones, or the one that was asked for.
        widths: exactness, by width of the windows.
        rollback: the same after rounds that were rejected in part; ``None`` without speculation.
    """

    model_type: str
    vocab_size: int
    caches: dict[str, int]
    reason: str | None
    together: str
    recurrent: dict[str, str]
    ports: dict[str, str | None]
    drafters: tuple[DrafterFit, ...]
    widths: tuple[WidthReport, ...]
    rollback: WidthReport | None

    @property
    def tie_margin(self) -> float:
        """The largest lead that a flip overcame: texts may part where two tokens are closer."""
        ways = [*self.widths, *([] if self.rollback is None else [self.rollback])]
        return max((flip.margin for way in ways for flip in way.flips), default=0.0)

    @property
    def exact(self) -> bool:
        """Whether every way gives the same bits."""
        ways = [*self.widths, *([] if self.rollback is None else [self.rollback])]
        return all(way.difference == 0 for way in ways)

    @property
    def sound(self) -> bool:
        """Whether logits are numbers, and rollbacks change no more than the width of windows."""
        most = max(way.difference for way in self.widths)
        if not math.isfinite(most):
            return False
        if self.rollback is None:
            return True
        return self.rollback.difference <= max(2 * most, 1e-6)


def check_model(
    model: Any, tokenizer: Any, *, drafter: str | os.PathLike[str] | None = None
) -> ModelReport:
    """Try what specdec does with a model.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        drafter: a kind, a folder, ``"auto"`` or a chain; all installed kinds where it is not given.

    Raises:
        UnsupportedModelError: the model cannot be driven.
    """
    target = bind_target(model, tokenizer)
    reason = target.no_speculation_reason
    ids = _ids(tokenizer, target.vocab_size)
    widths = WIDTHS if reason is None else (1,)
    logits = {width: _in_windows(target, ids, width) for width in widths}
    reports = [_compared(f"width {width}", logits[width], logits[1]) for width in widths]
    rollback = None
    if reason is None:
        rollback = _compared("rolled back", _with_rejections(target, ids), logits[1])
    together, recurrent = _how(target)
    return ModelReport(
        model_type=type(model).__module__.rpartition(".")[2],
        vocab_size=target.vocab_size,
        caches=dict(Counter(_named(target.new_state().extract_row(0)))),
        reason=reason,
        together=together,
        recurrent=recurrent,
        ports=_ports(target),
        drafters=_drafters(target, model, tokenizer, drafter),
        widths=tuple(reports),
        rollback=rollback,
    )


def _ids(tokenizer: Any, vocab_size: int) -> list[int]:
    if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
        raise OptionError(
            f"the tokenizer is {one_line(repr(tokenizer))}; give what mlx_lm.load returned second"
        )
    ids = [token for token in tokenizer.encode(_TEXT_SHOWN) if token < vocab_size]
    if not ids:
        raise OptionError("the tokenizer gives no ids that the model has; give the model's own")
    needed = _READ + _TEXT
    return (ids * (needed // len(ids) + 1))[:needed]


def _read(target: Target, ids: Sequence[int]) -> RowState:
    state = target.new_state()
    state.begin_round(_READ, reading=True)
    target.forward(mx.array([list(ids[:_READ])], mx.int32), state)
    state.commit_round()
    mx.eval(state.arrays())
    return state


def _in_windows(target: Target, ids: Sequence[int], width: int) -> mx.array:
    """Logits ``[positions, V]`` of the text behind its beginning, in windows that are all kept."""
    state, rows = _read(target, ids), []
    for start in range(_READ, len(ids), width):
        window = list(ids[start : start + width])
        state.begin_round(len(window))
        logits = target.forward(mx.array([window], mx.int32), state).logits[0]
        state.commit_round()
        mx.eval(logits, state.arrays())
        rows.append(logits.astype(mx.float32))
    return mx.concatenate(rows)


def _with_rejections(target: Target, ids: Sequence[int]) -> mx.array:
    """The same, where each window goes on wrongly after what is kept of it."""
    state, rows, start, turn = _read(target, ids), [], _READ, 0
    while start < len(ids):
        width = WIDTHS[1:][turn % (len(WIDTHS) - 1)]
        kept = min(1 + turn % width, len(ids) - start)
        wrong = [(token + 1 + turn) % target.vocab_size for token in ids[: width - kept]]
        window = [*ids[start : start + kept], *wrong]
        state.begin_round(len(window))
        logits = target.forward(mx.array([window], mx.int32), state).logits[0, :kept]
        mx.eval(logits)
        state.rollback([kept])
        mx.eval(state.arrays())
        rows.append(logits.astype(mx.float32))
        start, turn = start + kept, turn + 1
    return mx.concatenate(rows)


def _compared(name: str, got: mx.array, want: mx.array) -> WidthReport:
    # Some models give ids that nobody may draw no finite logit.
    both = mx.isfinite(want) & mx.isfinite(got)
    off = mx.where(both, mx.abs(got - want), mx.where(got == want, 0.0, mx.inf))
    best, other = mx.argmax(want, axis=-1), mx.argmax(got, axis=-1)
    pair = mx.sort(mx.topk(want, min(2, want.shape[-1]), axis=-1), axis=-1)
    read: Any = mx.stack([best, other]).tolist()
    margins: Any = (pair[:, -1] - pair[:, 0]).tolist()
    flips = [
        Flip(place, margins[place])
        for place, (a, b) in enumerate(zip(*read, strict=True))
        if a != b
    ]
    difference: Any = mx.max(off).item()
    return WidthReport(name, difference, tuple(flips))


def _named(caches: Sequence[Any]) -> list[str]:
    names = []
    for cache in caches:
        inside = getattr(cache, "caches", None)
        own = type(cache).__name__
        names.append(own if inside is None else f"{own}({', '.join(_named(inside))})")
    return names


def _how(target: Target) -> tuple[str, dict[str, str]]:
    if not isinstance(target, MlxLmTarget):
        return "as its plugin says", {}
    return target.together.value, target.recurrence.described()


def _ports(target: Target) -> dict[str, str | None]:
    taps, mtp, assistant = target.hidden_taps, target.recurrent_mtp, target.assistant_rows
    head = None if mtp is None else mtp.vocabulary_head
    return {
        "hidden_taps": None if taps is None else f"{taps.layer_count} layers of {taps.hidden_size}",
        "recurrent_mtp": None
        if mtp is None
        else f"hidden {mtp.hidden_size}, {'quantized' if head is not None else 'plain'} head",
        "assistant_rows": None if assistant is None else f"hidden {assistant.hidden_size}",
        "residual_basis": None if target.residual_basis is None else "rotated",
    }


def _drafters(
    target: Target, model: Any, tokenizer: Any, drafter: str | os.PathLike[str] | None
) -> tuple[DrafterFit, ...]:
    if drafter is not None:
        return (_tried(model, tokenizer, drafter),)
    native = target.native_draft if isinstance(target, DeclaresNativeDraft) else None
    fits = []
    for name, kind in sorted(default_registry().kinds.items()):
        if kind.artifact and name != native:
            fits.append(DrafterFit(name, None, "give its folder with --drafter"))
        else:
            fits.append(_tried(model, tokenizer, name))
    if native is not None and native not in default_registry().kinds:
        try:
            default_registry().select(kind=native)
        except PluginError as error:
            fits.append(DrafterFit(native, None, f"the model declares a head of it; {error}"))
    return tuple(fits)


def _tried(model: Any, tokenizer: Any, drafter: str | os.PathLike[str]) -> DrafterFit:
    try:
        with load_drafter(drafter, model, tokenizer) as loaded:
            return DrafterFit(loaded.kind, True)
    except SpecdecError as error:
        return DrafterFit(str(drafter), False, one_line(error))
