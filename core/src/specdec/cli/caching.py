"""How rows are cached: the options of ``specdec generate`` that mlx-lm's command has too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["add_caching", "caching"]


def add_caching(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("caches")
    group.add_argument(
        "--max-kv-size",
        type=int,
        help="positions to keep at most, for models without caches of their own",
    )
    group.add_argument("--kv-bits", type=int, help="bits to quantize attention K/V to")
    group.add_argument("--kv-group-size", type=int, help="values that share a scale (64)")
    group.add_argument(
        "--quantized-kv-start", type=int, help="positions before K/V are quantized (5000)"
    )


def caching(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them, for ``stream_generate``.

    Raises:
        OptionError: a value that makes no sense, or one that needs ``--kv-bits``.
    """
    from specdec.errors import OptionError
    from specdec.state.options import CacheOptions

    names = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("kv_group_size", "quantized_kv_start"):
        if name in given and "kv_bits" not in given:
            raise OptionError(f"--{name.replace('_', '-')} needs --kv-bits; give the bits")
    CacheOptions(**given)
    return given
