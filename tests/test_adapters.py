"""Under an adapter the target's text is the adapted model's, and only with drafters made for it.

The adapters are random ones in mlx-lm's own files, and mlx-lm puts them on the model. They are
large enough that the text is another one than the model's own.
"""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from drafters.tapped import TappedProvider
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters, remove_lora_layers
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    Text,
    drain,
    request,
    tiny_tokenizer,
)
from tiny_models import HYBRID, VOCABULARY, build_model

import specdec_demo
from specdec import (
    LoadedDrafter,
    PrefixCache,
    VerifyGroup,
    generate,
    load_drafter,
    load_model,
    stream_generate,
)
from specdec.cli import main
from specdec.contract import ContextKind
from specdec.drafters import check_adapters
from specdec.errors import AdapterError, ArtifactError, ModelNotFoundError, TargetError
from specdec.plugins import DraftKind, LoadedDraft
from specdec.targets import MlxLmTarget
from specdec.targets.adapters import adapter_layers
from specdec.testing.target import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPT = [5, 9, 40, 3, 5, 9, 40, 3, 5, 9]
CODE = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"
EAGER: dict[str, Any] = {"min_ngram": 1, "num_draft_tokens": 4}
TIED = {"tie_word_embeddings": True}
EMBEDDING = ["model.embed_tokens"]
HEAD = ["lm_head"]

ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "lora": ("qwen3", {}, {}, ("LoRALinear",)),
    "dora": ("qwen3", {}, {"kind": "dora"}, ("DoRALinear",)),
    "head": ("qwen3", {}, {"keys": HEAD}, ("LoRALinear",)),
    "tied embedding": ("qwen3", TIED, {"keys": EMBEDDING}, ("LoRAEmbedding",)),
    "tied dora embedding": (
        "qwen3",
        TIED,
        {"kind": "dora", "keys": EMBEDDING},
        ("DoRAEmbedding",),
    ),
    "scaled embedding": (
        "gemma",
        {},
        {"keys": [*EMBEDDING, "self_attn.q_proj"]},
        ("LoRAEmbedding", "LoRALinear"),
    ),
    "scaled head": ("granite", {}, {"keys": EMBEDDING}, ("LoRAEmbedding",)),
    "experts": ("qwen3_moe", {}, {}, ("LoRALinear", "LoRASwitchLinear")),
}
"""By name: architecture, changes to its config, how the adapter is made, its layers' types."""


def bare(architecture: str = "qwen3", **changes: Any) -> Any:
    """A model without an adapter; the one of experts has no config in ``tiny_models``."""
    if architecture != "qwen3_moe":
        return build_model(architecture, seed=3, **changes)
    module = importlib.import_module("mlx_lm.models.qwen3_moe")
    config = {
        "model_type": architecture,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "norm_topk_prob": True,
    }
    return seeded_weights(module.Model(module.ModelArgs.from_dict(config)), 3)


def write_adapter(
    folder: Path,
    model: Any,
    *,
    kind: str = "lora",
    keys: Sequence[str] | None = None,
    seed: int = 0,
    gain: float = 0.5,
) -> Path:
    """A random adapter for a model like this one, in mlx-lm's files; the model gets its layers."""
    parameters: dict[str, Any] = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    layers = len(model.layers)
    linear_to_lora_layers(model, layers, dict(parameters), use_dora=kind == "dora")
    leaves: Any = tree_flatten(model.parameters())
    held = {n: array for n, array in leaves if n.rsplit(".", 1)[-1] in {"lora_a", "lora_b", "m"}}
    drawn = {}
    for (name, array), key in zip(
        held.items(), mx.random.split(mx.random.key(seed), len(held)), strict=True
    ):
        noise = mx.random.normal(array.shape, key=key)
        magnitude = name.endswith(".m")
        drawn[name] = array * (1 + 0.2 * noise) if magnitude else noise * gain * 64**-0.25
    folder.mkdir(parents=True, exist_ok=True)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), drawn)
    return folder


