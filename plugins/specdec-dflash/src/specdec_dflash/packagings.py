"""The published packagings of block drafters, each read into one :class:`BlockConfig`.

- z-lab's (https://github.com/z-lab/dflash): a Qwen3 text config with ``dflash_config``.
- DeepSpec's (https://github.com/deepseek-ai/DeepSpec): a copy of the target's text config with the
  drafter's keys beside it. What the copy says of the target's own layers is not the drafter's.
- vLLM's speculators (https://github.com/vllm-project/speculators): ``transformer_layer_config``;
  its layer numbers count the embedding as 0, so tap i is its number i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError
from specdec.plugins.config_keys import Keys
from specdec_dflash.config import BlockConfig, Convolutions, Markov, Selector, Style
from specdec_dflash.rope import read_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_COLUMNS", "MOST_LAYERS", "kind_of", "read_config"]

MOST_COLUMNS: Final = 1024
"""Of a block; published ones have 16 at most."""

MOST_LAYERS: Final = 1024
"""Of a drafter; published ones have 8 at most."""

DFLASH: Final = "dflash"
DFLASH2: Final = "dflash2"
DEEPSPEC: Final = "deepspec"

_LFM2: Final = "Lfm2DSparkDraftModel"
_DSPARK: Final = ("Qwen3DSparkModel", "Gemma4DSparkModel", _LFM2)
_SPECULATORS: Final = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DEEPSPEC}
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_MARKOV: Final = ("vanilla", "gated", "rnn")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of block drafter that a ``config.json`` is of, if it is of one."""
    speculator = config.get("speculators_model_type")
    if speculator is not None:
        return _SPECULATORS.get(speculator) if isinstance(speculator, str) else None
    names = _architectures(config)
    dflash = config.get("dflash_config")
    own: Mapping[str, Any] = dflash if isinstance(dflash, Mapping) else {}
    if any(name in _DSPARK for name in names) or own.get("projector_type") == "dspark":
        return DEEPSPEC
    if "DFlash2DraftModel" in names or "selector_rank" in own:
        return DFLASH2
    if "DFlashDraftModel" in names or "target_layer_ids" in own:
        return DFLASH
    return None


def read_config(where: str, config: Mapping[str, Any]) -> BlockConfig:
    """What a ``config.json`` says.

    Args:
        where: names it in messages.
        config: of a kind that :func:`kind_of` knows.

    Raises:
        ArtifactError: a key is missing, or says something that is not supported; names it.
    """
    if config.get("speculators_model_type") is not None:
        return _speculators(where, config)
    if kind_of(config) == DEEPSPEC:
        return _deepspec(where, config)
    return _z_lab(where, config)


def _z_lab(where: str, config: Mapping[str, Any]) -> BlockConfig:
    flat = Keys(where, config)
    keys = flat.within(flat.level("dflash_config"))
    windows = _windows(keys)
    second = kind_of(config) == DFLASH2
    return BlockConfig(
        **_qwen(keys),
        windows=windows,
        causal=_causal(keys, windows, sliding=True),
        block_size=keys.count("block_size", least=2, most=MOST_COLUMNS),
        from_anchor=False,
        mask_token=keys.count("mask_token_id", least=0),
        taps=_taps(keys, "target_layer_ids"),
        target_layers=_optional_count(keys, "num_target_layers"),
        embedding_scale=keys.number("input_embedding_scale", 1.0, above=0),
        logit_scale=keys.number("output_multiplier", 1.0, above=0),
        soft_cap=_soft_cap(keys),
        convolutions=_convolutions(keys) if second else None,
        selector=_selector(keys) if second else None,
    )


