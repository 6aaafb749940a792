"""Rotary positions as a config asks for them: what mlx-lm reads of it, each number checked.

What is left out has mlx-lm's own default; what is null counts as left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specdec_dflash.config import Rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.plugins.config_keys import Keys

__all__ = ["read_rope"]

_NOT_SCALED: Final = ("default", "mrope")  # a text's positions of three axes are one
_LOW, _HIGH, _SHARE = "low_freq_factor", "high_freq_factor", "partial_rotary_factor"
_LENGTH: Final = "original_max_position_embeddings"
_POSITIVE: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "yarn": ("factor", _LENGTH, "beta_fast", "beta_slow"),
    "llama3": ("factor", _LENGTH, _LOW, _HIGH),
    "proportional": ("factor", _SHARE),
}
_MSCALES: Final = ("mscale", "mscale_all_dim")


def read_rope(
    keys: Keys, found: Mapping[str, Any], *, partial: bool = False, neox: bool = True
) -> Rope:
    """Rotary positions from either key.

    Args:
        keys: of the whole config.
        found: the level that they are described in.
        partial: whether a share of a head's features may be rotated, where no kind is named.
        neox: whether the halves of a head are rotated, where no key tells.

    Raises:
        ArtifactError: a kind or a number that is not supported; names it.
    """
    kind = found.get("rope_type") or found.get("type") or "default"
    own = keys.within({**found, "rope_type": kind})
    kind = own.one_of("rope_type", (*_NOT_SCALED, *_POSITIVE))
    inside = keys.alone(found)
    if partial and kind == "default" and inside.number(_SHARE, 1.0) != 1.0:
        kind = "proportional"
    return Rope(
        # YaRN divides by the logarithm of it.
        theta=own.number("rope_theta", 10000.0, above=1 if kind == "yarn" else 0),
        scaling=None if kind in _NOT_SCALED else _scaling(inside, kind),
        traditional=not keys.flag("rope_is_neox_style", neox),
        max_positions=keys.count("max_position_embeddings", 32768),
    )


def _scaling(inside: Keys, kind: str) -> dict[str, Any]:
    """What mlx-lm reads for a kind."""
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in _POSITIVE[kind]:
        if inside.has(name) or (name == "factor" and kind != "proportional"):
            scaling[name] = inside.number(name, above=0)
    if scaling.get(_SHARE, 1.0) > 1:
        raise inside.wrong(_SHARE, "a number above 0 and of 1 at most")
    if kind == "llama3" and scaling.get(_LOW, 1.0) >= scaling.get(_HIGH, 4.0):
        low = _LOW if inside.has(_LOW) else _HIGH
        raise inside.wrong(low, f"such that {_LOW} (1 by default) is below {_HIGH} (4)")
    for name in _MSCALES if kind == "yarn" else ():
        if inside.has(name):
            scaling[name] = inside.number(name)
            if scaling[name] < 0:
                raise inside.wrong(name, "a number of 0 or more")
    return scaling