def adapted(folder: Path, name: str = "lora", seed: int = 0) -> tuple[Any, Path]:
    """A model with an adapter on it, and the adapter's folder."""
    architecture, changes, how, _ = ADAPTERS[name]
    path = write_adapter(folder / name / str(seed), bare(architecture, **changes), seed=seed, **how)
    return load_adapters(bare(architecture, **changes), str(path)), path


def alone(model: Any, prompt: Sequence[int] = PROMPT, count: int = 24) -> list[int]:
    """What mlx-lm writes, greedily."""
    made = mlx_lm.stream_generate(model, tiny_tokenizer(), list(prompt), max_tokens=count)
    return [response.token for response in made]


def ours(model: Any, prompt: Sequence[int] = PROMPT, **options: Any) -> tuple[list[int], Any]:
    """Our tokens and statistics."""
    made = list(stream_generate(model, tiny_tokenizer(), list(prompt), 24, **options))
    return [response.token for response in made], made[-1].stats


def scripted(model: Any, *, supports: bool, provider: Any = None) -> LoadedDrafter:
    """A drafter that was loaded for the model, made for adapters or not."""
    provider = ScriptedProvider() if provider is None else provider
    provider.supports_adapters = supports
    loaded = LoadedDraft(provider=provider, num_draft_tokens=4)
    return LoadedDrafter("scripted", loaded, MlxLmTarget(model))


# The text is the adapted model's.


@pytest.mark.parametrize("name", ADAPTERS)
def test_greedy_text_under_an_adapter_is_that_of_mlx_lm(tmp_path: Path, name: str) -> None:
    architecture, changes, _, types = ADAPTERS[name]
    model, _ = adapted(tmp_path, name)
    assert adapter_layers(model) == types
    want = alone(model)
    assert want != alone(bare(architecture, **changes)), "the adapter changes nothing"
    drafter = load_drafter("ngram", model, **EAGER)
    assert drafter.target.adapters == types
    for options in ({}, {"drafter": drafter}, {"drafter": drafter, "num_draft_tokens": 8}):
        tokens, stats = ours(model, **options)
        assert tokens == want
        assert (stats.drafted > 0) is bool(options)
        assert stats.draft_errors == 0


@pytest.mark.parametrize("name", ["lora", "dora", "tied embedding"])
def test_seeded_text_under_an_adapter_is_that_of_a_plain_run(tmp_path: Path, name: str) -> None:
    architecture, changes, _, _ = ADAPTERS[name]
    model, _ = adapted(tmp_path, name)
    sampling: dict[str, Any] = {"temp": 0.9, "top_p": 0.95, "seed": 7}
    want, _ = ours(model, **sampling)
    assert want != ours(bare(architecture, **changes), **sampling)[0]
    tokens, stats = ours(model, drafter=load_drafter("ngram", model, **EAGER), **sampling)
    assert tokens == want
    assert stats.drafted > 0


def test_rows_with_3_1_and_0_drafts_under_one_adapter_are_each_the_adapted_models(
    tmp_path: Path,
) -> None:
    model, _ = adapted(tmp_path)
    prompts = [tuple(PROMPT), (7, 7, 30), (61, 2, 2, 18, 50)]
    texts = [
        Text(p, tuple(t for t, _ in generate_step(mx.array(p), model, max_tokens=20)))
        for p in prompts
    ]
    script = Script(texts, [[(RIGHT, RIGHT, RIGHT), (RIGHT, WRONG)], [(RIGHT,)], [()]])
    provider = ScriptedProvider(script)
    group = VerifyGroup(MlxLmTarget(model), provider)
    widths = (3, 1, 0)
    rows = group.admit(
        [
            request(text.prompt, max_tokens=20, num_draft_tokens=width)
            for text, width in zip(texts, widths, strict=True)
        ]
    )
    drain(group)
    assert [row.emitted for row in rows] == [text.output for text in texts]
    assert [row.stats.accepted > 0 for row in rows] == [True, True, False]
    assert provider.complaints == []


