"""One timed generation of a group of prompts: by mlx-lm or by specdec, alone or in a batch.

Decoding time starts where all prompts but their last tokens are read, on both sides, so a first
round that emits several tokens is timed as a whole. One prompt goes through ``stream_generate``,
several through ``BatchGenerator``, as users of either library would run them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import mlx_lm
from attrs import define, field, frozen
from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator
from mlx_lm.sample_utils import make_sampler

from specdec.batch import BatchGenerator
from specdec.drafters import bind_target
from specdec.errors import SpecdecError, one_line
from specdec.generation import stream_generate
from specdec.sampling import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from specdec.drafters import LoadedDrafter
    from specdec.verify import GenerationStats

__all__ = ["CHUNK", "Setting", "Turn", "Way"]

CHUNK: Final = 2048
"""Prompt tokens that are read at once."""


@frozen
class Setting:
    """What all ways of a comparison have in common.

    Attributes:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        max_tokens: tokens per prompt.
        sampling: ``temp``, ``top_p``, ``min_p``, ``top_k`` and ``seed``, as far as given.
    """

    model: Any
    tokenizer: Any
    max_tokens: int
    sampling: Mapping[str, Any]

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return not self.sampling.get("temp")

    def mlx_lm_sampler(self) -> Any:
        """The same options as mlx-lm's sampler callable."""
        given = {
            k: self.sampling[k] for k in ("temp", "top_p", "min_p", "top_k") if self.sampling.get(k)
        }
        if given.get("top_k", 0) >= bind_target(self.model).vocab_size:
            del given["top_k"]  # keeps all; mlx-lm refuses it
        return make_sampler(**given)


@frozen
class Turn:
    """What one generation came to.

    Attributes:
        seconds: from where all prompts but their last tokens were read, to the last token.
        counted: tokens that came in these seconds, end tokens included.
        full: the seconds of them in which every row decoded.
        in_full: tokens that came in those.
        first: seconds from the call to the first token.
        tokens: per row all tokens, an end token included.
        peak: bytes of memory at most, the model's weights included.
        stats: specdec's counters, one per row; none of mlx-lm's.
    """

    seconds: float
    counted: int
    full: float
    in_full: int
    first: float
    tokens: tuple[tuple[int, ...], ...]
    peak: int = 0
    stats: tuple[GenerationStats, ...] = ()

    @property
    def speed(self) -> float:
        """Tokens of all rows per second."""
        return self.counted / self.seconds


