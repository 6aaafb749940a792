"""``max_kv_size`` and ``kv_bits`` mean what they mean in mlx-lm, with every drafter.

The oracle is mlx-lm's own ``generate_step`` with the same options, one position at a time.
"""

from __future__ import annotations

import json
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from kept_state import contents, difference
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    Text,
    drain,
    on_device,
    request,
    tiny_tokenizer,
)
from tiny_models import HYBRID, WINDOWED, build_model, tiny_model

from specdec import (
    BatchGenerator,
    LoadedDrafter,
    PrefixCache,
    VerifyGroup,
    load_drafter,
    load_model,
    stream_generate,
)
from specdec.cli import main
from specdec.errors import OptionError
from specdec.plugins import LoadedDraft
from specdec.state import CacheOptions
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import GenerationResponse

MODEL = build_model("qwen3", head_dim=64)
PROMPT = (1, 2, 3, 4) * 6
COUNT = 40
MOVES = ([RIGHT] * 4, [RIGHT, RIGHT, WRONG], [WRONG], [RIGHT, WRONG, RIGHT])
DRAFTERS = ("plain", "ngram", "scripted", "on the device")
BITS: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}


def told(
    prompt: Sequence[int] = PROMPT, count: int = COUNT, *, model: Any = MODEL, **options: Any
) -> tuple[int, ...]:
    """What mlx-lm writes, greedy."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, **options)
    return tuple(token for token, _ in steps)


def drafting(kind: str, *texts: Text, model: Any = MODEL) -> LoadedDrafter | None:
    """A drafter that knows the texts that it is to draft for."""
    if kind == "plain":
        return None
    if kind == "ngram":
        return load_drafter("ngram", model, min_ngram=1, num_draft_tokens=4)
    plan = Script(
        texts, [[*MOVES[place % 4 :], *MOVES[: place % 4]] for place in range(len(texts))]
    )
    device = on_device(plan, lengths=True) if kind == "on the device" else None
    loaded = LoadedDraft(provider=ScriptedProvider(plan, device=device), num_draft_tokens=4)
    return LoadedDrafter("scripted", loaded, MlxLmTarget(model))


def ours(
    kind: str, wanted: Sequence[int], prompt: Sequence[int] = PROMPT, **options: Any
) -> list[GenerationResponse]:
    model = options.pop("model", MODEL)
    text = Text(tuple(prompt), tuple(wanted))
    drafter = drafting(kind, text, model=model)
    responses = list(
        stream_generate(
            model, tiny_tokenizer(), list(prompt), len(wanted), drafter=drafter, **options
        )
    )
    stats = responses[-1].stats
    assert stats is not None
    if kind == "plain":
        assert stats.drafted == 0
    else:
        assert (stats.reason, stats.draft_errors) == (None, 0)
        assert stats.drafted > 0
    if drafter is not None and isinstance(drafter.provider, ScriptedProvider):
        assert 0 < stats.accepted < stats.drafted
        assert stats.target_forwards < len(wanted)
        assert drafter.provider.complaints == []
    return responses


def tokens(responses: Sequence[Any]) -> tuple[int, ...]:
    return tuple(response.token for response in responses)


def apart(caches: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference of what a later query can see."""
    found: Any = difference(contents(caches), contents(others)).item()
    return float(found)


# Quantized.

