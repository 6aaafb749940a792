"""Rows join in two phases: whatever fails in a join, the live rows are as they were.

The oracle of a row's drafts is the same row alone with the same drafter: what it drafts and what
is accepted depends on its own text, so company, and what happens to it, must not show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from architectures import build
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    OnDevice,
    Script,
    ScriptedDeviceRows,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    on_device,
    request,
    solo,
    target,
    text_of,
)
from tiny_models import HYBRID, WINDOWED, OwnCache, build_model, tiny_model

from specdec import Row, SamplingOptions, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import GroupFailedError, OptionError
from specdec.sampling import RowSamplers
from specdec.state import CacheOptions, NativeState, RaggedState
from specdec.targets import MlxLmTarget
from specdec.verify import flight
from specdec.verify import live as executor
from specdec.verify.lane import MAX_FAILURES, DraftLane
from specdec.verify.members import MemberSampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, Swap
    from specdec.state import RowState

PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (61, 60), tuple(range(20, 31)), (33, 8, 33, 8, 2))
SAMPLINGS: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, 7), (0.7, 8))
BAD = (44, 45, 46, 47)


@cache
def texts_of(architecture: str) -> dict[tuple[tuple[int, ...], float, int | None], Text]:
    return {
        (prompt, temp, seed): Text(prompt, solo(prompt, temp, seed, architecture=architecture))
        for prompt in (*PROMPTS, BAD)
        for temp, seed in SAMPLINGS
    }


TEXTS = texts_of("qwen3")
MOVES = ([[RIGHT] * 3], [[RIGHT, WRONG], [WRONG], [RIGHT] * 4], [[RIGHT, RIGHT, WRONG], [RIGHT]])
TAPS = (0, 1)
PLAIN = CacheOptions()


# A drafter that refuses one row, or breaks once.


class PickyRows(ScriptedRows):
    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        self.provider.refuse("prefill", tokens[0].tolist())  # type: ignore[attr-defined]
        super().prefill(tokens, context)

    def capture(self, row: int, /) -> RowCheckpoint:
        if not self.decodes:
            self.provider.refuse("capture", self.rows[row].tokens)  # type: ignore[attr-defined]
        return super().capture(row)


class PickyDeviceRows(PickyRows, ScriptedDeviceRows):
    pass


class Drafter(ScriptedProvider):
    """Raises what it is told to raise next in a verb; refuses the row of ``BAD`` in another.

    Args:
        kind: one of ``KINDS``.
        architecture: of the target whose texts it drafts.
    """

    def __init__(self, kind: str, architecture: str = "qwen3") -> None:
        texts = list(texts_of(architecture).values())
        plan = Script(texts, [MOVES[place % len(MOVES)] for place in range(len(texts))])
        device = on_device(plan, lengths=True) if kind == "device" else None
        whole = kind == "whole prompt"
        super().__init__(
            plan,
            device=device,
            rows=PickyRows if device is None else PickyDeviceRows,
            mode=PrefillMode.FULL if whole else PrefillMode.TAIL_SPLIT,
            context={"taps": ContextKind.TAPS, "whole prompt": ContextKind.POST_NORM}.get(
                kind, ContextKind.NONE
            ),
            taps=TAPS if kind == "taps" else (),
        )
        self.next: dict[str, BaseException] = {}
        self.refusing: str | None = None
        self.refused = 0

    def strike(self, verb: str) -> None:
        super().strike(verb)
        if verb in self.next:
            raise self.next.pop(verb)

    def refuse(self, verb: str, tokens: Sequence[int]) -> None:
        if verb == self.refusing and tuple(tokens[:3]) == BAD[:3]:
            self.refused += 1
            raise Fault(f"not this one, {self.refused}")

    def restore(self, checkpoint: RowCheckpoint | None, decodes: bool) -> Any:
        if checkpoint is not None and decodes:
            held: Any = checkpoint.attachment.arrays["tokens"].tolist()
            self.refuse("restore", held)
        return super().restore(checkpoint, decodes)


KINDS = ("host", "device", "taps", "whole prompt")


def drafter(kind: str) -> Drafter | None:
    return Drafter(kind) if kind in KINDS else None


def asked(
    prompt: tuple[int, ...], which: int = 0, *, budget: int = 20, width: int = 4, **options: Any
) -> Any:
    temp, seed = SAMPLINGS[which]
    return request(
        prompt, temp=temp, seed=seed, max_tokens=budget, num_draft_tokens=width, **options
    )


def step(group: VerifyGroup, rounds: int = 1) -> None:
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()


def text(row: Row) -> tuple[int, ...]:
    """What the row's request gets from the target alone."""
    sampling = row.request.sampling
    whole = TEXTS[row.request.prompt, sampling.temp, sampling.seed].output
    return whole[: row.request.max_tokens]


Drafted = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


def drafted(row: Row) -> Drafted:
    stats = row.stats
    return (
        stats.rounds,
        stats.drafted,
        stats.accepted,
        tuple(stats.drafted_per_position),
        tuple(stats.accepted_per_position),
    )


@cache
def undisturbed(
    kind: str, prompt: tuple[int, ...], temp: float, seed: int | None, budget: int, width: int
) -> Drafted:
    """The counters of a row that is alone from its first round to its last."""
    group = VerifyGroup(target(), drafter(kind))
    [row] = group.admit(
        [request(prompt, temp=temp, seed=seed, max_tokens=budget, num_draft_tokens=width)]
    )
    drain(group)
    return drafted(row)


def check_undisturbed(kind: str, row: Row) -> None:
    """A row that ended by its budget, and at which nothing was ever raised."""
    wish, sampling = row.request, row.request.sampling
    assert row.emitted == text(row)
    assert drafted(row) == undisturbed(
        kind, wish.prompt, sampling.temp, sampling.seed, wish.max_tokens, wish.num_draft_tokens
    )
    assert (row.stats.draft_errors, row.stats.last_draft_error) == (0, None)
    if kind in KINDS and wish.num_draft_tokens:
        assert row.stats.reason is None


