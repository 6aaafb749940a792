"""A head's module from its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specdec.drafting.modules import load_module, quantize_module, without_drawing
from specdec.errors import ArtifactError, one_line
from specdec_mtp.find import HeadKind
from specdec_mtp.heads import MtpHead, NextnHead

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx

    from specdec.drafting.modules import Packing
    from specdec_mtp.heads import HeadModule
    from specdec_mtp.layers import LayerFamily

__all__ = ["build_head", "quantize_head"]

_KEPT: Final = ("mlp.gate", "mlp.shared_expert_gate")  # routers decide by small differences


def build_head(
    kind: HeadKind, tensors: Mapping[str, mx.array], args: Any, family: LayerFamily
) -> HeadModule:
    """A head with these weights, packed as they are stored.

    Args:
        kind: which.
        tensors: by name, as ``read_tensors`` gives them, norms finished.
        args: settings of its decoder layer.
        family: makes that layer.

    Raises:
        ArtifactError: a tensor is missing, unknown or of another shape; names it.
    """
    dense = not any(".switch_mlp." in name for name in tensors)
    made = MtpHead if kind is HeadKind.MTP else NextnHead
    try:
        with without_drawing():
            head = made(args, family, dense=dense)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"the {kind} head's layer cannot be made with the target's settings "
            f"({one_line(error)}); give the head of this target"
        ) from error
    load_module(f"the {kind} head", head, tensors)
    return head


def quantize_head(kind: HeadKind, head: HeadModule, packing: Packing) -> None:
    """Quantize a head that is stored in 16 or 32 bits; routers stay as they are.

    Args:
        kind: which.
        head: changed in place.
        packing: bits and group size.

    Raises:
        OptionError: MLX has no such format, or no weight has a size for it.
    """
    quantize_module(f"the {kind} head", head, packing, fits=lambda path: not path.endswith(_KEPT))
