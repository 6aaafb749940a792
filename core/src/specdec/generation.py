"""``stream_generate`` and ``generate``: mlx-lm's functions, with a drafter."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from attrs import evolve
from mlx_lm.generate import GenerationResponse as _MlxLmResponse
from mlx_lm.generate import generation_stream, wired_limit

from specdec.drafters import (
    LoadedDrafter,
    bind_target,
    check_adapters,
    check_adaptive,
    load_draft_model,
    load_drafter,
)
from specdec.errors import OptionError, UnsupportedOptionError, one_line
from specdec.requests import bind_grammar, check_ids, encode_prompt, wrapped
from specdec.sampling import SamplingOptions
from specdec.state import CacheOptions
from specdec.verify import Request, VerifyGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from specdec.checkpoints import PrefixCache
    from specdec.drafters import Drafter
    from specdec.sampling.processors import LogitsProcessor, WindowProcessor
    from specdec.verify import Emission, GenerationStats, Row, TokenLogprobs

__all__ = ["GenerationResponse", "generate", "stream_generate"]

# Options of mlx-lm that later versions bring, with the value that means "not used".
_NOT_YET: dict[str, tuple[Any, str]] = {
    "input_embeddings": (None, "pass a prompt of tokens"),
}


@dataclass
class GenerationResponse(_MlxLmResponse):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's response, with log-probabilities, and the statistics with the last one.

    Attributes:
        token_logprobs: the token's log-probability and the best alternatives, where they were
            asked for.
        stats: the request's counters; set on the last response alone.
    """

    token_logprobs: TokenLogprobs | None = None
    stats: GenerationStats | None = None