# What is live.


def truth(tokens: Sequence[int], bound: MlxLmTarget) -> mx.array:
    """The hidden states ``[L, 2·H]`` that a drafter of ``TAPS`` has read with these tokens."""
    state = bound.new_state()
    state.begin_round(len(tokens))
    window = bound.forward(mx.array([list(tokens)]), state, ContextKind.TAPS, TAPS)
    assert window.context is not None
    return window.context[0]


def check_in_step(group: VerifyGroup, provider: Drafter | None) -> None:
    """Every row of the draft group is a row of the group, in its order, and as far (I2)."""
    if provider is None:
        return
    groups = [each for each in provider.left_open if each.decodes]
    assert [each for each in provider.left_open if not each.decodes] == []
    if not groups:
        return
    [open_group] = groups
    # A row whose whole prompt was read and whose first token is not drawn is as far as its prompt.
    read = [
        tuple(row.tokens if place in group._live.firsts else row.tokens[:-1])
        for place, row in enumerate(group.rows)
    ]
    assert group._live.drafting.lane is not None
    places = list(group._live.drafting.lane._members.rows)
    assert places == sorted(places)
    assert [id(row) for row in group._live.drafting.lane._members.rows.values()] == [
        id(group.rows[place]) for place in places
    ]
    assert [tuple(held.tokens) for held in open_group.rows] == [read[place] for place in places]
    if provider.context is ContextKind.TAPS:
        for held in open_group.rows:
            if held.tokens:
                seen = mx.concatenate(held.contexts, axis=0)
                assert mx.allclose(seen, truth(held.tokens, target()), atol=1e-4)


@frozen(eq=False)
class Picture:
    """All that is live, by value. A window on its way counts as kept: it is, or will be."""

    rows: list[int]
    tokens: list[list[int]]
    read: list[int]
    lengths: list[int]
    arrays: list[mx.array]
    samplers: list[tuple[Any, int]]
    drafts: list[tuple[list[int], list[Any]]] | None
    window: tuple[Any, Any] | None
    resting: bool

    def check(self, other: Picture) -> None:
        for name in ("rows", "tokens", "read", "lengths", "samplers", "drafts", "window"):
            assert getattr(self, name) == getattr(other, name), name
        assert self.resting == other.resting
        for mine, its in zip(self.arrays, other.arrays, strict=True):
            assert mx.array_equal(mine, its)


def picture(group: VerifyGroup, provider: Drafter | None) -> Picture:
    state, early = group._live.state, group._live.flight
    ahead = 0 if state is None else state.open_width
    drafts = None
    if provider is not None and any(each.decodes for each in provider.left_open):
        drafts = [
            (list(row.tokens), [context.tolist() for context in row.contexts])
            for row in provider.decoding.rows
        ]
    return Picture(
        [id(row) for row in group.rows],
        [list(row.tokens) for row in group.rows],
        [row.processed + ahead for row in group.rows],
        [] if state is None or not group.rows else [n + ahead for n in state.lengths],
        [] if state is None or not group.rows else [mx.array(a) for a in state.arrays()],
        [(row.options, row.seed) for row in group._live.samplers._rows],
        drafts,
        None if early is None else (early.draw.samples.tolist(), early.row_count),
        group._live.drafting.resting is not None,
    )


# Places where a join fails before anything is committed.


class Failing(MlxLmTarget):
    """A tiny model; fails in a forward when it is told to."""

    def __init__(self, model: Any = None) -> None:
        super().__init__(tiny_model("qwen3") if model is None else model)
        self.left: int | None = None

    def forward(
        self,
        tokens: mx.array,
        state: RowState,
        context: ContextKind = ContextKind.NONE,
        taps: Sequence[int] = (),
    ) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.left = None
                raise Fault("target")
        return super().forward(tokens, state, context, taps)


@define(eq=False)
class Scene:
    """A live group, and what may be broken about it.

    Attributes:
        patch: undone after the join.
        second: options of the second of two requests that join.
        drafts: whether they reach the drafter.
        native: whether rows are in mlx-lm's own caches.
    """

    group: VerifyGroup
    failing: Failing
    provider: Drafter | None
    patch: pytest.MonkeyPatch = field(factory=pytest.MonkeyPatch)
    second: dict[str, Any] = field(factory=dict)
    drafts: bool = False
    native: bool = False


Place = Callable[[Scene], type[BaseException] | None]


def breaks(
    owner: Any,
    name: str,
    error: BaseException,
    where: Callable[[Scene], bool] = lambda _: True,
) -> Place:
    def place(scene: Scene) -> type[BaseException] | None:
        if not where(scene):
            return None
        scene.patch.setattr(owner, name, mock.Mock(side_effect=error))
        return type(error)

    return place


def in_progress(error: BaseException) -> Place:
    def place(scene: Scene) -> type[BaseException]:
        def progress(done: int, _of: int) -> None:
            if done:
                raise error

        scene.second["progress"] = progress
        return type(error)

    return place


def in_the_target(scene: Scene) -> type[BaseException]:
    scene.failing.left = 2
    return Fault


def in_the_cache(scene: Scene) -> type[BaseException]:
    scene.second["cache"] = [KVCache()] * 3
    return OptionError


def in_the_drafter(verb: str) -> Place:
    """An interrupt: what is no ``Exception`` is not the drafter's to raise, and passes."""

    def place(scene: Scene) -> type[BaseException] | None:
        if not scene.drafts:
            return None
        assert scene.provider is not None
        is_open = any(each.decodes for each in scene.provider.left_open)
        opening = "prepare_append" if is_open else "open"
        scene.provider.next[opening if verb == "opening" else verb] = KeyboardInterrupt()
        return KeyboardInterrupt

    return place


