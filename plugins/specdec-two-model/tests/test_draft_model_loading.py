"""What a draft model is loaded from, what it is compared with, and what is refused in one line."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx.nn.layers.embedding import Embedding
from tiny_models import OwnCache, build_model, random_state, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import load_drafter, load_model
from specdec.errors import ArtifactError, OptionError, SpecdecError
from specdec.plugins import LoadRequest
from specdec.plugins.models import find_model
from specdec.targets import MlxLmTarget
from specdec_two_model import tiny
from specdec_two_model.limits import context_limit
from specdec_two_model.loading import CPU_WIDTH, GPU_WIDTH, load_draft_model
from specdec_two_model.tokenizers import TEXT, check_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from specdec.plugins import LoadedDraft


@pytest.fixture(scope="module")
def target() -> tuple[MlxLmTarget, Any]:
    model, tokenizer = load_model("demo-qwen3-draft")
    return MlxLmTarget(model), tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled draft model."""
    found = find_model("demo-qwen3-draft")
    assert found is not None
    return shutil.copytree(found, tmp_path / "draft")


def asked(target: tuple[MlxLmTarget, Any], path: Path | None, **options: Any) -> LoadedDraft:
    bound, tokenizer = target
    number = options.pop("num_draft_tokens", None)
    return load_draft_model(
        LoadRequest(
            kind="two-model",
            path=path,
            target=bound,
            tokenizer=tokenizer,
            num_draft_tokens=number,
            options=options,
        )
    )


def refusal(load: Callable[[], object], error: type[SpecdecError] = ArtifactError) -> str:
    with pytest.raises(error) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_is_loaded_checked_and_counted(
    target: tuple[MlxLmTarget, Any], folder: Path
) -> None:
    before = random_state()
    loaded = asked(target, folder)
    assert random_state() == before, "nobody's random numbers change"
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0 < stored - loaded.provider.weight_bytes < 20_000, "headers"
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert loaded.num_draft_tokens == (CPU_WIDTH if on_cpu else GPU_WIDTH)
    assert loaded.max_draft_tokens is None
    assert asked(target, folder, num_draft_tokens=7).num_draft_tokens == 7
    grouped = loaded.provider.grouped
    assert grouped.supports_adapters
    assert grouped.checkpoint_namespace.startswith("standalone-draft-1:")
    assert grouped.checkpoint_namespace.endswith("; 2048"), "as config.json says"
    shorter = asked(target, folder, max_context=100).provider.grouped
    assert shorter.checkpoint_namespace.endswith("; 100")


def test_a_packed_draft_model_is_smaller_and_is_not_packed_twice(
    target: tuple[MlxLmTarget, Any], folder: Path
) -> None:
    plain = asked(target, folder).provider.weight_bytes
    packed = asked(target, folder, bits=4).provider
    assert packed.weight_bytes < plain * 0.35
    config = json.loads((folder / "config.json").read_text())
    model: Any = packed.grouped.model.model  # type: ignore[attr-defined]  # of this kind
    model.save_weights(str(folder / "model.safetensors"))
    config["quantization"] = {"bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert asked(target, folder).provider.weight_bytes == packed.weight_bytes
    assert "stored packed" in refusal(lambda: asked(target, folder, bits=4), OptionError)


def test_damaged_folders_are_refused_in_one_line(
    target: tuple[MlxLmTarget, Any], folder: Path, tmp_path: Path
) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    assert "needs its folder" in refusal(lambda: asked(target, None))
    assert "there is no file" in refusal(lambda: asked(target, tmp_path / "none"))
    whole, described = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[:1000])
    assert "cannot be loaded" in refusal(lambda: asked(target, folder))
    weights.unlink()
    assert "No safetensors" in refusal(lambda: asked(target, folder))
    weights.write_bytes(whole)
    for changes in ({"model_type": "no_such_model"}, {"num_hidden_layers": 3}, {"hidden_size": 64}):
        config.write_text(json.dumps({**described, **changes}))
        assert "cannot be loaded" in refusal(lambda: asked(target, folder))
    config.write_text("{")
    assert "no config.json that can be read" in refusal(lambda: asked(target, folder))
    config.write_text(json.dumps(described))
    for file in folder.glob("tokenizer*"):
        file.write_text("{")
    assert "check_tokenizer=False" in refusal(lambda: asked(target, folder))
    asked(target, folder, check_tokenizer=False)
    for file in folder.glob("*token*"):
        file.unlink()
    assert "gives no ids" in refusal(lambda: asked(target, folder)), (
        "transformers makes an empty one"
    )