def stream_generate(  # noqa: PLR0917  # mlx-lm's order
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: Any = None,
    stream: Any = generation_stream,
    *,
    drafter: Drafter | LoadedDrafter | None = None,
    num_draft_tokens: int | None = None,
    adaptive: bool | None = None,
    seed: int | None = None,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
    min_tokens_to_keep: int = 1,
    sampler: Callable[[mx.array], mx.array] | None = None,
    acceptance: Literal["match", "rejection"] = "match",
    draft_temp: float | None = None,
    draft_filters: bool = True,
    logits_processors: Sequence[LogitsProcessor | WindowProcessor] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_sequences: Any = None,
    min_tokens: int = 0,
    grammar: Any = None,
    num_forced_tokens: int = 16,
    logprobs: int | None = None,
    prompt_cache: Sequence[Any] | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prefix_cache: PrefixCache | None = None,
    snapshot_at: Sequence[int] = (),
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text; with a drafter in fewer forwards, and with the same tokens.

    Arguments are checked before anything is returned.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        prompt: text or token ids.
        max_tokens: tokens to generate at most; -1 for no limit.
        draft_model: a loaded model of the same tokenizer that drafts, as in mlx-lm; in place of
            ``drafter``.
        stream: the MLX stream to compute on, as in mlx-lm.
        drafter: a kind (``"ngram"``), a drafter's folder, ``"auto"``, a chain (``"ngram,mtp"``), or
            what :func:`specdec.load_drafter` returned; ``None`` decodes plainly through the same
            executor.
        num_draft_tokens: drafts a round, the same in all of them; 0 decodes plainly. Without a
            number as many as pay, by what rounds were measured to cost and drafts to bring.
        adaptive: whether ``num_draft_tokens`` is the most that a round may have rather than a fixed
            number; ``None`` is adaptive where no number is given, neither here nor when the
            drafter was loaded. The tokens are the same either way.
        seed: the request's seed: the same seed gives the same text, with and without a drafter,
            at any width. ``None`` takes a new one.
        temp: temperature; 0 is greedy.
        top_p: nucleus mass to keep; 0 keeps all.
        min_p: share of the top probability to keep; 0 keeps all.
        top_k: tokens to keep; 0 keeps all.
        xtc_probability: how often the most probable tokens are left out (XTC); 0 never.
        xtc_threshold: probability above which all tokens but the least probable are left out.
        xtc_special_tokens: ids that XTC never leaves out.
        min_tokens_to_keep: tokens that ``min_p`` keeps at least.
        sampler: a sampler callable as in mlx-lm, in place of temperature and filters.
        acceptance: ``"match"`` keeps the drafts that the target would have drawn, so the seed's
            text is the same with every drafter; ``"rejection"`` accepts more of them and keeps the
            target's distribution, not its seeded text.
        draft_temp: the temperature that drafts are drawn at, if not ``temp``; 0 for the most
            probable ones. It changes what is drafted, not what is accepted.
        draft_filters: whether drafts are drawn with ``top_p``, ``min_p``, XTC and ``top_k``.
        logits_processors: as in mlx-lm, in order, each shown the right history at every position;
            those of :mod:`specdec.sampling` take a whole window at once.
        stop: texts that end the output; neither they nor what follows is shown.
        stop_sequences: token sequences that end the output; their text is not shown.
        min_tokens: tokens before which neither an end token nor a stop ends the output.
        grammar: a :class:`specdec.grammar.Grammar` that the output obeys, or a callable that makes
            a row's :class:`~specdec.contract.TokenConstraint`.
        num_forced_tokens: the most tokens per round that the grammar itself drafts, where it
            leaves one way to go on; 0 for none.
        logprobs: how many alternatives to report with every token, 0 for its own log-probability
            alone; after processors and grammar, before filters and temperature.
        prompt_cache: mlx-lm's prompt cache. On every way out it covers the prompt and every
            emitted token, the last one too.
        max_kv_size: positions to keep at most, the first four and the last ones, where the model
            makes no caches of its own; as in mlx-lm.
        kv_bits: bits to quantize attention K/V to; ``None`` does not. Caches of sliding windows
            are never quantized.
        kv_group_size: values that share a scale, with ``kv_bits``.
        quantized_kv_start: positions from which on K/V are quantized, with ``kv_bits``.
        prefix_cache: where the beginning of the prompt is looked up, and where this request's rows
            of target and drafter are left for later ones; share one between requests. The text is
            the same with and without it (but for caches whose content depends on where chunks end,
            see docs/targets.md); ``stats.cached_tokens`` says what was not read again.
        snapshot_at: numbers of prompt tokens after which a row is left there too, such as the
            length of a system prompt that other requests share.
        prefill_step_size: prompt tokens per chunk.
        prompt_progress_callback: told of ``(tokens read, tokens)``, as in mlx-lm.
        kwargs: options of mlx-lm that are not supported yet are refused by name.

    Yields:
        One response per token, with mlx-lm's fields. The last one has ``stats``.

    Raises:
        OptionError: an option that makes no sense (also a ``ValueError``).
        UnsupportedOptionError: an option of mlx-lm that is not served yet.
        SpecdecError: the drafter cannot be loaded for this model.
        GroupFailedError: the model failed while generating. What it raises while the prompt is
            read is raised as it is, and so is what the request's own code raises (a sampler, a
            processor, a constraint).
        ConstraintError: the grammar and the processors left no token to draw.
    """
    _refuse(kwargs)
    if draft_model is not None and drafter is not None:
        raise OptionError("draft_model and drafter are both given; leave one of them out")
    tokenizer = wrapped(tokenizer)
    if num_draft_tokens is not None and (
        not isinstance(num_draft_tokens, int) or num_draft_tokens < 0
    ):
        raise OptionError(
            f"num_draft_tokens is {num_draft_tokens!r}; give 1 or more, or 0 to run plain"
        )
    check_adaptive(adaptive)
    for name, function in (
        ("sampler", sampler),
        ("prompt_progress_callback", prompt_progress_callback),
    ):
        if function is not None and not callable(function):
            raise OptionError(f"{name} is {one_line(repr(function))}; give a function")
    if not isinstance(prefill_step_size, int) or prefill_step_size < 1:
        raise OptionError(f"prefill_step_size is {prefill_step_size!r}; give 1 or more")
    sampling = SamplingOptions(
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        xtc_special_tokens=xtc_special_tokens,
        min_tokens_to_keep=min_tokens_to_keep,
        seed=seed,
        sampler=sampler,
        acceptance=acceptance,
        draft_temp=draft_temp,
        draft_filters=draft_filters,
    )
    tokens = encode_prompt(prompt, tokenizer)
    request = Request(
        prompt=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        end_tokens=frozenset(tokenizer.eos_token_ids),
        min_tokens=min_tokens,
        stop_sequences=stop_sequences,
        stop_strings=stop,
        tokenizer=tokenizer,
        processors=logits_processors,
        num_forced_tokens=num_forced_tokens,
        logprobs=logprobs,
        cache=prompt_cache,
        cache_options=CacheOptions(
            max_kv_size=max_kv_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
        ),
        prefix_cache=prefix_cache,
        snapshot_at=snapshot_at,
        progress=prompt_progress_callback,
    )
    loaded, reason = _drafter(drafter, draft_model, model, tokenizer, num_draft_tokens)
    try:
        target = bind_target(model, tokenizer) if loaded is None else loaded.target
        check_ids(tokens, target)
        if prompt_cache is not None:
            target.state_of(prompt_cache, request.cache_options)
        else:
            target.new_state(request.cache_options)
        width, paced = (0, False) if loaded is None else loaded.drafts(num_draft_tokens, adaptive)
        constraint = bind_grammar(grammar, tokenizer, target, request.end_tokens)
        request = evolve(request, num_draft_tokens=width, adaptive=paced, constraint=constraint)
        group = VerifyGroup(
            target,
            loaded.provider if loaded is not None else None,
            drafter=loaded.kind if loaded is not None else None,
            reason=reason,
            prefill_step_size=prefill_step_size,
            stream=stream,
            pace=loaded.pace() if loaded is not None and paced else None,
        )
    except BaseException:
        if loaded is not None and loaded is not drafter:
            loaded.close()
        raise
    own = loaded if loaded is not None and loaded is not drafter else None
    responses = _responses(model, group, request, own=own, stream=stream)
    if own is not None:
        # Its own ``finally`` never comes if it is never started.
        weakref.finalize(responses, own.close).atexit = False
    return responses


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generate a whole text; arguments and errors as in :func:`stream_generate`.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        prompt: text or token ids.
        verbose: print the text while it comes, and a summary, as mlx-lm does.
        kwargs: the other options of :func:`stream_generate`.

    Returns:
        The text.
    """
    parts: list[str] = []
    last: GenerationResponse | None = None
    rule = "=" * 10
    if verbose:
        print(rule)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        parts.append(response.text)
        last = response
    if verbose and last is not None:
        print(f"\n{rule}")
        if not any(parts):
            print("No text generated for this prompt")
            return ""
        print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec"
        )
        print(f"Peak memory: {last.peak_memory:.3f} GB")
    return "".join(parts)


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _NOT_YET:
            raise TypeError(f"stream_generate() got an unexpected keyword argument '{name}'")
        unused, hint = _NOT_YET[name]
        if value is not unused:
            raise UnsupportedOptionError(name, hint)


