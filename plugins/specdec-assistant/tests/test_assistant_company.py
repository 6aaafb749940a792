"""An assistant beside others: in a chain, behind forced tokens, in its target's folder.

Every draft is held to a float64 assistant over mlx-lm's caches of the same text: an assistant that
missed a token, or that saw one which was taken back, would draft otherwise.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from architectures import CONFIGS
from assistant_targets import PROMPTS, TARGETS, bound, greedy, model_of, write_fitted, write_random
from assistant_watched import Watched
from attrs import define
from request_oracle import json_tokenizer
from scripted import drain, request, tiny_tokenizer

from specdec import Request, SamplingOptions, VerifyGroup, load_drafter, stream_generate
from specdec.errors import ArtifactError
from specdec.grammar import Grammar

if TYPE_CHECKING:
    from pathlib import Path

    from specdec import Row

COUNT = 16
REPEATING = ((5, 9, 2, 40, 9, 2), (33,), (17, 3, 17, 3, 17), PROMPTS[2])


@define
class InFolder:
    """A tokenizer that knows where it was loaded from."""

    name_or_path: str
    eos_token_ids: tuple[int, ...] = ()


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    config = {"model_type": "gemma3_text", **CONFIGS["gemma3_text"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("name", "every"), [("gemma4 that shares", 6), ("gemma3", 3)])
def test_in_a_chain_it_reads_what_the_other_drafted_and_borrows_of_its_own_rows(
    name: str, every: int, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, watched = write_random(target_folder / "assistant", name), Watched.start(monkeypatch)
    here: Any = InFolder(str(target_folder))
    with load_drafter("ngram,assistant", model_of(name), here, num_draft_tokens=4) as loaded:
        rows: list[Row] = []
        # Alone, it is not asked where n-gram proposes; beside others it is, for them.
        for prompts in (REPEATING, REPEATING[:1], REPEATING[2:3]):
            group = VerifyGroup(loaded.target, loaded.provider, drafter="ngram,assistant")
            asked = [request(list(p), max_tokens=COUNT, num_draft_tokens=4) for p in prompts]
            rows += group.admit(asked)
            drain(group)
    texts = []
    for row in rows:
        assert list(row.emitted) == greedy(name, row.request.prompt)[:COUNT]
        assert (row.stats.reason, row.stats.last_draft_error) == (None, None)
        texts.append([*row.request.prompt, *row.emitted])
    assert sum(row.stats.drafted for row in rows) > sum(len(ids) for _, _, ids in watched.rows)
    assert watched.check(name, release, texts, every) > 9


def test_a_preview_is_the_next_draft_alone_and_at_the_end_of_a_chain(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gemma4 that shares"
    write_random(target_folder / "assistant", name)
    here: Any = InFolder(str(target_folder))
    for drafter, prompts in (("assistant", PROMPTS), ("ngram,assistant", PROMPTS[3:])):
        with load_drafter(drafter, model_of(name), here) as loaded, monkeypatch.context() as patch:
            group = VerifyGroup(loaded.target, loaded.provider, drafter=drafter)
            group.admit([request(list(p), max_tokens=8, num_draft_tokens=3) for p in prompts])
            watched = Watched.start(patch)
            for number in range(3):
                seen = group.preview()
                # A row that has read nothing drafts nothing, which one array of ids cannot say.
                assert (seen is None) == (number == 0 and len(prompts) > 1)
                watched.rows.clear()
                with group.round() as done:
                    done.deliver_all()
                drafted = [ids for _, _, ids in watched.rows]
                assert len(drafted) == len(prompts) - (seen is None)
                assert seen in (None, drafted)


def test_behind_forced_tokens_it_drafts_from_the_text_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gemma3"
    release, watched = write_random(tmp_path / "assistant", name), Watched.start(monkeypatch)
    tokenizer = json_tokenizer()
    grammar = Grammar.regex("abcdefgh[a-c]xyz[0-9]+klmno[x-z]{3}pqrst")
    bound_to = grammar.bind(tokenizer, bound(name).vocab_size, [tokenizer.eos_token_id])
    with load_drafter(tmp_path / "assistant", model_of(name), tokenizer) as loaded:
        group = VerifyGroup(loaded.target, loaded.provider, drafter="assistant")
        asked: dict[str, Any] = {"max_tokens": COUNT, "num_draft_tokens": 3}
        asked["sampling"] = SamplingOptions()
        forced: dict[str, Any] = {"constraint": bound_to, "num_forced_tokens": 6}
        rows = list(
            group.admit(
                [
                    Request(prompt=p, **asked, **(forced if at % 2 else {}))
                    for at, p in enumerate(REPEATING)
                ]
            )
        )
        drain(group)
    assert [row.stats.forced > 4 for row in rows] == [False, True, False, True]
    assert [row.stats.last_draft_error for row in rows] == [None] * 4
    for row in rows[::2]:
        assert list(row.emitted) == greedy(name, row.request.prompt)[:COUNT]
    texts = [[*row.request.prompt, *row.emitted] for row in rows]
    assert watched.check(name, release, texts, 1) > 25


def test_it_is_found_in_its_targets_folder_by_its_name(target_folder: Path) -> None:
    name = "gemma3"
    here: Any = InFolder(str(target_folder))
    with pytest.raises(ArtifactError, match=r"and there is none at .*assistant; give its path"):
        load_drafter("assistant", model_of(name), here)
    write_fitted(target_folder / "assistant", name)
    for drafter in ("auto", "assistant"):
        with load_drafter(drafter, model_of(name), here) as loaded:
            assert loaded.provider.id == "assistant"
            found = list(
                stream_generate(
                    model_of(name), tiny_tokenizer(), [50, 2], drafter=loaded, max_tokens=3
                )
            )
        assert [each.token for each in found] == greedy(name, (50, 2), 3)


@pytest.mark.parametrize("name", TARGETS)
def test_the_targets_keys_stay_where_they_are_over_all_rounds(name: str, tmp_path: Path) -> None:
    write_random(tmp_path / "assistant", name)
    with load_drafter(tmp_path / "assistant", model_of(name), tiny_tokenizer()) as loaded:
        group = VerifyGroup(loaded.target, loaded.provider, drafter="assistant")
        group.admit([request(list(PROMPTS[2]), max_tokens=COUNT, num_draft_tokens=3)])
        places = []
        for _ in range(8):
            with group.round() as done:
                done.deliver_all()
            state = group._live.state
            assert state is not None
            mx.eval(state.arrays())
            views = [np.asarray(array) for array in state.arrays() if array.shape[2] >= 40]
            places.append([view.__array_interface__["data"][0] for view in views])
            del views
    assert places[1]
    # The ring has 40 places: it begins anew meanwhile.
    assert places[1:] == [places[1]] * 7
