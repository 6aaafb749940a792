"""A target that counts, as a folder, with a tokenizer and text for training its drafter."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import qwen3
from tiny_models import VOCABULARY
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.drafting.modules import parameters_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "LETTERS",
    "MASK",
    "after",
    "arguments",
    "letters_tokenizer",
    "write_target",
    "write_text",
]

SPECIAL = ("<eos>", "<unk>", "<mask>")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_()\"':., "
MASK = 2


def after(token: int) -> int:
    """What the counting target writes after a token: the next letter, and the first at the end."""
    return len(SPECIAL) if token < len(SPECIAL) or token == VOCABULARY - 1 else token + 1


def _counting_model() -> tuple[Any, dict[str, Any]]:
    """A target that counts: its first layer turns one-hot embeddings into those of what follows."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.load_weights([(n, mx.zeros(a.shape)) for n, a in parameters_of(model).items()])
    model.model.embed_tokens.weight = mx.eye(VOCABULARY)
    model.model.norm.weight = mx.ones((VOCABULARY,))
    model.lm_head.weight = mx.eye(VOCABULARY)
    first, wide = model.model.layers[0], mx.eye(96, VOCABULARY)
    first.post_attention_layernorm.weight = mx.ones((VOCABULARY,))
    first.mlp.gate_proj.weight = first.mlp.up_proj.weight = wide
    turned = -mx.eye(VOCABULARY)  # the token goes, and what follows comes
    for token in range(VOCABULARY):
        turned[after(token), token] = 1.0
    first.mlp.down_proj.weight = turned @ wide.T / 64.0  # 64 = 8 * 8 is what the normed 8 becomes
    mx.eval(model.parameters())
    return model, config


def letters_tokenizer() -> Any:
    ids = {name: number for number, name in enumerate([*SPECIAL, *LETTERS])}
    assert len(ids) == VOCABULARY
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>", mask_token="<mask>")


def write_target(folder: Path) -> Path:
    """The counting target as a folder."""
    folder.mkdir()
    model, config = _counting_model()
    mx.save_safetensors(str(folder / "model.safetensors"), parameters_of(model))
    (folder / "config.json").write_text(json.dumps(config))
    letters_tokenizer().save_pretrained(folder)
    return folder


def write_text(folder: Path) -> Path:
    """Runs of letters that follow each other, each from any letter on."""
    folder.mkdir()
    draw = random.Random(0)
    runs = []
    for _ in range(400):
        token = draw.randrange(len(SPECIAL), VOCABULARY)
        for _ in range(draw.randint(2, 16)):
            runs.append(LETTERS[token - len(SPECIAL)])
            token = after(token)
    (folder / "runs.txt").write_text("".join(runs))
    return folder


SMALL = "--layers 1 --taps 0,1 --block 4 --length 32 --blocks 16 --lr 0.05 --norm-lr 0.02"


def arguments(target: Path, text: Path, out: Path, *more: str) -> list[str]:
    given = ("--model", str(target), "--text", str(text), "--out", str(out))
    return [*given, *SMALL.split(), *more]