def _deepspec(where: str, config: Mapping[str, Any]) -> BlockConfig:
    flat = Keys(where, config)
    keys = flat.within(flat.level("dflash_config"))
    names = _architectures(config)
    gemma = "Gemma4DSparkModel" in names
    windows = _windows(keys)
    if gemma and any(window is not None for window in windows):
        raise keys.wrong("layer_types", "full_attention in every layer of a Gemma drafter")
    bonus = keys.flag("dspark_bonus_anchor", False)  # the block's size counts the anchor, too
    drafts = keys.count("block_size", least=1 + bonus, most=MOST_COLUMNS) - bonus
    from_anchor = keys.flag("sample_from_anchor", not bonus)
    return BlockConfig(
        **(_gemma(keys) if gemma else _qwen(keys, neox=_LFM2 not in names)),
        windows=windows,
        causal=_causal(keys, windows, sliding=False),
        block_size=drafts if from_anchor else drafts + 1,
        from_anchor=from_anchor,
        mask_token=keys.count("mask_token_id", least=0),
        taps=_taps(keys, "target_layer_ids"),
        target_layers=_optional_count(keys, "num_target_layers"),
        soft_cap=_soft_cap(keys),
        **_heads(keys),
    )


def _speculators(where: str, config: Mapping[str, Any]) -> BlockConfig:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ArtifactError(f"{where} has no transformer_layer_config; give a complete release")
    keys = Keys(where, config, layer)
    kind = kind_of(config)
    if kind is None:
        raise keys.wrong("speculators_model_type", ", ".join(_SPECULATORS))
    windows = _windows(Keys(where, layer))
    free = keys.flag("sliding_window_non_causal", kind == DFLASH2)
    numbers = keys.counts("aux_hidden_state_layer_ids")
    if 0 in numbers:
        raise keys.wrong(
            "aux_hidden_state_layer_ids", "1 or more each; the embedding (0) cannot be tapped"
        )
    vocab, drafted = keys.count("vocab_size"), keys.get("draft_vocab_size")
    if kind == DFLASH2 and drafted not in (None, vocab):
        raise keys.wrong("draft_vocab_size", f"vocab_size, {vocab}, where a selector chooses")
    from_anchor = _from_anchor(keys)
    return BlockConfig(
        **_qwen(keys),
        windows=windows,
        causal=tuple(window is not None and not free for window in windows),
        block_size=keys.count("block_size", least=1 if from_anchor else 2, most=MOST_COLUMNS),
        from_anchor=from_anchor,
        mask_token=keys.count("mask_token_id", least=0),
        taps=[number - 1 for number in numbers],
        target_layers=None,
        convolutions=_convolutions(keys) if kind == DFLASH2 else None,
        selector=_selector(keys) if kind == DFLASH2 else None,
        draft_vocab=None if drafted in (None, vocab) else keys.count("draft_vocab_size"),
        **(_heads(keys, rank=256, confident=True) if kind == DEEPSPEC else {}),
    )