NO_ROOM = MemoryError("no room")
PLACES: dict[str, Place] = {
    "second prompt": in_progress(Fault("progress")),
    "second prompt interrupted": in_progress(KeyboardInterrupt()),
    "target": in_the_target,
    "second cache": in_the_cache,
    "samplers": breaks(RowSamplers, "prepare_append", NO_ROOM),
    "ragged state": breaks(RaggedState, "prepare_append", NO_ROOM, lambda at: not at.native),
    "native state": breaks(NativeState, "prepare_append", NO_ROOM, lambda at: at.native),
    "state interrupted": breaks(
        RaggedState, "prepare_append", KeyboardInterrupt(), lambda at: not at.native
    ),
    "host rows": breaks(executor, "Swap", NO_ROOM),
    "drafter's lane": breaks(
        DraftLane, "prepare_append", KeyboardInterrupt(), lambda at: at.drafts
    ),
    "drafter opens a prompt": in_the_drafter("open_prefill"),
    "drafter reads a prompt": in_the_drafter("prefill"),
    "drafter hands a prompt over": in_the_drafter("capture"),
    "drafter prepares": in_the_drafter("opening"),
}


def fail_to_join(scene: Scene, place: str, width: int = 4) -> bool:
    """Two requests, the first one healthy, that join where something is broken.

    Returns:
        Whether there was anything to break.
    """
    group, provider = scene.group, scene.provider
    before = picture(group, provider)
    lane = group._live.drafting.lane or group._live.drafting.resting
    scene.drafts = bool(width and not scene.native and provider and lane)
    with pytest.MonkeyPatch.context() as patch:
        scene.patch, scene.second = patch, {}
        error = PLACES[place](scene)
        if error is None:
            return False
        healthy = asked(PROMPTS[4], 1, budget=6, width=width)
        broken = asked((*PROMPTS[2], *PROMPTS[2]), budget=6, width=width, **scene.second)
        with pytest.raises(error):
            group.admit([healthy, broken])
    scene.failing.left = None
    picture(group, provider).check(before)
    if provider is not None:
        assert provider.next == {}
    check_in_step(group, provider)
    return True


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_join_that_fails_leaves_everything_as_it_was(kind: str, place: str, rounds: int) -> None:
    provider, failing = drafter(kind), Failing()
    group = VerifyGroup(failing, provider, drafter="scripted")
    scene = Scene(group, failing, provider)
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1, budget=14)])
    step(group, rounds)
    if kind == "plain":
        assert (group._live.flight is not None) == (rounds > 0)
    if not fail_to_join(scene, place):
        return
    step(group)
    assert fail_to_join(scene, place)  # and again, a round later
    [late] = group.admit([asked(PROMPTS[3], 2, budget=9)])
    check_in_step(group, provider)
    drain(group, lambda: check_in_step(group, provider))
    for row in (*live, late):
        check_undisturbed(kind, row)
    # Drained to zero, the group fails to take rows, and then takes some.
    assert fail_to_join(scene, place)
    again = group.admit([asked(PROMPTS[2], 1), asked(PROMPTS[4], budget=7)])
    drain(group, lambda: check_in_step(group, provider))
    for row in again:
        check_undisturbed(kind, row)
    group.close()
    if provider is not None:
        assert provider.complaints == []
        assert provider.left_open == []


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("place", PLACES)
def test_a_drafter_that_rests_goes_on_resting_after_a_join_that_failed(
    kind: str, place: str
) -> None:
    provider, failing = drafter(kind), Failing()
    assert provider is not None
    group = VerifyGroup(failing, provider, drafter="scripted")
    live = group.admit([asked(PROMPTS[0], width=0), asked(PROMPTS[1], 1, width=0)])
    step(group, 3)
    assert group._live.flight is not None
    calls = provider.calls["open"], provider.calls["draft"]
    scene = Scene(group, failing, provider)
    if not fail_to_join(scene, place):
        return
    step(group, 2)
    assert group._live.flight is not None  # still pipelined
    assert provider.left_open == []
    [late] = group.admit([asked(PROMPTS[3], 2, budget=9)])
    # Those that want no drafts are not in the draft group, and are not brought in.
    assert provider.decoding.row_count == 1
    step(group, 2)
    assert provider.decoding.row_count == 1
    drain(group, lambda: check_in_step(group, provider))
    check_undisturbed(kind, late)
    for row in live:
        assert row.emitted == text(row)
        assert row.stats.drafted == row.stats.draft_errors == 0
    assert provider.calls["open"] == calls[0] + 1 + (place == "drafter prepares")
    assert provider.complaints == []


@pytest.mark.parametrize("kind", ["host", "device", "plain"])
@pytest.mark.parametrize("architecture", [HYBRID, WINDOWED])
@pytest.mark.parametrize("place", PLACES)
def test_a_join_to_recurrent_or_windowed_rows_that_fails_leaves_everything_as_it_was(
    place: str, architecture: str, kind: str
) -> None:
    provider = None if kind == "plain" else Drafter(kind, architecture)
    failing = Failing(tiny_model(architecture))
    group = VerifyGroup(failing, provider, drafter="scripted")
    scene = Scene(group, failing, provider)
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1, budget=14)])
    step(group, 1)
    if not fail_to_join(scene, place):
        return
    step(group)
    assert fail_to_join(scene, place)
    [late] = group.admit([asked(PROMPTS[3], 2, budget=9)])
    drain(group, lambda: check_in_step(group, provider))
    assert fail_to_join(scene, place)
    again = group.admit([asked(PROMPTS[2], 1), asked(PROMPTS[4], budget=7)])
    drain(group, lambda: check_in_step(group, provider))
    for row in (*live, late, *again):
        sampling, counts = row.request.sampling, row.stats
        whole = texts_of(architecture)[row.request.prompt, sampling.temp, sampling.seed].output
        assert row.emitted == whole[: row.request.max_tokens]
        assert (counts.draft_errors, counts.last_draft_error) == (0, None)
        if provider is not None:
            assert counts.reason is None
            assert counts.accepted > 0
    group.close()
    if provider is not None:
        assert provider.complaints == []
        assert provider.left_open == []


