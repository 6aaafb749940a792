"""Texts with an assistant are mlx-lm's own, in batches of ragged acceptance; and drafts are right.

What a round borrows of the target's live rows costs drafts and no token where it is wrong, so what
was drafted is computed again in float64, from the caches of mlx-lm that read the same text.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from assistant_targets import (
    PROMPTS,
    TARGETS,
    bound,
    greedy,
    model_of,
    write_fitted,
    write_random,
)
from assistant_watched import borrowed
from oracles.assistant_plain import PlainAssistant
from scripted import drain, request, tiny_tokenizer

from specdec import (
    PrefixCache,
    Request,
    SamplingOptions,
    VerifyGroup,
    load_drafter,
    stream_generate,
)
from specdec.verify import flight
from specdec_assistant.rows import AssistantGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from specdec import Row

COUNT = 32


@contextmanager
def rows_of(
    name: str, folder: Path, prompts: Sequence[Sequence[int]], width: int = 3, **options: Any
) -> Iterator[list[Row]]:
    """A batch of requests, done."""
    with load_drafter(folder, model_of(name), tiny_tokenizer()) as loaded:
        group = VerifyGroup(loaded.target, loaded.provider, drafter="assistant")
        asked: dict[str, Any] = {"max_tokens": COUNT, "sampling": SamplingOptions()}
        asked |= {"num_draft_tokens": width, **options}
        rows = group.admit([Request(prompt=tuple(prompt), **asked) for prompt in prompts])
        drain(group)
        for row in rows:
            assert (row.stats.reason, row.stats.last_draft_error) == (None, None)
            assert row.stats.draft_errors == row.stats.invalid_drafts == 0
        yield list(rows)


BOTH_HEADS = [(name, at % 2 == 1) for at, name in enumerate(TARGETS)] + [("gemma3", False)]


@pytest.mark.parametrize(("name", "sparse"), BOTH_HEADS)
def test_texts_are_mlx_lms_in_a_batch_and_alone_with_the_same_drafts(
    name: str, sparse: bool, tmp_path: Path
) -> None:
    folder = write_fitted(tmp_path / "assistant", name, sparse=sparse)
    told = []
    with rows_of(name, folder, PROMPTS) as rows:
        for prompt, row in zip(PROMPTS, rows, strict=True):
            assert list(row.emitted) == greedy(name, prompt)[:COUNT]
            told.append((row.stats.drafted_per_position, row.stats.accepted_per_position))
    accepted = [sum(counts) / sum(drafted) for drafted, counts in told]
    assert max(accepted) > 0.8, "it knows the text"
    assert min(accepted) < 0.6, "rows go on at different speeds"
    for prompt, together in list(zip(PROMPTS, told, strict=True))[1:3]:
        with rows_of(name, folder, [prompt]) as [row]:
            assert list(row.emitted) == greedy(name, prompt)[:COUNT]
            assert (row.stats.drafted_per_position, row.stats.accepted_per_position) == together


@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_a_float64_assistant_over_mlx_lms_own_caches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = write_random(tmp_path / "assistant", name)
    seen: list[tuple[list[int], list[int], Any]] = []
    plain = AssistantGroup._drafted

    def drafted(group: AssistantGroup, asked: Any) -> Any:
        found = plain(group, asked)
        seen.append((list(group._tokens), asked.depths, found.tokens))
        return found

    monkeypatch.setattr(AssistantGroup, "_drafted", drafted)
    with rows_of(name, tmp_path / "assistant", PROMPTS[::-1], max_tokens=18) as rows:
        texts = [[*row.request.prompt, *row.emitted] for row in rows]
    oracle = PlainAssistant.of(config, tensors)
    port = bound(name).hidden_taps
    assert port is not None
    table = np.array(port.embed(mx.arange(64)[None])[0], np.float64)
    checked = 0
    for lengths, depths, tokens in seen[:3] + seen[5:7] + seen[-2:]:
        if len(lengths) < len(texts):
            continue
        for text, length, depth, draft in zip(texts, lengths, depths, tokens.tolist(), strict=True):
            if depth == 0:
                continue
            kv, hidden = borrowed(name, text[:length])
            wanted, _, _ = oracle.draft(kv, hidden, table[text[length]], table, depth)
            assert draft[:depth] == wanted
            checked += 1
    assert checked > 12


@pytest.mark.parametrize("bits", [4, 8])
def test_texts_over_quantized_keys_are_mlx_lms(bits: int, tmp_path: Path) -> None:
    name = "gemma4 of full layers"
    packed: dict[str, Any] = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 5}
    folder = write_fitted(tmp_path / "assistant", name)
    with load_drafter(folder, model_of(name), tiny_tokenizer()) as loaded:
        accepted = 0
        for prompt in PROMPTS:
            found = list(
                stream_generate(
                    model_of(name),
                    tiny_tokenizer(),
                    list(prompt),
                    drafter=loaded,
                    max_tokens=COUNT,
                    num_draft_tokens=3,
                    **packed,
                )
            )
            assert [each.token for each in found] == greedy(name, prompt, COUNT, **packed)
            stats = found[-1].stats
            assert stats is not None
            assert (stats.reason, stats.last_draft_error) == (None, None)
            accepted += stats.accepted
    assert accepted > 20


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_seeded_texts_go_on_with_an_assistant(acceptance: Any, tmp_path: Path) -> None:
    name = "gemma3"
    folder = write_fitted(tmp_path / "assistant", name, known=4, sparse=True)
    drawn = SamplingOptions(temp=0.4, top_p=0.9, seed=4, acceptance=acceptance)
    alone = []
    for prompt in PROMPTS:
        group = VerifyGroup(bound(name))
        [row] = group.admit([Request(prompt=prompt, sampling=drawn, max_tokens=20)])
        drain(group)
        alone.append(list(row.emitted))
    with rows_of(name, folder, PROMPTS, sampling=drawn, max_tokens=20) as rows:
        assert sum(row.stats.accepted for row in rows) > 4
        texts = [list(row.emitted) for row in rows]
    assert [len(text) for text in texts] == [20] * 4
    assert (texts == alone) == (acceptance == "match"), "the other rule draws otherwise"


def test_rows_join_and_leave(tmp_path: Path) -> None:
    name = "gemma4 that shares"
    folder = write_fitted(tmp_path / "assistant", name)
    counts = (24, 5, 14, 9)
    with load_drafter(folder, model_of(name), tiny_tokenizer()) as loaded:
        group = VerifyGroup(loaded.target, loaded.provider, drafter="assistant")
        done: list[Row] = []
        for prompt, count in zip(PROMPTS, counts, strict=True):
            done += group.admit([request(list(prompt), max_tokens=count, num_draft_tokens=2)])
            for _ in range(2):
                with group.round() as flown:
                    flown.deliver_all()
        drain(group)
        for prompt, count, row in zip(PROMPTS, counts, done, strict=True):
            assert list(row.emitted) == greedy(name, prompt)[:count]
            assert row.stats.last_draft_error is None


def test_a_prompt_from_the_prefix_cache_drafts_as_if_it_had_been_read(tmp_path: Path) -> None:
    name = "gemma4"
    folder = write_fitted(tmp_path / "assistant", name)
    cache = PrefixCache(1 << 24, directory=tmp_path / "kept")
    told = []
    with load_drafter(folder, model_of(name), tiny_tokenizer()) as loaded:
        for _ in range(2):
            found = list(
                stream_generate(
                    model_of(name),
                    tiny_tokenizer(),
                    list(PROMPTS[2]),
                    drafter=loaded,
                    max_tokens=12,
                    num_draft_tokens=3,
                    prefix_cache=cache,
                )
            )
            assert [each.token for each in found] == greedy(name, PROMPTS[2])[:12]
            told.append(found[-1].stats)
    cache.close()
    cold, warm = told
    assert cold is not None
    assert warm is not None
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(PROMPTS[2]) - 1)
    assert cold.accepted_per_position == warm.accepted_per_position
    assert cold.accepted > 0


def test_a_round_waits_for_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, waits = "gemma3", []

    def watched(owner: Any, verb: str) -> None:
        wait = getattr(owner, verb)

        def counted(*args: Any) -> Any:
            waits.append(verb)
            return wait(*args)

        monkeypatch.setattr(owner, verb, counted)

    folder = write_fitted(tmp_path / "assistant", name, sparse=True)
    with load_drafter(folder, model_of(name), tiny_tokenizer()) as loaded:
        group = VerifyGroup(loaded.target, loaded.provider, drafter="assistant")
        group.admit(
            [
                request(list(prompt), max_tokens=14, num_draft_tokens=depth)
                for prompt, depth in zip(PROMPTS, (3, 1, 2, 4), strict=True)
            ]
        )
        watched(flight, "host_read")
        watched(mx, "eval")
        watched(mx, "synchronize")
        rounds = 0
        while group.rows:
            with group.round() as done:
                done.deliver_all()
            rounds += 1
    assert waits == ["host_read"] * rounds
    assert rounds > 3
