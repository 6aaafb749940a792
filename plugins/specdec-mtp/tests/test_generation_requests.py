"""What a request asks for is kept to the token while a head drafts for it.

The reference is the target alone, through the same executor without a drafter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from mtp_demo import Output, demo, drafted, draws, greedy, head, prompts
from mtp_synthetic import write_qwen3_5
from scripted import tiny_tokenizer

from specdec import load_drafter, stream_generate
from specdec.errors import AdapterError
from specdec.grammar import Grammar
from specdec.sampling import BannedTokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLACE = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "implementation": {"enum": ["recursive", "iterative"]},
    },
    "required": ["description", "implementation"],
    "additionalProperties": False,
}


def both(prompt: tuple[int, ...], depth: int = 3, **options: Any) -> Output:
    """What the head's request gave, equal to the target's own."""
    alone = drafted(prompt, None, **options)
    found = drafted(prompt, head(), depth, **options)
    assert (found.tokens, found.text) == (alone.tokens, alone.text)
    assert (found.finish, found.stats.emitted) == (alone.finish, alone.stats.emitted)
    assert found.stats.reason is None
    return found


# Grammars.


@pytest.mark.parametrize("forced", [0, 16])
def test_a_grammar_is_obeyed_and_what_it_forces_is_read_by_the_head(forced: int) -> None:
    schema = Grammar.json_schema(PLACE)
    found = both(prompts()[0], max_tokens=60, grammar=schema, num_forced_tokens=forced)
    assert set(json.loads(found.text)) == {"description", "implementation"}
    assert (found.stats.forced > 0) == (forced > 0)
    assert found.stats.drafted > 0
    assert found.per_forward > 1


def test_a_grammar_with_seeded_draws_gives_the_target_s_text() -> None:
    schema = Grammar.regex("( [a-z]+,){2,6} (import|return) [a-z]+;")
    found = both(prompts()[1], max_tokens=24, grammar=schema, seed=9, **draws())
    assert found.stats.accepted > 0
    other = drafted(prompts()[1], head(), 3, max_tokens=24, grammar=schema, seed=10, **draws())
    assert other.text != found.text


# Ends.


def test_a_stop_string_ends_the_text_inside_what_was_drafted() -> None:
    _, tokenizer = demo()
    prompt = prompts()[2]
    text = tokenizer.decode(list(greedy(prompt))).lstrip()  # as mlx-lm streams it
    for stop in (text[9:14], "return s", text[1:3]):
        found = both(prompt, 4, stop=stop)
        assert found.finish == "stop"
        assert found.text == text.partition(stop)[0]


def test_a_stop_sequence_ends_the_text_at_every_place_of_a_burst() -> None:
    prompt = prompts()[2]
    tokens = greedy(prompt)
    for place in (1, 2, 3, 4, 5):
        found = both(prompt, 4, max_tokens=12, stop_sequences=[tokens[place : place + 2]])
        assert found.finish == "stop"
        assert found.tokens == tokens[: place + 2]


# Processors.


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_logits_processors(repetition_penalty=1.4, repetition_context_size=8),
        lambda: [BannedTokens(greedy(prompts()[2])[:3])],
    ],
    ids=["mlx-lm's repetition penalty", "banned tokens"],
)
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_processors_are_shown_the_right_history(make: Callable[[], Any], temp: float) -> None:
    found = both(prompts()[2], max_tokens=16, temp=temp, seed=5, logits_processors=make())
    assert found.stats.drafted > 0
    if not temp:
        assert found.tokens != greedy(prompts()[2])[:16], "they change the text"


def test_log_probabilities_are_those_of_the_target() -> None:
    prompt = prompts()[3]
    rows = []
    for drafter in (None, head()):
        asked = stream_generate(*demo(), prompt, drafter=drafter, max_tokens=8, logprobs=1)
        rows.append([each.token_logprobs for each in asked])
    assert rows[0] == rows[1]
    assert None not in rows[0]


# Adapters.


def test_a_target_under_an_adapter_is_refused_at_load_and_for_each_request(tmp_path: Path) -> None:
    model, _ = load_model(write_qwen3_5(tmp_path))
    loaded = load_drafter(tmp_path, model, kind="mtp", probe=False)
    ask: Any = {"drafter": loaded, "max_tokens": 2}
    assert len(list(stream_generate(model, tiny_tokenizer(), [5, 9], **ask))) == 2
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    for again in (
        lambda: stream_generate(model, tiny_tokenizer(), [5, 9], **ask),
        lambda: load_drafter(tmp_path, model, kind="mtp", probe=False),
    ):
        with pytest.raises(AdapterError, match="LoRALinear") as caught:
            again()
        assert "\n" not in str(caught.value)
        assert "mtp" in str(caught.value)
    loaded.close()
