"""Small ``dspark.json`` checkpoints of both variants, with weights by seed and tensor name."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from oracles.tiny_releases import Draws

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["edited", "rewritten", "stored", "write_dspark", "write_parrot"]


def write_dspark(
    folder: Path,
    *,
    seed: int = 0,
    variant: str = "dspark",
    seq_head: str | None = None,
    parts: bool = True,
    sts: Sequence[float] | None = None,
    gamma: int = 4,
    heads: int = 2,
    taps: Sequence[int] = (0, 2),
    hidden: int = 64,
    vocab: int = 64,
) -> Path:
    """A checkpoint for a target of two layers; ``parts`` are the sequential head and confidence."""
    d, inner, rank, layers = 32, 64, 8, 2
    draws = Draws(seed)
    for number in range(layers):
        at = f"bb.{number}."
        for name in ("attn_norm", "ff_norm"):
            draws.vector(f"{at}{name}", d)
        for name in ("q", "k", "v", "o"):
            _matrix(draws, f"{at}{name}", d, d)
        for name in ("gate", "up"):
            _matrix(draws, f"{at}{name}", d, inner)
        _matrix(draws, f"{at}down", inner, d)
    _matrix(draws, "W_c", len(taps) * hidden, d)
    draws.vector("ctx_norm", d)
    _matrix(draws, "tok_proj", hidden, d, gain=8.0)
    if gamma > 1:
        draws.vector("mask_emb", gamma - 1, d, center=0.0, spread=1.0)
    draws.vector("block_pos", gamma, d, center=0.0, spread=0.5)
    draws.vector("out_norm", d)
    _matrix(draws, "out_proj", d, hidden)
    if parts:
        draws.vector("markov.w1", vocab, rank, center=0.0, spread=1.0)
        _matrix(draws, "markov.w2", rank, vocab, gain=1.0)
        _matrix(draws, "conf.w", d + rank, 1, gain=2.0)
        draws.vector("conf.b", 1, center=0.3)
        if seq_head == "rnn":
            _matrix(draws, "rnn.wH", rank, rank, gain=1.0)
            draws.vector("rnn.bH", rank, center=0.0)
            _matrix(draws, "rnn.wO", rank, vocab, gain=2.0)
    config: dict[str, Any] = {
        "gamma": gamma,
        "dDraft": d,
        "nLayers": layers,
        "nHeads": heads,
        "markovRank": rank,
        "ffMult": inner // d,
        "tapLayers": list(taps),
    }
    if seq_head is not None:
        config["seqHead"] = seq_head
    if sts is not None:
        config["sts"] = {"thresholds": list(sts), "target": 0.8}
    described = {
        "kind": "dspark-drafter",
        "variant": variant,
        "version": 1,
        "target_id": "tiny",
        "config": config,
        "dims": {"hiddenSize": hidden, "vocabSize": vocab, "eps": 1e-6},
        "param_names": list(draws.tensors),
    }
    return _written(folder, described, draws.tensors)


def write_parrot(
    folder: Path, texts: Sequence[Sequence[int]], sure: NDArray[np.float32] | None = None
) -> Path:
    """A checkpoint that drafts what followed a token in these texts, last time it stood there.

    Args:
        folder: to be written.
        texts: of 64 ids.
        sure: ``[64]`` of each token, log-odds that it says for the draft behind it; even by
            default.
    """
    write_dspark(folder)
    described = json.loads((folder / "dspark.json").read_text())
    vocab, d = 64, described["config"]["dDraft"]
    table = np.zeros((vocab, vocab), np.float32)
    for text in texts:
        for before, after in pairwise(text):
            table[before] = 0.0
            table[before, after] = 50.0
    tensors = stored(folder)
    described["config"]["markovRank"] = vocab
    tensors["out_proj"] = np.zeros_like(tensors["out_proj"])
    tensors["markov.w1"] = np.eye(vocab, dtype=np.float32)
    tensors["markov.w2"] = table
    odds = np.zeros(vocab, np.float32) if sure is None else sure
    tensors["conf.w"] = np.concatenate([np.zeros(d, np.float32), odds])[:, None]
    tensors["conf.b"] = np.zeros(1, np.float32)
    return _written(folder, described, tensors)


def stored(folder: Path) -> dict[str, NDArray[np.float32]]:
    """A checkpoint's tensors."""
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return {name: np.array(value) for name, value in loaded.items()}


def edited(folder: Path, **changes: Any) -> Path:
    """Change what a checkpoint says; a key is looked for in every object, ``None`` takes it out."""
    file = folder / "dspark.json"
    described = json.loads(file.read_text())
    for key, value in changes.items():
        levels = (described, described["config"], described["dims"])
        level = next((level for level in levels if key in level), described["config"])
        if value is None:
            level.pop(key)
        else:
            level[key] = value
    file.write_text(json.dumps(described))
    return folder


def rewritten(folder: Path, **changes: Any) -> Path:
    """Change a checkpoint's tensors; ``__`` in a name is a dot, ``None`` takes it out.

    ``param_names`` follows.
    """
    described = json.loads((folder / "dspark.json").read_text())
    tensors = stored(folder)
    for name, value in changes.items():
        bare = name.replace("__", ".")
        if value is None:
            tensors.pop(bare)
        else:
            tensors[bare] = np.asarray(value, np.float32)
    described["param_names"] = list(tensors)
    return _written(folder, described, tensors)


def _matrix(draws: Draws, name: str, inputs: int, outputs: int, gain: float = 1.6) -> None:
    """``[in, out]``: a unit-variance input gives a standard deviation of ``gain``."""
    draws.vector(name, inputs, outputs, center=0.0, spread=gain * inputs**-0.5)


def _written(
    folder: Path, described: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "dspark.json").write_text(json.dumps(described, indent=2))
    return folder