def test_options_that_make_no_sense_are_refused(
    target: tuple[MlxLmTarget, Any], folder: Path
) -> None:
    def said(path: Path | None = folder, **options: Any) -> str:
        return refusal(lambda: asked(target, path, **options), OptionError)

    assert said(probe=False).endswith(
        "no option probe; its options are check_tokenizer, max_context, bits, group_size"
    )
    assert "check_tokenizer is 'no'" in said(check_tokenizer="no")
    assert "max_context is 0" in said(max_context=0)
    assert "max_context is True" in said(max_context=True)
    assert "bits is 7" in said(bits=7)
    assert "goes with model" in said(tokenizer=object())
    model = tiny_model("llama")
    assert "give one of the two" in said(model=model)
    assert "model is a str" in said(None, model="llama")
    assert "model is a type" in said(None, model=type(model))
    assert "model is a Embedding" in said(None, model=Embedding(4, 4))
    assert "model is a tuple" in said(None, model=(model, None))
    assert "a model that you hold" in said(None, model=model, bits=4)
    assert "give tokenizer=" in said(None, model=model, check_tokenizer=True)
    without = refusal(lambda: asked((target[0], None), folder), OptionError)
    assert "check_tokenizer=False" in without


def test_a_loaded_model_drafts_without_a_tokenizer_and_is_compared_where_it_has_one(
    target: tuple[MlxLmTarget, Any],
) -> None:
    model = tiny_model("llama")
    loaded = asked(target, None, model=model)
    assert loaded.provider.id == "a llama model"
    assert loaded.provider.weight_bytes > 0
    assert loaded.provider.grouped.checkpoint_namespace.endswith("; 2048"), "of its arguments"
    asked(target, None, model=model, tokenizer=target[1])
    other = _Words()
    message = refusal(lambda: asked(target, None, model=model, tokenizer=other))
    assert "another tokenizer" in message
    asked(target, None, model=model, tokenizer=other, check_tokenizer=False)
    own = asked(target, None, model=target[0].model, tokenizer=other)
    assert own.provider.weight_bytes == 0, "the target itself, whatever else is given"


class _Words:
    """A tokenizer whose ids are told by a table; unknown words are spelt."""

    def __init__(self, *changed: tuple[str, int]) -> None:
        self.changed = dict(changed)

    def encode(self, text: str) -> list[int]:
        return [self.changed.get(char, ord(char)) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)


def test_the_first_difference_of_two_tokenizers_is_shown() -> None:
    place = TEXT.index("敏")
    with pytest.raises(ArtifactError) as caught:
        check_tokenizers("the draft model d", _Words(), _Words(("敏", 7), ("す", 8)))
    message = str(caught.value)
    assert (
        f"token {place} of a test text is {ord('敏')} ('<{ord('敏')}>') for the target" in message
    )
    assert "but 7 ('<7>') for the draft model" in message
    check_tokenizers("the draft model d", _Words(), _Words())

    class Shorter(_Words):
        def encode(self, text: str) -> list[int]:
            return super().encode(text)[:-1]

    with pytest.raises(ArtifactError, match="but none at all for the draft model"):
        check_tokenizers("the draft model d", _Words(), Shorter())

    class Broken(_Words):
        def encode(self, text: str) -> list[int]:
            raise RuntimeError("no\nvocabulary")

    with pytest.raises(ArtifactError, match="cannot encode a test text"):
        check_tokenizers("the draft model d", _Words(), Broken())


def test_every_script_of_the_text_is_looked_at() -> None:
    for sample in "éßñŁ" + "Съ" + "敏日한" + "نع" + "हภ" + "🙂🇫" + "½—" + "1{~" + "\t\n":
        with pytest.raises(ArtifactError, match="another tokenizer"):
            check_tokenizers("a draft model", _Words(), _Words((sample, 1_000_000)))
    assert "\n\n\n" in TEXT
    assert "   " in TEXT


_SPLIT = r"""(?i:'t|'ll|'re)|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"""
_JOINED = ("1 2", "12 3", "' T", "Ċ Ċ", "Ġ Ġ", "Ġ Ċ", "Ċ ĠĊ", "e Ì", "eÌ ģ", "! Ċ")


