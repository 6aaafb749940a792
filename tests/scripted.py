"""Drafters that propose what a test wrote down, and the texts that the target writes alone.

The executor hides what a drafter raises, so whatever a scripted drafter finds wrong about a call
goes into ``complaints`` of its provider; a test asserts that there are none.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec import LoadedDrafter, Request, SamplingOptions, VerifyGroup
from specdec.contract import (
    Attachment,
    ContextKind,
    DeviceProposal,
    PrefillMode,
    RowCheckpoint,
    Swap,
    check_keep,
)
from specdec.plugins import LoadedDraft
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from specdec import Row
    from specdec.contract import RowConstraints, RowSampling, TargetView

    Cells = Sequence[Any]
    Plan = Callable[[tuple[int, ...], int, int], Any]
    DevicePlan = Callable[[list[tuple[int, ...]], list[int], list[int]], Any]

__all__ = [
    "RIGHT",
    "WRONG",
    "Ending",
    "Fault",
    "OnDevice",
    "Script",
    "ScriptedProvider",
    "ScriptedRows",
    "Text",
    "drain",
    "ending_of",
    "expected",
    "load_scripted",
    "on_device",
    "request",
    "silent",
    "solo",
    "target",
    "text_of",
    "tiny_tokenizer",
    "words",
]

RIGHT = "right"
WRONG = "wrong"
NAMESPACE = "scripted"


class Fault(RuntimeError):
    """What a scripted drafter raises on purpose."""


# What the target writes alone.


@cache
def target(architecture: str = "qwen3") -> MlxLmTarget:
    """The bound tiny model of an architecture."""
    return MlxLmTarget(tiny_model(architecture))


@cache
def solo(
    prompt: tuple[int, ...],
    temp: float = 0.0,
    seed: int | None = None,
    count: int = 40,
    architecture: str = "qwen3",
) -> tuple[int, ...]:
    """``count`` tokens of the target alone: mlx-lm's if greedy, else our own plain run."""
    if temp == 0:
        model = tiny_model(architecture)
        steps = generate_step(mx.array(prompt), model, max_tokens=count)
        return tuple(token for token, _ in steps)
    group = VerifyGroup(target(architecture))
    asked = request(prompt, temp=temp, seed=seed, max_tokens=count)
    [row] = group.admit([asked])
    drain(group)
    return row.emitted


@frozen
class Ending:
    """How a row must end: content, end token, reason."""

    tokens: tuple[int, ...]
    end_token: int | None
    finish: str


def expected(text: Sequence[int], end_tokens: Collection[int], max_tokens: int) -> Ending:
    """Where plain decoding of ``text`` ends; an end token wins over the budget."""
    limit = max_tokens if max_tokens > 0 else len(text)
    for place, token in enumerate(text[:limit]):
        if token in end_tokens:
            return Ending(tuple(text[:place]), token, "stop")
    assert max_tokens > 0, "the text is too short to say where it ends"
    assert len(text) >= limit, "the text is too short to say where it ends"
    return Ending(tuple(text[:limit]), None, "length")


def ending_of(row: Row) -> Ending:
    """How a row did end."""
    assert row.finish is not None
    return Ending(row.emitted, row.end_token, row.finish)


def request(
    prompt: Sequence[int],
    *,
    temp: float = 0.0,
    seed: int | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    **options: Any,
) -> Request:
    """A request; everything but the sampling is passed on."""
    sampling = SamplingOptions(temp=temp, seed=seed, sampler=sampler)
    return Request(prompt=tuple(prompt), sampling=sampling, **options)


def drain(group: VerifyGroup, after: Callable[[], None] | None = None) -> int:
    """Run a group until it is empty; ``after`` each round. Gives the number of rounds."""
    rounds = 0
    while group.rows:
        with group.round() as done:
            done.deliver_all()
        rounds += 1
        assert rounds < 1000, "the group does not come to an end"
        if after is not None:
            after()
    return rounds


