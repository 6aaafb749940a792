"""Windows that are begun early, and rows that end meanwhile by other code than a sampler."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted import Fault, drain, request, solo, target
from tiny_models import tiny_model

from specdec import VerifyGroup
from specdec.sampling import stateless

PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3))


@pytest.mark.parametrize("received", [1, 2, 4])
def test_a_cancelled_row_leaves_no_early_position_in_its_callers_cache(received: int) -> None:
    model, caches, got = tiny_model("qwen3"), make_prompt_cache(tiny_model("qwen3")), []

    def consume(emission: Any) -> None:
        got.append(emission.token)

    group = VerifyGroup(target())
    [row, other] = group.admit(
        [
            request(
                PROMPTS[2],
                max_tokens=12,
                cache=caches,
                consumer=consume,
                cancelled=lambda: len(got) == received,
            ),
            request(PROMPTS[1], max_tokens=12),
        ]
    )
    drain(group)
    assert (row.finish, row.emitted) == ("cancelled", solo(PROMPTS[2])[:received])
    assert other.emitted == solo(PROMPTS[1])[:12]
    assert {each.offset for each in caches} == {len(PROMPTS[2]) + received}
    logits = model(mx.array([[9]]), cache=caches)[0, -1]
    whole = model(mx.array([[*PROMPTS[2], *got, 9]]))[0, -1]
    assert mx.argmax(logits).item() == mx.argmax(whole).item()


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_a_processor_that_raises_while_another_row_leaves_ends_its_own_row(leaves: int) -> None:
    boom, length = Fault("processor"), len(PROMPTS[1]) + leaves

    @stateless
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] == length:  # in the window that is begun before the other row has left
            raise boom
        return logits

    group = VerifyGroup(target())
    first, gone, last = group.admit(
        [
            request(PROMPTS[0], max_tokens=leaves),
            request(PROMPTS[1], max_tokens=9, processors=(raises,)),
            request(PROMPTS[2], max_tokens=9),
        ]
    )
    drain(group)
    assert (gone.finish, gone.error) == ("error", boom)
    assert gone.emitted == solo(PROMPTS[1])[:leaves]
    assert first.emitted == solo(PROMPTS[0])[:leaves]
    assert (last.finish, last.emitted) == ("length", solo(PROMPTS[2])[:9])
