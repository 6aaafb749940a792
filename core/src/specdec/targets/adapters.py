"""Which layers of a live model are adapters.

mlx-lm puts an adapter into a model by replacing layers (``mlx_lm.tuner.utils.load_adapters``), and
takes it out in the same way (``remove_lora_layers``), at any time, so also while the model is
bound. Nothing is told of it. So the layers are looked at whenever the question comes.

A model has one adapter: no layer of mlx-lm chooses one by row. All rows of a group run under the
same one, and a batch of rows with adapter A, with adapter B and with none cannot be asked for.
Such requests run one after another on a model whose layers are replaced in between, or on a model
each.

Layers that are put into a live model are in training mode. ``mlx_lm.load`` ends that; whoever calls
``load_adapters`` ends it with ``model.eval()``, else an adapter with dropout gives random logits,
here as in mlx-lm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx.nn.layers.base import Module

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["adapter_layers"]

# All of mlx-lm's layers of LoRA (Hu et al., 2021) and DoRA (Liu et al., 2024) have a weight of this
# name. Going by it, not by class, finds those that an architecture brings itself, such as afm7's.
_MARK = "lora_a"


def adapter_layers(model: Module) -> tuple[str, ...]:
    """Names of the types of adapter layers in a model or a layer, itself included.

    One walk over the modules, on the host. Weights that were tuned in full, or into which an
    adapter was fused, are the model's own and show no layer.

    Args:
        model: any module of MLX's.

    Returns:
        Such as ``("DoRALinear",)`` or ``("LoRAEmbedding", "LoRALinear")``, in the order of the
        alphabet; empty where there is no adapter.
    """
    found: set[str] = set()
    nodes: list[Any] = [model]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Module) and _MARK in node:
            found.add(type(node).__name__)
        parts: Iterable[Any] = node.values() if isinstance(node, dict) else node
        nodes += [part for part in parts if isinstance(part, dict | list | tuple)]
    return tuple(sorted(found))