# What a script says.


@frozen
class Text:
    """A prompt and what the target writes after it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = field(repr=False)

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.output


def text_of(prompt: Sequence[int], temp: float = 0.0, seed: int | None = None) -> Text:
    """A prompt with the text of the target alone."""
    return Text(tuple(prompt), solo(tuple(prompt), temp, seed))


def spell(cells: Cells, continuation: Sequence[int]) -> list[Any]:
    """Cells in place: the target's own token, another one, or the cell itself."""
    spelt: list[Any] = []
    for place, cell in enumerate(cells):
        token = continuation[place] if place < len(continuation) else 0
        if cell is RIGHT or cell is WRONG:
            spelt.append((token + (cell is WRONG)) % VOCABULARY)
        else:
            spelt.append(cell)
    return spelt


class Script:
    """Proposes by cells: for each text a list of moves, taken by the number of tokens known.

    A row is recognised by its text, so it keeps its moves wherever it stands in a group.

    Args:
        texts: of all requests.
        moves: one list a text.
        polite: whether a move is cut to what was asked for.
    """

    def __init__(
        self, texts: Sequence[Text], moves: Sequence[Sequence[Any]], *, polite: bool = True
    ) -> None:
        self.texts = list(texts)
        self.moves = [list(each) for each in moves]
        self.polite = polite
        self.complaints: list[str] = []

    @classmethod
    def always(cls, texts: Sequence[Text], move: Any) -> Script:
        """One move in every round of every row."""
        return cls(texts, [[move]] * len(texts))

    def find(self, tokens: tuple[int, ...], step: int) -> int | None:
        for index, text in enumerate(self.texts):
            known = len(tokens) - len(text.prompt)
            if known == step and text.whole[: len(tokens)] == tokens:
                return index
        self.complaints.append(f"no request has the text {tokens} at step {step}")
        return None

    def move(self, tokens: tuple[int, ...], step: int) -> tuple[Any, Sequence[int]]:
        index = self.find(tokens, step)
        if index is None:
            return (), ()
        moves = self.moves[index]
        return moves[len(tokens) % len(moves)], self.texts[index].whole[len(tokens) :]

    def __call__(self, tokens: tuple[int, ...], depth: int, step: int) -> Any:
        cells, continuation = self.move(tokens, step)
        if not isinstance(cells, list | tuple):
            return cells
        spelt = spell(cells, continuation)
        return spelt[:depth] if self.polite else spelt


def silent(_tokens: tuple[int, ...], _depth: int, _step: int) -> list[int]:
    """Proposes nothing."""
    return []


@frozen(eq=False)
class OnDevice:
    """A device proposal: rows of ids, what cuts them, and what ``resolve`` says.

    Attributes:
        rows: B lists of one length.
        lengths: B ints or ``None``.
        resolve: what ``resolve`` returns; the rows, cut, where it is ``None``.
        dtype: of the ids.
    """

    rows: Sequence[Sequence[int]]
    lengths: Sequence[int] | None = None
    resolve: Callable[[list[list[int]]], Any] | None = None
    dtype: mx.Dtype = mx.int32


