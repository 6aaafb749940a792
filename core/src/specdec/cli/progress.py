"""Progress of long work: on a terminal, and nothing in a pipe."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measuring_progress", "prompt_progress"]

_LONG_PROMPT = 2048  # tokens; a shorter prompt is one chunk, read before a bar could be seen


def prompt_progress() -> Callable[[int, int], None] | None:
    """A callback for ``prompt_progress_callback`` that draws a bar on standard error.

    Returns:
        ``None`` where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(file=sys.stderr), transient=True)
    task: Any = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if total <= _LONG_PROMPT:
            return
        if task is None:
            bar.start()
            task = bar.add_task("reading the prompt", total=total)
        bar.update(task, completed=done)
        if done >= total:
            bar.stop()

    atexit.register(bar.stop)  # an error in between must not leave the cursor hidden
    return update


def measuring_progress() -> Callable[[float], None] | None:
    """A callback for a drafter's ``progress`` that draws a bar while rounds are measured.

    Returns:
        ``None`` where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress

    bars: list[Any] = []

    def update(share: float) -> None:
        if not bars:
            bar = Progress(console=Console(file=sys.stderr), transient=True)
            bar.start()
            bar.add_task("measuring what rounds cost here (once)", total=1.0)
            bars.append(bar)
        bars[0].update(bars[0].task_ids[0], completed=share)
        if share >= 1.0:
            bars.pop().stop()

    return update