def _tokenizer(split: str = _SPLIT, added: Sequence[str] = (), **normalizer: Any) -> Any:
    """Bytes, some joined pieces, and tokens that were added; changes do not move other ids."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(p.replace(" ", "") for p in _JOINED)]
    merges = [(piece.split(" ")[0], piece.split(" ")[1]) for piece in _JOINED]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer["by"]
    made.add_special_tokens(list(added))
    made_fast: Any = PreTrainedTokenizerFast
    return made_fast(tokenizer_object=made)


OTHER_TOKENIZERS: dict[str, dict[str, Any]] = {
    "two digits together": {"split": _SPLIT.replace(r"\p{N}|", r"\p{N}{1,2}|")},
    "three digits together": {"split": _SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")},
    "small contractions alone": {"split": _SPLIT.replace("?i:", "?:")},
    "marks with their letters": {"split": _SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1)},
    "lines one by one": {"split": _SPLIT.replace(r"\s*[\r\n]+", r"[\r\n]")},
    "blanks with what follows": {"split": _SPLIT.replace(r"|\s+(?!\S)", "")},
    "composed": {"by": normalizers.NFC()},
    "decomposed": {"by": normalizers.NFD()},
    "compatible": {"by": normalizers.NFKC()},
    "one kind of blank": {"by": normalizers.Replace("\u00a0", " ")},
    "wide blanks": {"by": normalizers.Replace("\u3000", " ")},
    "without invisible characters": {"by": normalizers.Replace("\u200b", "")},
    "straight quotes": {"by": normalizers.Replace("\u2019", "'")},
    "lines of one kind": {"by": normalizers.Replace("\r\n", "\n")},
}


@pytest.mark.parametrize("other", OTHER_TOKENIZERS)
def test_a_tokenizer_of_the_same_pieces_that_cuts_or_normalises_otherwise_is_refused(
    other: str,
) -> None:
    with pytest.raises(ArtifactError, match="another tokenizer: token"):
        check_tokenizers("a draft model", _tokenizer(), _tokenizer(**OTHER_TOKENIZERS[other]))


def test_special_tokens_of_the_same_text_must_have_the_same_id() -> None:
    names = ["<|start|>", "<|end|>"]
    target = _tokenizer(added=names)
    for same in (_tokenizer(added=names), _tokenizer(), _tokenizer(added=[*names, "<|more|>"])):
        check_tokenizers("a draft model", target, same)
        check_tokenizers("a draft model", same, target)
    with pytest.raises(ArtifactError) as caught:
        check_tokenizers("a draft model", target, _tokenizer(added=names[::-1]))
    first = target.convert_tokens_to_ids("<|start|>")
    assert f"'<|start|>' is token {first} for the target, but {first + 1} for" in str(caught.value)


def test_how_far_a_model_reads_is_told_by_its_config_its_table_or_the_user() -> None:
    llama, gpt2 = tiny.tiny_model(), tiny.tiny_model("positions")
    assert context_limit("m", llama, {}, None) is None
    assert context_limit("m", llama, {"max_position_embeddings": 512}, None) == 512
    assert context_limit("m", llama, {"text_config": {"n_positions": 256}}, None) == 256
    assert context_limit("m", llama, {"max_position_embeddings": 512}, 4096) == 4096
    assert context_limit("m", gpt2, {"n_positions": 64, "n_ctx": 64}, None) == 32
    assert context_limit("m", gpt2, {}, 4096) == 32, "a table ends where it ends"
    assert context_limit("m", gpt2, {}, 9) == 9
    gpt2.model.wpe.weight = gpt2.model.wpe.weight[:32]
    with pytest.raises(ArtifactError, match="table of 32 positions"):
        context_limit("m", gpt2, {}, None)


def test_a_model_of_a_cache_that_cannot_be_rolled_back_is_refused(
    target: tuple[MlxLmTarget, Any],
) -> None:
    model = build_model("llama")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    message = refusal(lambda: asked(target, None, model=model))
    assert "cannot draft" in message
    assert "OwnCache" in message


def test_the_bundled_draft_model_is_found_as_one() -> None:
    model, tokenizer = load_model("demo-qwen3")
    with load_drafter("demo-qwen3-draft", model, tokenizer) as loaded:
        assert loaded.kind == "two-model"