def on_device(script: Script, *, lengths: bool, dtype: mx.Dtype = mx.int32) -> DevicePlan:
    """A script whose moves are left on the device; ``None`` where a move is ``None``.

    Without ``lengths`` the rows are filled up with wrong ids to one length.
    """

    def plan(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> OnDevice | None:
        moves = [script.move(text, step) for text, step in zip(texts, steps, strict=True)]
        if any(cells is None for cells, _ in moves):
            return None
        spelt = [spell(cells, continuation) for cells, continuation in moves]
        width = min(max(depths), max(map(len, spelt)))
        if width == 0:
            return None
        rows = [
            [*row, *spell([WRONG] * width, continuation)[len(row) :]][:width]
            for row, (_, continuation) in zip(spelt, moves, strict=True)
        ]
        cut = [min(len(row), width) for row in spelt] if lengths else None
        return OnDevice(rows, cut, dtype=dtype)

    return plan


# The drafter.


@define(eq=False)
class ScriptedRow:
    """One draft row: the tokens that it has read, and the hidden states that came with them."""

    tokens: list[int]
    contexts: list[mx.array] = field(factory=list)


@define(eq=False)
class DraftRound:
    """What a drafter was asked and told in one round."""

    group: ScriptedRows
    pending: list[int]
    depths: list[int]
    steps: list[int]
    drafts: list[list[int]]
    on_device: bool = False
    resolved: int = 0
    accepted: list[int] | None = None
    context: mx.array | None = None


class ScriptedRows:
    """A prefill group or a decode group; complains of every call that the contract forbids."""

    def __init__(self, provider: ScriptedProvider, rows: list[ScriptedRow], decodes: bool) -> None:
        self.provider = provider
        self.rows = rows
        self.decodes = decodes
        self.closed = False
        self.round: DraftRound | None = None
        self.tap_layers = provider.taps
        self.context = provider.context
        self.prefill_mode = provider.mode
        self.namespace = NAMESPACE
        self.chunks: list[list[list[int]]] = []

    @property
    def row_count(self) -> int:
        return len(self.rows)

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        self._enter("prepare_append")
        joining = [self.provider.restore(c, self.decodes) for c in checkpoints]

        def join() -> None:
            self.provider.strike("join")
            self.rows = [*self.rows, *joining]

        return Swap(join)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        self._enter("filter_rows")
        check_keep(keep, self.row_count)
        self.rows = [self.rows[k] for k in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        self._enter("capture")
        held = self.rows[row]
        arrays = {"tokens": mx.array(held.tokens, mx.int32)}
        for number, context in enumerate(held.contexts):
            arrays[f"context{number}"] = mx.contiguous(context)
        mx.eval(arrays)
        return RowCheckpoint(
            namespace=NAMESPACE,
            processed_tokens=len(held.tokens),
            attachment=Attachment(schema=NAMESPACE, arrays=arrays),
        )

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        self._enter("prefill")
        if self.decodes:
            self._complain("prefill() of a decode group")
        read: Any = tokens.tolist()
        self._check_context("prefill", context, tokens.shape)
        self.chunks.append(read)
        for index, (row, chunk) in enumerate(zip(self.rows, read, strict=True)):
            row.tokens.extend(chunk)
            if context is not None:
                row.contexts.append(context[index])

    def materialize(self) -> None:
        pass

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[Any]:
        self._enter("draft")
        asked = self._open(pending, depths, steps)
        plan = self.provider.plan
        texts = self._texts(pending)
        proposals = [
            plan(text, depth, step) for text, depth, step in zip(texts, depths, steps, strict=True)
        ]
        asked.drafts = [
            _valid(proposal, depth) for proposal, depth in zip(proposals, depths, strict=True)
        ]
        return proposals

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        asked = self.round
        if asked is None or self.closed:
            self._complain("commit() without a round")
            return
        self.provider.strike("commit")
        if asked.on_device and asked.resolved != 1:
            self._complain(f"resolve() was called {asked.resolved} times before commit()")
        if len(accepted) != self.row_count:
            self._complain(f"commit({list(accepted)}) of {self.row_count} rows")
        width = None if context is None else context.shape[1]
        self._check_context("commit", context, (self.row_count, width))
        for index, (row, count) in enumerate(zip(self.rows, accepted, strict=True)):
            drafts = asked.drafts[index]
            if not 0 <= count <= len(drafts):
                self._complain(f"commit: row {index} keeps {count} of the drafts {drafts}")
            row.tokens.extend([asked.pending[index], *drafts[:count]])
            if context is not None:
                row.contexts.append(context[index, : 1 + count])
        asked.accepted, asked.context = list(accepted), context
        self.round = None

    def close(self) -> None:
        self.closed = True
        self.round = None
        self.provider.strike("close")

    # Inside.

    def _open(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> DraftRound:
        if not self.decodes:
            self._complain("draft() of a prefill group")
        if not len(pending) == len(depths) == len(steps) == self.row_count:
            self._complain(f"draft({pending}, {depths}, {steps}) of {self.row_count} rows")
        nothing: list[list[int]] = [[] for _ in self.rows]
        asked = DraftRound(self, list(pending), list(depths), list(steps), nothing)
        self.round = asked
        self.provider.rounds.append(asked)
        return asked

    def _texts(self, pending: Sequence[int]) -> list[tuple[int, ...]]:
        return [(*row.tokens, token) for row, token in zip(self.rows, pending, strict=True)]

    def _enter(self, verb: str) -> None:
        if self.closed:
            self._complain(f"{verb}() after close()")
        if self.round is not None:
            self._complain(f"{verb}() inside a round")
        self.provider.strike(verb)

    def _check_context(
        self, verb: str, context: mx.array | None, shape: Sequence[int | None]
    ) -> None:
        if (context is None) is not (self.context == ContextKind.NONE):
            self._complain(f"{verb}() of a group that reads {self.context} got {type(context)}")
        elif context is not None and (context.ndim != 3 or context.shape[:2] != tuple(shape)):
            self._complain(f"{verb}() got a context of shape {context.shape} for {tuple(shape)}")

    def _complain(self, what: str) -> None:
        self.provider.complaints.append(what)


class ScriptedDeviceRows(ScriptedRows):
    """Rows that leave their drafts on the device."""

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        self._enter("draft_device")
        assert self.provider.device is not None
        texts = self._texts(pending)
        said = self.provider.device(texts, list(depths), list(steps))
        if said is None or not isinstance(said, OnDevice):
            return said
        asked = self._open(pending, depths, steps)
        asked.on_device = True
        tokens = mx.array([list(row) for row in said.rows], said.dtype)

        def resolve(ids: Sequence[int]) -> Any:
            asked.resolved += 1
            if self.round is not asked:
                self._complain("resolve() outside its round")
            wide = len(said.rows[0])
            read = [list(ids[at : at + wide]) for at in range(0, len(ids), wide)]
            if read != tokens.tolist():
                self._complain(f"resolve() got {read}, but the drafts are {tokens.tolist()}")
            cut = said.lengths or [wide] * len(read)
            kept = [row[: max(0, size)] for row, size in zip(read, cut, strict=True)]
            asked.drafts = [
                _valid(row, depth) for row, depth in zip(kept, asked.depths, strict=True)
            ]
            self.provider.strike("resolve")
            return kept if said.resolve is None else said.resolve(kept)

        lengths = None if said.lengths is None else mx.array(list(said.lengths), mx.int32)
        return DeviceProposal(tokens=tokens, resolve=resolve, lengths=lengths)


class ScriptedProvider:
    """A drafter that follows a plan, and fails where it is told to.

    Args:
        plan: proposals on the host.
        device: proposals on the device, if it makes any: ``OnDevice``, ``None``, or anything else
            for the executor to refuse.
        rows: the class of its groups, where it is not the usual one.
        mode: how it reads prompts.
        context: the hidden states that it reads.
        taps: the layers, for ``ContextKind.TAPS``.
        faults: by verb, the numbers of the calls that raise, first call 1.
    """

    id = NAMESPACE
    weight_bytes = 0
    checkpoint_namespace = NAMESPACE
    supports_adapters = True

    def __init__(
        self,
        plan: Plan = silent,
        *,
        device: DevicePlan | None = None,
        rows: type[ScriptedRows] | None = None,
        mode: PrefillMode = PrefillMode.TAIL_SPLIT,
        context: ContextKind = ContextKind.NONE,
        taps: tuple[int, ...] = (),
        faults: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.kind = rows or (ScriptedRows if device is None else ScriptedDeviceRows)
        self.mode = mode
        self.context = context
        self.taps = taps
        self.faults = dict(faults or {})
        self.calls: Counter[str] = Counter()
        self.complaints: list[str] = plan.complaints if isinstance(plan, Script) else []
        self.rounds: list[DraftRound] = []
        self.groups: list[ScriptedRows] = []
        self.closed = 0

    @property
    def grouped(self) -> ScriptedProvider:
        return self

    def target_tap_layers(self, _target: TargetView, /) -> tuple[int, ...]:
        return self.taps

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> ScriptedRows:
        self.strike("open_prefill")
        return self._group(checkpoints, decodes=False)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> ScriptedRows:
        self.strike("open")
        return self._group(checkpoints, decodes=True)

    def close(self) -> None:
        self.closed += 1
        if any(not group.closed for group in self.groups):
            self.complaints.append("the provider was closed before its groups")

    # For tests.

    @property
    def decoding(self) -> ScriptedRows:
        """The group that decodes now."""
        [group] = [g for g in self.groups if g.decodes and not g.closed]
        return group

    @property
    def left_open(self) -> list[ScriptedRows]:
        """Groups that nobody has closed."""
        return [group for group in self.groups if not group.closed]

    def strike(self, verb: str) -> None:
        """Count a call, and fail if this one should."""
        self.calls[verb] += 1
        if self.calls[verb] in self.faults.get(verb, ()):
            raise Fault(f"{verb} {self.calls[verb]}")

    def restore(self, checkpoint: RowCheckpoint | None, decodes: bool) -> ScriptedRow:
        """A row from a checkpoint."""
        if checkpoint is None:
            if decodes:
                self.complaints.append("a cold row joined a decode group")
            return ScriptedRow([])
        arrays = checkpoint.attachment.arrays
        tokens: Any = arrays["tokens"].tolist()
        if len(tokens) != checkpoint.processed_tokens:
            self.complaints.append("a checkpoint whose tokens are not what was processed")
        contexts = [arrays[f"context{number}"] for number in range(len(arrays) - 1)]
        return ScriptedRow(list(tokens), contexts)

    def _group(self, checkpoints: Iterable[RowCheckpoint | None], decodes: bool) -> ScriptedRows:
        rows = [self.restore(checkpoint, decodes) for checkpoint in checkpoints]
        group = self.kind(self, rows, decodes)
        self.groups.append(group)
        return group


def _valid(proposal: Any, depth: int) -> list[int]:
    """The start of a proposal that a row may count on."""
    valid: list[int] = []
    for item in proposal if isinstance(proposal, list) else []:
        whole = isinstance(item, int) and 0 <= item < VOCABULARY
        if not whole or len(valid) == depth:
            break
        valid.append(item)
    return valid


# What stream_generate needs.


def load_scripted(
    provider: ScriptedProvider, width: int = 4, architecture: str = "qwen3"
) -> LoadedDrafter:
    """A scripted drafter as ``load_drafter`` would return it."""
    loaded = LoadedDraft(provider=provider, num_draft_tokens=width)
    return LoadedDrafter("scripted", loaded, target(architecture))


@cache
def words(begin: str | None = None) -> Any:
    """A Hugging Face tokenizer of the words ``w0`` .. ``w63``, with a beginning token if asked."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options: dict[str, Any] = {}
    if begin is not None:
        special = [(begin, vocabulary[begin])]
        made.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=special)
        options["bos_token"] = begin
    tokenizer: Any = PreTrainedTokenizerFast
    return tokenizer(tokenizer_object=made, **options)


def tiny_tokenizer(*end_tokens: int, begin: str | None = None) -> Any:
    """The words as mlx-lm wraps a tokenizer, for the tiny models."""
    return TokenizerWrapper(words(begin), eos_token_ids=end_tokens)
