"""State that is used again writes what a cold start writes, with and without a drafter.

Cases B9 and B10 of the known ways to get this wrong: a prefix of a wrapped window, and caches that
were saved without a drafter and loaded with one, and the reverse.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from adversary import alone, planted
from architectures import build
from kept_state import contents, difference, states_alone
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from scripted import Script, ScriptedProvider, Text, drain, request, tiny_tokenizer
from tiny_models import build_model

from specdec import LoadedDrafter, PrefixCache, VerifyGroup, stream_generate
from specdec.errors import OptionError
from specdec.plugins import LoadedDraft
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec import Row

TURN = tuple((7 * place + 3) % 59 + 1 for place in range(20))
SHARED = 4  # tokens that both turns begin with
COUNT = 24
NAMES = ("qwen3", "gemma3_text", "lfm2", "falcon_h1", "gear", "llama4")
"""Full attention, a window of 16, a convolution, a list of caches, all three kinds, chunks."""


@cache
def model(name: str) -> Any:
    return build_model(name) if name in {"qwen3", "gemma3_text", "lfm2"} else build(name)


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(model(name))


@cache
def text(name: str, prompt: tuple[int, ...], count: int = COUNT) -> Text:
    return Text(prompt, alone(model(name), prompt, count))


def drafts(*texts: Text) -> ScriptedProvider:
    """The third of four is wrong, every round."""
    return ScriptedProvider(Script.always(texts, planted(4, 2)))


def check_drafted(stats: Any, *, drafted: bool) -> None:
    assert (0 < stats.accepted < stats.drafted) is drafted
    assert (stats.drafted > 0) is drafted


# B9: turn 2 shares the first tokens of a turn 1 that went past its window.


def serve(
    name: str, prompt: tuple[int, ...], store: PrefixCache, *, drafted: bool, **options: Any
) -> Row:
    wanted = text(name, prompt)
    provider = drafts(wanted) if drafted else None
    group = VerifyGroup(target(name), provider)
    [row] = group.admit(
        [
            request(
                prompt,
                max_tokens=COUNT,
                num_draft_tokens=4,
                prefix_cache=store,
                **options,
            )
        ]
    )
    drain(group)
    assert row.emitted == wanted.output
    check_drafted(row.stats, drafted=drafted)
    assert provider is None or provider.complaints == []
    return row


def parted(number: int) -> tuple[int, ...]:
    """A prompt that shares the first tokens alone with turn 1 and with each other."""
    return (*TURN[:SHARED], *(((13 + number) * place + 1) % 59 + 1 for place in range(19)))


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_short_prefix_of_a_long_turn_is_warm_and_writes_the_cold_text(
    name: str, drafted: bool
) -> None:
    """A row is never cut to it: it is there where it was asked for, or where prompts parted."""
    store = PrefixCache(1 << 24)
    assert serve(name, TURN, store, drafted=drafted).stats.cached_tokens == 0
    assert serve(name, parted(0), store, drafted=drafted).stats.cached_tokens == 0
    assert serve(name, parted(1), store, drafted=drafted).stats.cached_tokens == SHARED

    asked = PrefixCache(1 << 24)
    serve(name, TURN, asked, drafted=drafted, snapshot_at=[SHARED])
    assert serve(name, parted(0), asked, drafted=drafted).stats.cached_tokens == SHARED
    first = text(name, TURN)
    again = (*first.whole[:-1], 3, 2, 1)
    kept = serve(name, again, asked, drafted=drafted).stats.cached_tokens
    assert kept == len(first.whole) - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_row_kept_with_a_drafter_is_not_taken_without_one_nor_the_reverse(
    name: str, tmp_path: Path
) -> None:
    """On the disk as well: an entry holds the draft row too, or none."""
    for first in (True, False):
        folder = tmp_path / str(first)
        with PrefixCache(1 << 24, folder) as store:
            serve(name, TURN, store, drafted=first)
        for drafted, cached in ((not first, 0), (first, len(TURN) - 1), (not first, 19)):
            with PrefixCache(1 << 24, folder) as store:
                assert serve(name, TURN, store, drafted=drafted).stats.cached_tokens == cached


# B10: a caller's cache, saved and loaded, between turns with and without a drafter.


def turn(name: str, whole: Text, start: int, caches: list[Any], *, drafted: bool) -> list[int]:
    """Ten tokens behind ``whole.prompt``, of which the caches hold the first ``start``."""
    prompt = Text(whole.prompt[start:], whole.output)
    options: dict[str, Any] = {}
    if drafted:
        # The drafter sees the turn's own tokens alone.
        loaded = LoadedDraft(provider=drafts(prompt), num_draft_tokens=4)
        options["drafter"] = LoadedDrafter("scripted", loaded, target(name))
    responses = list(
        stream_generate(
            model(name),
            tiny_tokenizer(),
            list(prompt.prompt),
            max_tokens=10,
            prompt_cache=caches,
            **options,
        )
    )
    check_drafted(responses[-1].stats, drafted=drafted)
    return [response.token for response in responses]


def saved(caches: list[Any], path: Path) -> list[Any]:
    save_prompt_cache(str(path), caches)
    loaded: list[Any] = load_prompt_cache(str(path))
    return loaded


@pytest.mark.parametrize("through_a_file", [True, False])
@pytest.mark.parametrize("turns", [(False, True, False), (True, False, True), (True, True, True)])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_cache_goes_from_turns_without_a_drafter_to_turns_with_one(
    name: str, turns: Sequence[bool], through_a_file: bool, tmp_path: Path
) -> None:
    caches = make_prompt_cache(model(name))
    whole: tuple[int, ...] = ()
    for number, drafted in enumerate(turns):
        prompt = (*whole, *TURN[number : number + 9])
        wanted = text(name, prompt)
        got = turn(name, wanted, len(whole), caches, drafted=drafted)
        assert tuple(got) == wanted.output[:10]
        whole = (*prompt, *got)
        if through_a_file:
            caches = saved(caches, tmp_path / f"{number}.safetensors")
        held = states_alone(model(name), whole, read=len(prompt) - 1)[len(whole)]
        apart: Any = difference(contents(caches), held).item()
        assert apart <= 1e-3


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("change", ["one layer less", "a draft model's layers behind"])
def test_a_cache_of_another_number_of_layers_is_refused_by_both_numbers(
    change: str, drafted: bool, tmp_path: Path
) -> None:
    caches = make_prompt_cache(model("qwen3"))
    turn("qwen3", text("qwen3", TURN), 0, caches, drafted=False)
    layers = len(caches)
    wrong = caches[:-1] if change == "one layer less" else [*caches, *caches[:1]]
    loaded = saved(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(OptionError, match=f"{len(wrong)} entries, .* needs {layers}"):
        turn("qwen3", text("qwen3", TURN), 0, loaded, drafted=drafted)
    # What was refused is as it was.
    assert all(cache.offset == len(TURN) + 10 for cache in loaded)
