"""Model types of every kind, prompts, and what mlx-lm alone makes of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from adversary import text_alone
from mlx_lm.models.cache import make_prompt_cache

from architectures import build
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripted import Text

__all__ = [
    "CHOSEN",
    "COUNT",
    "PROMPTS",
    "SERVED",
    "STEP",
    "counting",
    "model",
    "offsets",
    "target",
    "text",
]

CHOSEN = (
    "qwen3",  # full attention, as most types
    "llama",  # and windows
    "gemma3_text",
    "gemma3n",  # layers that read other layers' keys
    "gpt_oss",  # windows with sinks
    "qwen3_5",  # gated delta
    "kimi_linear",
    "mamba",  # no attention at all
    "mamba2",
    "rwkv7",
    "lfm2",  # short convolutions
    "recurrent_gemma",  # recurrent and windows
    "gear",  # all three
    "falcon_h1",  # lists of a recurrent cache and an attention cache
    "baichuan_m1",  # lists with windows
    "deepseek_v32",  # lists of two attention caches
    "longcat_flash_ngram",  # n-grams of the tokens as state
    "llama4",  # chunked attention
    "gpt_bigcode",  # rows of equal length alone
    "afm7",
    "minimax_m3_vl",
    "phi3small",  # decode plainly
    "deepseek_v41",
)
SERVED = tuple(
    name
    for name in CHOSEN
    if name not in {"qwen3", "gemma3n", "recurrent_gemma", "gear", "minimax_m3_vl"}
)
COUNT = 48
STEP = 8  # prompt tokens a chunk, in mlx-lm and here
PROMPTS = tuple(
    tuple((factor * place + 3) % 59 + 1 for place in range(length))
    for factor, length in ((7, 30), (11, 7), (13, 13))
)


@cache
def model(name: str) -> Any:
    """The one model that a session's tests of this type share; none of them may change it."""
    return build(name)


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(model(name))


@cache
def text(name: str, prompt: tuple[int, ...]) -> Text:
    """What mlx-lm alone writes."""
    return text_alone(model(name), prompt, COUNT, prefill_step_size=STEP)


def offsets(caches: Sequence[Any]) -> list[int]:
    """Positions that mlx-lm's caches say they hold; a recurrent one says nothing."""
    told: list[int] = []
    for each in caches:
        if hasattr(each, "caches"):
            told += offsets(each.caches)
        elif isinstance(getattr(each, "offset", None), int):
            told.append(each.offset)
    return told


@cache
def counting(name: str) -> tuple[bool, ...]:
    """Which caches count positions at all: some layers are given one and do not use it."""
    caches = make_prompt_cache(model(name))
    model(name)(mx.array([PROMPTS[1]]), cache=caches)
    told = offsets(caches)
    assert set(told) <= {0, len(PROMPTS[1])}
    return tuple(offset > 0 for offset in told)