@cache
def without_row_form() -> Any:
    """The tiny model, in caches that cannot be rolled back: nothing is begun early."""
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    return model


NATIVE: dict[str, Callable[[], Any]] = {
    "no row form": without_row_form,
    "no windows": partial(build, "phi3small"),  # a window is begun early
}


@cache
def native_text(name: str, prompt: tuple[int, ...], which: int) -> tuple[int, ...]:
    """What the model alone writes: mlx-lm's text if greedy, else our own plain run."""
    if SAMPLINGS[which][0] == 0:
        steps = generate_step(mx.array(prompt), NATIVE[name](), max_tokens=20)
        return tuple(token for token, _ in steps)
    group = VerifyGroup(MlxLmTarget(NATIVE[name]()))
    [row] = group.admit([asked(prompt, which)])
    drain(group)
    return row.emitted


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_join_to_native_caches_that_fails_leaves_everything_as_it_was(
    place: str, rounds: int, name: str
) -> None:
    failing, provider = Failing(NATIVE[name]()), Drafter("host")
    assert isinstance(failing.new_state(), NativeState)
    group = VerifyGroup(failing, provider)
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1, budget=14)])
    step(group, rounds)
    assert (group._live.flight is not None) is (name == "no windows" and rounds > 0)
    scene = Scene(group, failing, None, native=True)
    if not fail_to_join(scene, place):
        return
    step(group)
    fail_to_join(scene, place)
    [late] = group.admit([asked(PROMPTS[3], 2, budget=9)])
    drain(group)
    fail_to_join(scene, place)
    [again] = group.admit([asked(PROMPTS[2], 1, budget=5)])
    drain(group)
    for row, which in zip((*live, late, again), (0, 1, 2, 1), strict=True):
        whole = native_text(name, row.request.prompt, which)
        assert row.emitted == whole[: row.request.max_tokens]
        assert row.stats.drafted == 0
        assert row.stats.reason == failing.no_speculation_reason


# Interrupted between one commit and another.


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["samplers", "state", "drafter"])
@pytest.mark.parametrize("first", [False, True])
def test_a_commit_that_is_interrupted_fails_the_group_and_leaves_nothing_open(
    kind: str, error: type[BaseException], where: str, first: bool
) -> None:
    """No order of commits can be undone halfway: the rows' committed tokens are what is kept."""
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    caches = [KVCache(), KVCache()]
    live = [] if first else group.admit([asked(PROMPTS[0], cache=caches)])
    step(group, 0 if first else 2)
    owner, name = {"samplers": (RowSamplers, "_bind"), "state": (RaggedState, "_swap")}.get(
        where, (RowSamplers, "nothing")
    )
    if where == "drafter":
        if provider is None or error is MemoryError or first:
            return
        provider.next["join"] = error()
    raised = GroupFailedError if error is MemoryError else error
    with (
        mock.patch.object(owner, name, create=True, side_effect=error),
        pytest.raises(raised),
    ):
        group.admit([asked(PROMPTS[1]), asked(PROMPTS[3])])
    with pytest.raises(GroupFailedError, match=error.__name__):
        group.round()
    for row in live:
        assert row.emitted == text(row)[: len(row.emitted)]
        assert {cache.offset for cache in caches} == {len(row.tokens)}
    if provider is not None:
        assert provider.left_open == []


# What a drafter refuses.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["prefill", "capture", "restore"])
@pytest.mark.parametrize("rounds", range(3))
@pytest.mark.parametrize("others", ["none", "before", "behind", "around"])
def test_a_row_that_the_drafter_refuses_goes_on_without_it_and_nobody_notices(
    kind: str, verb: str, rounds: int, others: str
) -> None:
    provider = drafter(kind)
    assert provider is not None
    provider.refusing = verb
    group = VerifyGroup(target(), provider, drafter="scripted")
    live = group.admit([asked(PROMPTS[0], budget=24), asked(PROMPTS[1], 1)])
    step(group, rounds)
    before = picture(group, provider).drafts
    joining = [asked(BAD, 1, budget=5)]  # it ends before the others
    if others in ("before", "around"):
        joining.insert(0, asked(PROMPTS[3], 2))
    if others in ("behind", "around"):
        joining.append(asked(PROMPTS[4]))
    rows = group.admit(joining)
    assert before is not None
    after = picture(group, provider).drafts
    assert after is not None
    assert after[:2] == before
    bad = next(row for row in rows if row.request.prompt == BAD)
    good = [row for row in rows if row is not bad]
    assert provider.decoding.row_count == 2 + len(good)
    assert bad.stats.draft_errors == 1
    assert bad.stats.reason == "drafter scripted failed: Fault: not this one, " + (
        "2" if verb == "restore" and good else "1"  # together with the others, and then alone
    )
    [late] = group.admit([asked(PROMPTS[2], 2)])
    drain(group, lambda: check_in_step(group, provider))
    for row in (*live, *good, late):
        check_undisturbed(kind, row)
    assert bad.emitted == text(bad)
    assert bad.stats.drafted == 0
    # A drafter that needs tokens alone is asked again, a few times.
    assert bad.stats.draft_errors == (MAX_FAILURES if kind in ("host", "device") else 1)
    assert bad.stats.reason == f"drafter scripted failed: {bad.stats.last_draft_error}"
    # Nothing of it counts against the drafter: the next ones are served.
    assert group._live.drafting.lane is not None
    assert group._live.drafting.lane.failures == 0
    provider.refusing = None
    [again] = group.admit([asked(BAD, 1)])
    drain(group)
    check_undisturbed(kind, again)
    assert provider.calls["open"] == 1
    assert provider.complaints == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["prefill", "capture", "restore"])
