"""What a provider owns: weights that go when it is closed, rows whose memory is told ahead."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer
from mtp_demo import demo
from mtp_files import demo_folder, demo_head, prefixed
from mtp_synthetic import write_glm

import specdec
from specdec.batch.memory import MemoryPlan
from specdec.contract import DeclaresRowBytes, Greedy
from specdec.errors import ArtifactError, ClosedError, OptionError
from specdec.targets import MlxLmTarget
from specdec.testing import TinyTarget
from specdec_mtp.find import HeadKind, find_head
from specdec_mtp.tiny import tiny_head

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec_mtp.provider import HeadProvider


class Draws:
    """Greedy rows."""

    rejecting = False
    selection = Greedy()

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        return mx.argmax(logprobs, axis=-1)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("nobody asks")


def group(provider: HeadProvider, target: TinyTarget, prompts: Sequence[Sequence[int]]) -> Any:
    """Rows that have read their prompts."""
    checkpoints = []
    for prompt in prompts:
        prefill = provider.grouped.open_prefill(target=target, checkpoints=[None])
        hidden = target.hidden(prompt, prefill.context, ())
        prefill.prefill(mx.array([list(prompt)], mx.int32), hidden)
        checkpoints.append(prefill.capture(0))
        prefill.close()
    return provider.grouped.open(target=target, sampling=Draws(), checkpoints=checkpoints)


def test_a_closed_provider_lets_its_weights_go_and_opens_no_more_groups() -> None:
    provider, target = tiny_head(ids=(1, 3, 5)), TinyTarget()
    rows = group(provider, target, [[1, 2, 3]])
    module = weakref.ref(provider.module)
    provider.close()
    provider.close()
    with pytest.raises(ClosedError):
        provider.grouped.open_prefill(target=target, checkpoints=[None])
    assert rows.draft([4], [2], [0]), "an open group goes on"
    rows.close()
    assert module() is not None
    del rows
    gc.collect()
    assert module() is None


def test_a_row_takes_what_it_is_said_to_take() -> None:
    provider, target = tiny_head(), TinyTarget()
    assert isinstance(provider.grouped, DeclaresRowBytes)
    for length in (2, 200, 300, 1000):
        rows = group(provider, target, [[token % 8 for token in range(length)]])
        rows.draft([1], [2], [0])
        held = sum(array.nbytes for array in rows._live._caches.arrays())
        said = provider.grouped.row_bytes(target, length + 2)
        assert held <= said <= held + 600 * held // length
        rows.close()
    alone, both = MemoryPlan(target, None), MemoryPlan(target, None, provider)
    assert both.row_bytes(500) == alone.row_bytes(500) + provider.grouped.row_bytes(target, 500)
    assert both.weight_bytes == provider.weight_bytes > 0


def graph_size(arrays: Sequence[mx.array], path: Path) -> int:
    """Operations behind arrays that nobody has computed."""
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("[label")


@pytest.mark.parametrize("depths", [[2, 2], [0, 3], [0, 0], [1, 0]])
@pytest.mark.parametrize("ids", [None, (5,)])
def test_no_graph_grows_from_round_to_round(
    ids: tuple[int, ...] | None, depths: list[int], tmp_path: Path
) -> None:
    # Over one id a draft does not depend on the head, so nobody else would compute its caches.
    provider, target = tiny_head(ids=ids), TinyTarget()
    rows = group(provider, target, [[1, 2, 3], [4, 5]])
    sizes = []
    for number in range(4):
        opened = rows.draft_device([1, 2], depths, [number, number])
        if opened is None:
            rows.draft([1, 2], depths, [number, number])
        else:
            mx.eval(opened.tokens)
            opened.resolve([0] * opened.tokens.size)
        rows.commit([0, 0], mx.zeros((2, 1 + max(depths), 32)))
        mx.synchronize()
        sizes.append(graph_size(rows._live._caches.arrays(), tmp_path / "graph.dot"))
    assert max(sizes) <= 2, "keys and values are computed"


def test_native_tries_the_head_too_so_another_model_s_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(demo_folder(), folder)
    (folder / "model.safetensors").unlink()
    keys = mx.random.split(mx.random.key(1), 15)
    strange = {
        name: array if array.ndim == 1 else 0.05 * mx.random.normal(array.shape, key=key)
        for (name, array), key in zip(sorted(demo_head().items()), keys, strict=True)
    }
    held = prefixed(strange, "mtp.")
    mx.save_safetensors(str(folder / "mtp.safetensors"), held, metadata={"format": "pt"})
    model, _ = demo()
    tokenizer = load_tokenizer(folder)
    for drafter in ("mtp", "native"):
        with pytest.raises(ArtifactError, match="it is another model's"):
            specdec.load_drafter(drafter, model, tokenizer)
    specdec.load_drafter("native", model, tokenizer, probe=False).close()


def test_native_needs_to_know_where_the_model_is() -> None:
    model, tokenizer = demo()
    with pytest.raises(ArtifactError, match="no tokenizer was given"):
        specdec.load_drafter("native", model)

    class Moved:
        name_or_path = "/nowhere/any/more"

    with pytest.raises(ArtifactError, match="tokenizer is of '/nowhere/any/more'"):
        specdec.load_drafter("native", model, Moved())
    chosen = specdec.load_drafter("native", model, tokenizer, chain="own", num_draft_tokens=4)
    assert (chosen.kind, chosen.num_draft_tokens) == ("mtp", 4)


def test_a_head_of_the_other_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds a head of the kind mtp, not nextn"):
        find_head(demo_folder(), HeadKind.NEXTN)
    with pytest.raises(ArtifactError, match="holds a head of the kind nextn, not mtp"):
        find_head(write_glm(tmp_path / "glm", "glm4_moe"), HeadKind.MTP)


def test_a_draft_vocabulary_that_the_head_cannot_be_cut_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = demo()
    port: Any = type(MlxLmTarget(model).recurrent_mtp)
    monkeypatch.setattr(port, "subset", lambda *_: None)
    with pytest.raises(OptionError, match="draft_vocab lists 3 ids"):
        specdec.load_drafter("mtp", model, tokenizer, draft_vocab=[1, 2, 3], probe=False)
    listed = tmp_path / "draft_vocab.json"
    listed.write_text(json.dumps({"ids": [1, 2]}))
    with pytest.raises(OptionError, match="draft_vocab lists 2 ids"):
        specdec.load_drafter("mtp", model, tokenizer, draft_vocab=str(listed), probe=False)
    specdec.load_drafter("mtp", model, tokenizer, draft_vocab=False, probe=False).close()
