"""The trained head of the demo model: the text is the target's, in clearly fewer forwards.

How a head is read changes what it drafts and nothing else, so every reading has to give the same
text; and the one that the head was trained for accepts the most.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from mtp_demo import Output, drafted, draws, greedy, head, prompts, seeded
from mtp_synthetic import write_qwen3_5, write_qwen3_next
from scripted import drain, request

from specdec import VerifyGroup, load_drafter
from specdec.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

READINGS: dict[str, dict[str, Any]] = {
    "own entries kept": {"chain": "own"},
    "raw output fed back": {"feed": "raw"},
    "no prompt read": {"history": "own"},
    "all at once": {"chain": "own", "hidden": "pre_norm", "feed": "raw", "history": "own"},
}
WORSE: dict[str, dict[str, Any]] = {
    "before the final norm": {"hidden": "pre_norm"},
    "norms not shifted": {"norm_shift": False},
}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_greedy_tokens_are_mlx_lms_at_every_depth(depth: int) -> None:
    forwards = 0
    for prompt in prompts()[1:3]:
        found = drafted(prompt, head(), depth)
        assert found.tokens == greedy(prompt)
        assert (found.stats.drafter, found.stats.reason) == ("mtp", None)
        assert len(found.stats.drafted_per_position) == depth
        assert found.stats.drafted_per_position[-1] > 0
        forwards += found.stats.target_forwards
    assert forwards <= (31, 25, 22, 21)[depth - 1], "48 without drafts"


@pytest.mark.parametrize("depth", [1, 4])
def test_seeded_tokens_are_those_of_the_target_alone(depth: int) -> None:
    for prompt, seed in zip(prompts()[2:4], (3, 4), strict=True):
        found = drafted(prompt, head(), depth, seed=seed, **draws())
        assert found.tokens == seeded(prompt, seed)
        assert found.per_forward > 1.2
    other = drafted(prompts()[2], head(), depth, seed=5, **draws())
    assert other.tokens != seeded(prompts()[2], 3), "another seed gives another text"
    assert other.tokens != greedy(prompts()[2])


@cache
def usual() -> Output:
    """The head as it was trained, on the prompt that readings are compared over."""
    return drafted(prompts()[2], head(), 3)


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_gives_the_same_text(reading: str) -> None:
    prompt = prompts()[2]
    options = READINGS[reading]
    found = drafted(prompt, head(**options), 3)
    assert found.tokens == greedy(prompt)
    assert found.stats.accepted > 0
    assert found.stats != usual().stats or reading == "own entries kept", "it drafts otherwise"
    drawn = drafted(prompt, head(**options), 2, max_tokens=10, seed=3, **draws())
    assert drawn.tokens == seeded(prompt, 3)[:10]


def test_a_wrong_reading_accepts_clearly_less() -> None:
    def forwards(**options: Any) -> int:
        found = 0
        for prompt in prompts()[2:4]:
            output = drafted(prompt, head(**options), 3)
            assert output.tokens == greedy(prompt)
            found += output.stats.target_forwards
        return found

    best = forwards()
    assert best <= 20, "48 without drafts"
    assert forwards(**WORSE["before the final norm"]) > 1.4 * best
    assert forwards(**WORSE["norms not shifted"]) > 2.2 * best


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_head_quantized_at_load_is_smaller_and_the_text_the_same(group_size: int) -> None:
    packed = head(bits=4, group_size=group_size)
    # 4 bits and a group's two 16-bit numbers, norms aside, in place of 16 bits.
    share = (4 + 32 / group_size) / 16
    ratio = packed.provider.weight_bytes / head().provider.weight_bytes
    assert share < ratio < share + 0.01
    found = drafted(prompts()[2], packed, 3, max_tokens=20)
    assert found.tokens == greedy(prompts()[2])[:20]
    assert found.per_forward > 1.8
    names = [each.provider.grouped.checkpoint_namespace for each in (packed, head())]
    assert names[0] != names[1]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("release", ["dense", "experts", "next"])
def test_a_quantized_target_writes_its_own_text(
    release: str, bits: int | None, tmp_path: Path
) -> None:
    if release == "next":
        folder = write_qwen3_next(tmp_path)
    else:
        folder = write_qwen3_5(tmp_path, experts=4 if release == "experts" else 0)
    model, _ = load_model(folder)
    if bits is not None:
        quantize(model, group_size=32, bits=bits)
    with load_drafter(folder, model, kind="mtp", probe=False) as loaded:
        for prompt in ([5, 9, 40, 3, 22, 17], [8], list(range(30, 45))):
            steps = generate_step(mx.array(prompt), model, max_tokens=24)
            group = VerifyGroup(loaded.target, loaded.provider, drafter="mtp")
            [row] = group.admit([request(prompt, max_tokens=24, num_draft_tokens=3)])
            drain(group)
            assert list(row.emitted) == [int(token) for token, _ in steps]
            assert (row.stats.reason, row.stats.draft_errors) == (None, 0)
            assert row.stats.drafted > 40


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 5])
def test_a_budget_ends_a_text_at_its_edge(budget: int) -> None:
    prompt, depth = prompts()[2], 3
    if not budget:
        with pytest.raises(OptionError, match="max_tokens"):
            drafted(prompt, head(), depth, max_tokens=budget)
        return
    found = drafted(prompt, head(), depth, max_tokens=budget)
    assert found.tokens == greedy(prompt)[:budget]
    assert found.finish == "length"
    assert found.stats.drafted <= 2 * budget
