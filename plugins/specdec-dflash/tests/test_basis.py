"""Drafters on a target with a rotated residual stream draft what they draft on the original."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from demo_texts import DemoTexts
from dspark_synthetic import write_dspark
from mlx_lm.utils import load_model
from rotated_target import TEXTS, Drafts, OfferingTarget, Pair, drafts_of, pair_of, rotate, taps_of
from scripted import drain, request
from tiny_models import VOCABULARY

from specdec import VerifyGroup
from specdec.contract import ResidualBasis
from specdec.drafting.modules import Packing, parameters_of, quantize_module, without_drawing
from specdec.errors import ContractError, SpecdecDrafterWarning, TargetLacksError
from specdec.plugins import LoadRequest
from specdec.plugins.models import find_model
from specdec.targets import MlxLmTarget
from specdec.testing.target import TinyTarget
from specdec_dflash.basis import basis_of, turned_linear
from specdec_dflash.config import Convolutions, Markov, Selector
from specdec_dflash.loading import load_drafter, provider_of
from specdec_dflash.method import Drafting
from specdec_dflash.model import BlockModel
from specdec_dflash.plugin import load_dspark
from specdec_dflash.tiny import TINY, random_weights, tiny_block

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.plugins import LoadedDraft

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "vocab_size": VOCABULARY,
    "mask_token": 63,
    "target_layers": None,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "dflash": {"taps": (0, 1), "embedding_scale": 1.5},
    "dflash after the final norm": {"taps": (1, 2)},
    "dflash2": {
        "taps": (2, 0),
        "convolutions": Convolutions(2, 16),
        "selector": Selector(8, 6),
        "windows": (4, None),
    },
    "deepspec": {
        "taps": (1, 0, 2),
        "markov": Markov(8, "gated"),
        "confidence": True,
        "confidence_of_markov": True,
        "from_anchor": True,
    },
    "own head": {"own_head": True},
    "own embedding": {"own_embedding": True},
    "own both, some ids": {
        "own_embedding": True,
        "own_head": True,
        "ids": tuple(range(0, VOCABULARY, 2)),
        "taps": (2,),
    },
}


@cache
def pair(architecture: str = "qwen3") -> Pair:
    return pair_of(architecture, tie_word_embeddings=False)


def block(kind: str) -> Any:
    return tiny_block(**SIZES, **KINDS[kind])


def drafts_on(target: MlxLmTarget, kind: str) -> Drafts:
    return drafts_of(target, block(kind))


@cache
def wanted(architecture: str, kind: str) -> Drafts:
    return drafts_on(pair(architecture).original, kind)


def reporting(basis: ResidualBasis | None) -> OfferingTarget:
    """The rotated model, with another word about its basis."""
    return OfferingTarget(pair().rotated.model, basis)


# The target itself.


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_rotated_model_computes_the_same_from_another_residual_stream(
    architecture: str,
) -> None:
    both = pair(architecture)
    tokens = mx.array([TEXTS[1]])
    same = both.original.model(tokens), both.rotated.model(tokens)
    assert mx.allclose(*same, atol=1e-4, rtol=0).item()
    plain, turned = (
        taps_of(target, TEXTS[1], (0, 1, 2)) for target in (both.original, both.rotated)
    )
    basis = both.basis
    assert basis.scale is not None
    assert not mx.allclose(basis.rotation, basis.rotation.T, atol=0.1).item()
    for at, factor in enumerate((mx.array(1.0), mx.array(1.0), basis.scale)):
        own, stored = (array[..., 64 * at : 64 * at + 64] for array in (plain, turned))
        assert not mx.allclose(own, stored, atol=0.1).item()
        assert mx.allclose(stored @ basis.rotation.T * factor, own, atol=1e-4, rtol=0).item()


# Drafts.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_drafts_on_the_rotated_target_are_those_on_the_original(
    architecture: str, kind: str
) -> None:
    found, same = drafts_on(pair(architecture).rotated, kind), wanted(architecture, kind)
    assert found.difference(same) <= 1e-4
    assert found.tokens == same.tokens
    assert len({tuple(each) for each in same.tokens}) > 1


@pytest.mark.parametrize("head", [None, "rnn"])
def test_a_narrow_drafter_on_the_rotated_target_drafts_what_it_drafts_on_the_original(
    head: str | None, tmp_path: Path
) -> None:
    folder = write_dspark(tmp_path, seq_head=head)  # its taps: a layer's, and after the norm

    def on(target: MlxLmTarget) -> Drafts:
        asked = LoadRequest(kind="dspark", path=folder, target=target, options={"probe": False})
        return drafts_of(target, load_dspark(asked).provider)

    same, found = on(pair().original), on(pair().rotated)
    assert found.difference(same) <= 1e-4
    assert found.tokens == same.tokens
    assert on(reporting(None)).difference(same) > 1e-2
    assert on(reporting(evolve(pair().basis, scale=None))).difference(same) > 1e-2


# What is not read at all cannot be turned wrongly.
WRONG: Final = {
    "no basis": tuple(KINDS),
    "transposed": tuple(KINDS),
    "scale forgotten": tuple(
        kind
        for kind, says in KINDS.items()
        if not says.get("own_head") or 2 in says.get("taps", ())
    ),
    "scale inverted": ("dflash", "dflash after the final norm", "own both, some ids"),
}


@pytest.mark.parametrize(("mistake", "kind"), [(m, k) for m, kinds in WRONG.items() for k in kinds])
def test_a_wrong_basis_gives_other_drafts(mistake: str, kind: str) -> None:
    basis = pair().basis
    assert basis.scale is not None
    told = {
        "no basis": None,
        "transposed": evolve(basis, rotation=basis.rotation.T),
        "scale forgotten": evolve(basis, scale=None),
        "scale inverted": evolve(basis, scale=1.0 / basis.scale),
    }[mistake]
    assert drafts_on(reporting(told), kind).difference(wanted("qwen3", kind)) > 1e-2


@pytest.mark.parametrize("part", ["embedding", "head_input"])
def test_each_part_is_turned_where_the_target_does_it(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"specdec_dflash.basis.TargetBasis.{part}", lambda _, given: given)
    target, own = pair().rotated, f"own {part.partition('_')[0]}"
    assert drafts_on(target, "dflash").difference(wanted("qwen3", "dflash")) > 1e-2
    assert drafts_on(target, own).difference(wanted("qwen3", own)) <= 1e-4


def test_without_a_folded_scale_a_rotation_alone_is_taken_back() -> None:
    both = pair_of("qwen3", seed=3, tie_word_embeddings=False)
    even = mx.full((64,), 1.25)
    original, rotated = both.original.model, both.rotated.model
    rotated.lm_head.weight = rotated.lm_head.weight @ both.basis.rotation.T
    rotated.lm_head.weight = rotated.lm_head.weight / both.basis.scale @ both.basis.rotation
    for model in (original, rotated):
        model.model.norm.weight = even  # commutes with any rotation
    target = OfferingTarget(rotated, ResidualBasis(rotation=both.basis.rotation))
    plain = MlxLmTarget(original)
    for kind in ("dflash", "dflash after the final norm", "own both, some ids"):
        assert drafts_on(target, kind).difference(drafts_on(plain, kind)) <= 1e-4


# Bound once.


def test_a_later_bind_with_another_basis_is_refused_and_the_first_one_goes_on() -> None:
    both, provider = pair(), block("dflash")
    want = drafts_of(both.rotated, provider)
    other = pair_of("qwen3", seed=1, tie_word_embeddings=False).rotated
    for target, error, says in (
        (MlxLmTarget(pair("llama").original.model), TargetLacksError, "residual_basis"),
        (other, ContractError, "rotated otherwise; load it again"),
    ):
        with pytest.raises(error, match=says) as caught:
            drafts_of(target, provider)
        assert "\n" not in str(caught.value)
        again = drafts_of(both.rotated, provider)
        assert again.difference(want) == 0.0
    assert drafts_of(OfferingTarget(both.rotated.model, both.basis), provider).tokens == want.tokens


def test_the_same_basis_of_another_model_is_bound_again() -> None:
    provider = block("dflash2")
    want = drafts_of(pair().rotated, provider)
    twin = pair_of("qwen3", tie_word_embeddings=False).rotated  # the same numbers elsewhere
    assert twin.identity is not pair().rotated.identity
    assert drafts_of(twin, provider).difference(want) == 0.0


def test_what_is_not_rotated_is_not_bound_to_a_rotated_target_later() -> None:
    both, provider = pair(), block("dflash")
    want = drafts_of(both.original, provider)
    with pytest.raises(ContractError, match="not rotated; load it again"):
        drafts_of(both.rotated, provider)
    assert drafts_of(both.original, provider).difference(want) == 0.0


def test_without_a_basis_the_drafter_computes_with_the_very_arrays_it_was_given() -> None:
    config = evolve(TINY, **SIZES)
    model = model_of(config)
    given = parameters_of(model)
    values = {name: np.array(array) for name, array in given.items()}
    method: Any = provider_of("d", config, model, Drafting(), None).grouped.method_for(
        pair().original
    )
    assert method._model is model
    assert all(parameters_of(model)[name] is array for name, array in given.items())
    # With one, the network that was given is left alone, too.
    turned: Any = provider_of("d", config, model, Drafting(), None).grouped.method_for(
        pair().rotated
    )
    assert turned._model is not model
    for name, array in parameters_of(model).items():
        assert array is given[name]
        assert np.array_equal(np.array(array), values[name])
    bound = parameters_of(turned._model)
    assert {name for name, array in bound.items() if array is not given[name]} == {"fc.weight"}


def test_a_namespace_does_not_depend_on_when_it_is_asked_for() -> None:
    early, late = block("dflash"), block("dflash")
    name = early.grouped.checkpoint_namespace
    late.grouped.method_for(pair().rotated)
    assert late.grouped.checkpoint_namespace == name


BROKEN: Final = (
    ("shape", lambda basis: evolve(basis, rotation=basis.rotation[:, :32])),
    ("not orthogonal", lambda basis: evolve(basis, rotation=basis.rotation * 1.1)),
    ("not orthogonal", lambda basis: evolve(basis, rotation=basis.rotation * mx.nan)),
    ("scale of shape", lambda basis: evolve(basis, scale=basis.scale[:1])),
    ("zeros or no numbers", lambda basis: evolve(basis, scale=mx.zeros((64,)))),
    ("zeros or no numbers", lambda basis: evolve(basis, scale=basis.scale * mx.inf)),
)


@pytest.mark.parametrize(("says", "change"), BROKEN)
def test_what_is_no_rotation_is_refused_in_one_line(says: str, change: Any) -> None:
    provider = block("dflash")
    with pytest.raises(ContractError, match=says) as caught:
        drafts_of(reporting(change(pair().basis)), provider)
    assert "\n" not in str(caught.value)
    found = drafts_of(pair().rotated, provider)  # nothing was bound
    assert found.difference(wanted("qwen3", "dflash")) <= 1e-4


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_rotation_of_sixteen_bits_is_one(dtype: mx.Dtype) -> None:
    basis = pair().basis
    assert basis.scale is not None
    short = ResidualBasis(basis.rotation.astype(dtype), basis.scale.astype(dtype))
    found = basis_of(reporting(short), "a drafter")
    assert found is not None
    assert found.rotation.dtype == mx.float32
    x = mx.random.normal((1, 2, 64), key=mx.random.key(1)).astype(dtype)
    assert found.embedding(x).dtype == found.head_input(x).dtype == dtype
    assert found.combiner(x[0], (0,)).dtype == dtype


def test_a_packed_combination_of_taps_is_folded_from_what_its_packing_says() -> None:
    model = model_of(evolve(TINY, **SIZES))
    quantize_module("it", model, Packing(4, 32), lambda path: path == "fc")
    basis = basis_of(pair().rotated, "a drafter")
    assert basis is not None
    turned = turned_linear(model.fc, basis, (0, 2))
    assert turned.weight.dtype == mx.float32
    x = mx.random.normal((3, 128), key=mx.random.key(2))
    original = pair().basis
    assert original.scale is not None
    stored = mx.concatenate(
        [x[:, :64] @ original.rotation, x[:, 64:] / original.scale @ original.rotation], axis=-1
    )
    assert mx.allclose(turned(stored), model.fc(x), atol=1e-4, rtol=0).item()


def model_of(config: Any) -> BlockModel:
    with without_drawing():
        model = BlockModel(config, own_embedding=False, own_head=False)
    model.load_weights(list(random_weights(model, 0).items()))
    return model


def test_the_kits_target_reports_a_basis_and_drafts_are_of_it() -> None:
    target, provider = TinyTarget(), tiny_block()
    texts = ((1, 5, 2), (4, 0, 3, 3, 6))
    turned = drafts_of(target, provider, texts)
    plain = drafts_of(target.without("residual_basis"), tiny_block(), texts)
    assert turned.difference(plain) > 1e-2  # its weights are not rotated: it would differ


# A trained drafter, loaded from its folder.

DEMO = DemoTexts("demo-qwen3", "demo-qwen3-dflash")


@cache
def demo() -> Pair:
    """The demo model in float32, and rotated."""
    folder = find_model("demo-qwen3")
    assert folder is not None
    models = [load_model(folder, lazy=True)[0] for _ in range(2)]
    for model in models:
        model.set_dtype(mx.float32)
    basis = rotate(models[1])
    return Pair(MlxLmTarget(models[0]), OfferingTarget(models[1], basis), basis)


def loaded(target: MlxLmTarget, **options: Any) -> LoadedDraft:
    return load_drafter(
        LoadRequest(
            kind="dflash",
            path=find_model("demo-qwen3-dflash"),
            target=target,
            tokenizer=DEMO.demo()[1],
            options=options,
        )
    )


def per_forward(target: MlxLmTarget, draft: LoadedDraft) -> float:
    group = VerifyGroup(target, draft.provider, drafter="dflash")
    [row] = group.admit([request(DEMO.prompts()[2], max_tokens=16, num_draft_tokens=3)])
    drain(group)
    group.close()
    assert row.stats.draft_errors == 0
    return 16 / row.stats.target_forwards


def test_a_trained_drafter_is_accepted_on_a_rotated_target() -> None:
    assert per_forward(demo().rotated, loaded(demo().rotated, probe=False)) > 1.9


def test_the_probe_hears_on_a_rotated_target_what_it_hears_on_the_original() -> None:
    said = []
    for target in (demo().original, demo().rotated):
        with pytest.warns(SpecdecDrafterWarning) as caught:
            draft = loaded(target, tap_shift=1)  # a layer later still is the one after the norm
        said.append([str(each.message) for each in caught])
        grouped: Any = draft.provider.grouped
        assert grouped.target_tap_layers(target) == (2, 4, 5), "as asked"
    assert said[0] == said[1]
    assert "at 68% with tap_shift=0" in said[0][0]
