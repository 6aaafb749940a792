"""The states between the steps of the gated delta rule, where mlx-lm computes it step by step.

On CPU and CUDA mlx-lm runs the rule as a loop in Python (Yang et al. 2024, "Gated Delta Networks",
arXiv 2412.06464), so the state after each position exists anyway and only has to be kept. On CUDA
one kernel does what the loop does (``kernel``), for prompts and single positions too.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec.targets.recurrent.update import DeltaWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.targets.recurrent.update import DeltaUpdate

__all__ = ["Stepping", "stepping_of"]


@define(eq=False)
class Stepping:
    """A module's code, with the loop over positions told to leave its states here.

    mlx-lm's functions are looked up by name, and copied with another name bound; nothing of theirs
    is changed.

    Attributes:
        states: the state after each step of the last run that was to keep them, one by one or
            stacked ``[T, ...]``.
        last: the state that the module was given for the last of them.
    """

    _call: Any
    _update: Any
    _loop: Any
    states: list[mx.array] | mx.array = field(init=False, factory=list)
    last: mx.array | None = field(init=False, default=None)
    _stepped: list[mx.array] = field(init=False, factory=list)
    _keep: bool = field(init=False, default=False)
    _at_once: DeltaUpdate | None = field(init=False, default=None)
    _recorded: Any = field(init=False)
    _keeping_loop: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        step = self._loop.__globals__["_gated_delta_step_ops"]

        def keeping(*args: Any, **kwargs: Any) -> Any:
            output, state = step(*args, **kwargs)
            self._stepped.append(state)
            return output, state

        self._keeping_loop = _rebound(self._loop, "_gated_delta_step_ops", keeping)
        update = _rebound(self._update, "gated_delta_ops", self._window)
        self._recorded = _rebound(self._call, "gated_delta_update", update)

    def run(
        self,
        module: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        keep: bool,
        at_once: DeltaUpdate | None,
    ) -> Any:
        """Run the code of a module.

        Args:
            module: the module.
            args: its positional arguments.
            kwargs: the others.
            keep: whether the states between positions are wanted.
            at_once: computes a window in place of the loop.
        """
        self.clear()
        self._keep, self._at_once = keep, at_once
        return self._recorded(module, *args, **kwargs)

    def clear(self) -> None:
        """Let go of all states."""
        self.states, self.last, self._stepped = [], None, []

    def _window(self, *args: Any, **kwargs: Any) -> Any:
        """What ``gated_delta_ops`` does, under its name."""
        done = None
        if self._at_once is not None:
            done = self._at_once(DeltaWindow(*args, **kwargs), every=self._keep)
        if done is None and not self._keep:
            return self._loop(*args, **kwargs)
        states: list[mx.array] | mx.array
        if done is None:
            self._stepped = states = []
            output, last = self._keeping_loop(*args, **kwargs)
        else:
            output, states = done
            last = states[-1]
        if self._keep:
            self.states, self.last = states, last
        return output, last


def stepping_of(kind: type[Any]) -> Stepping | None:
    """The code of a class of modules whose gated delta loop leaves its states, if it has one.

    Where a version of mlx-lm names its functions otherwise, the update is run again instead.
    """
    call: Any = kind.__call__
    update: Any = getattr(call, "__globals__", {}).get("gated_delta_update")
    loop: Any = getattr(update, "__globals__", {}).get("gated_delta_ops")
    names = ((call, "gated_delta_update"), (update, "gated_delta_ops"))
    if not all(_names(*each) for each in (*names, (loop, "_gated_delta_step_ops"))):
        return None
    return Stepping(call, update, loop)


def _names(function: Any, name: str) -> bool:
    """Whether a function's code uses a name of its module."""
    return isinstance(function, FunctionType) and name in function.__code__.co_names


def _rebound(function: Any, name: str, value: Any) -> Any:
    """A copy of a function for which a name of its module means something else."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
