"""Cost curves on disk: one file per machine, model, quantization and version of MLX.

A curve is a measurement and no truth: what cannot be read is measured anew, and what cannot be
written is measured again by the next process.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from specdec.cost.curve import Curve, Point
from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CurveStore"]

_LAYOUT = 1


class CurveStore:
    """Curves by what they were measured on.

    Args:
        folder: where they are; the user's cache folder where none is given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = user_cache_path("specdec") / "costs" if folder is None else folder

    def read(self, identity: str) -> Curve | None:
        """The curve of a machine and model; ``None`` where there is none that can be read."""
        try:
            found: Any = json.loads(self._file(identity).read_text())
            if found["layout"] != _LAYOUT or found["identity"] != identity:
                return None
            return Curve({Point(b, w, c): float(time) for b, w, c, time in found["times"]})
        except (OSError, ValueError, LookupError, TypeError, OptionError):
            return None

    def write(self, identity: str, times: Mapping[Point, float]) -> None:
        """Keep times beside those that are there; a point that was timed again is replaced."""
        held = self.read(identity)
        merged = {**({} if held is None else held.times), **times}
        entry = {
            "layout": _LAYOUT,
            "identity": identity,
            "times": [[p.batch, p.width, p.context, t] for p, t in sorted(merged.items())],
        }
        file = self._file(identity)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as stream:
                json.dump(entry, stream)
            os.replace(stream.name, file)
        except OSError:
            return  # nothing depends on it

    def forget(self, identity: str) -> None:
        """Measure anew the next time."""
        self._file(identity).unlink(missing_ok=True)

    def _file(self, identity: str) -> Path:
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"
