"""``stream_generate`` and ``generate``: mlx-lm's functions, with a drafter."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from attrs import evolve
from mlx_lm.generate import GenerationResponse as _MlxLmResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec.drafters import LoadedDrafter, bind_target, load_drafter
from specdec.errors import OptionError, UnsupportedOptionError, one_line
from specdec.sampling import SamplingOptions
from specdec.verify import Request, VerifyGroup

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Sequence
    from typing import SupportsIndex

    from specdec.checkpoints import PrefixCache
    from specdec.targets import Target
    from specdec.verify import Emission, GenerationStats, Row

__all__ = ["GenerationResponse", "generate", "stream_generate"]

# Options of mlx-lm that later versions bring, with the value that means "not used".
_NOT_YET: dict[str, tuple[Any, str]] = {
    "draft_model": (None, "pass drafter= instead"),
    "logits_processors": (None, "generate without processors, or use mlx_lm.stream_generate"),
    "max_kv_size": (None, "generate without a limit, or use mlx_lm.stream_generate"),
    "kv_bits": (None, "generate without a quantized cache, or use mlx_lm.stream_generate"),
    "input_embeddings": (None, "pass a prompt of tokens"),
}
# They only say how kv_bits is applied.
_WITHOUT_EFFECT = ("kv_group_size", "quantized_kv_start")


@dataclass
class GenerationResponse(_MlxLmResponse):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's response, and the statistics with the last one.

    Attributes:
        stats: the request's counters; set on the last response alone.
    """

    stats: GenerationStats | None = None


