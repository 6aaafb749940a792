"""Timing drafters fairly: every prompt through every run in turn, compared pair by pair.

Decoding time starts where the prompt but its last token is read, in mlx-lm as here, so a first
round that emits several tokens is timed as a whole. Machines drift, so a prompt's runs follow each
other in rotating order, and ratios are taken per prompt before the median is.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import mlx_lm
from attrs import define, field

from specdec.chained import members_of
from specdec.drafters import bind_target, load_drafter
from specdec.generation import stream_generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specdec.drafters import LoadedDrafter
    from specdec.verify import GenerationStats

__all__ = ["Result", "compare", "options_for"]


@define
class Result:
    """One run over all prompts.

    Attributes:
        name: ``mlx-lm``, ``plain``, or a drafter.
        width: the most drafts a round; ``None`` without a drafter.
        seconds: decoding seconds per prompt.
        tokens: tokens per prompt, an end token included.
        ratios: decoding speed over mlx-lm's, per prompt.
        same: prompts whose tokens equal the reference's: mlx-lm's where greedy, else plain
            decoding's at the same seed; ``None`` for the reference and where there is none.
        differing: prompts whose tokens differ.
    """

    name: str
    width: int | None
    seconds: list[float] = field(factory=list)
    tokens: list[list[int]] = field(factory=list)
    ratios: list[float] = field(factory=list)
    same: int | None = None
    differing: int = 0
    stats: list[GenerationStats] = field(factory=list)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all decoding seconds."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of ``ratios``."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of ``ratios``."""
        if len(self.ratios) < 2:
            return (self.ratio, self.ratio)
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return (low, high)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per target forward over all prompts."""
        forwards = sum(s.target_forwards for s in self.stats)
        return sum(s.emitted for s in self.stats) / forwards if forwards else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of all drafts, or ``None`` where nothing was drafted."""
        drafted = sum(s.drafted for s in self.stats)
        return sum(s.accepted for s in self.stats) / drafted if drafted else None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "name": self.name,
            "width": self.width,
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "quartiles": list(self.quartiles),
            "ratios": self.ratios,
            "tokens_per_forward": self.tokens_per_forward,
            "acceptance_rate": self.acceptance_rate,
            "same": self.same,
            "differing": self.differing,
        }


@define
class _Clock:
    """Starts when the prompt, but its last token, has been read."""

    start: float = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done < total:
            self.start = time.perf_counter()


def compare(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    drafters: Sequence[str],
    widths: Sequence[int | None] = (None,),
    options: Mapping[str, Any] | None = None,
    max_tokens: int = 64,
    sampling: Mapping[str, Any] | None = None,
    show_progress: bool = False,
) -> list[Result]:
    """Time mlx-lm, plain decoding, and each drafter at each width, on every prompt.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        prompts: texts.
        drafters: kinds, folders, ``"auto"`` or chains (``"ngram,mtp"``).
        widths: drafts a round; ``None`` is each drafter's own number.
        options: settings of the drafters' kinds; see :func:`options_for`.
        max_tokens: tokens per prompt.
        sampling: keywords of :func:`specdec.stream_generate`; greedy by default.
        show_progress: whether to draw a progress bar on standard error.

    Returns:
        mlx-lm's result first, then plain decoding's, then the drafters'.

    Raises:
        SpecdecError: a drafter cannot be loaded for this model.
    """
    request = {**(sampling or {}), "max_tokens": max_tokens}
    greedy = not request.get("temp")
    results = [Result("mlx-lm", None), Result("plain", None)]
    loaded: list[LoadedDrafter | None] = [None, None]
    try:
        for name in drafters:
            own = options_for(name, drafters, options or {})
            # A chain's members are as wide as they were loaded, whatever a request asks for.
            number = _widest(widths) if members_of(name) else None
            drafter = load_drafter(name, model, tokenizer, num_draft_tokens=number, **own)
            for width in widths:
                results.append(Result(name, drafter.width(width)))
                loaded.append(drafter)
        for turn, prompt in enumerate(_tracked(["", *prompts], show_progress)):
            # The first turn warms every run up; it repeats the first prompt and is thrown away.
            text = prompt if turn else prompts[0]
            for i in range(len(results)):
                index = (i + turn) % len(results)
                measured = _run(
                    model,
                    tokenizer,
                    text,
                    result=results[index],
                    drafter=loaded[index],
                    request=request,
                )
                if turn:
                    _keep(results[index], *measured)
    finally:
        for each in {id(d): d for d in loaded if d is not None}.values():
            each.close()
    _judge(results, 0 if greedy else 1)
    return results


def options_for(name: str, drafters: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are one drafter's.

    Where there are chains and others, options with a member's name in front (``ngram.max_ngram``)
    are the chains', and those without the others'. Else every drafter gets all of them, so that
    none is passed over silently.

    Args:
        name: the drafter.
        drafters: all of them.
        options: all settings.
    """
    in_chain = members_of(name) is not None
    if all((members_of(each) is not None) == in_chain for each in drafters):
        return dict(options)
    return {key: value for key, value in options.items() if ("." in key) == in_chain}


def _widest(widths: Sequence[int | None]) -> int | None:
    """The largest number; none where a drafter's own is wanted as well."""
    numbers = [width for width in widths if width is not None]
    return max(numbers, default=None) if len(numbers) == len(widths) else None


def _run(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    result: Result,
    drafter: LoadedDrafter | None,
    request: Mapping[str, Any],
) -> tuple[float, list[int], GenerationStats | None]:
    clock = _Clock()
    generate: Callable[..., Iterator[Any]]
    if result.name == "mlx-lm" and drafter is None:
        from mlx_lm.sample_utils import make_sampler

        keys = ("temp", "top_p", "min_p", "top_k")
        given = {k: request[k] for k in keys if request.get(k)}
        if given.get("top_k", 0) >= bind_target(model).vocab_size:
            del given["top_k"]  # keeps all; mlx-lm refuses it
        sampler = make_sampler(**given)
        responses = mlx_lm.stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=request["max_tokens"],
            sampler=sampler,
            prompt_progress_callback=clock,
        )
    else:
        generate = stream_generate
        responses = generate(
            model,
            tokenizer,
            prompt,
            drafter=drafter,
            num_draft_tokens=result.width,
            prompt_progress_callback=clock,
            **request,
        )
    last, tokens = None, []
    for response in responses:
        tokens.append(response.token)
        last = response
    return time.perf_counter() - clock.start, tokens, getattr(last, "stats", None)


def _keep(result: Result, seconds: float, tokens: list[int], stats: GenerationStats | None) -> None:
    result.seconds.append(seconds)
    result.tokens.append(tokens)
    if stats is not None:
        result.stats.append(stats)


def _judge(results: Sequence[Result], reference: int) -> None:
    """Ratios to mlx-lm, and whether the tokens are the reference's."""
    base = results[0]
    for index, result in enumerate(results):
        result.ratios = [
            (len(ours) / s) / (len(theirs) / t)
            for ours, s, theirs, t in zip(
                result.tokens, result.seconds, base.tokens, base.seconds, strict=True
            )
        ]
        if index > reference:
            pairs = zip(result.tokens, results[reference].tokens, strict=True)
            equal = [ours == theirs for ours, theirs in pairs]
            result.same, result.differing = sum(equal), len(equal) - sum(equal)


def _tracked(prompts: Sequence[str], show: bool) -> Iterator[str]:
    if not show:
        yield from prompts
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.stderr)
    yield from track(prompts, description="prompts", console=console, transient=True)
