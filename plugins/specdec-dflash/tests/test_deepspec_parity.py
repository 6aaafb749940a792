"""DeepSpec drafters and speculators draft as a plain float64 computation does, slot by slot.

The oracle computes each block anew from the text and a release's files, so context that was
projected in chunks, at other widths or beside other rows shows in its logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from deepspec_driven import Driven, Watched, log_softmax
from deepspec_synthetic import DRAFT_IDS, RELEASES, VOCABULARY, write_release
from numpy.typing import NDArray

from specdec import SamplingOptions
from specdec.contract import Proposal
from specdec.sampling import RowSamplers
from specdec.sampling.noise import gumbel, seed_words
from specdec.verify.members import MemberSampling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from oracles.block_plain import PlainBlock

Floats = NDArray[np.float64]

MARGIN = 1e-4
PROMPTS = tuple(
    tuple((step * place + start) % (VOCABULARY - 1) for place in range(length))
    for step, start, length in ((7, 3, 3), (11, 5, 9), (13, 1, 14))
)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every release by its name."""
    folder = tmp_path_factory.mktemp("releases")
    for name in RELEASES:
        write_release(name, folder / name)
    return folder


def check_logits(seen: Sequence[mx.array], row: int, expected: PlainBlock) -> None:
    """What a row's drafts were the largest of, against the oracle's logits."""
    for slot, (ids, logits) in enumerate(zip(expected.ids, expected.logits, strict=True)):
        told = np.array(seen[slot][row]).astype(np.float64)
        assert np.abs(told[ids] - log_softmax(logits)).max() < MARGIN
        others = np.delete(told, ids)
        assert np.all(np.isneginf(others)), "nothing else was scored"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", RELEASES)
def test_rows_draft_as_the_plain_computation_from_equal_logits(
    name: str, rows: int, releases: Path
) -> None:
    watched = Watched()
    driven = Driven.of(releases / name, PROMPTS[-rows:], watched)
    longest = driven.oracle.longest
    rounds = [
        ([longest] * rows, [0, 2, longest][-rows:]),
        ([2, longest, 1][-rows:], [1, 0, 1][-rows:]),
        ([longest, 3, 2][-rows:], [0] * rows),
    ]
    for number, (depths, accepted) in enumerate(rounds):
        pending = [(17 * number + 5 * row + 2) % (VOCABULARY - 1) for row in range(rows)]
        watched.seen.clear()
        drafts = driven.rows.draft(pending, depths, [0] * rows)
        assert isinstance(drafts, list)
        for row, draft in enumerate(drafts):
            expected = driven.expected(row, pending[row], depths[row])
            assert draft == expected.tokens
            check_logits(watched.seen, row, expected)
        driven.opened(pending, drafts)
        driven.commit(accepted)


@pytest.mark.parametrize("name", ["qwen", "gemma", "qwen rnn", "speculators dspark"])
def test_fewer_drafts_are_the_first_of_a_whole_block(name: str, releases: Path) -> None:
    driven = Driven.of(releases / name, PROMPTS, Watched(), block=None)  # as it is by default
    pending, depths = [5, 9, 2], [2, 1, 3]
    drafts = driven.rows.draft(pending, depths, [0] * 3)
    whole = [driven.expected(row, pending[row], driven.oracle.longest) for row in range(3)]
    assert drafts == [each.tokens[:depth] for each, depth in zip(whole, depths, strict=True)]


# Confidence.

ROWS = 20
CUTS = {
    "qwen": (0.4, {0, 1, 2, 5}),
    "qwen gated": (0.25, {0, 1, 5}),
    "qwen rnn": (0.6, {0, 1, 2, 3, 4, 5}),
    "gemma": (0.2, {1, 2, 3, 4, 5}),
    "lfm2": (0.35, {0, 1, 3, 5}),
    "speculators dspark listed": (0.2, {0, 1, 5}),
}
"""Thresholds, and how many drafts they leave some row or other."""


