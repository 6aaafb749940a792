"""Measured times on disk: one file per machine, model, quantization and version of MLX.

They are a measurement and no truth: what cannot be read is measured anew, and what cannot be
written is measured again by the next process.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field
from mlx.utils import tree_flatten
from platformdirs import user_cache_path

from specdec.cost.curve import Point
from specdec.cost.times import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CostStore", "Kept", "identity_of"]

_LAYOUT = 1
# What a file of any content may raise while it is read; nesting without end recurses.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@define
class Kept:
    """What is known of a machine and model.

    Attributes:
        windows: milliseconds of the target's windows by point.
        plain: milliseconds of a plain round, by rows.
        rounds: milliseconds of rounds with drafts, by drafter and kind of round.
    """

    windows: dict[Point, float] = field(factory=dict)
    plain: dict[int, float] = field(factory=dict)
    rounds: dict[str, dict[Kind, float]] = field(factory=dict)


class CostStore:
    """What was measured, by what it was measured on.

    Args:
        folder: where it is; the user's cache folder where none is given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = user_cache_path("specdec") / "costs" if folder is None else folder

    def read(self, identity: str) -> Kept:
        """What is known of a machine and model; empty where nothing can be read."""
        try:
            found: Any = json.loads(self._file(identity).read_text())
            if found["layout"] != _LAYOUT or found["identity"] != identity:
                return Kept()
            return Kept(
                {Point(*_whole(b, w, c)): _time(t) for b, w, c, t in found["windows"]},
                {_whole(b)[0]: _time(t) for b, t in found["plain"]},
                {
                    str(drafter): {Kind(*_whole(b, a, w)): _time(t) for b, a, w, t in rounds}
                    for drafter, rounds in found["rounds"].items()
                },
            )
        except _UNREADABLE:
            return Kept()

    def write(self, identity: str, kept: Kept) -> None:
        """Keep times beside those that are there; what was timed again is replaced."""
        held = self.read(identity)
        rounds = dict(held.rounds)
        for drafter, times in kept.rounds.items():
            rounds[drafter] = {**rounds.get(drafter, {}), **times}
        entry = {
            "layout": _LAYOUT,
            "identity": identity,
            "windows": [
                [p.batch, p.width, p.context, t]
                for p, t in sorted({**held.windows, **kept.windows}.items())
            ],
            "plain": [[b, t] for b, t in sorted({**held.plain, **kept.plain}.items())],
            "rounds": {
                drafter: [[k.rows, k.asked, k.width, t] for k, t in sorted(times.items())]
                for drafter, times in sorted(rounds.items())
            },
        }
        file = self._file(identity)
        with suppress(OSError):  # nothing depends on it
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=file.parent)
            try:
                with open(handle, "w") as stream:
                    json.dump(entry, stream)
                os.replace(path, file)
            except BaseException:
                os.unlink(path)
                raise

    def forget(self, identity: str) -> None:
        """Measure anew the next time."""
        with suppress(OSError):
            self._file(identity).unlink(missing_ok=True)

    def _file(self, identity: str) -> Path:
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"


def identity_of(model: Any) -> str | None:
    """What times are true for: the machine, the shapes and types of a model's weights, MLX.

    Args:
        model: an mlx module.

    Returns:
        ``None`` where the model has no parameters that tell.
    """
    if not hasattr(model, "parameters"):
        return None
    shapes: Mapping[str, mx.array] = dict(tree_flatten(model.parameters()))
    told = "\n".join(f"{name} {a.shape} {a.dtype}" for name, a in sorted(shapes.items()))
    layout = hashlib.sha256(told.encode()).hexdigest()[:32]
    kind = type(model).__module__
    return f"{_machine()}; mlx {version('mlx')}; {kind} {layout}"


def _machine() -> str:
    info: Mapping[str, Any] = mx.device_info()
    name = info.get("device_name", platform.processor() or platform.machine())
    return f"{name}, {os.cpu_count()} cores, {mx.default_device()}"


def _whole(*values: Any) -> tuple[int, ...]:
    wrong = [value for value in values if type(value) is not int or not 0 <= value < 1 << 53]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no number of rows or positions")
    return values


def _time(value: Any) -> float:
    time = float(value)
    if not 0 < time < float("inf"):
        raise ValueError(f"{time} is no time")
    return time
