"""What a verify group emits under both rules has the target's distribution, whatever drafts.

A real model whose attention writes nothing: the next token depends on the last one alone, so the
exact distribution of everything that is emitted follows, in float64, from one table of logits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from attrs import define, evolve, field
from test_rejection import HONEST, LYING, chi_square, exact, p_value, tail

from specdec import Request, SamplingOptions, VerifyGroup
from specdec.contract import (
    Attachment,
    ContextKind,
    DeviceProposal,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    Swap,
)
from specdec.errors import ConstraintError, ContractError
from specdec.sampling.penalties import make_logits_processors
from specdec.testing import TinyTarget
from specdec.verify import drafts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specdec import Row
    from specdec.contract import RowConstraints, RowSampling, TargetView

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

VOCABULARY = 16
WIDE = 20  # ids of a drafter with a larger vocabulary
LISTED = (0, 1, 2, 4, 5, 7, 8, 11, 13, 14, 15)
START = 3
ROWS = 1500
TOKENS = 6
MANY = {"rows": 2500, "tokens": 8}
DEPTH = 2


# The target.


@cache
def target() -> TinyTarget:
    made = TinyTarget(VOCABULARY)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    return made


@cache
def table() -> Floats:
    """Logits ``[V, V]`` after each token, from mlx-lm's own call of the model."""
    logits = target().model(mx.arange(VOCABULARY)[:, None])[:, 0]
    return np.array(logits).astype(np.float64)


def normal(logits: Floats) -> Floats:
    result: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return result


def test_the_next_token_depends_on_the_last_one_alone() -> None:
    text = [START, 9, 0, 15, 9, 9, 2]
    logits = np.array(target().model(mx.array([text]))[0]).astype(np.float64)
    assert np.abs(logits - table()[text]).max() < 1e-5
    shares = np.exp(normal(table()))
    assert shares.max() < 0.7
    assert np.abs(shares[:, None] - shares[None]).sum(-1)[~np.eye(VOCABULARY, dtype=bool)].min() > 0


# The drafter: another table, near the target's.


@cache
def near(size: int) -> Floats:
    """Log-probabilities ``[WIDE, size]`` after each token."""
    noise = np.random.default_rng(2).normal(size=(WIDE, WIDE))
    wide = np.zeros((WIDE, WIDE))
    wide[:VOCABULARY, :VOCABULARY] = table()
    wide[VOCABULARY:, :VOCABULARY] = table()[: WIDE - VOCABULARY]
    # What the target does not have is drawn now and then.
    wide[:, VOCABULARY:] = np.log(np.exp(wide[:, :VOCABULARY]).sum(-1, keepdims=True)) - 3.2
    return normal((wide + 0.8 * noise)[:, :size])


@define(eq=False)
class Near:
    """A drafter; the provider of its own groups.

    Attributes:
        how: ``sampled`` from the table, or its best token, ``greedy``.
        declares: what it says that it drew from: ``None`` for nothing, or a function of the true
            log-probabilities ``[B, V]`` and the raw ones, given the depth's number.
        device: whether drafts stay on the device.
        size: ids that it selects over, from 0 on.
        listed: the ids that it selects over, if it lists some.
        cuts: whether it declares over these alone.
        leaves_out: it stops before a token that it drew with a smaller probability.
        wrong: made of the declared array before it is handed over.
    """

    how: str = "sampled"
    declares: Callable[[mx.array, mx.array], mx.array] | None = None
    device: bool = False
    size: int = VOCABULARY
    listed: Any = None
    cuts: bool = True
    leaves_out: float = 0.0
    wrong: Callable[[mx.array], Any] = field(default=lambda logq: logq)
    open_groups: int = 0

    id = "near"
    weight_bytes = 0
    checkpoint_namespace = "near"
    supports_adapters = True

    @property
    def grouped(self) -> Any:
        return self if self.listed is None else Listing(self)

    def open_prefill(self, *, target: TargetView, checkpoints: Any) -> NearRows:
        return NearRows(self, checkpoints, None)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> NearRows:
        return (NearDeviceRows if self.device else NearRows)(self, checkpoints, sampling)

    def close(self) -> None:
        pass