@define
class _Clock:
    """Notes when prompts are read, tokens come, and rows end.

    Attributes:
        rows: how many there are.
        began: what is called where the decoding time starts.
    """

    rows: int
    began: Callable[[], None] | None = None
    called: float = field(factory=time.perf_counter)
    start: float | None = None
    first: float | None = None
    last: float = 0.0
    counted: int = 0
    full: tuple[float, int] | None = None
    tokens: dict[int, list[int]] = field(factory=dict)

    def read(self) -> None:
        """All prompts but their last tokens are read."""
        self.start = time.perf_counter()
        self.counted = 0
        if self.began is not None:
            self.began()

    def progress(self, done: int, total: int) -> None:
        """As mlx-lm's callback of a single prompt."""
        if done < total:
            self.read()

    def token(self, row: int, token: int, *, ends: bool) -> None:
        """A token came, with which its row ends or not."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.counted += 1
        self.tokens.setdefault(row, []).append(token)
        if ends and self.full is None:
            self.full = (self.last, self.counted)

    def turn(self, peak: int, stats: Sequence[GenerationStats]) -> Turn:
        """What it all came to."""
        start = self.called if self.start is None else self.start
        first = self.last if self.first is None else self.first
        until, in_full = self.full or (self.last, self.counted)
        return Turn(
            seconds=max(self.last - start, 1e-9),
            counted=self.counted,
            full=max(until - start, 1e-9),
            in_full=in_full,
            first=first - self.called,
            tokens=tuple(tuple(self.tokens.get(row, ())) for row in range(self.rows)),
            peak=peak,
            stats=tuple(stats),
        )


@frozen
class Way:
    """A way to generate.

    Attributes:
        drafter: drafts; ``None`` for none.
        width: drafts a round; ``None`` for what specdec chooses.
        mlx_lm: whether mlx-lm decodes plainly, and not specdec.
    """

    drafter: LoadedDrafter | None = None
    width: int | None = None
    mlx_lm: bool = False

    def run(
        self,
        setting: Setting,
        prompts: Sequence[Sequence[int]],
        began: Callable[[], None] | None = None,
    ) -> Turn:
        """Generate for all prompts at once.

        Args:
            setting: model, tokenizer, options.
            prompts: ids, one list per row.
            began: called where the decoding time starts.

        Raises:
            SpecdecError: a row ended with an error; or what the generation raises.
        """
        mx.synchronize()
        mx.reset_peak_memory()
        clock = _Clock(len(prompts), began)
        if len(prompts) == 1:
            stats = self._alone(setting, prompts[0], clock)
        else:
            stats = self._together(setting, prompts, clock)
        return clock.turn(mx.get_peak_memory(), stats)

    def _alone(
        self, setting: Setting, prompt: Sequence[int], clock: _Clock
    ) -> Sequence[GenerationStats]:
        options: dict[str, Any] = {
            "max_tokens": setting.max_tokens,
            "prompt_progress_callback": clock.progress,
        }
        responses: Iterable[Any]
        if self.mlx_lm:
            responses = mlx_lm.stream_generate(
                setting.model,
                setting.tokenizer,
                list(prompt),
                sampler=setting.mlx_lm_sampler(),
                **options,
            )
        else:
            responses = stream_generate(
                setting.model,
                setting.tokenizer,
                list(prompt),
                drafter=self.drafter,
                num_draft_tokens=self.width,
                adaptive=self.width is None,
                **options,
                **setting.sampling,
            )
        stats = None
        for response in responses:
            clock.token(0, response.token, ends=response.finish_reason is not None)
            stats = getattr(response, "stats", None)
        return [] if stats is None else [stats]

    def _together(
        self, setting: Setting, prompts: Sequence[Sequence[int]], clock: _Clock
    ) -> Sequence[GenerationStats]:
        generator = self._generator(setting, prompts)
        try:
            return _drive(generator, prompts, clock)
        finally:
            generator.close()

    def _generator(self, setting: Setting, prompts: Sequence[Sequence[int]]) -> Any:
        options: dict[str, Any] = {
            "max_tokens": setting.max_tokens,
            "stop_tokens": [[token] for token in sorted(setting.tokenizer.eos_token_ids)],
            "completion_batch_size": len(prompts),
            "prefill_batch_size": len(prompts),
            # All prompts are read in one call, so that no row decodes before the last is read.
            "prefill_step_size": max(CHUNK, sum(map(len, prompts))),
        }
        if self.mlx_lm:
            sampler = None if setting.greedy else setting.mlx_lm_sampler()
            return MlxLmBatchGenerator(setting.model, sampler=sampler, **options)
        return BatchGenerator(
            setting.model,
            drafter=self.drafter,
            num_draft_tokens=self.width,
            adaptive=self.width is None,
            sampling=SamplingOptions(**setting.sampling),
            return_prompt_caches=False,
            **options,
        )


def _drive(
    generator: Any, prompts: Sequence[Sequence[int]], clock: _Clock
) -> Sequence[GenerationStats]:
    """Run a batch generator of either library to the end of all rows."""
    uids = generator.insert_segments([_chunks(prompt) for prompt in prompts])
    rows = {uid: row for row, uid in enumerate(uids)}
    unread, going = set(uids), set(uids)
    stats: dict[int, GenerationStats] = {}
    while going:
        told, answers = generator.next()
        for answer in answers:
            if answer.token is None:
                why = getattr(answer, "error", None)
                raise SpecdecError(f"a row ended without a token: {one_line(why)}")
            ends = answer.finish_reason is not None
            clock.token(rows[answer.uid], answer.token, ends=ends)
            if ends:
                going.discard(answer.uid)
                said = getattr(answer, "stats", None)
                if said is not None:
                    stats[rows[answer.uid]] = said
        unread -= {each.uid for each in told if each.progress[0] >= each.progress[1] - 1}
        if not unread and clock.start is None:
            clock.read()
    return [stats[row] for row in sorted(stats)]


def _chunks(prompt: Sequence[int]) -> list[list[int]]:
    return [list(prompt[at : at + CHUNK]) for at in range(0, len(prompt), CHUNK)]
