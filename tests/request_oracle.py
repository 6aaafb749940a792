"""What a request must give: a plain loop over mlx-lm's model, one token a forward.

Nothing of the executor runs here. Logits are those of mlx-lm's model over its own caches, penalties
and filters are mlx-lm's, a grammar is asked for one position at a time, stop strings are looked for
in the whole decoded text, and a seeded draw is written out: ``argmax(scores / T + noise)``.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from attrs import evolve, field, frozen
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper, _byte_decoder
from scripted import RIGHT, WRONG, Script, ScriptedProvider, Text, drain, on_device, target
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import Request, SamplingOptions, VerifyGroup, load_drafter
from specdec.contract import ContextKind, PrefillMode
from specdec.sampling import gumbel, make_logits_processors
from specdec.sampling.noise import seed_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec import Row
    from specdec.contract import DraftProvider
    from specdec.grammar import Grammar

__all__ = [
    "DRAFTERS",
    "JSON_PIECES",
    "WIDTH",
    "Asked",
    "Told",
    "alone",
    "at_once",
    "beyond",
    "bytes_tokenizer",
    "drafter",
    "json_tokenizer",
    "ngram",
    "plain_loop",
    "ran",
    "told_of",
]

# Tokenizers of as many ids as the tiny models have.

_LETTERS: dict[int, str] = {byte: char for char, byte in _byte_decoder().items()}

JSON_PIECES: tuple[str, ...] = (
    *'0123456789{}:",[]-.',
    *"abcdefghijklmnopqrstuvwxyz",
    *('":', '",', "ab", "cd", "ef", "gh", "12", "34", "56", "me", "ge", "zz", '{"', "_", "<", ">"),
    *("+", "*", "<end>"),
)


def bytes_tokenizer(pieces: Sequence[bytes], *ends: int, eos: str | None = None) -> Any:
    """A byte-level tokenizer whose ids stand for these bytes, as mlx-lm wraps it."""
    vocabulary = {"".join(_LETTERS[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    plain = fast(tokenizer_object=made, eos_token=eos)
    return TokenizerWrapper(plain, BPEStreamingDetokenizer, eos_token_ids=ends)


@cache
def json_tokenizer(*ends: int) -> Any:
    """Digits, letters and what JSON is written with; some ids have two letters."""
    assert len(JSON_PIECES) == VOCABULARY
    return bytes_tokenizer([piece.encode() for piece in JSON_PIECES], *ends, eos="<end>")


def at_once(tokenizer: Any, tokens: Sequence[int]) -> str:
    """mlx-lm's one-shot text: its detokenizer, fed everything."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


# What is asked.


@frozen
class Asked:
    """One request.

    Attributes:
        penalties: arguments of ``make_logits_processors``, mlx-lm's or ours.
        extra: gives fresh processors for each run, behind the penalties.
    """

    prompt: tuple[int, ...]
    temp: float = 0.0
    seed: int | None = None
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    penalties: Mapping[str, Any] = field(factory=dict, hash=False)
    extra: Callable[[], Sequence[Any]] = tuple
    max_tokens: int = 20
    end_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    tokenizer: Any = field(factory=json_tokenizer, hash=False)

    def constraint(self) -> Any:
        """What binds the grammar: a callable that gives a fresh matcher, or ``None``."""
        if self.grammar is None:
            return None
        return _bound(self.grammar, self.tokenizer, tuple(sorted(self.end_tokens)))

    def request(self, by: Literal["ours", "mlx-lm"] = "ours", **options: Any) -> Request:
        """The request of the executor, with processors of ours or of mlx-lm's."""
        make = make_logits_processors if by == "ours" else mlx_lm_processors
        given: dict[str, Any] = {
            "sampling": SamplingOptions(
                temp=self.temp,
                seed=self.seed,
                top_p=self.top_p,
                min_p=self.min_p,
                top_k=self.top_k,
            ),
            "max_tokens": self.max_tokens,
            "end_tokens": self.end_tokens,
            "min_tokens": self.min_tokens,
            "stop_strings": self.stop_strings,
            "stop_sequences": self.stop_sequences,
            "tokenizer": self.tokenizer,
            "processors": [*make(**self.penalties), *self.extra()],
            "constraint": self.constraint(),
        }
        return Request(prompt=self.prompt, **{**given, **options})


@cache
def _bound(grammar: Grammar, tokenizer: Any, ends: tuple[int, ...]) -> Any:
    return grammar.bind(tokenizer, VOCABULARY, ends)


# What must come.


@frozen
class Told:
    """What a request gave.

    Attributes:
        logprobs: ``[V]`` for each token, an end token included; not compared.
    """

    tokens: tuple[int, ...]
    end_token: int | None
    finish: str
    text: str
    logprobs: tuple[mx.array, ...] = field(default=(), eq=False, repr=False)


def told_of(row: Row) -> Told:
    """What a row of the executor gave."""
    assert row.finish is not None
    return Told(row.emitted, row.end_token, row.finish, row.text)


@cache
def alone(asked: Asked) -> Told:
    """What the tiny model alone gives."""
    return plain_loop(asked, tiny_model("qwen3"))