STARTS = {
    "at once": 0,
    "before the prompt's end": len(PROMPT) - 5,
    "with the prompt's last chunk": len(PROMPT) - 1,
    "with the first token": len(PROMPT),
    "inside the first drafts": len(PROMPT) + 2,
    "inside later drafts": len(PROMPT) + 17,
    "never": 5000,
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("chunk", [4, 2048])
@pytest.mark.parametrize("start", STARTS)
def test_a_quantized_row_writes_the_tokens_of_mlx_lm(start: str, chunk: int, kind: str) -> None:
    options: dict[str, Any] = {
        **BITS,
        "quantized_kv_start": STARTS[start],
        "prefill_step_size": chunk,
    }
    theirs, left = make_prompt_cache(MODEL), make_prompt_cache(MODEL)
    wanted = told(prompt_cache=theirs, **options)
    assert tokens(ours(kind, wanted, **options)) == wanted
    # And once more in caches of the caller's, which become what mlx-lm makes of them.
    assert tokens(ours(kind, wanted, prompt_cache=left, **options)) == wanted
    kinds = {KVCache} if start == "never" else {QuantizedKVCache}
    assert {type(cache) for cache in left} == {type(cache) for cache in theirs} == kinds
    assert {cache.offset for cache in left} == {len(PROMPT) + COUNT}
    assert {cache.offset for cache in theirs} == {len(PROMPT) + COUNT}
    if start == "never":
        assert apart(left, theirs) < 1e-3
    else:
        assert {(cache.group_size, cache.bits) for cache in left} == {(32, 4)}
        # A last bit of a key decides now and then which step it is rounded to.
        assert mean_apart(left, theirs) < 1e-3
    assert told((7, 8), 8, prompt_cache=left) == told((7, 8), 8, prompt_cache=theirs)


def mean_apart(caches: Sequence[Any], others: Sequence[Any]) -> float:
    pairs = zip(contents(caches), contents(others), strict=True)
    found: Any = mx.max(mx.stack([mx.mean(mx.abs(a - b)) for a, b in pairs])).item()
    return float(found)


def test_these_starts_write_different_texts() -> None:
    """Else it would not be noticed where a row was quantized at another place."""
    texts = {told(**{**BITS, "quantized_kv_start": start}) for start in STARTS.values()}
    assert len(texts) >= 3
    assert told() == told(**{**BITS, "quantized_kv_start": 5000}) != told(**BITS)


@pytest.mark.parametrize("kind", ["plain", "scripted"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_every_number_of_bits_and_group_size_is_mlx_lms(bits: int, group: int, kind: str) -> None:
    options: dict[str, Any] = {
        "kv_bits": bits,
        "kv_group_size": group,
        "quantized_kv_start": len(PROMPT) + 6,
    }
    wanted = told(**options)
    assert tokens(ours(kind, wanted, **options)) == wanted


def test_what_is_left_out_is_what_it_is_in_mlx_lm() -> None:
    theirs = signature(generate_step).parameters
    for function in (stream_generate, BatchGenerator, CacheOptions):
        mine = signature(function).parameters
        for name in ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"):
            assert mine[name].default == theirs[name].default, (function, name)
    wanted = told(kv_bits=3)
    assert tokens(ours("scripted", wanted, kv_bits=3)) == wanted


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_caller_s_quantized_caches_stay_as_they_are_packed(kind: str) -> None:
    """As in mlx-lm: the options quantize what is not yet."""

    def begun() -> list[Any]:
        caches = make_prompt_cache(MODEL)
        MODEL(mx.array([[9, 8, 7]]), cache=caches)
        return [caches[0].to_quantized(group_size=64, bits=8), caches[1]]

    theirs, left = begun(), begun()
    options: dict[str, Any] = {**BITS, "quantized_kv_start": len(PROMPT) + 9}
    wanted = told(prompt_cache=theirs, **options)
    assert tokens(ours(kind, wanted, prompt_cache=left, **options)) == wanted
    packed = [(cache.offset, cache.group_size, cache.bits) for cache in left]
    length = 3 + len(PROMPT) + COUNT
    assert packed == [(length, 64, 8), (length, 32, 4)]
    assert packed == [(cache.offset, cache.group_size, cache.bits) for cache in theirs]


@pytest.mark.parametrize("kind", ["plain", "scripted", "on the device"])
@pytest.mark.parametrize("leave", range(1, 9))
@pytest.mark.parametrize("ended", [False, True])
def test_on_every_way_out_the_caches_are_quantized_as_far_as_mlx_lms(
    leave: int, kind: str, ended: bool
) -> None:
    """Rows come to be quantized with the fifth token; they end before, with and after it."""
    options: dict[str, Any] = {**BITS, "quantized_kv_start": len(PROMPT) + 4}
    wanted = told(**options)
    ends = (wanted[leave - 1],) if ended else ()
    left = []
    for generate in (mlx_lm.stream_generate, stream_generate):
        caches = make_prompt_cache(MODEL)
        drafter = drafting(kind, Text(PROMPT, wanted))
        chosen: dict[str, Any] = {} if generate is mlx_lm.stream_generate else {"drafter": drafter}
        responses: Any = generate(
            MODEL,
            tiny_tokenizer(*ends),
            list(PROMPT),
            COUNT,
            prompt_cache=caches,
            **options,
            **chosen,
        )
        received = []
        for response in responses:
            received.append(response.token)
            if len(received) == leave and not ended:
                responses.close()
        left.append((received, caches))
    [(theirs, their_caches), (mine, my_caches)] = left
    assert mine == theirs == list(wanted[: len(theirs)])
    length = len(PROMPT) + len(mine)
    assert {cache.offset for cache in my_caches} == {length}
    assert [type(cache) for cache in my_caches] == [type(cache) for cache in their_caches]
    assert (type(my_caches[0]) is QuantizedKVCache) is (length >= len(PROMPT) + 4)
    again = told((7, 8), 8, prompt_cache=my_caches, **options)
    assert again == told((7, 8), 8, prompt_cache=their_caches, **options)


@pytest.mark.parametrize("options", [{}, {"drafter": "ngram"}])
def test_caches_that_cannot_be_replaced_are_refused_before_the_first_token(
    options: dict[str, Any],
) -> None:
    """A quantized cache is another object, and a tuple cannot take it."""
    caches = tuple(make_prompt_cache(MODEL))
    with pytest.raises(OptionError, match="list"):
        stream_generate(
            MODEL, tiny_tokenizer(), list(PROMPT), 4, prompt_cache=caches, kv_bits=8, **options
        )
    assert {cache.offset for cache in caches} == {0}


# A window.


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("chunk", [5, 2048])
@pytest.mark.parametrize("size", [5, 8, 16, len(PROMPT), 31, 48, 200])
def test_a_row_of_a_size_writes_the_tokens_of_mlx_lm(size: int, chunk: int, kind: str) -> None:
    options: dict[str, Any] = {"max_kv_size": size, "prefill_step_size": chunk}
    wanted = told(**options)
    assert tokens(ours(kind, wanted, **options)) == wanted


def test_these_sizes_write_different_texts() -> None:
    texts = [told(max_kv_size=size) for size in (5, 8, 16, 31, 200)]
    assert len(set(texts)) >= 4
    assert texts[-1] == told()


@pytest.mark.parametrize("kind", ["plain", "scripted"])
@pytest.mark.parametrize("size", [16, 200])
def test_a_row_of_a_size_is_never_quantized(size: int, kind: str) -> None:
    """In mlx-lm both options at once raise; caches of windows are left as they are here."""
    with pytest.raises(NotImplementedError):
        told(max_kv_size=size, **BITS)
    wanted = told(max_kv_size=size)
    assert tokens(ours(kind, wanted, max_kv_size=size, **BITS)) == wanted


def told_mixed(model: Any, start: int) -> tuple[int, ...]:
    """mlx-lm's loop, with attention layers quantized and the others left as they are."""
    caches, emitted = make_prompt_cache(model), list[int]()
    window = [list(PROMPT[:-1]), [PROMPT[-1]]]
    while len(emitted) < COUNT:
        logits = model(mx.array([window.pop(0)]), cache=caches)
        for place, held in enumerate(caches):
            if type(held) is KVCache and held.offset >= start:
                caches[place] = held.to_quantized(group_size=32, bits=4)
        if not window:
            best: Any = mx.argmax(logits[0, -1]).item()
            emitted.append(best)
            window.append([best])
    return tuple(emitted)


MIXED = {
    WINDOWED: build_model(WINDOWED, head_dim=32),
    HYBRID: build_model(HYBRID, hidden_size=128, block_dim=128),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("start", [0, len(PROMPT) + 3, len(PROMPT) + 14])
@pytest.mark.parametrize("architecture", MIXED)
def test_layers_of_other_kinds_are_left_as_they_are(
    architecture: str, start: int, kind: str
) -> None:
    model = MIXED[architecture]
    wanted = told_mixed(model, start)
    caches = make_prompt_cache(model)
    options: dict[str, Any] = {**BITS, "quantized_kv_start": start}
    got = ours(kind, wanted, model=model, prompt_cache=caches, **options)
    assert tokens(got) == wanted
    other = RotatingKVCache if architecture == WINDOWED else ArraysCache
    assert [type(held) for held in caches] == [other, QuantizedKVCache]


def test_quantizing_them_would_be_noticed() -> None:
    """The window's text depends on the quantized layer beside it."""
    model = MIXED[WINDOWED]
    assert len({told_mixed(model, 0), told_mixed(model, len(PROMPT) + 3), told(model=model)}) == 3


@pytest.mark.parametrize("architecture", [WINDOWED, HYBRID])
def test_a_size_is_for_models_without_caches_of_their_own(architecture: str) -> None:
    model = tiny_model(architecture)
    wanted = told(model=model, max_kv_size=8)
    assert wanted == told(model=model)
    assert tokens(ours("scripted", wanted, model=model, max_kv_size=8)) == wanted


# Drawn.


@pytest.mark.parametrize(
    "options",
    [{"max_kv_size": 16}, {**BITS, "quantized_kv_start": len(PROMPT) + 11}, {**BITS}],
)
def test_a_seed_s_text_is_the_same_with_every_drafter(options: dict[str, Any]) -> None:
    drawn: dict[str, Any] = {"temp": 0.9, "top_p": 0.95, "seed": 5}
    plain = list(stream_generate(MODEL, tiny_tokenizer(), list(PROMPT), COUNT, **drawn, **options))
    wanted = tokens(plain)
    for kind in DRAFTERS[1:]:
        assert tokens(ours(kind, wanted, **drawn, **options)) == wanted
    unlimited = stream_generate(MODEL, tiny_tokenizer(), list(PROMPT), COUNT, **drawn)
    assert tokens(list(unlimited)) != wanted


# Several rows.

PROMPTS = ((1, 2, 3), PROMPT, (61,), (33, 8, 33, 8, 33, 8, 2), tuple(range(20, 43)))
SERVED: dict[str, dict[str, Any]] = {
    "size": {"max_kv_size": 16},
    "quantized": {**BITS},
    "quantized later": {**BITS, "quantized_kv_start": 29},  # of some rows in the prompt
    "both": {"max_kv_size": 16, **BITS},
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", SERVED)
def test_a_batch_generator_gives_each_prompt_what_mlx_lm_gives_it_alone(
    name: str, kind: str
) -> None:
    options = SERVED[name]
    oracle = {"max_kv_size": 16} if name == "both" else options
    texts = [Text(prompt, told(prompt, **oracle)) for prompt in PROMPTS]
    written: dict[int, list[int]] = {}
    last: dict[int, Any] = {}
    drafter = drafting(kind, *texts)
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=COUNT, **options) as generator:

        def step() -> None:
            for answer in generator.next()[1]:
                assert answer.token is not None
                written.setdefault(answer.uid, []).append(answer.token)
                last[answer.uid] = answer

        uids = generator.insert(PROMPTS[:2])
        for late in PROMPTS[2:]:
            step()
            step()
            uids += generator.insert([late])
        while generator.has_work:
            step()
    for uid, text in zip(uids, texts, strict=True):
        assert tuple(written[uid]) == text.output
        kept, stats = last[uid].prompt_cache, last[uid].stats
        assert {type(held) for held in kept} == (
            {RotatingKVCache} if "max_kv_size" in options else {QuantizedKVCache}
        )
        assert stats.reason in {None, "no drafter was asked for"}
        if kind in ("scripted", "on the device"):
            assert 0 < stats.accepted < stats.drafted
    if drafter is not None and isinstance(drafter.provider, ScriptedProvider):
        assert drafter.provider.complaints == []


def test_rows_with_other_options_share_a_group_and_each_is_what_it_is_alone() -> None:
    asked: list[dict[str, Any]] = [{}, *SERVED.values()]
    texts = [
        Text(
            prompt,
            told(
                prompt,
                **(
                    {"max_kv_size": 16}
                    if len(options) > 2 and "max_kv_size" in options
                    else options
                ),
            ),
        )
        for prompt, options in zip(PROMPTS, asked, strict=True)
    ]
    plan = Script(texts, [[*MOVES[at % 4 :], *MOVES[: at % 4]] for at in range(len(texts))])
    provider = ScriptedProvider(plan)
    group = VerifyGroup(MlxLmTarget(MODEL), provider)
    rows = group.admit(
        [
            request(
                prompt, max_tokens=COUNT, num_draft_tokens=4, cache_options=CacheOptions(**options)
            )
            for prompt, options in zip(PROMPTS, asked, strict=True)
        ]
    )
    drain(group)
    for row, text in zip(rows, texts, strict=True):
        assert row.emitted == text.output
        assert row.stats.reason is None
        assert 0 < row.stats.accepted < row.stats.drafted
    assert provider.complaints == []


# The prefix cache.


CACHED: list[dict[str, Any]] = [
    {},
    {**BITS},
    {**BITS, "kv_bits": 8},
    {**BITS, "kv_group_size": 64},
    {**BITS, "quantized_kv_start": len(PROMPT) + 3},
    {"max_kv_size": 16},
    {"max_kv_size": 17},
]


@pytest.mark.parametrize("kind", ["plain", "scripted"])
def test_the_prefix_cache_keeps_rows_of_other_options_apart(kind: str) -> None:
    store = PrefixCache(1 << 26)
    for cached in (0, len(PROMPT) - 1):
        for options in CACHED:
            wanted = told(**options)
            responses = ours(kind, wanted, prefix_cache=store, **options)
            assert tokens(responses) == wanted
            stats = responses[-1].stats
            assert stats is not None
            assert stats.cached_tokens == cached


@pytest.mark.parametrize("options", CACHED)
def test_a_second_turn_goes_on_from_a_stored_row_as_mlx_lm_from_its_caches(
    options: dict[str, Any],
) -> None:
    store, first = PrefixCache(1 << 26), told(**options)
    ours("plain", first, prefix_cache=store, **options)
    held = make_prompt_cache(MODEL, options.get("max_kv_size"))
    others = {key: value for key, value in options.items() if key != "max_kv_size"}
    # The stored row has not read the last token, which mlx-lm then reads with the next turn too.
    assert told(PROMPT, COUNT - 1, prompt_cache=held, **others) == first[:-1]
    wanted = told((first[-1], 7, 8), 12, prompt_cache=held, **others)
    turn = (*PROMPT, *first, 7, 8)
    got = ours("plain", wanted, turn, prefix_cache=store, **options)
    assert tokens(got) == wanted
    assert got[-1].stats is not None
    assert got[-1].stats.cached_tokens == len(turn) - 3


# What makes no sense.

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_kv_size": 4}, "max_kv_size is 4; give 5 or more"),
    ({"max_kv_size": 0}, "max_kv_size is 0"),
    ({"max_kv_size": -1}, "max_kv_size is -1"),
    ({"max_kv_size": 8.5}, "max_kv_size is 8.5"),
    ({"max_kv_size": True}, "max_kv_size is True"),
    ({"kv_bits": 7}, "kv_bits is 7; give 2, 3, 4, 5, 6 or 8"),
    ({"kv_bits": 0}, "kv_bits is 0"),
    ({"kv_bits": 16}, "kv_bits is 16"),
    ({"kv_bits": "4"}, "kv_bits is '4'"),
    ({"kv_bits": 4, "kv_group_size": 48}, "kv_group_size is 48; give 32, 64 or 128"),
    ({"kv_bits": 4, "kv_group_size": None}, "kv_group_size is None"),
    ({"kv_bits": 4, "kv_group_size": 128}, "kv_group_size 128.*cannot"),  # heads of 64
    ({"kv_bits": 4, "quantized_kv_start": -1}, "quantized_kv_start is -1; give 0 or more"),
    ({"kv_bits": 4, "quantized_kv_start": 1.5}, "quantized_kv_start is 1.5"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_value_that_makes_no_sense_is_refused_at_the_call(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        stream_generate(MODEL, tiny_tokenizer(), list(PROMPT), 4, **options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_batch_generator_refuses_the_same_before_a_row_is_read(
    options: dict[str, Any], words: str
) -> None:
    with (
        pytest.raises(OptionError, match=words) as caught,
        BatchGenerator(MODEL, **options) as generator,
    ):
        generator.insert([PROMPT])
    assert "\n" not in str(caught.value)


# The command.

TEXT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"


@cache
def commanded(**options: Any) -> tuple[int, ...]:
    model, tokenizer = load_model("demo")
    responses = mlx_lm.stream_generate(model, tokenizer, TEXT, 24, **options)
    return tuple(response.token for response in responses)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(("generate", "--prompt", TEXT, *argv))
    except SystemExit as stop:  # argparse's own way out
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("--max-kv-size 8", {"max_kv_size": 8}),
        ("--kv-bits 2 --quantized-kv-start 0", {"kv_bits": 2, "quantized_kv_start": 0}),
        ("--kv-bits 2", {"kv_bits": 2}),
        (
            "--kv-bits 2 --kv-group-size 32 --quantized-kv-start 30",
            {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": 30},
        ),
        ("--kv-bits 2 --quantized-kv-start 5000", {}),
    ],
)
def test_the_command_writes_what_mlx_lm_writes(
    capsys: pytest.CaptureFixture[str], argv: str, options: dict[str, Any], drafter: str
) -> None:
    given = ["--max-tokens", "24", "--json", *argv.split()]
    status, out, err = run(capsys, *given, *(["--drafter", drafter] * (drafter != "none")))
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert tuple(found["tokens"]) == commanded(**options)
    if drafter == "ngram":
        assert (found["drafter"], found["reason"]) == ("ngram", None)
        assert found["drafted"] > 0


def test_the_command_s_options_have_an_effect() -> None:
    texts = {
        commanded(),
        commanded(max_kv_size=8),
        commanded(kv_bits=2, quantized_kv_start=0),
        commanded(kv_bits=2, kv_group_size=32, quantized_kv_start=30),
    }
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--max-kv-size 4", "max_kv_size is 4; give 5 or more"),
        ("--max-kv-size many", "--max-kv-size"),
        ("--kv-bits 7", "kv_bits is 7; give 2, 3, 4, 5, 6 or 8"),
        ("--kv-bits four", "--kv-bits"),
        ("--kv-bits 4 --kv-group-size 48", "kv_group_size is 48; give 32, 64 or 128"),
        ("--kv-bits 4 --kv-group-size 128", "kv_group_size 128"),  # heads of 64
        ("--kv-bits 4 --quantized-kv-start -1", "quantized_kv_start is -1; give 0 or more"),
        ("--kv-group-size 32", "--kv-group-size needs --kv-bits"),
        ("--quantized-kv-start 8", "--quantized-kv-start needs --kv-bits"),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: str, words: str
) -> None:
    status, out, err = run(capsys, "--max-tokens", "4", *argv.split())
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    # argparse's own mistakes come with its usage.
    assert len(err.splitlines()) == 1 or err.startswith("usage: ")