@pytest.mark.parametrize("name", CUTS)
def test_a_block_ends_before_its_first_doubtful_slot(name: str, releases: Path) -> None:
    cut, lengths = CUTS[name]
    prompts = [PROMPTS[row % 3][: 2 + row % 3] for row in range(ROWS)]
    pending = [(7 * row + 3) % (VOCABULARY - 1) for row in range(ROWS)]
    driven = Driven.of(releases / name, prompts, Watched(), confidence=cut)
    longest = driven.oracle.longest
    expected = [driven.expected(row, token, longest) for row, token in enumerate(pending)]
    kept = [each.kept(cut) for each in expected]
    assert set(kept) == lengths, "what there is to tell apart"

    proposal = driven.rows.draft_device(pending, [longest] * ROWS, [0] * ROWS)
    assert proposal is not None
    assert proposal.lengths is not None
    told: Any = proposal.lengths.tolist()
    assert told == kept
    ids: Any = proposal.tokens.reshape(-1).tolist()
    drafts = proposal.resolve(ids)
    assert drafts == [each.tokens[:count] for each, count in zip(expected, kept, strict=True)]
    driven.opened(pending, drafts)
    driven.commit([len(draft) for draft in drafts])

    again = driven.rows.draft(pending, [2, longest] * (ROWS // 2), [0] * ROWS)
    assert isinstance(again, list)
    for row, draft in list(enumerate(again))[::3]:
        own = driven.expected(row, pending[row], (2, longest)[row % 2])
        assert draft == own.tokens[: own.kept(cut)]


def test_a_threshold_of_zero_is_none_at_all(releases: Path) -> None:
    driven = Driven.of(releases / "qwen", PROMPTS[:1], Watched(), confidence=0)
    proposal = driven.rows.draft_device([3], [5], [0])
    assert proposal is not None
    assert proposal.lengths is None


# Draws.

STEPS = [4, 0, 9]
DRAWN = (
    "qwen",
    "qwen rnn",
    "gemma",
    "speculators dspark listed",
    "speculators dflash listed",
    "speculators dflash2",
)


def samplers(acceptance: Literal["match", "rejection"] = "match") -> RowSamplers:
    options = [
        SamplingOptions(temp=temp, seed=seed, acceptance=acceptance)
        for temp, seed in ((0.5, 3), (1.0, 4), (1.7, 5))
    ]
    rows = RowSamplers()
    rows.prepare_append([(each, each.resolved_seed()) for each in options]).commit()
    return rows


class Draw:
    """A row's draw in float64: the largest of ``logits / T + gumbel(seed, step, id)``."""

    def __init__(self, temp: float, seed: int, step: int) -> None:
        self.temp, self.seed, self.step = temp, seed_words(seed), step

    def __call__(self, slot: int, logits: Floats, ids: Sequence[int]) -> int:
        seeds, at = mx.array([self.seed], mx.uint32), mx.array([[self.step + slot]], mx.uint32)
        noise = np.array(gumbel(seeds, at, mx.array(list(ids), mx.uint32))[0, 0])
        return int(np.argmax(logits / self.temp + noise))


DRAWS = [Draw(0.5, 3, STEPS[0]), Draw(1.0, 4, STEPS[1]), Draw(1.7, 5, STEPS[2])]


@pytest.mark.parametrize("name", DRAWN)
def test_drafts_at_a_temperature_are_the_rows_own_draws(name: str, releases: Path) -> None:
    driven = Driven.of(releases / name, PROMPTS, samplers())
    longest, pending = driven.oracle.longest, [5, 9, 2]
    drafts = driven.rows.draft(pending, [longest] * 3, STEPS)
    assert isinstance(drafts, list)
    expected = [driven.expected(row, pending[row], longest, DRAWS[row]) for row in range(3)]
    assert drafts == [each.tokens for each in expected]
    best = [driven.expected(row, pending[row], longest).tokens for row in range(3)]
    assert drafts != best, "a draw is no argmax"
    driven.opened(pending, drafts)
    driven.commit([0, 1, longest])


@pytest.mark.parametrize(
    ("name", "listed"),
    [(name, listed) for name in DRAWN for listed in (False, True)[: 1 + name.endswith("listed")]],
)
def test_what_drafts_were_drawn_from_is_declared_for_rejection(
    name: str, listed: bool, releases: Path
) -> None:
    rows = samplers("rejection")
    sampling = MemberSampling(rows, DRAFT_IDS if listed else None)
    sampling.bind(None, 3)
    driven = Driven.of(releases / name, PROMPTS, sampling)
    longest, pending = driven.oracle.longest, [5, 9, 2]
    proposal = driven.rows.draft(pending, [longest] * 3, STEPS)
    assert isinstance(proposal, Proposal)
    assert proposal.logq is not None
    told = np.array(proposal.logq).astype(np.float64)
    assert told.shape == (3, longest, len(DRAFT_IDS) if listed else VOCABULARY)
    for row, (temp, draw) in enumerate(zip((0.5, 1.0, 1.7), DRAWS, strict=True)):
        expected = driven.expected(row, pending[row], longest, draw)
        assert list(proposal.tokens[row]) == expected.tokens
        for slot in range(longest):
            logq, ids = told[row, slot], expected.ids[slot]
            if not listed:
                assert np.all(np.isneginf(np.delete(logq, ids)))
                logq = logq[ids]
            assert np.abs(logq - log_softmax(expected.logits[slot] / temp)).max() < 5 * MARGIN
