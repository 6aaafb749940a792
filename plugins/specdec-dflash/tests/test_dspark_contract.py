"""The conformance kit over drafters of ``dspark.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import mlx.core as mx
from attrs import evolve

from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec.testing import DraftRowContract
from specdec_dflash.dspark_config import DsparkConfig
from specdec_dflash.dspark_loading import dspark_provider
from specdec_dflash.dspark_model import DsparkModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting import ProjectedProvider

FEW = hypothesis.settings(
    max_examples=4, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
TINY = DsparkConfig(
    hidden_size=32,
    vocab_size=8,
    eps=1e-6,
    gamma=4,
    width=16,
    layers=2,
    heads=2,
    inner=32,
    rank=4,
    recurrent=False,
    confidence=True,
    taps=(0, 2),
)


def tiny(seed: int = 0, least: float | None = None, **changes: object) -> ProjectedProvider:
    config = evolve(TINY, **changes)  # type: ignore[arg-type]  # by name
    with without_drawing():
        model = DsparkModel(config)
    shapes = parameters_of(model)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {}
    for (name, array), key in zip(sorted(shapes.items()), keys, strict=True):
        noise = mx.random.normal(array.shape, key=key)
        near_one = array.ndim == 1 and not name.endswith("bias")
        gain = 0.1 if array.ndim == 1 else 2.0 * array.shape[-1] ** -0.5
        weights[name] = noise * gain + (1.0 if near_one else 0.0)
    load_module("a tiny drafter", model, weights)
    thresholds = None if least is None else (least,) * config.gamma
    return dspark_provider(f"tiny-{seed}", config, model, thresholds)


class TestDsparkRows(DraftRowContract):
    """All drafts of a block; its state follows from the text."""

    settings = FEW

    def make_provider(self) -> ProjectedProvider:
        return tiny()

    def make_other_providers(self) -> Sequence[ProjectedProvider]:
        return [tiny(1), tiny(taps=(2, 0)), tiny(eps=0.5), tiny(heads=4)]


class TestConfidentDsparkRows(DraftRowContract):
    """A recurrent head, and drafts that end where it is not sure."""

    settings = FEW

    def make_provider(self) -> ProjectedProvider:
        return tiny(least=0.5, recurrent=True)

    def make_other_provider(self) -> ProjectedProvider:
        return tiny(1, least=0.5, recurrent=True)
