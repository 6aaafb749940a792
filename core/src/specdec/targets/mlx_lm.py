"""An mlx-lm model as the target: forwards over windows, ports for drafters, states for rows."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache

from specdec.checkpoints import weights_identity
from specdec.contract import ContextKind
from specdec.errors import OptionError, TargetLacksError, UnsupportedModelError
from specdec.state import NativeState, RaggedState, row_state, types_without_row_form
from specdec.targets.adapters import adapter_layers
from specdec.targets.intercept import Backbone, find_backbone
from specdec.targets.sizes import RowSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.contract import AssistantRows, ResidualBasis
    from specdec.state import RowState

__all__ = ["MlxLmTarget"]

_MANY = 11  # rows of a probe; a number of heads that no model has


@frozen(eq=False)
class _Window:
    logits: mx.array
    context: mx.array | None


class _HiddenPort:
    """Embedding and head of the bound model; serves both hidden ports of the contract."""

    def __init__(self, backbone: Backbone, hidden_size: int) -> None:
        self._backbone = backbone
        self._hidden_size = hidden_size

    @property
    def layer_count(self) -> int:
        return len(self._backbone.layers)

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @property
    def vocabulary_head(self) -> Any | None:
        head = self._backbone.parent.get("lm_head")
        if head is None:
            head = self._backbone.module.get("embed_tokens")
        quantized = isinstance(head, QuantizedLinear | QuantizedEmbedding)
        # Whoever takes it reads its weights alone; an adapter's would be left out.
        return head if quantized and not adapter_layers(head) else None

    def embed(self, ids: mx.array) -> mx.array:
        return self._backbone.embed(ids)

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._backbone.head(hidden, mx.zeros(hidden.shape[:2], mx.uint32))
        return logits


class MlxLmTarget:
    """An mlx-lm model, driven from outside; implements the contract's ``TargetView``.

    Args:
        model: what ``mlx_lm.load`` returned. It is neither changed nor copied.

    Raises:
        UnsupportedModelError: calling the model does not give logits ``[B, L, V]``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._backbone = find_backbone(model)
        # Built but never evaluated: shapes alone tell whether the model fits.
        probe = mx.zeros((1, 2), mx.uint32)
        logits = model(probe)
        if not isinstance(logits, mx.array) or logits.ndim != 3 or logits.shape[:2] != (1, 2):
            raise UnsupportedModelError(
                f"{type(model).__module__}: calling the model does not give logits [batch, length, "
                "vocabulary]; specdec drives text models as mlx-lm loads them"
            )
        self.vocab_size: int = logits.shape[2]
        self._port = self._probe_port(probe)
        self._apart = self._why_rows_stay_apart()
        self._cache_scheme = _scheme(make_prompt_cache(model))
        self._reason = self.new_state().reason
        self._sizes = RowSizes()

    @property
    def identity(self) -> object:
        """The model itself."""
        return self.model

    @property
    def hidden_taps(self) -> _HiddenPort | None:
        """Layers, embedding and head; ``None`` where the model has no usual ``model.layers``."""
        return self._port

    @property
    def recurrent_mtp(self) -> _HiddenPort | None:
        """Embedding and head; ``None`` where the model has no usual ``model.layers``."""
        return self._port

    @property
    def assistant_rows(self) -> AssistantRows | None:
        """Not offered: needs the row form of sliding windows."""
        return None

    @property
    def residual_basis(self) -> ResidualBasis | None:
        """mlx-lm models carry no rotated residual stream."""
        return None

    @property
    def draft_projections(self) -> Mapping[str, Callable[..., mx.array]] | None:
        """None are declared."""
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Types of the adapter layers that are in the model now, such as ``LoRALinear``."""
        return adapter_layers(self.model)

    @property
    def no_speculation_reason(self) -> str | None:
        """Why this target decodes one position at a time, if it does."""
        return self._reason

    def can_tap(self, layers: Sequence[int]) -> bool:
        """Whether a forward can capture exactly these layers."""
        if not layers:
            return True
        count = self._port.layer_count if self._port is not None else -1
        return all(0 <= layer <= count for layer in layers) and len(set(layers)) == len(layers)

    def new_state(self) -> RowState:
        """The state of one cold row."""
        return self._state(make_prompt_cache(self.model))

    def row_bytes(self, tokens: int) -> int:
        """Bytes that the caches of one row take at most at so many positions."""
        return self._sizes.at(self, tokens)

    def state_identity(self) -> str:
        """Weights and adapters as they are now, the caches that hold a row, and what computes."""
        return f"{weights_identity(self.model)}; {self._cache_scheme}; {_backend()}"

    def state_of(self, caches: Sequence[Any]) -> RowState:
        """The state of one row that continues the caller's mlx-lm caches.

        Raises:
            OptionError: the caches are not one per layer of this model, or stand at different
                positions.
        """
        expected = len(make_prompt_cache(self.model))
        if len(caches) != expected:
            raise OptionError(
                f"prompt_cache has {len(caches)} entries, but this model needs {expected}; make it "
                "with mlx_lm.models.cache.make_prompt_cache(model)"
            )
        offsets = {c.offset for c in caches if isinstance(getattr(c, "offset", None), int)}
        if len(offsets) > 1:
            raise OptionError(
                f"prompt_cache stands at different positions ({sorted(offsets)}) in different "
                "layers; trim it with mlx_lm.models.cache.trim_prompt_cache or start a new one"
            )
        return self._state(caches)

    def forward(
        self,
        tokens: mx.array,
        state: RowState,
        context: ContextKind = ContextKind.NONE,
        taps: Sequence[int] = (),
    ) -> _Window:
        """Run the window that was begun on ``state``.

        Args:
            tokens: ``[B, W]`` ids.
            state: rows with a round of width W open; each row continues at its own position.
            context: which hidden states to return.
            taps: layers, for ``ContextKind.TAPS``.

        Raises:
            TargetLacksError: hidden states were asked of a model without the usual layers.
        """
        caches = state.row_caches
        if len(caches) == 1:
            return self._run(tokens, caches[0], context, taps)
        windows = [
            self._run(tokens[row : row + 1], cache, context, taps)
            for row, cache in enumerate(caches)
        ]
        contexts = [w.context for w in windows if w.context is not None]
        return _Window(
            mx.concatenate([w.logits for w in windows], axis=0),
            mx.concatenate(contexts, axis=0) if contexts else None,
        )

    def _run(
        self, tokens: mx.array, caches: list[Any], context: ContextKind, taps: Sequence[int]
    ) -> _Window:
        if context is ContextKind.NONE:
            return _Window(self.model(tokens, cache=caches), None)
        backbone = self._backbone
        if backbone is None:
            raise TargetLacksError("hidden_taps")
        last = len(backbone.layers)
        wanted = {
            ContextKind.PRE_NORM: (last - 1,),
            ContextKind.POST_NORM: (last,),
        }.get(context, tuple(taps))
        with backbone.recording([i for i in wanted if i < last], last in wanted) as recorded:
            logits = self.model(tokens, cache=caches)
        outputs = [recorded[i].output for i in wanted]
        return _Window(logits, outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, -1))

    def _state(self, caches: Sequence[Any]) -> RowState:
        if self._apart is not None:
            return NativeState(caches, self._apart)
        return row_state(caches)

    def _why_rows_stay_apart(self) -> str | None:
        """Why the model's code cannot take rows of different length in one call, if it cannot.

        Some models broadcast the mask or the offsets over the wrong axis. With as many rows as no
        model has heads the shapes show it; with as many as it has, nothing would.
        """
        if types_without_row_form(make_prompt_cache(self.model)):
            return None
        rows = [RaggedState(make_prompt_cache(self.model)) for _ in range(_MANY)]
        state, others = rows[0], rows[1:]
        try:
            state.begin_round(1)
            self.model(mx.zeros((1, 1), mx.uint32), cache=state.caches)
            state.commit_round()
            state.prepare_append(others).commit()
            state.begin_round(2)
            logits = self.model(mx.zeros((_MANY, 2), mx.uint32), cache=state.caches)
        except (ValueError, TypeError, IndexError):  # what MLX raises for shapes and offsets
            logits = None
        if logits is not None and logits.shape == (_MANY, 2, self.vocab_size):
            return None
        return f"{type(self.model).__module__} cannot take rows of different length in one call"

    def _probe_port(self, probe: mx.array) -> _HiddenPort | None:
        """The hidden port, if one recorded call shows hidden states of one shape throughout."""
        backbone = self._backbone
        if backbone is None:
            return None
        every = range(len(backbone.layers))
        with backbone.recording(every, final=True) as recorded:
            self.model(probe)
        shapes = {getattr(tap.output, "shape", None) for tap in recorded.values()}
        shape = next(iter(shapes))
        if len(shapes) != 1 or shape is None or len(shape) != 3 or shape[:2] != probe.shape:
            return None
        if backbone.embed(probe).shape != shape:
            return None
        return _HiddenPort(backbone, shape[2])


def _scheme(caches: Sequence[Any]) -> str:
    """How a row of these caches is laid out: each type once a run of layers, with its settings."""
    kinds = []
    for held in caches:
        settings = {
            name: value
            for name, value in sorted(vars(held).items())
            if isinstance(value, int | float | str)
        }
        kinds.append(f"{type(held).__name__}{settings}")
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return ", ".join(f"{count} x {kind}" for kind, count in runs)


def _backend() -> str:
    return f"{_versions()} on {mx.default_device()}"


@cache
def _versions() -> str:
    # A release may mend how state is computed; what the one before stored is then another state.
    return ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "specdec-core"))
