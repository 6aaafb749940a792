"""The demo model's text is the target's own, with and without a drafter.

CI takes 8 prompts of 32 tokens; ``SPECDEC_ALL_PROMPTS=1 pytest tests/test_losslessness.py -s``
takes all prompts and 64 tokens, and prints what it compared.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx_lm
import pytest

import specdec
import specdec_demo
from specdec import Request, SamplingOptions, VerifyGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALL = os.environ.get("SPECDEC_ALL_PROMPTS") == "1"
PROMPTS, TOKENS = (100, 64) if ALL else (8, 32)
SEEDED: dict[str, Any] = {"temp": 0.8, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(specdec_demo.path()))[:2]
    model.set_dtype(getattr(mx, request.param))
    mx.eval(model.parameters())
    return model, tokenizer


def prompts() -> Iterator[str]:
    lines = specdec_demo.prompts().read_text(encoding="utf-8").splitlines()
    return (str(json.loads(line)["text"]) for line in lines[:PROMPTS])


def tokens(responses: Any) -> list[int]:
    return [response.token for response in responses]


def batched(
    model: Any, tokenizer: Any, texts: Sequence[str], drafter: str | None, **sampling: Any
) -> list[list[int]]:
    """Texts in ragged batches of 8, with the end token as mlx-lm reports it."""
    loaded = None if drafter is None else specdec.load_drafter(drafter, model, tokenizer)
    target = specdec.bind_target(model)
    results: list[list[int]] = []
    for start in range(0, len(texts), 8):
        group = VerifyGroup(target, None if loaded is None else loaded.provider, drafter=drafter)
        rows = group.admit(
            [
                Request(
                    prompt=tokenizer.encode(text),
                    sampling=SamplingOptions(**sampling),
                    max_tokens=TOKENS,
                    end_tokens=tokenizer.eos_token_ids,
                    num_draft_tokens=0 if loaded is None else loaded.num_draft_tokens,
                )
                for text in texts[start : start + 8]
            ]
        )
        while group.rows:
            with group.round() as verified:
                verified.deliver_all()
        results += [[*r.emitted, *([] if r.end_token is None else [r.end_token])] for r in rows]
        assert all(row.error is None for row in rows)
    return results


def test_greedy_text_is_mlx_lms_alone_and_in_ragged_batches(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    texts = list(prompts())
    limit: dict[str, Any] = {"max_tokens": TOKENS}
    alone = [tokens(mlx_lm.stream_generate(model, tokenizer, t, **limit)) for t in texts]
    plain = [tokens(specdec.stream_generate(model, tokenizer, t, **limit)) for t in texts]
    accepted = 0
    for text, expected in zip(texts, alone, strict=True):
        responses = list(
            specdec.stream_generate(
                model, tokenizer, text, drafter="ngram", num_draft_tokens=3, **limit
            )
        )
        assert tokens(responses) == expected
        stats = responses[-1].stats
        assert stats is not None
        assert stats.drafter == "ngram"
        accepted += stats.accepted
    assert accepted > len(texts), "the drafter has drafted"
    assert plain == alone
    assert batched(model, tokenizer, texts, "ngram") == alone
    assert batched(model, tokenizer, texts, None) == alone
    report(model, "greedy", alone, accepted)


def test_seeded_text_does_not_depend_on_the_drafter_the_width_or_the_batch(
    loaded: tuple[Any, Any],
) -> None:
    model, tokenizer = loaded
    texts = list(prompts())
    options = {"max_tokens": TOKENS, **SEEDED}
    plain = [tokens(specdec.stream_generate(model, tokenizer, t, **options)) for t in texts]
    accepted = 0
    for turn, (text, expected) in enumerate(zip(texts, plain, strict=True)):
        responses = list(
            specdec.stream_generate(
                model, tokenizer, text, drafter="ngram", num_draft_tokens=1 + turn % 8, **options
            )
        )
        assert tokens(responses) == expected
        accepted += cast("specdec.GenerationStats", responses[-1].stats).accepted
    assert accepted > 0, "the drafter has drafted"
    assert batched(model, tokenizer, texts, "ngram", **SEEDED) == plain
    assert batched(model, tokenizer, texts, None, **SEEDED) == plain
    greedy = tokens(specdec.stream_generate(model, tokenizer, texts[0], max_tokens=TOKENS))
    assert plain[0] != greedy, "the temperature has an effect"
    report(model, "seeded", plain, accepted)


def report(model: Any, what: str, texts: list[list[int]], accepted: int) -> None:
    if ALL:
        dtype = model.model.embed_tokens.weight.dtype
        print(
            f"\n{what} {dtype}: {len(texts)} prompts, {sum(map(len, texts))} tokens, "
            f"{accepted} accepted drafts; all identical, alone and in batches of 8"
        )
