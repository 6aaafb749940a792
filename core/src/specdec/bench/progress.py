"""A progress bar on standard error, or none."""

from __future__ import annotations

import sys
from typing import Any, Self

from attrs import define, field

__all__ = ["Bar"]


@define
class Bar:
    """A bar.

    Attributes:
        show: whether there is one.
    """

    show: bool
    _progress: Any = field(default=None)
    _task: Any = field(default=None)

    def __enter__(self) -> Self:
        if self.show:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(file=sys.stderr), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, steps: int) -> None:
        """Show another bar."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=steps)

    def step(self) -> None:
        """One step of it is done."""
        if self._progress is not None:
            self._progress.advance(self._task)
