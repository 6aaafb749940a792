"""How norm weights are stored is told by the file and by the values, and their quarrel is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from mtp_files import (
    NORMS,
    demo_config,
    demo_folder,
    demo_head,
    next_token_head,
    prefixed,
    split_release,
    write,
)

from specdec_mtp.find import HeadFiles, HeadKind, Layout, find_head
from specdec_mtp.norms import NORM_NAMES, NormEvidence, norm_evidence, shifted
from specdec_mtp.tensors import read_tensors

if TYPE_CHECKING:
    from pathlib import Path

TOP, IN_LAYER = NORMS[:3], NORMS[3:]
MLX_TRUNK = {"language_model.model.layers.0.linear_attn.conv1d.weight": mx.ones((6, 4, 1))}


def evidence(folder: Path, kind: HeadKind = HeadKind.MTP) -> NormEvidence:
    files = find_head(folder, kind)
    return norm_evidence(files, read_tensors(files))


def scales() -> dict[str, mx.array]:
    """The demo's head with norm weights as scales."""
    return {name: w + 1.0 if name in NORMS else w for name, w in demo_head().items()}


def told(layout: Layout, *, raw_trunk: bool | None = None, from_mlx: bool = False) -> HeadFiles:
    return evolve(
        find_head(demo_folder(), HeadKind.MTP),
        layout=layout,
        raw_trunk=raw_trunk,
        from_mlx=from_mlx,
    )


def with_means(means: dict[str, float]) -> dict[str, mx.array]:
    return {name: mx.full((4,), means.get(name, 0.1)) for name in NORMS}


SILENT = told(Layout.PREFIXED, from_mlx=True)
COULD_BE_EITHER = with_means({})


def test_every_norm_of_the_head_is_meant_and_nothing_else() -> None:
    one_dimensional = {name for name, weight in demo_head().items() if weight.ndim == 1}
    assert set(NORM_NAMES) == one_dimensional


def test_the_raw_release_wants_the_shift_for_both_reasons() -> None:
    found = evidence(demo_folder())
    assert (found.shift, found.certain, found.mixed) == (True, True, ())
    assert "Hugging Face's layout" in found.reasons[0]
    assert "layers.0.post_attention_layernorm.weight (-0.43)" in found.reasons[1]


def test_a_split_release_has_had_it(tmp_path: Path) -> None:
    found = evidence(split_release(tmp_path))
    assert (found.shift, found.certain) == (False, True)
    assert found.reasons[1] == "all means are above 0.3"


def test_a_converted_release_that_kept_its_head_has_had_it(tmp_path: Path) -> None:
    files = {"model.safetensors": {**prefixed(scales(), "mtp."), **MLX_TRUNK}}
    found = evidence(write(tmp_path, files, demo_config(), mlx=True))
    assert (found.shift, found.certain) == (False, True)