@pytest.mark.parametrize("place", range(4))
def test_a_draft_group_is_opened_with_those_that_are_taken(
    kind: str, verb: str, place: int
) -> None:
    provider = drafter(kind)
    assert provider is not None
    provider.refusing = verb
    group = VerifyGroup(target(), provider, drafter="scripted")
    joining = [asked(prompt, which) for which, prompt in enumerate(PROMPTS[:3])]
    rows = group.admit([*joining[:place], asked(BAD), *joining[place:]])
    assert provider.decoding.row_count == 3
    assert [each for each in provider.left_open if each is not provider.decoding] == []
    drain(group, lambda: check_in_step(group, provider))
    for row in rows[:place] + rows[place + 1 :]:
        check_undisturbed(kind, row)
    assert rows[place].emitted == text(rows[place])
    assert rows[place].stats.drafted == 0
    assert rows[place].stats.reason is not None
    group.close()
    assert provider.left_open == []


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("verb", ["open_prefill", "prefill", "capture", "prepare_append"])
@pytest.mark.parametrize("place", range(3))
def test_a_row_that_failed_once_is_brought_in_at_its_own_place(
    kind: str, verb: str, place: int
) -> None:
    provider = drafter(kind)
    assert provider is not None
    group = VerifyGroup(target(), provider, drafter="scripted")
    live = group.admit([asked(PROMPTS[0], budget=24), asked(PROMPTS[1], 1)])
    step(group)
    late = []
    for number in range(3):
        if number == place:
            provider.next[verb] = Fault("once")
        late += group.admit([asked(PROMPTS[2 + number], number)])
    check_in_step(group, provider)
    unlucky = late.pop(place)
    assert (unlucky.stats.draft_errors, unlucky.stats.reason) == (
        1,
        "drafter scripted failed: Fault: once",
    )
    assert provider.decoding.row_count == 4
    step(group)
    assert provider.decoding.row_count == 5
    assert unlucky.stats.reason is None
    drain(group, lambda: check_in_step(group, provider))
    for row in (*live, *late):
        check_undisturbed(kind, row)
    assert unlucky.emitted == text(unlucky)
    # It was brought in before its first round, so it drafted as if nothing had happened.
    assert drafted(unlucky) == undisturbed(
        kind, unlucky.request.prompt, *SAMPLINGS[place], unlucky.request.max_tokens, 4
    )
    assert (unlucky.stats.draft_errors, unlucky.stats.last_draft_error) == (1, "Fault: once")
    assert provider.calls["open"] == 1
    assert provider.complaints == []


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_refused_together_but_not_alone_may_join_together(kind: str) -> None:
    provider = drafter(kind)
    assert provider is not None
    group = VerifyGroup(target(), provider, drafter="scripted")
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    step(group, 2)
    provider.next["prepare_append"] = Fault("together")
    rows = group.admit([asked(PROMPTS[2]), asked(PROMPTS[3], 1)])
    assert provider.decoding.row_count == 4
    drain(group, lambda: check_in_step(group, provider))
    for row in live:
        check_undisturbed(kind, row)
    for row in rows:
        assert row.emitted == text(row)
        assert row.stats.reason is None
        assert row.stats.last_draft_error == "Fault: together"
        assert row.stats.draft_errors == 1
        assert row.stats.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_drafter_that_fails_to_commit_costs_drafts_and_no_token(kind: str) -> None:
    provider = drafter(kind)
    assert provider is not None
    group = VerifyGroup(target(), provider, drafter="scripted")
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    step(group, 2)
    provider.next["join"] = Fault("half a swap")
    late = group.admit([asked(PROMPTS[2]), asked(PROMPTS[3], 1)])
    assert provider.left_open == []  # whatever it holds now, it is not asked again
    drain(group, lambda: check_in_step(group, provider))
    for row in (*live, *late):
        assert row.emitted == text(row)
        assert row.stats.draft_errors == 1
        assert row.stats.last_draft_error == "Fault: half a swap"
        again = kind in ("host", "device")
        assert row.stats.reason == (
            None if again else "drafter scripted failed: Fault: half a swap"
        )
    assert sum(row.stats.accepted for row in late) > 0 or kind not in ("host", "device")
    # Rows that come later may draft in either case.
    [fresh] = group.admit([asked(PROMPTS[4], 2)])
    drain(group)
    check_undisturbed(kind, fresh)
    assert provider.complaints == []


@pytest.mark.parametrize("kind", ["taps", "whole prompt"])
@pytest.mark.parametrize("between", [0, 1])
def test_new_rows_draft_beside_rows_that_lost_the_drafter(kind: str, between: int) -> None:
    provider = drafter(kind)
    assert provider is not None
    group = VerifyGroup(target(), provider, drafter="scripted")
    old = group.admit([asked(PROMPTS[0], budget=30), asked(PROMPTS[1], 1, budget=30)])
    step(group, 2)
    provider.next["draft"] = Fault("gone")
    step(group)
    assert provider.left_open == []
    step(group, between)
    new = group.admit([asked(PROMPTS[2], 1, budget=9), asked(PROMPTS[3], budget=12)])
    assert provider.decoding.row_count == 2
    drain(group, lambda: check_in_step(group, provider))
    for row in new:
        check_undisturbed(kind, row)
    for row in old:
        assert row.emitted == text(row)
        assert row.stats.reason == "drafter scripted failed: Fault: gone"
        assert row.stats.draft_errors == 1
    assert provider.complaints == []


def test_a_round_with_rows_outside_waits_for_the_device_once() -> None:
    provider = drafter("device")
    assert provider is not None
    provider.refusing = "restore"
    group = VerifyGroup(target(), provider)
    group.admit([asked(PROMPTS[0]), asked(BAD, 1), asked(PROMPTS[1], 1), asked(PROMPTS[2], 2)])
    rounds = 0
    while group.rows:
        with mock.patch.object(flight, "host_read", side_effect=flight.host_read) as read:
            step(group)
        assert read.call_count == 1
        rounds += 1
    assert all(told.on_device for told in provider.rounds if max(told.depths))
    assert any(len(told.depths) == 3 for told in provider.rounds if told.on_device)
    assert rounds > 4