def _drafter(
    drafter: Drafter | LoadedDrafter | None,
    draft_model: Any,
    model: Any,
    tokenizer: Any,
    num_draft_tokens: int | None,
) -> tuple[LoadedDrafter | None, str | None]:
    """The drafter to use, or why there is none."""
    if drafter is None and draft_model is None:
        return None, "no drafter was asked for"
    if num_draft_tokens == 0:
        return None, "num_draft_tokens is 0"
    if isinstance(drafter, LoadedDrafter):
        if drafter.target.identity is not model:
            raise OptionError(
                f"drafter {drafter.kind} was loaded for another model; "
                "call load_drafter(..., model) for this one"
            )
        check_adapters(drafter.provider, drafter.kind, drafter.target)
        return drafter, None
    width = num_draft_tokens
    if drafter is None:
        return load_draft_model(draft_model, model, tokenizer, num_draft_tokens=width), None
    return load_drafter(drafter, model, tokenizer, num_draft_tokens=width), None


class _Timer:
    """Tokens and seconds, as mlx-lm counts them: the prompt's end with the first token."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.prompt_tps = 0.0
        self.count = 0
        self._since = time.perf_counter()

    def prompt_read(self) -> None:
        """The first token is there."""
        now = time.perf_counter()
        self.prompt_tps = self.prompt_tokens / (now - self._since)
        self._since = now

    @property
    def tps(self) -> float:
        return self.count / (time.perf_counter() - self._since)


def _responses(
    model: Any, group: VerifyGroup, request: Request, *, own: LoadedDrafter | None, stream: Any
) -> Generator[GenerationResponse, None, None]:
    total = len(request.prompt)
    # Whoever closes the generator between two tokens is to find the caches at the one before.
    ahead = request.cache is None and request.prefix_cache is None
    try:
        with wired_limit(model, [stream]):
            timer = _Timer(total)
            last: Emission | None = None
            try:
                [row] = group.admit([request])
                while row.finish is None:
                    with group.round(ahead=ahead) as verified:
                        for emission in verified.deliver(0):
                            timer.count += 1
                            if timer.count == 1:
                                timer.prompt_read()
                                if request.progress is not None:
                                    request.progress(total, total)
                            if emission.finish is not None:
                                last = emission
                                continue
                            yield _response(emission, timer)
            finally:
                group.close()
            if row.error is not None:
                raise row.error
            if last is not None:
                yield _response(last, timer, row)
    finally:
        if own is not None:
            own.close()


def _response(emission: Emission, timer: _Timer, row: Row | None = None) -> GenerationResponse:
    return GenerationResponse(
        text=emission.text,
        token=emission.token,
        logprobs=emission.logprobs,
        from_draft=emission.from_draft,
        prompt_tokens=timer.prompt_tokens,
        prompt_tps=timer.prompt_tps,
        generation_tokens=timer.count,
        generation_tps=timer.tps,
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=None if row is None else emission.finish,
        token_logprobs=emission.token_logprobs,
        stats=None if row is None else row.stats,
    )
