"""The conformance kit over assistants: both heads, one kind of layer or two, both positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis
import mlx.core as mx

from specdec.testing import DraftRowContract, PluginContract
from specdec_assistant.provider import Positions
from specdec_assistant.tiny import FULL, tiny_assistant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec_assistant.provider import AssistantProvider

# They share their rows: the first class looks closely, the others at what differs.
FEWER = hypothesis.settings(
    max_examples=3,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
)


class TestAssistantRows(DraftRowContract):
    """A sliding and a full layer, and a score of every token."""

    settings = FEWER

    def make_provider(self) -> AssistantProvider:
        return tiny_assistant()

    def make_other_providers(self) -> Sequence[AssistantProvider]:
        return [
            tiny_assistant(seed=1),
            tiny_assistant(positions=Positions.ADVANCING),
            tiny_assistant(window=4),
            tiny_assistant(eps=1e-2),
            tiny_assistant(scale=0.25),
            tiny_assistant(sparse=True),
        ]


class TestRowsOfASparseHead(DraftRowContract):
    """Full layers alone, the tokens of two centroids, and steps that go ahead."""

    settings = FEWER

    def make_provider(self) -> AssistantProvider:
        return tiny_assistant(sparse=True, layers=(FULL, FULL), positions=Positions.ADVANCING)

    def make_other_provider(self) -> AssistantProvider:
        return tiny_assistant(sparse=True, layers=(FULL,), positions=Positions.ADVANCING)


class TestAssistantPlugin(PluginContract):
    distribution = "specdec-assistant"


def test_where_no_likely_token_is_the_targets_any_may_be_drafted() -> None:
    """A draw from nothing would be accepted whatever it is: its declared share of q is 0."""
    model: Any = tiny_assistant(sparse=True, vocab_size=16).grouped._own.model
    head, table = model.masked_embedding, model.embed_tokens
    head._groups = mx.arange(16, dtype=mx.int32).reshape(4, 4)
    head.centroids.weight = mx.stack([mx.full((24,), scale) for scale in (-1.0, -2.0, 1.0, 2.0)])
    hidden = mx.stack([mx.ones((24,)), -mx.ones((24,))])  # the best groups: 12 to 15, 0 to 7
    logits, ids = head(table, hidden, 8)
    assert ids is None
    assert mx.array_equal(logits[0], mx.zeros((8,))).item()
    near = 1e-5 if mx.default_device() == mx.Device(mx.cpu) else 1e-2  # products there may be TF32
    assert mx.allclose(logits[1], table.as_linear(hidden)[1, :8], atol=near).item()
