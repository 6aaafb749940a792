"""Looking into one call of an mlx-lm model, without patching classes or copying forwards.

For the length of one call, a layer (an entry of the backbone's layer list) or the backbone itself
(an entry of its parent module) is replaced by a wrapper that records, stands in, or stops. The
model's own code does the rest, so head scaling, soft caps and embedding scales are the model's.
A model is used from one thread at a time, as in mlx-lm.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import mlx.core as mx

__all__ = ["Backbone", "Delegate", "StandIn", "find_backbone", "standing_in"]


StandIn = tuple[Any, Any, Any]
"""The list or dict that holds a module, the module's number or name there, and what stands in."""


@contextmanager
def standing_in(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Put each stand-in in its place, and back what was there.

    None stays in the model, also when putting back is interrupted.
    """
    held = [(holder, name, holder[name]) for holder, name, _ in stand_ins]
    interrupt: KeyboardInterrupt | None = None
    try:
        for place in stand_ins:
            _assign(*place)
        yield
    finally:
        while held:
            try:
                while held:
                    _assign(*held[-1])
                    held.pop()
            except KeyboardInterrupt as raised:
                interrupt = raised
        if interrupt is not None:
            raise interrupt


def _assign(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, list):
        holder[name] = value
    else:
        dict.__setitem__(holder, name, value)  # past the module's own checks


class Delegate:
    """Stands in a module's place; what it does not define is the module's."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, key: str) -> Any:
        return self._module[key]

    def __contains__(self, key: str) -> bool:
        return key in self._module


class _Recorder(Delegate):
    output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._module(*args, **kwargs)
        self.output = output[0] if isinstance(output, tuple | list) else output
        return output


class _Constant(Delegate):
    def __init__(self, module: Any, value: mx.array) -> None:
        super().__init__(module)
        self._value = value

    def __call__(self, *_args: Any, **_kwargs: Any) -> mx.array:
        return self._value


class _FirstInput(BaseException):
    """Carries the first layer's input out of a call that needs nothing more."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class _Stop(Delegate):
    def __call__(self, hidden: mx.array, *_args: Any, **_kwargs: Any) -> Any:
        raise _FirstInput(hidden)


class Backbone:
    """The module that runs the layers, and its place in the model.

    Args:
        model: the whole mlx-lm model, called as ``model(ids, cache=...) -> logits``.
        parent: the module that holds the backbone.
        name: the backbone's name in ``parent``.
    """

    def __init__(self, model: Any, parent: Any, name: str) -> None:
        self.model = model
        self.parent = parent
        self.name = name
        self.module = parent[name]
        self.layers: list[Any] = self.module["layers"]

    def _stand_in(self, value: Any) -> StandIn:
        return self.parent, self.name, value

    @contextmanager
    def recording(self, layers: Sequence[int], final: bool) -> Iterator[dict[int, _Recorder]]:
        """Record the outputs of layers, and of the backbone (key ``len(layers)``) if asked."""
        taps = {i: _Recorder(self.layers[i]) for i in set(layers)}
        whole = _Recorder(self.module) if final else None
        stand_ins: list[StandIn] = [(self.layers, i, tap) for i, tap in taps.items()]
        if whole is not None:
            stand_ins.append(self._stand_in(whole))
        with standing_in(stand_ins):
            yield taps if whole is None else {**taps, len(self.layers): whole}

    def head(self, hidden: mx.array, ids: mx.array) -> Any:
        """Everything the model does after its backbone, over ``hidden [B, L, H]``.

        Args:
            hidden: what the backbone returns.
            ids: ``[B, L]`` ids of any value, for the model's signature.
        """
        with standing_in([self._stand_in(_Constant(self.module, hidden))]):
            return self.model(ids)

    def embed(self, ids: mx.array) -> mx.array:
        """What the first layer is given for ``ids [B, L]``: embeddings as the model scales them."""
        try:
            with standing_in([(self.layers, 0, _Stop(self.layers[0]))]):
                self.model(ids)
        except _FirstInput as reached:
            return reached.hidden
        raise RuntimeError("the model returned without calling its first layer")


def find_backbone(model: Any) -> Backbone | None:
    """The submodule whose ``layers`` are ``model.layers``, or ``None`` where there is none."""
    layers = getattr(model, "layers", None)
    if not layers:
        return None
    queue = [model]
    while queue:
        parent = queue.pop(0)
        for name, child in parent.items():
            if not isinstance(child, dict):
                continue
            own = child.get("layers")
            if isinstance(own, list) and own and own[0] is layers[0] and callable(child):
                return Backbone(model, parent, name) if len(own) == len(layers) else None
            queue.append(child)
    return None
