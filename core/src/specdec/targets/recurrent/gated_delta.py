"""The states between the steps of the gated delta rule, where mlx-lm computes it step by step.

On CPU and CUDA mlx-lm runs the rule as a loop in Python (Yang et al. 2024, "Gated Delta Networks",
arXiv 2412.06464), so the state after each position exists anyway and only has to be kept.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

__all__ = ["Stepping", "stepping_of"]


@define(eq=False)
class Stepping:
    """A module's code, with the loop over positions told to leave its states here.

    Attributes:
        run: the code; called with the module first.
        states: the state after each step since it was cleared.
    """

    run: Callable[..., Any]
    states: list[mx.array]


def stepping_of(kind: type[Any]) -> Stepping | None:
    """The code of a class of modules whose gated delta loop leaves its states, if it has one.

    mlx-lm's functions are looked up by name, and copied with another name bound; nothing of theirs
    is changed. Where a version names them otherwise, the update is run again instead.
    """
    states: list[mx.array] = []
    call = kind.__call__
    update = getattr(call, "__globals__", {}).get("gated_delta_update")
    loop = getattr(update, "__globals__", {}).get("gated_delta_ops")
    step = getattr(loop, "__globals__", {}).get("_gated_delta_step_ops")
    if step is None:
        return None

    def keeping(*args: Any, **kwargs: Any) -> Any:
        output, state = step(*args, **kwargs)
        states.append(state)
        return output, state

    loop = _rebound(loop, "_gated_delta_step_ops", keeping)
    update = _rebound(update, "gated_delta_ops", loop)
    run = _rebound(call, "gated_delta_update", update)
    return None if run is None else Stepping(run, states)


def _rebound(function: Any, name: str, value: Any) -> Any:
    """A copy of a function for which a name of its module means something else."""
    if value is None or not isinstance(function, FunctionType):
        return None
    if name not in function.__code__.co_names:
        return None
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