def stream_generate(  # noqa: PLR0917  # mlx-lm's order
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: Any = None,
    stream: Any = generation_stream,
    *,
    drafter: str | os.PathLike[str] | LoadedDrafter | None = None,
    num_draft_tokens: int | None = None,
    seed: int | None = None,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    sampler: Callable[[mx.array], mx.array] | None = None,
    prompt_cache: Sequence[Any] | None = None,
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
        draft_model: not supported yet; pass ``drafter``.
        stream: the MLX stream to compute on, as in mlx-lm.
        drafter: a kind (``"ngram"``), a drafter's folder, or what :func:`specdec.load_drafter`
            returned; ``None`` decodes plainly through the same executor.
        num_draft_tokens: the most drafts a round; 0 decodes plainly.
        seed: the request's seed: the same seed gives the same text, with and without a drafter,
            at any width. ``None`` takes a new one.
        temp: temperature; 0 is greedy.
        top_p: nucleus mass to keep; 0 keeps all.
        min_p: share of the top probability to keep; 0 keeps all.
        top_k: tokens to keep; 0 keeps all.
        sampler: a sampler callable as in mlx-lm, in place of the four above.
        prompt_cache: mlx-lm's prompt cache. On every way out it covers the prompt and every
            emitted token, the last one too.
        prefix_cache: where the beginning of the prompt is looked up, and where this request's rows
            of target and drafter are left for later ones; share one between requests. The text is
            the same with and without it, ``stats.cached_tokens`` says what was not read again.
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
        GroupFailedError: the model failed while generating.
    """
    _refuse({**kwargs, "draft_model": draft_model})
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if num_draft_tokens is not None and (
        not isinstance(num_draft_tokens, int) or num_draft_tokens < 0
    ):
        raise OptionError(
            f"num_draft_tokens is {num_draft_tokens!r}; give 1 or more, or 0 to run plain"
        )
    for name, function in (
        ("sampler", sampler),
        ("prompt_progress_callback", prompt_progress_callback),
    ):
        if function is not None and not callable(function):
            raise OptionError(f"{name} is {one_line(repr(function))}; give a function")
    if not isinstance(prefill_step_size, int) or prefill_step_size < 1:
        raise OptionError(f"prefill_step_size is {prefill_step_size!r}; give 1 or more")
    sampling = SamplingOptions(
        temp=temp, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed, sampler=sampler
    )
    tokens = _encode(prompt, tokenizer)
    request = Request(
        prompt=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        end_tokens=frozenset(tokenizer.eos_token_ids),
        cache=prompt_cache,
        prefix_cache=prefix_cache,
        snapshot_at=snapshot_at,
        progress=prompt_progress_callback,
    )
    loaded, reason = _drafter(drafter, model, tokenizer, num_draft_tokens)
    try:
        target = bind_target(model, tokenizer) if loaded is None else loaded.target
        _check_prompt(tokens, target)
        if prompt_cache is not None:
            target.state_of(prompt_cache)
        width = 0 if loaded is None else loaded.width(num_draft_tokens)
        request = evolve(request, num_draft_tokens=width)
        group = VerifyGroup(
            target,
            loaded.provider if loaded is not None else None,
            drafter=loaded.kind if loaded is not None else None,
            reason=reason,
            prefill_step_size=prefill_step_size,
            stream=stream,
        )
    except BaseException:
        if loaded is not None and loaded is not drafter:
            loaded.close()
        raise
    own = loaded if loaded is not None and loaded is not drafter else None
    responses = _responses(model, tokenizer, group, request, own=own, stream=stream)
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
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_YET:
            raise TypeError(f"stream_generate() got an unexpected keyword argument '{name}'")
        unused, hint = _NOT_YET[name]
        if value is not unused and not (name == "logits_processors" and not value):
            raise UnsupportedOptionError(name, hint)


def _encode(prompt: str | mx.array | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        # As mlx-lm: a template that starts with the beginning token brings it itself.
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return tuple(tokenizer.encode(prompt, add_special_tokens=special))
    ids = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    if not isinstance(ids, Iterable):
        raise OptionError(f"the prompt is {one_line(repr(prompt))}; give text or token ids")
    return tuple(map(_id, ids))


def _id(value: object) -> int:
    """A token id as an int, whatever kind of whole number it is."""
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise OptionError(
            f"the prompt has {one_line(repr(value))}; token ids are whole numbers"
        ) from None


def _check_prompt(tokens: Sequence[int], target: Target) -> None:
    for token in tokens:
        if not 0 <= token < target.vocab_size:
            raise OptionError(
                f"the prompt has {token}; this model's ids are 0 to {target.vocab_size - 1}"
            )


def _drafter(
    drafter: str | os.PathLike[str] | LoadedDrafter | None,
    model: Any,
    tokenizer: Any,
    num_draft_tokens: int | None,
) -> tuple[LoadedDrafter | None, str | None]:
    """The drafter to use, or why there is none."""
    if drafter is None:
        return None, "no drafter was asked for"
    if num_draft_tokens == 0:
        return None, "num_draft_tokens is 0"
    if isinstance(drafter, LoadedDrafter):
        if drafter.target.identity is not model:
            raise OptionError(
                f"drafter {drafter.kind} was loaded for another model; "
                "call load_drafter(..., model) for this one"
            )
        return drafter, None
    return load_drafter(drafter, model, tokenizer, num_draft_tokens=num_draft_tokens), None


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
    model: Any,
    tokenizer: Any,
    group: VerifyGroup,
    request: Request,
    *,
    own: LoadedDrafter | None,
    stream: Any,
) -> Generator[GenerationResponse, None, None]:
    detokenizer = tokenizer.detokenizer
    total = len(request.prompt)
    try:
        with wired_limit(model, [stream]):
            timer = _Timer(total)
            last: Emission | None = None
            try:
                [row] = group.admit([request])
                while row.finish is None:
                    with group.round() as verified:
                        for emission in verified.deliver(0):
                            timer.count += 1
                            if timer.count == 1:
                                timer.prompt_read()
                                if request.progress is not None:
                                    request.progress(total, total)
                            if emission.content:
                                detokenizer.add_token(emission.token)
                            if emission.finish is not None:
                                last = emission
                                continue
                            yield _response(detokenizer.last_segment, emission, timer)
            finally:
                group.close()
            if row.error is not None:
                raise row.error
            if last is not None:
                detokenizer.finalize()
                yield _response(detokenizer.last_segment, last, timer, row)
    finally:
        if own is not None:
            own.close()


def _response(
    text: str, emission: Emission, timer: _Timer, row: Row | None = None
) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=emission.token,
        logprobs=emission.logprobs,
        from_draft=emission.from_draft,
        prompt_tokens=timer.prompt_tokens,
        prompt_tps=timer.prompt_tps,
        generation_tokens=timer.count,
        generation_tps=timer.tps,
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=None if row is None else emission.finish,
        stats=None if row is None else row.stats,
    )
