"""Whether a folder holds a whole language model, from its config and its tensors' names.

A drafter's config often says ``"model_type": "qwen3"``, and some drafters bring an embedding and a
tokenizer. So a folder counts only if its config is of a model that writes text and of no drafter,
its tensors go from an embedding over a first layer, and none is a part that only drafters have. No
MLX is imported and no weight is read.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError
from specdec.plugins.headers import read_header, read_index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.plugins import Artifact
    from specdec.plugins.headers import Stored

__all__ = ["is_model"]

_DRAFTER: Final = re.compile(
    "mtp|assistant|dflash|dspark|eagle|medusa|speculator|draft", re.IGNORECASE
)
"""In a model type, or in the name of an architecture."""

_DRAFTER_KEYS: Final = (
    "speculators_model_type",
    "speculators_config",
    "dflash_config",
    "eagle_config",
    "draft_vocab_size",
    "num_target_layers",
    "target_hidden_size",
    "backbone_hidden_size",
)

_DRAFTER_PART: Final = re.compile(
    r"((language_)?model\.)*(fc|midlayer|hidden_norm|eh_proj|enorm|hnorm|pre_fc_norm_\w+|d2t|t2d"
    r"|(pre|post)_projection|masked_embedding|markov_head|confidence_head|candidate_selector)(\.|$)"
)
"""Outside the layers: what joins an embedding and a target's hidden states, or chooses drafts."""

_EMBEDDING: Final = re.compile(r"(.*\.)?(wte|\w*emb\w*)\.weight")
_NUMBER: Final = re.compile(r"\.(\d+)\.")
_MODULE: Final = re.compile(r"[\w-]+")
_HEAD: Final = re.compile(r"(.*\.)?mtp\.")

_WRITES: Final = re.compile("CausalLM|ConditionalGeneration|LMHead")
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tekken.json",
    "vocab.json",
    "*vocab*.txt",
    "*.model",
    "*.tiktoken",
)
_EMBEDDER: Final = ("modules.json", "config_sentence_transformers.json")
"""Files that sentence-transformers puts beside a model that embeds texts and writes none."""


def is_model(artifact: Artifact) -> bool:
    """Whether a model of mlx-lm with its tokenizer is in there, and no part or head of one.

    A release that carries the tensors of its prediction head is a whole model all the same. As this
    kind is asked last, specdec-mtp takes such a release for its head where it is installed, and
    ``kind="two-model"`` drafts with the model. A model whose weights are damaged or not all
    downloaded counts, so that loading it says so.
    """
    config, folder = artifact.config, artifact.path
    if config is None or not _is_of_a_model(config):
        return False
    if any(artifact.has(name) for name in _EMBEDDER):
        return False
    try:
        has_tokenizer = any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
        return has_tokenizer and _holds_a_model(folder)
    except OSError:
        return False


def _is_of_a_model(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model that writes text, and of no drafter."""
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or any(map(_DRAFTER.search, (model_type, *names))):
        return False
    if any(config.get(key) is not None for key in _DRAFTER_KEYS):
        return False
    if any("CausalLM" in name for name in names):
        return True  # where mlx-lm does not know it, loading says so better than detection could
    writes = not names or any(map(_WRITES.search, names))
    return writes and _is_known(model_type)


def _holds_a_model(folder: Path) -> bool:
    files = sorted(folder.glob("model*.safetensors"))  # as mlx-lm looks for them
    stored: dict[str, Stored] = {}
    damaged = False
    for file in files:
        try:
            stored.update(read_header(file).tensors)
        except ArtifactError:
            damaged = True
    trunk = [name for name in stored if not _HEAD.match(name)]
    if any(map(_DRAFTER_PART.match, trunk)):
        return False
    embeds = any(len(stored[name].shape) == 2 and _EMBEDDING.fullmatch(name) for name in trunk)
    first = (_NUMBER.search(name) for name in trunk)
    whole = embeds and any(number is not None and int(number[1]) == 0 for number in first)
    return bool(files) and (whole or damaged or _lacks_files(folder))


def _lacks_files(folder: Path) -> bool:
    """Whether a file that the index names is not there."""
    try:
        return any(not (folder / name).is_file() for name in (read_index(folder) or {}).values())
    except ArtifactError:
        return True


def _is_known(model_type: str) -> bool:
    """Whether mlx-lm has this type; yes where it is not installed, for loading will say that."""
    package = _mlx_lm()
    if package is None:
        return True
    name = _renamed(package).get(model_type, model_type)
    return _MODULE.fullmatch(name) is not None and (package / "models" / f"{name}.py").is_file()


def _mlx_lm() -> Path | None:
    """The folder of mlx-lm, which is not imported."""
    try:
        found = importlib.util.find_spec("mlx_lm")
    except (ImportError, ValueError):
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


@cache
def _renamed(package: Path) -> Mapping[str, str]:
    """Model types that mlx-lm loads as another: its table, read from the source."""
    try:
        lines = ast.parse((package / "utils.py").read_bytes()).body
        for line in lines:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "MODEL_REMAPPING":
                table: dict[str, str] = ast.literal_eval(line.value)
                return table
    except (OSError, ValueError, SyntaxError):
        pass
    return {}
