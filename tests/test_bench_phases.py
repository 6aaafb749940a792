"""What rounds are spent on, looked into on real ones; and that normal rounds never are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted import tiny_tokenizer
from tiny_models import HYBRID, VOCABULARY, tiny_model

from specdec import bind_target, load_drafter
from specdec.bench import Simulated, random_prompts
from specdec.bench.no_text import text_or_none
from specdec.bench.phases import Recorder, recording
from specdec.bench.simulated import Texts
from specdec.bench.turns import Setting, Turn, Way
from specdec.cost.times import RoundTimes
from specdec.verify.flight import Flight
from specdec.verify.lane import DraftLane
from specdec.verify.live import LiveRows
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from specdec.bench.phases import Phases

WRAPPED = [
    (RoundTimes, "observe"),
    (DraftLane, "bring_in"),
    (DraftLane, "catch_up"),
    (DraftLane, "propose"),
    (DraftLane, "commit"),
    (Verifier, "launch"),
    (Flight, "land"),
    (LiveRows, "commit"),
    (LiveRows, "commit_plain"),
]
PROMPTS = random_prompts(VOCABULARY, count=3, length=9)


def originals() -> list[Any]:
    return [getattr(owner, verb) for owner, verb in WRAPPED]


def looked_at(way: Way, setting: Setting, prompts: list[list[int]]) -> tuple[Turn, Phases]:
    recorder = Recorder()
    with recording(recorder):
        turn = way.run(setting, prompts, recorder.reset)
    return turn, recorder.phases(turn.seconds, turn.counted)


@pytest.mark.parametrize("architecture", ["qwen3", HYBRID])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_round_is_counted_once_and_no_token_changes(architecture: str, batch: int) -> None:
    model, prompts = tiny_model(architecture), PROMPTS[:batch]
    setting, texts = Setting(model, text_or_none(None), 12, {}), Texts()
    before = originals()
    plain, spent = looked_at(Way(), setting, prompts)
    assert spent.rounds == 12
    assert (spent.draft, spent.tokens) == (0, 12 * batch)
    assert spent.verify > 0
    for prompt, text in zip(prompts, plain.tokens, strict=True):
        texts.learn(prompt, text)
    for chance, rounds in ((1.0, 4), (0.0, 12)):
        with Simulated(chance, drafts=2).load(bind_target(model), texts) as drafter:
            turn, spent = looked_at(Way(drafter, 2), setting, prompts)
        assert turn.tokens == plain.tokens
        assert spent.rounds == rounds
        assert {stats.target_forwards for stats in turn.stats} == {rounds}
        assert min(spent.draft, spent.verify, spent.rollback, spent.host) > 0
        parts = spent.draft + spent.verify + spent.rollback + spent.host
        assert parts == pytest.approx(turn.seconds)
        assert spent.bound > spent.serial == pytest.approx(turn.speed)
    assert originals() == before


def test_what_is_wrapped_is_put_back_after_an_error() -> None:
    before = originals()

    def fail() -> None:
        with recording(Recorder()):
            assert all(now is not old for now, old in zip(originals(), before, strict=True))
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert originals() == before


def test_the_phases_of_a_drafter_on_the_host_are_its_own() -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    with load_drafter("ngram", model, tokenizer) as drafter:
        turn, spent = looked_at(Way(drafter, 2), Setting(model, tokenizer, 24, {}), PROMPTS[:1])
    assert spent.rounds == turn.stats[0].target_forwards
    assert 0 < spent.draft < spent.verify