@define(eq=False)
class Listing:
    """The same factory, declaring the ids it selects over."""

    _near: Near

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)

    def draft_vocabulary(self, _target: TargetView, /) -> Any:
        return self._near.listed


class NearRows:
    """Rows that count what they have read; the pending token is all they need to know."""

    namespace = "near"
    tap_layers = ()
    context = ContextKind.NONE
    prefill_mode = PrefillMode.TAIL_SPLIT

    def __init__(self, near: Near, checkpoints: Sequence[Any], sampling: Any) -> None:
        self.near = near
        self.sampling = sampling
        self.read = [0 if c is None else c.processed_tokens for c in checkpoints]
        self.drafts: list[list[int]] | None = None
        near.open_groups += 1

    @property
    def row_count(self) -> int:
        return len(self.read)

    def prepare_append(self, checkpoints: Sequence[Any], /) -> Swap:
        grown = [*self.read, *(0 if c is None else c.processed_tokens for c in checkpoints)]

        def join() -> None:
            self.read = grown

        return Swap(join)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        self.read = [self.read[k] for k in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        attachment = Attachment(schema="near", arrays={"nothing": mx.zeros(1)})
        return RowCheckpoint(
            namespace="near", processed_tokens=self.read[row], attachment=attachment
        )

    def prefill(self, tokens: mx.array, _context: mx.array | None, /) -> None:
        self.read = [count + tokens.shape[1] for count in self.read]

    def materialize(self) -> None:
        pass

    def consume(self, _tokens: mx.array, _context: Any, lengths: Sequence[int], /) -> None:
        self.read = [count + length for count, length in zip(self.read, lengths, strict=True)]

    def proposed(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[mx.array, mx.array | None, mx.array | None]:
        """Ids ``[B, d]``, how many of them count, and what is declared."""
        near, at = self.near, mx.array(self.source().astype(np.float32))
        last, tokens, declared, kept = mx.array(list(pending)), [], [], []
        for depth in range(max(depths)):
            raw, there = at[last], [step + depth for step in steps]
            true = self.sampling.log_distribution(raw, there)
            if near.how == "greedy":
                last = mx.argmax(raw, axis=-1)
            else:
                last = self.sampling.sample(raw, there)
            share = mx.take_along_axis(true, last[:, None], axis=-1)[:, 0]
            kept.append(mx.exp(share) >= near.leaves_out)
            tokens.append(last.astype(mx.int32))
            if near.declares is not None:
                declared.append(near.declares(true, raw))
        lengths = None
        if near.leaves_out:
            lengths = mx.cumprod(mx.stack(kept, 1).astype(mx.int32), axis=1).sum(axis=1)
        logq = self.cut(mx.stack(declared, axis=1)) if declared else None
        return mx.stack(tokens, axis=1), lengths, logq

    def source(self) -> Floats:
        near_to = near(self.near.size)
        if self.near.listed is None:
            return near_to
        inside = np.isin(np.arange(self.near.size), self.near.listed)
        with np.errstate(divide="ignore"):
            return normal(np.where(inside, near_to, -np.inf))

    def cut(self, logq: mx.array) -> Any:
        ids = mx.array(list((self.near.cuts and self.near.listed) or range(VOCABULARY)))
        return self.near.wrong(mx.take(logq, ids, axis=-1))

    def draft(self, pending: Any, depths: Any, steps: Any, /) -> Any:
        assert self.drafts is None, "draft() inside a round"
        if not max(depths):
            self.drafts = [[] for _ in depths]
            return self.drafts
        tokens, lengths, logq = self.proposed(pending, depths, steps)
        told: Any = tokens.tolist()
        counts: Any = [tokens.shape[1]] * len(depths) if lengths is None else lengths.tolist()
        self.drafts = [
            row[: min(count, depth)] for row, count, depth in zip(told, counts, depths, strict=True)
        ]
        drafts = [list(draft) for draft in self.drafts]
        return drafts if logq is None else Proposal(drafts, logq)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        assert context is None
        assert self.drafts is not None, "commit() without a round"
        for row, (count, draft) in enumerate(zip(accepted, self.drafts, strict=True)):
            assert 0 <= count <= len(draft)
            self.read[row] += 1 + count
        self.drafts = None

    def close(self) -> None:
        self.near.open_groups -= 1


class NearDeviceRows(NearRows):
    """Leaves its drafts on the device."""

    def draft_device(self, pending: Any, depths: Any, steps: Any, /) -> DeviceProposal:
        tokens, lengths, logq = self.proposed(pending, depths, steps)

        def resolve(ids: Sequence[int]) -> list[list[int]]:
            wide = tokens.shape[1]
            rows = [list(ids[start : start + wide]) for start in range(0, len(ids), wide)]
            cut: Any = [wide] * len(rows) if lengths is None else lengths.tolist()
            self.drafts = [
                row[: min(count, depth)]
                for row, count, depth in zip(rows, cut, depths, strict=True)
            ]
            return self.drafts

        return DeviceProposal(tokens, resolve, lengths=lengths, logq=logq)


def truly(true: mx.array, _raw: mx.array) -> mx.array:
    """What the drafts were drawn from."""
    return true


def rawly(_true: mx.array, raw: mx.array) -> mx.array:
    """What they would have been drawn from without filters and temperature: a lie."""
    return raw


# Runs.


def run(
    options: Sequence[SamplingOptions],
    drafter: Any,
    *,
    rows: int = ROWS,
    tokens: int = TOKENS,
    first_seed: int = 0,
    **request: Any,
) -> list[Row]:
    """Rows that emit ``tokens`` tokens each behind START; row b has seed ``first_seed + b``."""
    group = VerifyGroup(target(), drafter)
    admitted = group.admit(
        [
            Request(
                prompt=(START,),
                sampling=evolve(options[b % len(options)], seed=first_seed + b),
                num_draft_tokens=DEPTH,
                max_tokens=tokens,
                **request,
            )
            for b in range(rows)
        ]
    )
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    group.close()
    assert all(row.error is None for row in admitted)
    return admitted


def emitted(rows: Sequence[Row]) -> Ints:
    return np.array([row.emitted for row in rows])


def p_values(
    tokens: Ints, options: SamplingOptions, logits: Floats | None = None
) -> dict[str, float]:
    """Chi-square of y1 and y2, and of each token given the one before, all places together."""
    after = np.stack([exact(row, options) for row in normal(table() if logits is None else logits)])
    first = np.bincount(tokens[:, 0], minlength=VOCABULARY)
    second = np.bincount(tokens[:, 1], minlength=VOCABULARY)
    found = {"y1": p_value(first, after[START]), "y2": p_value(second, after[START] @ after)}
    for name, pairs in (("y2|y1", tokens[:, :2]), ("y|y-1", tokens)):
        statistic, degrees = 0.0, 0
        before, behind = pairs[:, :-1].ravel(), pairs[:, 1:].ravel()
        for token in range(VOCABULARY):
            counts = np.bincount(behind[before == token], minlength=VOCABULARY)
            if counts.sum():
                each = chi_square(counts, after[token])
                statistic, degrees = statistic + each[0], degrees + each[1]
        found[name] = tail(statistic, degrees)
    return found


def rate(rows: Sequence[Row]) -> float:
    """Accepted share of the first drafts."""
    drafted = sum(row.stats.drafted_per_position[0] for row in rows if row.stats.drafted)
    accepted = sum(row.stats.accepted_per_position[0] for row in rows if row.stats.accepted)
    return accepted / drafted


PLAIN = SamplingOptions(temp=1.0, acceptance="rejection")
FILTERED = SamplingOptions(
    temp=1.3, top_p=0.95, min_p=0.02, top_k=9, xtc_probability=0.3, xtc_threshold=0.2,
    acceptance="rejection",
)  # fmt: skip


# Drafts on the host and on the device give the same text (see the last test), so one is enough.
@pytest.mark.parametrize(
    ("options", "declares", "device"),
    [
        (PLAIN, None, False),
        (PLAIN, truly, True),
        (FILTERED, None, True),
        (FILTERED, truly, False),
    ],
)
def test_by_rejection_everything_that_is_emitted_has_the_target_s_distribution(
    options: SamplingOptions, declares: Any, device: bool, record_property: Any
) -> None:
    drafter = Near(declares=declares, device=device)
    rows = run([options], drafter, **MANY)
    found = p_values(emitted(rows), options)
    record_property("p_values", found)
    record_property("rate", rate(rows))
    assert min(found.values()) > HONEST, found
    assert all(row.stats.draft_errors == row.stats.invalid_drafts == 0 for row in rows)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("declares", [None, truly])
def test_as_many_drafts_are_accepted_as_p_and_q_allow(
    declares: Any, device: bool, record_property: Any
) -> None:
    # Two tokens take one draft, behind the prompt alone.
    rows = run([PLAIN], Near(declares=declares, device=device), tokens=2)
    p, q = exact(normal(table())[START], PLAIN), exact(near(VOCABULARY)[START], PLAIN)
    chance = float(np.minimum(p, q).sum() if declares else (p * q).sum())
    record_property("rate", rate(rows))
    assert sum(row.stats.drafted for row in rows) == ROWS
    assert abs(rate(rows) - chance) < 4 * (chance * (1 - chance) / ROWS) ** 0.5


@pytest.mark.parametrize(("options", "device"), [(PLAIN, False), (FILTERED, True)])
def test_by_match_it_has_it_too_and_is_what_the_target_emits_alone(
    options: SamplingOptions, device: bool, record_property: Any
) -> None:
    match = evolve(options, acceptance="match")
    rows = run([match], Near(declares=truly, device=device))
    found = p_values(emitted(rows), match)
    record_property("p_values", found)
    record_property("rate", rate(rows))
    assert min(found.values()) > HONEST, found
    assert (emitted(rows) == emitted(run([match], None))).all()


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_certain_drafts_are_judged_as_such(how: str, record_property: Any) -> None:
    drafter = Near(how=how)
    rows = run([PLAIN], drafter)
    record_property("rate", rate(rows))
    assert min(p_values(emitted(rows), PLAIN).values()) > HONEST
    assert rate(rows) > 0.2


def test_without_a_drafter_the_rule_draws_from_the_target_as_well() -> None:
    plain = emitted(run([PLAIN], None))
    assert min(p_values(plain, PLAIN).values()) > HONEST
    assert (plain != emitted(run([evolve(PLAIN, acceptance="match")], None))).mean() > 0.3


@pytest.mark.parametrize(("options", "device"), [(PLAIN, True), (FILTERED, False)])
def test_a_distribution_over_listed_ids_is_put_in_its_place(
    options: SamplingOptions, device: bool, record_property: Any
) -> None:
    rows = run([options], Near(declares=truly, device=device, listed=LISTED))
    found = p_values(emitted(rows), options)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert all(row.stats.draft_errors == 0 for row in rows)
    everywhere = run([options], Near(declares=truly, device=device, listed=LISTED, cuts=False))
    assert (emitted(everywhere) == emitted(rows)).all()


@pytest.mark.parametrize(("declares", "device"), [(None, True), (truly, False), (truly, True)])
def test_drafts_of_a_larger_vocabulary_do_no_harm_where_they_stand(
    declares: Any, device: bool, record_property: Any
) -> None:
    rows = run([PLAIN], Near(declares=declares, device=device, size=WIDE))
    found = p_values(emitted(rows), PLAIN)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert sum(row.stats.invalid_drafts for row in rows) > 0.05 * ROWS
    assert all(row.stats.draft_errors == 0 for row in rows)


def test_neither_do_they_where_no_other_row_has_a_draft(record_property: Any) -> None:
    drafter, drawn, invalid = Near(declares=truly, size=WIDE), [], 0
    for seed in range(800):  # each alone
        [row] = run([PLAIN], drafter, rows=1, first_seed=seed, tokens=2)
        drawn.append(row.emitted[0])
        invalid += row.stats.invalid_drafts
    p = exact(normal(table())[START], PLAIN)
    found = p_value(np.bincount(drawn, minlength=VOCABULARY), p)
    record_property("p_value", found)
    assert found > HONEST
    assert invalid > 60


# Processors and constraints. Each looks at the last token alone, so all stays in one table.

BIAS = {2: 1.5, 6: -2.0, 9: float("-inf")}


def shaped() -> Floats:
    """The table after ``BIAS`` and a repetition penalty of 1.7 on the last token."""
    logits = table().copy()
    for token, bias in BIAS.items():
        logits[:, token] += bias
    own = np.diag(logits)
    logits[np.arange(VOCABULARY), np.arange(VOCABULARY)] = np.where(own < 0, own * 1.7, own / 1.7)
    return logits


class Dwindling:
    """A processor that declares nothing, and holds its own state: what it saw last."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.seen.append(int(tokens.size))
        assert self.seen == list(range(self.seen[0], self.seen[0] + len(self.seen)))
        return logits - 3.0 * (mx.arange(VOCABULARY) == tokens[-1])


@pytest.mark.parametrize(
    ("options", "declares", "device"),
    [(PLAIN, truly, False), (FILTERED, truly, True), (PLAIN, None, True)],
)
def test_processors_come_before_the_rule(
    options: SamplingOptions, declares: Any, device: bool, record_property: Any
) -> None:
    chain = make_logits_processors(BIAS, 1.7, 1)
    rows = run([options], Near(declares=declares, device=device), processors=chain)
    found = p_values(emitted(rows), options, shaped())
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found


@pytest.mark.parametrize(
    ("size", "declares"), [(VOCABULARY, None), (VOCABULARY, truly), (WIDE, truly)]
)
def test_position_by_position_the_rule_is_the_same(
    declares: Any, size: int, record_property: Any
) -> None:
    drafter, group_rows = Near(declares=declares, size=size), []
    for first in range(0, 600, 200):
        group = VerifyGroup(target(), drafter)
        group_rows += group.admit(
            [
                Request(
                    prompt=(START,),
                    sampling=evolve(PLAIN, seed=first + b),
                    num_draft_tokens=DEPTH,
                    max_tokens=5,
                    processors=[Dwindling()],
                )
                for b in range(200)
            ]
        )
        while group.rows:
            with group.round() as done:
                done.deliver_all()
    assert all(row.error is None for row in group_rows)
    logits = table() - 3.0 * np.eye(VOCABULARY)
    found = p_values(emitted(group_rows), PLAIN, logits)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    # The same at once, in a row that declares that it holds no state.
    at_once = run(
        [PLAIN], Near(declares=declares, size=size), rows=50, tokens=5, processors=[Fading()]
    )
    assert [row.emitted for row in at_once] == [row.emitted for row in group_rows[:50]]


class Fading:
    """As ``Dwindling``, for a whole window."""

    def process_window(self, view: Any, logits: mx.array) -> mx.array:
        last: mx.array = view.tokens[-view.width :]
        return logits - 3.0 * (mx.arange(VOCABULARY)[None] == last[:, None])


FORCED = {5: 12, 12: 1}
"""After these tokens just one is allowed."""


def allowed_after(token: int) -> npt.NDArray[np.bool_]:
    ids = np.arange(VOCABULARY)
    allowed: npt.NDArray[np.bool_] = (
        ids == FORCED[token] if token in FORCED else (ids + token) % 3 != 0
    )
    return allowed


class Picky:
    """A constraint by the last token."""

    def __init__(self, forces: bool) -> None:
        self.last = START
        self.forces = forces

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        last, masks, count = self.last, [allowed_after(self.last)], 0
        for token in draft:
            if not (0 <= token < VOCABULARY and allowed_after(last)[token]):
                break
            last, count = token, count + 1
            masks.append(allowed_after(last))
        return mx.array(np.stack(masks)), count

    def advance(self, token: int, /) -> bool:
        if not allowed_after(self.last)[token]:
            raise ConstraintError(f"{token} after {self.last}")
        self.last = token
        return False

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        last = self.last
        found: list[int] = []
        while self.forces and last in FORCED and len(found) < max_tokens:
            last = FORCED[last]
            found.append(last)
        return found


@pytest.mark.parametrize(
    ("options", "declares", "forces"),
    [(PLAIN, truly, False), (PLAIN, truly, True), (PLAIN, None, True), (FILTERED, truly, True)],
)
def test_drafts_that_a_constraint_refuses_count_as_rejected(
    options: SamplingOptions, declares: Any, forces: bool, record_property: Any
) -> None:
    rows = run([options], Near(declares=declares), constraint=lambda: Picky(forces))
    with np.errstate(divide="ignore"):
        logits = np.where(np.stack([allowed_after(t) for t in range(16)]), table(), -np.inf)
    found = p_values(emitted(rows), options, logits)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert (sum(row.stats.forced for row in rows) > 0) is forces


def test_refused_drafts_that_only_vanish_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    vanish = drafts.Drafts.cut

    def cut(self: Any, counts: Any) -> Any:
        return evolve(vanish(self, counts), refused=self.refused)

    monkeypatch.setattr(drafts.Drafts, "cut", cut)
    rows = run([PLAIN], Near(declares=truly), constraint=lambda: Picky(False))
    logits = np.where(np.stack([allowed_after(t) for t in range(16)]), table(), -np.inf)
    found = p_values(emitted(rows), PLAIN, logits)
    record_property("p_values", found)
    assert found["y|y-1"] < LYING


# Rows of both rules, and lies.


@pytest.mark.parametrize(("declares", "device"), [(None, True), (truly, False)])
def test_rows_of_both_rules_stand_side_by_side(
    declares: Any, device: bool, record_property: Any
) -> None:
    rules = [
        PLAIN,
        evolve(PLAIN, acceptance="match"),
        FILTERED,
        SamplingOptions(),
        evolve(FILTERED, acceptance="match"),
    ]
    rows = run(rules, Near(declares=declares, device=device), rows=5 * 700)
    for kind, options in enumerate(rules):
        theirs = rows[kind :: len(rules)]
        if options.temp:
            found = p_values(emitted(theirs), options)
            record_property(f"p_values {kind}", found)
            assert min(found.values()) > HONEST, found
    alone = run(rules, None, rows=5 * 100)
    for kind in (1, 3, 4):
        got = emitted(rows[kind :: len(rules)][:100])
        assert (got == emitted(alone[kind :: len(rules)])).all()


LIES = {
    "other numbers": Near(declares=rawly),
    "its best": Near(how="greedy", declares=truly),
    "left out, on the device": Near(declares=truly, leaves_out=0.1, device=True),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_q_that_was_not_drawn_from_is_seen_under_rejection_and_hurts_no_match(
    lie: str, record_property: Any
) -> None:
    options = FILTERED if "numbers" in lie else PLAIN
    found = p_values(emitted(run([options], LIES[lie])), options)
    record_property("p_values", found)
    assert found["y|y-1"] < LYING, found
    match = evolve(options, acceptance="match")
    got = emitted(run([match], LIES[lie]))
    assert min(p_values(got, match).values()) > HONEST
    assert (got == emitted(run([match], None))).all()


@pytest.mark.parametrize("device", [False, True])
def test_drafts_left_out_for_what_they_are_do_no_harm_where_none_is_declared(
    device: bool, record_property: Any
) -> None:
    rows = run([PLAIN], Near(leaves_out=0.1, device=device))
    found = p_values(emitted(rows), PLAIN)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert rate(rows) > 0.2


# What is no distribution.

NO_LOGQ: dict[str, Callable[[mx.array], Any]] = {
    "a list": lambda logq: logq.tolist(),
    "ints": lambda logq: mx.zeros(logq.shape, mx.int32),
    "two axes": lambda logq: logq[:, 0],
    "no axis": lambda _: mx.array(0.0),
    "more rows": lambda logq: mx.concatenate([logq, logq]),
    "less ids": lambda logq: logq[..., 1:],
    "less depth": lambda logq: logq[:, :1],
    "more ids": lambda logq: mx.concatenate([logq, logq[..., :1]], axis=-1),
}


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("wrong", NO_LOGQ)
def test_what_is_no_array_of_log_probabilities_costs_the_drafts_and_nothing_else(
    wrong: str, device: bool
) -> None:
    options = [PLAIN, evolve(PLAIN, acceptance="match"), SamplingOptions()]
    drafter = Near(declares=truly, wrong=NO_LOGQ[wrong], device=device)
    rows = run(options, drafter, rows=12, tokens=12)
    assert (emitted(rows) == emitted(run(options, None, rows=12, tokens=12))).all()
    for row in rows:
        assert row.stats.draft_errors == 3
        assert "logq" in (row.stats.last_draft_error or "")
        assert "failed: " in (row.stats.reason or "")
        assert row.stats.accepted == 0
    assert drafter.open_groups == 0
    # Nobody looks at it where no row judges by rejection.
    match = evolve(PLAIN, acceptance="match")
    rows = run([match], drafter, rows=12, tokens=12)
    assert all(row.stats.draft_errors == 0 for row in rows)
    assert sum(row.stats.accepted for row in rows) > 0


@pytest.mark.parametrize("device", [False, True])
def test_nan_in_it_counts_as_no_distribution_at_that_position(device: bool) -> None:
    def spoilt(logq: mx.array) -> mx.array:
        return mx.where(mx.arange(logq.shape[-1]) == 7, mx.nan, logq)

    rows = run([PLAIN], Near(declares=truly, wrong=spoilt, device=device), rows=300)
    want = run([PLAIN], Near(device=device), rows=300)
    assert (emitted(rows) == emitted(want)).all()
    assert [row.stats for row in rows] == [row.stats for row in want]
    assert (emitted(rows) != emitted(run([PLAIN], Near(declares=truly), rows=300))).any()


@pytest.mark.parametrize("listed", [(0, 3, 99), (-1, 3, 4), (3, 3, 4), ("a", 1, 2), 7, ()])
def test_a_list_of_ids_that_makes_no_sense_is_refused_when_a_group_is_made(listed: Any) -> None:
    drafter = Near(declares=truly, wrong=lambda logq: logq[..., :3])
    drafter.listed = LISTED

    class Nonsense(Listing):
        def draft_vocabulary(self, _target: TargetView, /) -> Any:
            return listed

    class Provider:
        id, weight_bytes = "near", 0
        grouped = Nonsense(drafter)

        def close(self) -> None:
            pass

    with pytest.raises(ContractError, match=r"^draft_vocabulary\(\) begins .* below 16$"):
        VerifyGroup(target(), Provider())
    assert drafter.open_groups == 0


# What both rules must have in common, and what a seed is worth.


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("declares", [None, truly, rawly])
def test_greedy_rows_emit_the_same_under_both_rules(declares: Any, device: bool) -> None:
    drafter = Near(declares=declares, device=device)
    by_rejection = run([SamplingOptions(acceptance="rejection")], drafter, rows=3, tokens=30)
    by_match = run([SamplingOptions()], drafter, rows=3, tokens=30)
    assert (emitted(by_rejection) == emitted(by_match)).all()
    assert [row.stats for row in by_rejection] == [row.stats for row in by_match]
    assert (emitted(by_match) == emitted(run([SamplingOptions()], None, rows=3, tokens=30))).all()


DRAFTERS = {
    "one-hot": Near(),
    "declared": Near(declares=truly),
    "listed": Near(declares=truly, listed=LISTED),
    "wide": Near(declares=truly, size=WIDE),
    "left out": Near(leaves_out=0.1),
}


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_by_rejection_a_seed_gives_one_text_alone_and_in_any_batch(kind: str, device: bool) -> None:
    drafter = evolve(DRAFTERS[kind], device=device)
    options = [PLAIN, FILTERED, evolve(PLAIN, acceptance="match"), SamplingOptions()]
    together = run(options, drafter, rows=40, tokens=14)
    for b, row in enumerate(together[:16]):
        [alone] = run([options[b % 4]], drafter, rows=1, tokens=14, first_seed=b)
        assert alone.emitted == row.emitted
        assert alone.stats == row.stats
    # With drafts on the host and on the device alike.
    other = run(options, evolve(drafter, device=not device), rows=40, tokens=14)
    assert (emitted(other) == emitted(together)).all()


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    yield
    assert all(each.open_groups == 0 for each in (*DRAFTERS.values(), *LIES.values()))