@pytest.mark.parametrize(
    "lie", [lambda rows: rows[:-1], lambda rows: [*rows, []], lambda _: None, lambda _: 1 // 0]
)
def test_a_lie_about_device_drafts_is_not_blamed_on_rows_outside(
    lie: Callable[[list[list[int]]], Any],
) -> None:
    provider = drafter("device")
    assert provider is not None
    honest = provider.device
    assert honest is not None

    def lying(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> Any:
        said = honest(texts, depths, steps)
        return None if said is None else OnDevice(said.rows, said.lengths, lie)

    provider.device, provider.refusing = lying, "restore"
    group = VerifyGroup(target(), provider)
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    [bad] = group.admit([asked(BAD)])
    drain(group)
    for row in (*live, bad):
        assert row.emitted == text(row)
    assert all(row.stats.invalid_drafts + row.stats.draft_errors > 0 for row in live)
    assert bad.stats.invalid_drafts == 0
    assert bad.stats.draft_errors == MAX_FAILURES


def test_a_wrong_id_on_the_device_is_blamed_on_its_own_row_behind_one_outside() -> None:
    provider = drafter("device")
    assert provider is not None
    honest = provider.device
    assert honest is not None

    def wrong(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> Any:
        said = honest(texts, depths, steps)
        if said is None or len(texts) < 2 or not depths[0]:
            return said
        return OnDevice([[-1] * len(said.rows[0]), *said.rows[1:]], said.lengths)

    provider.device, provider.refusing = wrong, "restore"
    group = VerifyGroup(target(), provider)
    bad, rude, good = group.admit([asked(BAD), asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    drain(group)
    for row in (bad, rude, good):
        assert row.emitted == text(row)
    assert rude.stats.invalid_drafts > 0
    assert bad.stats.invalid_drafts == good.stats.invalid_drafts == 0
    check_undisturbed("device", good)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_members_that_stood_down_do_not_fall_behind_while_a_row_is_tried_again(kind: str) -> None:
    provider = drafter(kind)
    assert provider is not None
    group = VerifyGroup(target(), provider)
    [down] = group.admit([asked(PROMPTS[0], budget=24)])
    step(group)
    provider.next["prepare_append"] = Fault("at first")
    [late] = group.admit([asked(PROMPTS[1], 1)])
    down.width = 0  # as a row does whose drafts are invalid
    provider.next["prefill"] = Fault("and again")
    step(group)
    check_in_step(group, provider)
    drain(group, lambda: check_in_step(group, provider))
    assert late.stats.draft_errors == 2
    assert late.stats.accepted > 0
    for row in (down, late):
        assert row.emitted == text(row)
    assert provider.complaints == []


@pytest.mark.parametrize("verb", ["open_prefill", "prefill", "capture", "open"])
def test_an_interrupt_while_rows_are_brought_in_fails_the_group_and_leaves_nothing_open(
    verb: str,
) -> None:
    provider = drafter("host")
    assert provider is not None
    group = VerifyGroup(target(), provider)
    rows = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    provider.next["draft"] = Fault("once")
    step(group)
    provider.next[verb] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        step(group)
    with pytest.raises(GroupFailedError, match="KeyboardInterrupt"):
        group.round()
    assert provider.left_open == []
    for row in rows:
        assert row.emitted == text(row)[:1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_a_row_outside_is_none_and_those_of_others_are_their_own(kind: str) -> None:
    shown: dict[tuple[int, ...], tuple[int, RowCheckpoint | None]] = {}

    def publish(row: Row, _caches: list[Any], checkpoint: RowCheckpoint | None) -> None:
        shown[row.request.prompt] = (row.processed, checkpoint)

    provider = drafter(kind)
    assert provider is not None
    provider.refusing = "restore"
    group = VerifyGroup(target(), provider)
    prompts = (PROMPTS[0], BAD, PROMPTS[1], PROMPTS[2])
    rows = group.admit(
        [asked(prompt, budget=9 - at, publish=publish) for at, prompt in enumerate(prompts)]
    )
    drain(group)
    for row in rows:
        processed, checkpoint = shown[row.request.prompt]
        if row.request.prompt == BAD:
            assert checkpoint is None
            continue
        assert checkpoint is not None
        assert checkpoint.processed_tokens == processed
        held = checkpoint.attachment.arrays["tokens"].tolist()
        assert held == row.tokens[:processed]


# The parts by themselves.


def test_members_draw_what_their_rows_draw_alone() -> None:
    options = [
        SamplingOptions(temp=0.9, seed=3),
        SamplingOptions(temp=0.0),
        SamplingOptions(temp=1.3, top_k=9, seed=4),
        SamplingOptions(temp=0.9, seed=5),
    ]
    samplers = RowSamplers()
    samplers.prepare_append([(each, each.seed or 0) for each in options]).commit()
    logprobs = mx.random.normal((4, 64), key=mx.random.key(1))
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    seen = MemberSampling(samplers)
    assert seen.selection == samplers.selection
    steps = [4, 0, 7, 2]
    every: Any = samplers.sample(logprobs, steps).tolist()
    for places in ([0], [3], [1, 2], [0, 2, 3], [3, 1]):
        seen.bind(places, 4)
        mine = logprobs[mx.array(places)]
        drawn: Any = seen.sample(mine, [steps[place] for place in places]).tolist()
        assert drawn == [every[place] for place in places]
    seen.bind(None, 4)
    assert seen.sample(logprobs, steps).tolist() == every


@frozen(eq=False)
class Part:
    """Something that has rows, and what shows that they are what they were."""

    name: str
    make: Callable[[Sequence[int]], Any]
    one: Callable[[int], Any]
    show: Callable[[Any], list[Any]]


def read_alone(
    bound: MlxLmTarget, prompt: Sequence[int], options: CacheOptions = PLAIN
) -> RowState:
    state = bound.new_state(options)
    state.begin_round(len(prompt))
    bound.forward(mx.array([list(prompt)]), state)
    state.commit_round()
    mx.eval(state.arrays())
    return state


def state_part(
    name: str, model: Any, *, restored: bool = False, options: CacheOptions = PLAIN
) -> Part:
    bound = MlxLmTarget(model)

    def one(number: int) -> RowState:
        state = read_alone(bound, PROMPTS[number], options)
        if not restored:
            return state
        return bound.state_of(state.extract_row(0))

    def make(numbers: Sequence[int]) -> RowState:
        if not numbers:
            state = one(0)
            state.filter_rows([])
            return state
        state = one(numbers[0])
        state.prepare_append([one(number) for number in numbers[1:]]).commit()
        return state

    def show(state: RowState) -> list[Any]:
        """Lengths, and the next token that each row would be given."""
        shown = []
        for row in range(state.row_count):
            alone = bound.state_of(state.extract_row(row))
            alone.begin_round(2)
            logits = bound.forward(mx.array([[7, 9]]), alone).logits
            shown.append((state.lengths[row], logits[0].tolist()))
        return shown

    return Part(name, make, one, show)


def sampler_part() -> Part:
    def one(number: int) -> tuple[SamplingOptions, int]:
        return SamplingOptions(temp=[0.0, 1.0, 0.7][number % 3], seed=number), number

    def make(numbers: Sequence[int]) -> RowSamplers:
        samplers = RowSamplers()
        samplers.prepare_append([one(number) for number in numbers]).commit()
        return samplers

    flat = mx.zeros((1, 2, 64))

    def show(samplers: RowSamplers) -> list[Any]:
        if not samplers.row_count:
            return []
        scores = mx.broadcast_to(flat, (samplers.row_count, 2, 64))
        drawn: list[Any] = samplers.draw(scores, [3] * samplers.row_count).tolist()  # type: ignore[assignment]
        return drawn

    return Part("samplers", make, one, show)


QUANTIZED = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=5)
"""Some of the prompts are as long, others not."""

PARTS = [
    state_part("attention, cold", tiny_model("qwen3")),
    state_part("attention, restored", tiny_model("qwen3"), restored=True),
    state_part("recurrent, cold", tiny_model(HYBRID)),
    state_part("recurrent, restored", tiny_model(HYBRID), restored=True),
    state_part("windows, cold", tiny_model(WINDOWED)),
    state_part("windows, restored", tiny_model(WINDOWED), restored=True),
    state_part("kept windows", tiny_model("qwen3"), options=CacheOptions(max_kv_size=8)),
    state_part("quantized", build_model("qwen3", head_dim=32), options=QUANTIZED),
    state_part("native, cold", build("phi3small")),
    state_part("native, restored", build("phi3small"), restored=True),
    sampler_part(),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("live", [[], [0], [0, 1, 3]])
@pytest.mark.parametrize("joining", [[2], [2, 4]])
def test_a_part_shows_a_change_only_when_it_is_committed(
    part: Part, live: list[int], joining: list[int]
) -> None:
    things = part.make(live)
    before = part.show(things)
    alone = {number: part.show(part.make([number]))[0] for number in range(5)}
    assert before == [alone[number] for number in live]
    dropped = things.prepare_append([part.one(number) for number in joining])
    assert part.show(things) == before
    dropped.discard()
    dropped.discard()
    dropped.commit()
    assert part.show(things) == before
    change: Swap = things.prepare_append([part.one(number) for number in joining])
    change.commit()
    change.commit()
    change.discard()
    rows = live + joining
    assert part.show(things) == [alone[number] for number in rows]
    # Reordered, drained and joined again.
    order = [*range(len(rows) - 1, -1, -2), *range(len(rows) - 2, -1, -2)]
    things.filter_rows(order)
    assert part.show(things) == [alone[rows[place]] for place in order]
    things.filter_rows([])
    assert part.show(things) == []
    things.prepare_append([part.one(1), part.one(3)]).commit()
    assert part.show(things) == [alone[1], alone[3]]


@pytest.mark.parametrize("kind", ["host", "device", "taps"])
@pytest.mark.parametrize("live", range(3))
@pytest.mark.parametrize("verdict", ["commit", "discard", "refuse"])
def test_captured_rows_join_a_lane(kind: str, live: int, verdict: str) -> None:
    """Checkpoints of rows in the middle of their text, as a prefix cache would give them back."""
    provider = drafter(kind)
    assert provider is not None
    source = VerifyGroup(target(), provider)
    rows = source.admit(
        [asked(prompt, which % 3) for which, prompt in enumerate([*PROMPTS[:3], BAD])]
    )
    step(source, 2)
    assert source._live.drafting.lane is not None
    checkpoints = [source._live.drafting.lane.capture(place) for place in range(4)]
    assert all(checkpoints)
    lane = DraftLane(provider, "scripted", target())
    samplers = RowSamplers()
    samplers.prepare_append([(row.request.sampling, row.seed) for row in rows]).commit()
    if live:
        lane.prepare_append(rows[:live], checkpoints[:live], samplers, 0).commit()
    if verdict == "refuse":
        provider.refusing = "restore"
    opened = len(provider.left_open)
    change = lane.prepare_append(rows[live:], checkpoints[live:], samplers, live)
    assert list(lane._members.rows) == list(range(live))
    if verdict == "discard":
        change.discard()
        assert list(lane._members.rows) == list(range(live))
        assert len(provider.left_open) == opened
        change = lane.prepare_append(rows[live:], checkpoints[live:], samplers, live)
    change.commit()
    places = range(3 if verdict == "refuse" else 4)
    assert list(lane._members.rows) == list(places)
    for place in places:
        again, first = lane.capture(place), checkpoints[place]
        assert again is not None
        assert first is not None
        assert again.processed_tokens == first.processed_tokens == len(rows[place].tokens) - 1
        assert again.attachment.arrays.keys() == first.attachment.arrays.keys()
        for name, array in first.attachment.arrays.items():
            assert mx.array_equal(again.attachment.arrays[name], array)
    lane.filter_rows([2, 3, 0])
    assert [row.request.prompt for row in lane._members.rows.values()] == [
        row.request.prompt
        for row in (rows[2], rows[3], rows[0])[:: 2 if verdict == "refuse" else 1]
    ]
    assert (lane.capture(1) is None) == (verdict == "refuse")
    lane.filter_rows([])
    assert lane._members.rows == {}
    provider.refusing = None
    lane.prepare_append([rows[1]], [checkpoints[1]], samplers, 0).commit()
    assert list(lane._members.rows) == [0]
    lane.close()
    source.close()
    assert provider.left_open == []


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("rounds", range(3))
def test_a_row_restored_from_a_cache_joins_again_after_a_join_that_failed(
    kind: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller's cache is as it was, and still his."""
    provider = drafter(kind)
    begun, rest = PROMPTS[3][:7], PROMPTS[3][7:]
    caches = make_prompt_cache(tiny_model("qwen3"))
    tiny_model("qwen3")(mx.array([list(begun)]), cache=caches)
    if provider is not None:
        assert isinstance(provider.plan, Script)
        whole = text_of(PROMPTS[3]).output
        provider.plan.texts.append(Text(rest, whole))
        provider.plan.moves.append([[RIGHT] * 3])
    group = VerifyGroup(target(), provider)
    live = group.admit([asked(PROMPTS[0]), asked(PROMPTS[1], 1)])
    step(group, rounds)
    with monkeypatch.context() as patch:
        patch.setattr(RaggedState, "prepare_append", mock.Mock(side_effect=NO_ROOM))
        with pytest.raises(MemoryError):
            group.admit([asked(rest, budget=8, cache=caches), asked(PROMPTS[2])])
    assert {cache.offset for cache in caches} == {len(begun)}
    [row] = group.admit([asked(rest, budget=8, cache=caches)])
    drain(group)
    assert row.emitted == solo(PROMPTS[3])[:8]
    assert {cache.offset for cache in caches} == {len(PROMPTS[3]) + 8}
    for each in live:
        check_undisturbed(kind, each)
    if provider is not None:
        assert provider.complaints == []


def test_a_request_with_caches_without_a_row_form_does_not_take_the_drafter_from_later_ones() -> (
    None
):
    provider = drafter("host")
    assert provider is not None
    group = VerifyGroup(target(), provider, drafter="scripted")
    own = [OwnCache() for _ in range(2)]
    apart = request(PROMPTS[0], max_tokens=4, num_draft_tokens=4, cache=own)
    [first] = group.admit([asked(PROMPTS[1])])
    drain(group)
    [alone] = group.admit([apart])
    drain(group)
    assert alone.stats.drafter is None
    assert alone.emitted == solo(PROMPTS[0])[:4]
    assert alone.stats.reason == "no row form for cache type OwnCache"
    [later] = group.admit([asked(PROMPTS[3], 1)])
    drain(group)
    for row in (first, later):
        check_undisturbed("host", row)
        assert row.stats.drafter == "scripted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_a_caller_s_window_joins_the_others_and_drafts_as_they_do(
    kind: str,
) -> None:
    provider = drafter(kind)
    group = VerifyGroup(target(), provider, drafter="scripted")
    [first] = group.admit([asked(PROMPTS[1])])
    step(group)
    rings = [RotatingKVCache(max_size=64) for _ in range(2)]
    [beside] = group.admit([asked(PROMPTS[0], cache=rings)])
    step(group)
    [later] = group.admit([asked(PROMPTS[3], 1)])
    drain(group, lambda: check_in_step(group, provider))
    for row in (first, beside, later):
        check_undisturbed(kind, row)
        assert row.stats.drafter == "scripted"
        assert row.stats.accepted > 0
    assert {cache.offset for cache in rings} == {len(PROMPTS[0]) + 20}
    assert provider is not None
    assert provider.complaints == []


# Any history, with a failure anywhere.

BREAKS = (
    *(place for place in PLACES if place != "native state"),
    "refused at prefill",
    "refused at capture",
    "refused at restore",
    "none",
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rounds"), st.integers(1, 3)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(
            st.just("join"),
            st.lists(
                st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 2), st.integers(1, 16)),
                min_size=1,
                max_size=2,
            ),
            st.sampled_from(BREAKS),
            st.sampled_from([4, 4, 4, 1, 0]),
        ),
    ),
    min_size=3,
    max_size=9,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, kind=st.sampled_from(["host", "device", "taps", "plain"]))
def test_any_history_of_joins_that_fail_somewhere_leaves_live_rows_undisturbed(
    steps: list[Any], kind: str
) -> None:
    provider, failing = drafter(kind), Failing()
    group = VerifyGroup(failing, provider, drafter="scripted")
    scene = Scene(group, failing, provider)
    served: list[Row] = []
    unlucky: list[Row] = []
    left: set[int] = set()

    def join(wishes: list[tuple[int, int, int]], width: int) -> None:
        for prompt, which, budget in wishes:
            row: list[Row] = []
            row += group.admit(
                [
                    asked(
                        PROMPTS[prompt],
                        which,
                        budget=budget,
                        width=width,
                        cancelled=lambda row=row: bool(row) and id(row[0]) in left,
                    )
                ]
            )
            served.extend(row)

    for name, *rest in steps:
        if name == "rounds":
            step(group, rest[0])
        elif name == "leave" and group.rows:
            left.add(id(group.rows[rest[0] % len(group.rows)]))
        elif name == "join":
            wishes, where, width = rest
            if where in PLACES:
                fail_to_join(scene, where, width)
            elif where.startswith("refused") and provider is not None and width:
                provider.refusing = where.split()[-1]
                unlucky += group.admit([asked(BAD, budget=7, width=width)])
            join(wishes, width)
        check_in_step(group, provider)
    drain(group, lambda: check_in_step(group, provider))
    for row in served:
        if id(row) in left:
            assert row.emitted == text(row)[: len(row.emitted)]
            assert row.stats.draft_errors == 0
        else:
            check_undisturbed(kind, row)
    for row in unlucky:
        assert row.emitted == text(row)
    group.close()
    if provider is not None:
        assert provider.complaints == []
        assert provider.left_open == []
