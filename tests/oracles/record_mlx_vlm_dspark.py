"""Records what mlx-vlm's ``dspark`` and ``gemma4_dspark`` draft, as an oracle of ``deepspec``.

Run it where mlx-vlm is installed; specdec is not needed there::

    python3.11 -m venv vlm
    vlm/bin/pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 mlx-vlm==0.7.10 attrs
    vlm/bin/python tests/oracles/record_mlx_vlm_dspark.py

It writes ``plugins/specdec-dflash/tests/data/mlx_vlm_dspark.json``. Releases come from
``deepspec_synthetic``, hidden states of an imagined target from a seed. pytest does not collect
this file.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from deepspec_synthetic import HIDDEN, VOCABULARY, write_gemma, write_qwen  # noqa: E402

DATA = ROOT / "plugins/specdec-dflash/tests/data/mlx_vlm_dspark.json"
# Positions that are read before each round: a prompt, then 1 + accepted.
READ = (9, 3, 1, 5)
# One position alone is written into mlx-vlm's ring in place; its causal mask then takes the ring's
# order for the text's, and hides wrong positions. So none is read alone where there is a window.
READ_OF_A_WINDOW = (9, 3, 2, 5)
SEED = 17
CONVENTIONS = {
    "release": "deepspec_synthetic's writer and its options; 'own' is its embedding and its head",
    "hidden": "numpy.random.default_rng(seed).standard_normal((sum of 'read', 2 H)) as float32: "
    "the two tapped layers of every position, in the order of reading",
    "rounds": "before each, 'read' more positions; 'pending' follows them; as many greedy drafts "
    "as a block has",
    "logits": "[d, V] that each draft was the largest of, Markov bias included",
    "confidence": "[d] after the sigmoid, or null",
}
_OWN = ("mask_token_id", "target_layer_ids", "num_target_layers")
_BONUS: dict[str, Any] = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 6,
    "dspark_bonus_anchor": True,
    "dflash_query_causal": True,
    "enable_confidence_head": False,
    "dflash_config": {"causal": True, "swa_window_size": 6, "sample_from_anchor": False},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("dspark", {}),
    "interleaved": ("dspark", {"rope_is_neox_style": False, "confidence_head_with_markov": False}),
    "bonus anchor, causal window": ("dspark", _BONUS),
    "gemma": ("gemma4_dspark", {}),
    "gemma with values": ("gemma4_dspark", {"attention_k_eq_v": False}),
}


def short(array: mx.array) -> Any:
    """Seven digits: a float32 has no more that mean something here."""
    shown: Any = np.vectorize(lambda value: float(f"{value:.7g}"))(np.array(array))
    return shown.tolist()


def drafter_of(folder: Path, module: str) -> Any:
    """mlx-vlm's drafter with a release's weights; its head is what a target would give it."""
    found = importlib.import_module(f"mlx_vlm.speculative.drafters.{module}")
    config = json.loads((folder / "config.json").read_text())
    if module == "dspark":  # it reads DSpark's keys from there alone, where DeepSpec has them flat
        own = {key: config[key] for key in _OWN}
        config["dflash_config"] = {**own, **config.get("dflash_config", {})}
    drafter = found.Model(found.ModelConfig.from_dict(config))
    weights: Any = drafter.sanitize(mx.load(str(folder / "model.safetensors")))
    if module == "dspark":
        head = weights.pop("lm_head.weight")
        drafter.lm_head = lambda hidden: hidden @ head.T
    drafter.load_weights(list(weights.items()), strict=True)
    drafter.eval()
    return drafter


def record(name: str, folder: Path, module: str) -> dict[str, Any]:
    """One release's rounds."""
    drafter, seen = drafter_of(folder, module), []
    read = READ_OF_A_WINDOW if drafter.layers[0].self_attn.is_sliding else READ
    given = np.random.default_rng(SEED).standard_normal((sum(read), 2 * HIDDEN))
    hidden = mx.array(given.astype(np.float32))[None]
    cache, at, rounds, outputs = drafter.make_cache(), 0, [], []
    forward = drafter._hidden

    def watched(*arguments: Any) -> mx.array:
        found: mx.array = forward(*arguments)
        outputs.append(found)
        return found

    def sampler(logits: mx.array) -> mx.array:
        seen.append(logits)
        return mx.argmax(logits, axis=-1)

    drafter._hidden = watched
    if not hasattr(drafter.layers[0].self_attn, "v_proj"):
        # 0.7.10 looks for v_proj here, and so cannot draft at all with K = V; its layers can.
        drafter._project_context_kv = lambda _hidden: None
    for number, count in enumerate(read):
        pending = (13 * number + 4) % (VOCABULARY - 1)
        seen.clear()
        new = hidden[:, at : at + count]
        drafts = drafter.draft_block(pending, new, cache, drafter.config.block_size, sampler)
        told = drafter.confidence(outputs[-1], mx.array([pending]), drafts) if seen else None
        rounds.append(
            {
                "read": count,
                "pending": pending,
                "drafts": np.array(drafts[0]).tolist(),
                "logits": short(mx.concatenate(seen)),
                "confidence": None if told is None else short(told[0]),
            }
        )
        at += count
    return {"name": name, "seed": SEED, "rounds": rounds}


def main() -> None:
    """Writes the recording."""
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (module, options) in CASES.items():
            write = write_qwen if module == "dspark" else write_gemma
            folder = write(Path(scratch) / name, **options)
            family = "qwen" if module == "dspark" else "gemma"
            case = {**record(name, folder, module), "family": family, "options": options}
            cases.append(case)
    made_by = {package: version(package) for package in ("mlx", "mlx-lm", "mlx-vlm")}
    DATA.parent.mkdir(parents=True, exist_ok=True)
    recording = {"made_by": made_by, "conventions": CONVENTIONS, "cases": cases}
    DATA.write_text(json.dumps(recording) + "\n")


if __name__ == "__main__":
    main()
