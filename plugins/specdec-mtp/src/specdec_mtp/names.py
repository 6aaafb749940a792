"""Names of a head's tensors as they are published, and without their prefix.

Hugging Face's releases prefix them, vLLM's speculators name the parts around the decoder layer in
their own way, and mlx-vlm's split releases have bare names, or a flat form of the next-token layer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["HeadKind", "Layout", "Names"]

_ROOTS: Final = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


class HeadKind(StrEnum):
    """The two published forms of a head."""

    MTP = "mtp"
    NEXTN = "nextn"

    @property
    def a_head(self) -> str:
        """Such a head, for messages."""
        return f"{'an' if self is HeadKind.MTP else 'a'} {self.value} head"


class Layout(StrEnum):
    """How a head's tensors are named where they were found.

    Attributes:
        SPLIT: bare names, in a release or file of the head's own.
        PREFIXED: ``mtp.*``, among the target's tensors or in a file of the head's own.
        NEXTN: ``model.layers.{n}.*`` with n the number of the target's layers.
    """

    SPLIT = "split"
    PREFIXED = "prefixed"
    NEXTN = "nextn"


class Names:
    """What the tensors of a head are called in files.

    Args:
        kind: the head's form.
        own: whether everything in the files belongs to the head, so names may be bare.
        layers: number of the target's layers, behind which a next-token layer stands.
    """

    _SPECULATORS: Final = {
        "input_proj": "fc",
        "final_layernorm": "norm",
        "hidden_layernorm": "pre_fc_norm_hidden",
        "token_layernorm": "pre_fc_norm_embedding",
    }
    _FLAT: Final = {"shared_head_norm": "shared_head.norm", "lm_head": "shared_head.head"}

    def __init__(self, kind: HeadKind, *, own: bool, layers: int | None) -> None:
        self._kind = kind
        self._own = own
        self._prefixes = [(f"{root}mtp.", "", Layout.PREFIXED) for root in _ROOTS]
        if kind is HeadKind.NEXTN and layers is not None:
            for root in _ROOTS:
                here, later = f"{root}layers.{layers}.", f"{root}layers.{layers + 1}."
                self._prefixes.append((here, "", Layout.NEXTN))
                self._prefixes.append((later, "layers.1.", Layout.NEXTN))

    def bare(self, name: str) -> tuple[str, Layout] | None:
        """A stored name without prefix, and the layout it speaks of; ``None`` if not the head's."""
        if self._kind is HeadKind.MTP and name.startswith("mtp_layers."):
            return self._speculators(name), Layout.SPLIT
        for prefix, instead, layout in self._prefixes:
            if name.startswith(prefix):
                return self._plain(instead + name.removeprefix(prefix)), layout
        return (self._plain(name), Layout.SPLIT) if self._own else None

    def _plain(self, name: str) -> str:
        """mlx-vlm's names of the parts around the decoder layer, in Hugging Face's."""
        if self._kind is HeadKind.MTP:
            return name
        name = name.removeprefix("model.").removeprefix("mtp_block.")
        first, dot, rest = name.partition(".")
        return self._FLAT.get(first, first) + dot + rest

    def _speculators(self, name: str) -> str:
        number, _, rest = name.removeprefix("mtp_layers.").partition(".")
        first, dot, after = rest.partition(".")
        if number == "0" and first in self._SPECULATORS:
            return self._SPECULATORS[first] + dot + after
        return f"layers.{number}.{rest}"
