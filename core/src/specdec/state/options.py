"""How a request's rows are cached, where it is not as the model's own caches are."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from specdec.errors import OptionError, one_line

__all__ = ["CacheOptions"]


def _check_size(_: Any, __: Any, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 5):
        raise OptionError(
            f"max_kv_size is {one_line(repr(value))}; give 5 or more positions, or None for all"
        )


def _check_bits(_: Any, __: Any, value: Any) -> None:
    if value is not None and (type(value) is not int or value not in {2, 3, 4, 5, 6, 8}):
        raise OptionError(
            f"kv_bits is {one_line(repr(value))}; give 2, 3, 4, 5, 6 or 8, or None for no "
            "quantization"
        )


def _check_group(_: Any, __: Any, value: Any) -> None:
    if type(value) is not int or value not in {32, 64, 128}:
        raise OptionError(f"kv_group_size is {one_line(repr(value))}; give 32, 64 or 128")


def _check_start(_: Any, __: Any, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise OptionError(f"quantized_kv_start is {one_line(repr(value))}; give 0 or more")


@frozen
class CacheOptions:
    """mlx-lm's options of the same names.

    Attributes:
        max_kv_size: positions that are kept of a row, the first four and the last ones, where the
            model makes no caches of its own.
        kv_bits: bits that attention K/V are quantized to; ``None`` keeps them as they are. Caches
            of sliding windows are not quantized.
        kv_group_size: values that share a scale.
        quantized_kv_start: positions from which on a row is quantized; mlx-lm's default is 5000.

    Raises:
        OptionError: a value that makes no sense (also a ``ValueError``).
    """

    max_kv_size: int | None = field(default=None, validator=_check_size)
    kv_bits: int | None = field(default=None, validator=_check_bits)
    kv_group_size: int = field(default=64, validator=_check_group)
    quantized_kv_start: int = field(default=5000, validator=_check_start)