def test_a_raw_file_beside_a_converted_target_wants_it(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": MLX_TRUNK}, demo_config(), mlx=True)
    write(tmp_path, {"mtp.safetensors": prefixed(demo_head(), "mtp.")})
    found = evidence(tmp_path)
    assert (found.shift, found.certain) == (True, True)
    assert "prefix" in found.reasons[0]


def test_a_split_release_of_unchanged_values_is_found_out_by_them(tmp_path: Path) -> None:
    found = evidence(split_release(tmp_path, demo_head()))
    assert (found.shift, found.certain) == (True, False)
    assert "MLX wrote it" in found.reasons[0]
    assert "negative" in found.reasons[1]


def test_high_means_leave_the_decision_to_the_file(tmp_path: Path) -> None:
    files = {"model.safetensors": {**prefixed(scales(), "mtp."), **MLX_TRUNK}}
    write(tmp_path, files, demo_config())
    found = norm_evidence(told(Layout.PREFIXED, raw_trunk=True), scales())
    assert (found.shift, found.certain) == (True, False)


@pytest.mark.parametrize("raw", [TOP, IN_LAYER])
@pytest.mark.parametrize("raw_trunk", [True, False])
def test_a_file_at_odds_with_itself_is_told_with_names(
    raw: tuple[str, ...], raw_trunk: bool
) -> None:
    tensors = {k: w + 1.0 if k in NORMS and k not in raw else w for k, w in demo_head().items()}
    if raw == TOP:  # of those, the demo's own hidden norm and final norm could be either
        tensors |= with_means(dict.fromkeys(IN_LAYER, 0.8) | dict.fromkeys(TOP, -0.2))
    found = norm_evidence(told(Layout.PREFIXED, raw_trunk=raw_trunk), tensors)
    assert (found.shift, found.certain) == (raw_trunk, False)
    assert found.mixed == raw
    assert all(name in found.reasons[2] for name in NORMS if name not in raw)
    mended = shifted(tensors, 1.0, found.mixed)
    assert norm_evidence(told(Layout.SPLIT, from_mlx=True), mended).certain


def test_where_neither_says_anything_nothing_is_certain() -> None:
    found = norm_evidence(SILENT, COULD_BE_EITHER)
    assert (found.shift, found.certain) == (False, False)


FILES = {
    None: SILENT,
    True: told(Layout.PREFIXED, raw_trunk=True),
    False: told(Layout.SPLIT, from_mlx=True),
}
VALUES = {
    None: COULD_BE_EITHER,
    True: with_means({"layers.0.post_attention_layernorm.weight": -0.43}),
    False: with_means(dict.fromkeys(NORMS, 0.6)),
}


@pytest.mark.parametrize("says", FILES)
@pytest.mark.parametrize("seen", VALUES)
def test_two_witnesses_are_certain_unless_they_quarrel_or_are_silent(
    says: bool | None, seen: bool | None
) -> None:
    found = norm_evidence(FILES[says], VALUES[seen])
    voices = {says, seen} - {None}
    assert found.certain == (len(voices) == 1)
    if len(voices) == 1:
        assert found.shift is voices.pop()
    elif voices:
        assert found.shift, "a negative scale decides; high means do not"


@pytest.mark.parametrize(("mean", "raw"), [(-0.1, True), (-0.06, True), (-0.04, False)])
def test_only_a_clearly_negative_mean_is_no_scale(mean: float, raw: bool) -> None:
    found = norm_evidence(SILENT, with_means({"norm.weight": mean}))
    assert (found.shift, found.certain) == (raw, raw)


def test_bare_names_that_mlx_did_not_write_tell_nothing(tmp_path: Path) -> None:
    found = evidence(split_release(tmp_path, demo_head(), mlx=False))
    assert (found.shift, found.certain) == (True, True)
    assert "do not tell" in found.reasons[0]


def test_a_missing_norm_keeps_high_means_from_telling() -> None:
    tensors = with_means(dict.fromkeys(NORMS, 0.6))
    del tensors["norm.weight"]
    assert not norm_evidence(SILENT, tensors).certain


def test_next_token_layers_are_never_shifted(tmp_path: Path) -> None:
    _, stored, config = next_token_head("glm4_moe")
    stored["enorm.weight"] = -mx.ones((64,))
    write(tmp_path, {"model.safetensors": prefixed(stored, "model.layers.3.")}, config)
    found = evidence(tmp_path, HeadKind.NEXTN)
    assert (found.shift, found.certain) == (False, True)


def test_shifting_adds_in_the_tensors_own_type_as_mlx_lm_does() -> None:
    head = demo_head()
    moved = shifted(head, 1.0)
    for name, weight in head.items():
        wanted = weight + 1.0 if name in NORMS else weight
        assert moved[name].dtype == mx.bfloat16
        assert mx.array_equal(moved[name], wanted), name
    assert mx.array_equal(head["norm.weight"], demo_head()["norm.weight"]), "left as it was"


@given(
    names=st.sets(st.sampled_from(NORMS)),
    by=st.floats(-4, 4, allow_nan=False, width=16),
)
def test_shifting_moves_the_named_tensors_alone(names: set[str], by: float) -> None:
    tensors = {**with_means({}), "fc.weight": mx.ones((2, 4))}
    moved = shifted(tensors, by, names | {"absent.weight"})
    assert set(moved) == set(tensors)
    for name, weight in tensors.items():
        assert mx.allclose(moved[name], weight + (by if name in names else 0.0)), name