def test_a_quantized_model_under_an_adapter_keeps_its_text(tmp_path: Path) -> None:
    def quantized() -> Any:
        model = bare()
        quantize(model, group_size=32, bits=8)
        return model

    path = write_adapter(tmp_path, quantized())
    model = load_adapters(quantized(), str(path))
    want = alone(model)
    assert want != alone(quantized())
    tokens, stats = ours(model, drafter=load_drafter("ngram", model, **EAGER))
    assert tokens == want
    assert stats.drafted > 0


# What drafters see of the target.


@pytest.mark.parametrize("late", [False, True], ids=["bound after", "bound before"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_taps_head_and_embedding_are_the_adapted_ones(
    tmp_path: Path, name: str, late: bool
) -> None:
    architecture, changes, _, _ = ADAPTERS[name]
    model, path = adapted(tmp_path, name)
    if late:
        model = bare(architecture, **changes)
        target = MlxLmTarget(model)
        load_adapters(model, str(path))
    else:
        target = MlxLmTarget(model)
    port = target.hidden_taps
    assert port is not None
    read = {}
    for context, taps in ((ContextKind.TAPS, (0, 2)), (ContextKind.POST_NORM, ())):
        state = target.new_state()
        state.begin_round(len(PROMPT))
        window = target.forward(mx.array([PROMPT]), state, context, taps)
        assert window.context is not None
        read[context] = window.context
        logits = window.logits
        state.commit_round()
    want = model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    other = bare(architecture, **changes)(mx.array([PROMPT]))
    assert mx.array_equal(logits, want).item()
    assert not mx.allclose(want, other, rtol=0.01, atol=0.01).item(), "the adapter changes nothing"
    # The model's own backbone is what is tapped, and its own head is what is offered.
    final = model.model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    assert mx.array_equal(read[ContextKind.POST_NORM], final).item()
    assert mx.array_equal(read[ContextKind.TAPS][..., port.hidden_size :], final).item()
    assert mx.array_equal(port.logits(final), want).item()
    scale = {"gemma": 8.0, "granite": 3.0}.get(architecture, 1.0)
    embedded = model.model.embed_tokens(mx.array([PROMPT])) * scale
    assert mx.allclose(port.embed(mx.array([PROMPT])), embedded, rtol=1e-6).item()
    first = model.layers[0](embedded, "causal", None)
    assert mx.allclose(
        read[ContextKind.TAPS][..., : port.hidden_size], first, rtol=1e-4, atol=1e-4
    ).item()


@pytest.mark.parametrize(
    ("changes", "keys", "own"),
    [({}, HEAD, QuantizedLinear), (TIED, EMBEDDING, QuantizedEmbedding)],
    ids=["head", "tied embedding"],
)
def test_a_quantized_head_is_not_offered_without_its_adapter(
    changes: dict[str, Any], keys: list[str], own: type
) -> None:
    def head_under(chosen: list[str] | None) -> Any:
        model = bare(**changes)
        quantize(model, group_size=32, bits=8)
        target = MlxLmTarget(model)
        config: dict[str, Any] = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": chosen}
        if chosen is not None:
            linear_to_lora_layers(model, 2, config)
        port = target.recurrent_mtp
        assert port is not None
        return port.vocabulary_head

    assert isinstance(head_under(None), own)
    assert isinstance(head_under(["self_attn.q_proj"]), own), "its weights are all there is to it"
    assert head_under(keys) is None


def test_a_quantized_head_that_carries_an_adapter_itself_is_not_offered() -> None:
    class Own(QuantizedLinear):
        def __call__(self, x: mx.array) -> mx.array:
            base: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return base + mx.matmul(x @ self.lora_a, self.lora_b)

    model = bare()
    quantize(model, group_size=32, bits=8)
    target = MlxLmTarget(model)
    port = target.recurrent_mtp
    assert port is not None
    assert port.vocabulary_head is model.lm_head
    head: Any = model.lm_head
    head.lora_a, head.lora_b = mx.ones((64, 2)), mx.ones((2, VOCABULARY))
    head.__class__ = Own
    assert target.adapters == ("Own",)
    assert port.vocabulary_head is None


@pytest.mark.parametrize("architecture", ["qwen3", HYBRID, "rwkv7"])
def test_a_model_without_an_adapter_shows_none(architecture: str) -> None:
    if architecture == "rwkv7":  # its own blocks are called LoRA
        module = importlib.import_module("mlx_lm.models.rwkv7")
        config = {
            "model_type": architecture,
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "norm_eps": 1e-5,
            "head_dim": 16,
            "num_hidden_layers": 1,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        }
        model = module.Model(module.ModelArgs.from_dict(config))
        assert any("LoRA" in type(part).__name__ for _, part in model.named_modules())
    else:
        model = bare(architecture)
    assert adapter_layers(model) == ()


def test_the_adapter_layers_of_an_architecture_of_its_own_are_found() -> None:
    layer: Any = importlib.import_module("mlx_lm.models.afm7").FusedLinear(8, [4, 2])
    assert adapter_layers(layer) == ()
    assert adapter_layers(layer.to_lora(r=2)) == ("FusedLoRALinear",)


# Drafters that are not made for it.


def offer(monkeypatch: pytest.MonkeyPatch, provider: Any) -> None:
    """Make ``load_drafter("scripted", ...)`` load this provider."""
    kind = DraftKind(
        name="scripted",
        load=lambda _: LoadedDraft(provider=provider, num_draft_tokens=4),
        artifact=False,
    )
    registry = SimpleNamespace(
        kinds={"scripted": kind},
        select=lambda **_: kind,
        owner=lambda _: "specdec-scripted",
        bind_target=lambda *_: None,
    )
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: registry)


def test_a_drafter_that_is_not_made_for_adapters_is_refused_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, _ = adapted(tmp_path, "dora")
    provider = ScriptedProvider()
    provider.supports_adapters = False
    offer(monkeypatch, provider)
    with pytest.raises(AdapterError) as caught:
        load_drafter("scripted", model)
    message = str(caught.value)
    assert "drafter scripted" in message
    assert "DoRALinear" in message
    for way_out in ("without a drafter", "mlx_lm.fuse", "ngram"):
        assert way_out in message
    assert "\n" not in message
    assert (caught.value.drafter, caught.value.adapters) == ("scripted", ("DoRALinear",))
    assert isinstance(caught.value, TargetError)
    assert provider.groups == [], "a group was opened for a pairing that is refused"
    assert provider.closed == 1
    # By name at the call it is the same, and nothing is generated.
    with pytest.raises(AdapterError, match=r"drafter scripted .* DoRALinear"):
        stream_generate(model, tiny_tokenizer(), PROMPT, drafter="scripted")
    with pytest.raises(AdapterError):
        generate(model, tiny_tokenizer(), PROMPT, drafter="scripted")
    # The same drafter for the model without the adapter, and one that is made for adapters.
    load_drafter("scripted", bare())
    provider.supports_adapters = True
    load_drafter("scripted", model)


def test_a_drafter_of_hidden_states_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, _ = adapted(tmp_path)
    offer(monkeypatch, TappedProvider.tiny(hidden_size=64))
    with pytest.raises(AdapterError, match="LoRALinear"):
        load_drafter("scripted", model)
    offer(monkeypatch, TappedProvider.tiny(hidden_size=64))
    loaded = load_drafter("scripted", bare())
    assert loaded.target.adapters == ()


def test_an_adapter_that_comes_after_the_drafter_stops_it_until_it_goes(tmp_path: Path) -> None:
    _, path = adapted(tmp_path)
    model = bare()
    drafter = scripted(model, supports=False)
    provider: Any = drafter.provider
    before, stats = ours(model, drafter=drafter)
    assert stats.drafter == "scripted"
    assert before == alone(model)

    load_adapters(model, str(path))
    calls = dict(provider.calls)
    with pytest.raises(AdapterError, match=r"drafter scripted .* LoRALinear"):
        stream_generate(model, tiny_tokenizer(), PROMPT, drafter=drafter)
    assert provider.calls == calls, "the drafter was asked all the same"
    assert provider.closed == 0, "a drafter of the caller's was closed"
    under, _ = ours(model)
    assert under == alone(model) != before
    assert ours(model, drafter=drafter, num_draft_tokens=0)[0] == under

    remove_lora_layers(model)
    assert drafter.target.adapters == ()
    again, stats = ours(model, drafter=drafter)
    assert again == before
    assert stats.drafter == "scripted"
    assert provider.calls != calls


def test_a_drafter_that_is_made_for_adapters_goes_on_when_one_comes(tmp_path: Path) -> None:
    _, path = adapted(tmp_path)
    model = bare()
    drafters = [load_drafter("ngram", model, **EAGER), scripted(model, supports=True)]
    load_adapters(model, str(path))
    for drafter in drafters:
        tokens, stats = ours(model, drafter=drafter)
        assert tokens == alone(model)
        assert stats.drafter == drafter.kind


def test_a_drafter_that_is_made_for_adapters_costs_no_look_at_the_target() -> None:
    class Blind(MlxLmTarget):
        @property
        def adapters(self) -> tuple[str, ...]:
            raise AssertionError("looked at")

    target, provider = Blind(bare()), ScriptedProvider()
    check_adapters(provider, "scripted", target)
    provider.supports_adapters = False
    with pytest.raises(AssertionError, match="looked at"):
        check_adapters(provider, "scripted", target)


# Rows that were kept.


def test_rows_of_one_adapter_are_not_taken_under_another(tmp_path: Path) -> None:
    paths = {seed: adapted(tmp_path, seed=seed)[1] for seed in (0, 1)}
    model, cache = bare(), PrefixCache(8 << 20)
    drafter = load_drafter("ngram", model, **EAGER)
    seen: dict[Any, tuple[str, list[int]]] = {}
    for name in (None, 0, 1, 0, None):
        remove_lora_layers(model)
        if name is not None:
            load_adapters(model, str(paths[name]))
        identity = drafter.target.state_identity()
        tokens, stats = ours(model, drafter=drafter, prefix_cache=cache)
        assert tokens == alone(model)
        # What was kept is found again by who left it, and by nobody else.
        assert stats.cached_tokens == (len(PROMPT) - 1 if name in seen else 0)
        assert seen.setdefault(name, (identity, tokens)) == (identity, tokens)
        warm, stats = ours(model, drafter=drafter, prefix_cache=cache)
        assert warm == tokens
        assert stats.cached_tokens == len(PROMPT) - 1
    assert len({identity for identity, _ in seen.values()}) == 3
    assert len({tuple(tokens) for _, tokens in seen.values()}) == 3
    cache.close()


# Models and commands.


@pytest.fixture(scope="module")
def demo_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = mlx_lm.load(str(specdec_demo.path()))[0]
    return write_adapter(tmp_path_factory.mktemp("adapter") / "demo", model, gain=0.3)


def test_a_model_is_loaded_with_its_adapter(demo_adapter: Path) -> None:
    model, tokenizer = load_model("demo-qwen3", adapter_path=demo_adapter)
    assert adapter_layers(model) == ("LoRALinear",)
    assert not model.layers[-1].self_attn.q_proj.training
    theirs = mlx_lm.load(str(specdec_demo.path()), adapter_path=str(demo_adapter))
    want = mlx_lm.generate(theirs[0], theirs[1], CODE, max_tokens=24)
    assert want != mlx_lm.generate(*mlx_lm.load(str(specdec_demo.path()))[:2], CODE, max_tokens=24)
    assert generate(model, tokenizer, CODE, max_tokens=24) == want
    assert adapter_layers(load_model("demo-qwen3")[0]) == ()


def test_a_folder_that_is_no_adapter_is_refused_in_one_line(
    tmp_path: Path, demo_adapter: Path
) -> None:
    with pytest.raises(
        ArtifactError, match=r"adapter_path is '.*nowhere', which is no folder; give"
    ):
        load_model("demo-qwen3", adapter_path=tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="adapter_path is '', which is no folder"):
        load_model("demo-qwen3", adapter_path="")
    with pytest.raises(ArtifactError, match=r"has no adapter_config\.json; give a folder"):
        load_model("demo-qwen3", adapter_path=tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text((demo_adapter / config.name).read_text())
    with pytest.raises(ArtifactError, match=r"has no adapters\.safetensors; give a folder"):
        load_model("demo-qwen3", adapter_path=tmp_path)
    # For another model, and with a config of nothing: mlx-lm's words, with both names.
    _, other = adapted(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"demo-qwen3 with adapter .*ValueError") as caught:
        load_model("demo-qwen3", adapter_path=other)
    assert "not an adapter parameter in the model" in str(caught.value), "no reason in the line"
    assert "\n" not in str(caught.value)
    (other / config.name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match="with adapter"):
        load_model("demo-qwen3", adapter_path=other)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_generates_with_an_adapter(
    capsys: pytest.CaptureFixture[str], demo_adapter: Path
) -> None:
    asked = ("generate", "--model", "demo-qwen3", "--prompt", CODE, "--max-tokens", "24", "--json")
    under = ("--adapter-path", str(demo_adapter))
    found = []
    for options in ((), under, (*under, "--drafter", "ngram", "--option", "min_ngram=1")):
        status, out, err = run(capsys, *asked, *options)
        assert (status, err) == (0, "")
        found.append(json.loads(out))
    assert found[0]["tokens"] != found[1]["tokens"] == found[2]["tokens"]
    assert found[2]["drafter"] == "ngram"
    assert found[2]["drafted"] > 0


def test_the_benchmark_runs_under_an_adapter(
    capsys: pytest.CaptureFixture[str], demo_adapter: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": CODE}) + "\n")
    asked = ("bench", "--model", "demo-qwen3", "--prompts", str(prompts), "--max-tokens", "8")
    under = ("--adapter-path", str(demo_adapter), "--drafter", "ngram", "--json")
    status, out, err = run(capsys, *asked, *under)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["adapter_path"] == str(demo_adapter)
    assert [(r["same"], r["differing"]) for r in found["results"][1:]] == [(1, 0)]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_missing_adapter_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path
) -> None:
    prompt = ("--prompt", "x") if command == "generate" else ("--limit", "1")
    missing = str(tmp_path / "nowhere")
    for folder, reason in (
        (missing, "is no folder"),
        (str(tmp_path), "has no adapter_config.json"),
        ("", "is no folder"),
    ):
        status, out, err = run(capsys, command, *prompt, "--adapter-path", folder)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert reason in err


def test_a_command_with_a_drafter_that_is_not_made_for_it_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, demo_adapter: Path
) -> None:
    provider = ScriptedProvider()
    provider.supports_adapters = False
    offer(monkeypatch, provider)
    asked = ("generate", "--prompt", "x", "--drafter", "scripted", "--max-tokens", "2")
    status, out, err = run(capsys, *asked, "--adapter-path", str(demo_adapter))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("specdec: drafter scripted does not support a target under an adapter")
    assert run(capsys, *asked)[0] == 0