def _from_anchor(keys: Keys) -> bool:
    """Whether the first column drafts: by the number of drafts, else by the flag, else not."""
    methods = keys.level("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if isinstance(tokens, int) and keys.count("block_size") - tokens in (0, 1):
        return keys.count("block_size") == tokens
    return keys.flag("sample_from_anchor", False)


# Parts of a config.


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _qwen(keys: Keys, *, neox: bool = True) -> dict[str, Any]:
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.wrong("hidden_act", "silu")
    if keys.get("attention_sink_bias"):
        raise keys.wrong("attention_sink_bias", "absent or false")
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    return {
        "style": Style.QWEN,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": keys.count("num_key_value_heads", heads),
        "head_dim": keys.count("head_dim", max(hidden // heads, 1)),
        "rope": read_rope(
            keys, keys.level("rope_parameters") or keys.level("rope_scaling"), neox=neox
        ),
        "bias": keys.flag("attention_bias", False),
        **_sizes(keys),
    }


def _gemma(keys: Keys) -> dict[str, Any]:
    if keys.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise keys.wrong("hidden_activation", "gelu_pytorch_tanh")
    for key in ("enable_moe_block", "hidden_size_per_layer_input"):
        if keys.get(key):
            raise keys.wrong(key, "absent, false or 0")
    shared = keys.flag("attention_k_eq_v", False)
    rope = keys.level("rope_parameters")
    own = rope.get("full_attention", rope)
    hidden = keys.count("hidden_size")
    return {
        "style": Style.GEMMA,
        "hidden_size": hidden,
        "heads": keys.count("num_attention_heads"),
        "kv_heads": keys.count("num_global_key_value_heads" if shared else "num_key_value_heads"),
        "head_dim": keys.count("global_head_dim"),
        "rope": read_rope(keys, own if isinstance(own, Mapping) else {}, partial=True),
        "shared_values": shared,
        "bias": keys.flag("attention_bias", False),
        "own_embedding_scale": hidden**0.5,
        **_sizes(keys),
    }


def _sizes(keys: Keys) -> dict[str, Any]:
    return {
        "intermediate_size": keys.count("intermediate_size"),
        "vocab_size": keys.count("vocab_size"),
        "eps": keys.number("rms_norm_eps", above=0),
    }


def _heads(keys: Keys, *, rank: int = 0, confident: bool = False) -> dict[str, Any]:
    """The parts that DSpark adds; ``rank`` and ``confident`` hold where no key tells."""
    rank = keys.count("markov_rank", rank, least=0)
    markov = Markov(rank, keys.one_of("markov_head_type", _MARKOV, "vanilla")) if rank else None
    confidence = keys.flag("enable_confidence_head", confident)
    of_markov = confidence and keys.flag("confidence_head_with_markov", markov is not None)
    if of_markov and markov is None:
        raise keys.wrong("markov_rank", "1 or more, as confidence_head_with_markov is true")
    return {"markov": markov, "confidence": confidence, "confidence_of_markov": of_markov}


def _convolutions(keys: Keys) -> Convolutions:
    group = keys.count("conv_group_size")
    if keys.count("hidden_size") % group:
        raise keys.wrong("conv_group_size", f"a divisor of hidden_size {keys.get('hidden_size')}")
    return Convolutions(keys.count("conv_kernel_size"), group)


def _selector(keys: Keys) -> Selector:
    return Selector(keys.count("selector_rank"), keys.count("selector_top_k"))


def _windows(keys: Keys) -> tuple[int | None, ...]:
    layers = keys.count("num_hidden_layers", most=MOST_LAYERS)
    types = keys.get("layer_types") or ["full_attention"] * layers
    known = isinstance(types, list) and all(each in _LAYER_TYPES for each in types)
    if not known or len(types) != layers:
        raise keys.wrong("layer_types", f"{' or '.join(_LAYER_TYPES)} for each of {layers} layers")
    if "sliding_attention" not in types:
        return (None,) * layers
    window = keys.count("swa_window_size" if keys.has("swa_window_size") else "sliding_window")
    return tuple(window if each == "sliding_attention" else None for each in types)


def _causal(keys: Keys, windows: Sequence[int | None], *, sliding: bool) -> tuple[bool, ...]:
    """Per layer; where no key says it, layers of a window are as ``sliding`` says."""
    for key in ("causal", "is_causal", "dflash_query_causal"):
        if keys.has(key):
            return (keys.flag(key, False),) * len(windows)
    return tuple(sliding and window is not None for window in windows)


def _taps(keys: Keys, key: str) -> tuple[int, ...]:
    found = keys.get(key)
    if isinstance(found, list) and -1 in found:
        raise keys.wrong(key, "layers; the embedding's output (-1) cannot be tapped")
    return keys.counts(key)


def _optional_count(keys: Keys, key: str) -> int | None:
    return keys.count(key) if keys.has(key) else None


def _soft_cap(keys: Keys) -> float | None:
    cap = keys.number("final_logit_softcapping", 0.0)
    return cap if cap > 0 else None