def plain_loop(asked: Asked, model: Any) -> Told:
    """What a model alone gives."""
    caches = make_prompt_cache(model)
    if len(asked.prompt) > 1:
        model(mx.array([asked.prompt[:-1]]), cache=caches)
    processors = [*mlx_lm_processors(**asked.penalties), *asked.extra()]
    bound = asked.constraint()
    matcher = None if bound is None else bound()
    tokens: list[int] = []
    logprobs: list[mx.array] = []

    def told(finish: str, text: str, end_token: int | None = None) -> Told:
        return Told(tuple(tokens), end_token, finish, text, tuple(logprobs))

    while True:
        history = mx.array([*asked.prompt, *tokens])
        logits = model(history[None, -1:], cache=caches)[:, -1, :]
        for processor in processors:
            logits = processor(history, logits)
        if len(tokens) < asked.min_tokens and asked.end_tokens:
            logits[:, mx.array(sorted(asked.end_tokens))] = -mx.inf
        if matcher is not None:
            allowed, _ = matcher.masks(())
            logits = logits if allowed is None else mx.where(allowed, logits, -mx.inf)
        scores = logits - mx.logsumexp(logits, keepdims=True)
        logprobs.append(scores[0])
        token = _drawn(asked, scores, len(tokens))
        if token in asked.end_tokens:
            return told("stop", at_once(asked.tokenizer, tokens), token)
        tokens.append(token)
        complete = matcher is not None and matcher.advance(token)
        text = _stopped(asked, tokens)
        if text is not None or complete:
            return told("stop", at_once(asked.tokenizer, tokens) if text is None else text)
        if len(tokens) == asked.max_tokens:
            return told("length", at_once(asked.tokenizer, tokens))


@cache
def beyond(asked: Asked, told: Told, count: int = 8) -> tuple[int, ...]:
    """What a drafter may believe: the tokens, the end token, and what would follow in a free run.

    Only with ends that nothing else depends on: a finished grammar has nothing behind it.
    """
    tokens = told.tokens if told.end_token is None else (*told.tokens, told.end_token)
    free = alone(
        evolve(
            asked,
            end_tokens=frozenset(),
            stop_strings=(),
            stop_sequences=(),
            min_tokens=0,
            grammar=None,
            max_tokens=len(tokens) + count,
        )
    )
    return (*tokens, *free.tokens[len(tokens) :])


def _drawn(asked: Asked, logprobs: mx.array, step: int) -> int:
    """One draw, from first principles."""
    if asked.temp == 0:
        best: Any = mx.argmax(logprobs, axis=-1).item()
        return int(best)
    for apply, amount in (
        (partial(apply_top_p, top_p=asked.top_p), 0 < asked.top_p < 1),
        (partial(apply_min_p, min_p=asked.min_p), asked.min_p > 0),
        (partial(apply_top_k, top_k=asked.top_k), asked.top_k > 0),
    ):
        if amount:
            logprobs = apply(logprobs)
    assert asked.seed is not None
    noise = gumbel(
        mx.array([seed_words(asked.seed)], mx.uint32),
        mx.array([[step]], mx.uint32),
        mx.arange(logprobs.shape[-1], dtype=mx.uint32),
    )
    scores = logprobs.astype(mx.float32) * (1.0 / asked.temp) + noise[:, 0]
    drawn: Any = mx.argmax(scores, axis=-1).item()
    return int(drawn)


def _stopped(asked: Asked, tokens: list[int]) -> str | None:
    """The text of a row that a stop sequence or a stop string ends here; else ``None``."""
    if len(tokens) < asked.min_tokens:
        return None
    cuts = []
    if asked.stop_strings:
        text, before = (
            at_once(asked.tokenizer, ids).rstrip("\ufffd") for ids in (tokens, tokens[:-1])
        )
        cuts += [
            text[:start]
            for string in asked.stop_strings
            for start in range(len(text))
            if text.startswith(string, start) and start + len(string) > len(before)
        ]
    cuts += [
        at_once(asked.tokenizer, tokens[: -len(sequence)])
        for sequence in asked.stop_sequences
        if tuple(tokens[-len(sequence) :]) == sequence
    ]
    return min(cuts, key=len, default=None)


# Drafters that know what the rows must give.

DRAFTERS = ("plain", "n-gram", "right", "wrong", "mixed", "mute", "device", "full prefill")
WIDTH = 4
_MIXED: list[Any] = [[RIGHT, RIGHT, WRONG], [RIGHT] * WIDTH, [WRONG], [], [RIGHT]]
_MOVES: dict[str, list[Any]] = {
    "right": [[RIGHT] * WIDTH],
    "wrong": [[WRONG] * WIDTH],
    "mixed": _MIXED,
    "mute": [[]],
    "device": _MIXED[:-2],
    "full prefill": _MIXED,
}


@cache
def ngram() -> DraftProvider:
    """The n-gram drafter where it drafts as often as it can."""
    return load_drafter("ngram", tiny_model("qwen3"), min_ngram=1, num_draft_tokens=4).provider


def drafter(kind: str, *rows: tuple[Asked, Told]) -> DraftProvider | None:
    """A drafter of one of ``DRAFTERS`` for these rows."""
    if kind == "plain":
        return None
    if kind == "n-gram":
        return ngram()
    texts = [Text(asked.prompt, beyond(asked, told)) for asked, told in rows]
    script = Script(texts, [_MOVES[kind]] * len(texts))
    options: dict[str, Any] = {}
    if kind == "device":
        options = {"device": on_device(script, lengths=True)}
    elif kind == "full prefill":
        options = {"mode": PrefillMode.FULL, "context": ContextKind.PRE_NORM}
    return ScriptedProvider(script, **options)


def ran(provider: DraftProvider | None, *requests: Request) -> list[Row]:
    """The requests' rows, run in one group."""
    group = VerifyGroup(target(), provider)
    rows = group.admit(list(requests))
    drain(group)
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []
    return rows
