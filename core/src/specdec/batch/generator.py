"""``BatchGenerator``: mlx-lm's, with a drafter.

One call of ``next`` is one round of the rows that decode and one budget of prompt tokens. Drafts,
seed, acceptance rule, processors and grammar are each row's own matter, so all share one group;
only rows that cannot be rolled back decode apart.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.utils import maybe_set_recommended_wired_limit

from specdec.batch.counters import BatchStats, Moment
from specdec.batch.engine import Engine, load
from specdec.batch.options import OF_MLX_LM, PromptOptions, listed
from specdec.batch.settings import Settings
from specdec.drafters import bind_target
from specdec.errors import ClosedError, RoundOpenError
from specdec.state import CacheOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Unpack

    from specdec.batch.responses import BatchResponse, PromptResponse
    from specdec.checkpoints import PrefixCache
    from specdec.drafters import Drafter, LoadedDrafter
    from specdec.sampling import SamplingOptions

__all__ = ["BatchGenerator"]


class BatchGenerator:
    """Generates for many requests at once, which come and go while others decode.

    Takes the place of ``mlx_lm.generate.BatchGenerator``: same calls, same fields. What a request
    gets is what it would get alone. Requests begin in the order of ``insert``: one that does not
    fit yet waits, and those behind it too. If the model fails, every request keeps its tokens and
    is read again; the cause of it ends alone.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second; needed for text, stop strings and grammars.
        drafter: a kind, a folder, ``"auto"``, a chain (``"ngram,mtp"``), or what
            :func:`specdec.load_drafter` returned; ``None`` for none.
        num_draft_tokens: drafts a round of requests that do not say, the same in all of them; 0 for
            none. Without a number as many as pay, by what is measured.
        adaptive: whether numbers of drafts are the most that a round may have rather than fixed
            ones; ``None`` is adaptive for requests without a number.
        max_tokens: likewise, tokens to generate at most; -1 for no limit.
        stop_tokens: sequences of ids that end an output; one id alone is an end token and no
            content; the tokenizer's end tokens if not given.
        sampler: mlx-lm's sampler callable for requests that do not say; greedy if not given.
        sampling: sampling options, in place of ``sampler``.
        logits_processors: of requests that do not say.
        completion_batch_size: requests that read or decode at the same time at most.
        prefill_batch_size: prompts that are read at the same time at most.
        prefill_step_size: prompt tokens per call of ``next`` at most, and per chunk.
        max_kv_size: positions to keep of a row at most, where the model makes no caches of its own.
        stream: the MLX stream to compute on; mlx-lm's generation stream if not given.
        memory_limit: bytes for caches of reading and decoding rows and the drafter's weights; the
            model's weights, and the copy while rows join, are not counted.
        prefix_cache: where beginnings of prompts are looked up and rows are left.
        return_prompt_caches: whether last responses have a ``prompt_cache``.
        kv_bits: bits to quantize attention K/V to; ``None`` does not.
        kv_group_size: values that share a scale, with ``kv_bits``.
        quantized_kv_start: positions from which on a row's K/V are quantized, with ``kv_bits``.

    Raises:
        OptionError: an option that makes no sense (also a ``ValueError``).
        SpecdecError: the drafter cannot be loaded for this model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafter: Drafter | LoadedDrafter | None = None,
        num_draft_tokens: int | None = None,
        adaptive: bool | None = None,
        max_tokens: int = 128,
        stop_tokens: Sequence[Sequence[int]] | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        sampling: SamplingOptions | None = None,
        logits_processors: Sequence[Any] | None = None,
        completion_batch_size: int = 32,
        prefill_batch_size: int = 8,
        prefill_step_size: int = 2048,
        max_kv_size: int | None = None,
        stream: Any = None,
        memory_limit: int | None = None,
        prefix_cache: PrefixCache | None = None,
        return_prompt_caches: bool = True,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
    ) -> None:
        self._closed, self._inside = True, False  # nothing to close if something fails here
        settings = Settings(
            tokenizer=tokenizer,
            num_draft_tokens=num_draft_tokens,
            adaptive=adaptive,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            sampler=sampler,
            sampling=sampling,
            logits_processors=logits_processors,
            completion_batch_size=completion_batch_size,
            prefill_batch_size=prefill_batch_size,
            prefill_step_size=prefill_step_size,
            cache_options=CacheOptions(
                max_kv_size=max_kv_size,
                kv_bits=kv_bits,
                kv_group_size=kv_group_size,
                quantized_kv_start=quantized_kv_start,
            ),
            memory_limit=memory_limit,
            prefix_cache=prefix_cache,
            return_prompt_caches=return_prompt_caches,
        )
        self.model = model
        self._stream = generation_stream if stream is None else stream
        loaded = load(drafter, model, settings)
        self._own = None if loaded is drafter else loaded
        target = bind_target(model, settings.tokenizer) if loaded is None else loaded.target
        try:
            target.new_state(settings.cache_options)
            self._engine = Engine(target, loaded, settings, self._stream)
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise
        self._old_wired_limit = maybe_set_recommended_wired_limit()
        self._closed = False

    @property
    def stream(self) -> Any:
        """The MLX stream to compute on."""
        return self._stream

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of all caches, given ones that wait included; of rows that decode a bound."""
        return self._engine.held_bytes()

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or answers were not returned yet."""
        return self._engine.has_work

    # Requests.

    def insert(  # noqa: PLR0917  # mlx-lm's order
        self,
        prompts: Sequence[Sequence[int] | str],
        max_tokens: int | Sequence[int | None] | None = None,
        caches: Sequence[Sequence[Any] | None] | None = None,
        all_tokens: Sequence[Sequence[int]] | None = None,
        samplers: Sequence[Any] | None = None,
        logits_processors: Sequence[Any] | None = None,
        stop_sequences: Sequence[Any] | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Add requests; all are checked before any is taken.

        Args:
            prompts: token ids, or text where there is a tokenizer.
            max_tokens: a number for all, or one per prompt.
            caches: mlx-lm caches to continue from, one list per prompt; they are copied.
            all_tokens: the tokens that those caches hold.
            samplers: mlx-lm's sampler callables; ``None`` for the generator's.
            logits_processors: lists of processors; ``None`` in it for none, as in mlx-lm.
            stop_sequences: mlx-lm's ``StopSequences``, or sequences of ids as ``stop_tokens``.
            options: see :class:`PromptOptions`.

        Returns:
            The requests' numbers, which no other request of this generator ever has.

        Raises:
            OptionError: names the prompt, and what does not fit; nothing was added.
            AdapterError: the model runs under an adapter that the drafter does not support.
            ClosedError: after ``close``.
        """
        return self.insert_segments(
            [[prompt] for prompt in listed(prompts)],
            max_tokens,
            caches,
            all_tokens,
            samplers,
            logits_processors,
            stop_sequences,
            **options,
        )

    def insert_segments(  # noqa: PLR0917, D417  # as in mlx-lm, and as above
        self,
        segments: Sequence[Sequence[Sequence[int] | str]],
        max_tokens: int | Sequence[int | None] | None = None,
        caches: Sequence[Sequence[Any] | None] | None = None,
        all_tokens: Sequence[Sequence[int]] | None = None,
        samplers: Sequence[Any] | None = None,
        logits_processors: Sequence[Any] | None = None,
        stop_sequences: Sequence[Any] | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Add requests whose prompts come in segments; otherwise as :meth:`insert`.

        With a prefix cache a row is left there at the end of each segment.

        Args:
            segments: per prompt, a list of segments.
            max_tokens: this and all others as in :meth:`insert`.
        """
        self._check("insert", inside=True)
        # In the order of OF_MLX_LM.
        given = (max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences)
        named: dict[str, Any] = {**dict(zip(OF_MLX_LM, given, strict=True)), **options}
        return self._engine.insert(listed(segments), named)

    def remove(
        self, uids: Sequence[int], return_prompt_caches: bool = False
    ) -> dict[int, tuple[list[Any], list[int]]]:
        """End requests, wherever they are; those that are not known are left out.

        Args:
            uids: the requests.
            return_prompt_caches: whether to return what :meth:`extract_cache` would.
        """
        self._check("remove")
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        self._engine.drop(uids)
        return caches

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of requests' caches, and the tokens that they cover, as in mlx-lm.

        They cover ``all_tokens`` while a request waits, then what was read, and then everything.

        Args:
            uids: the requests; those that are not known are left out.
        """
        self._check("extract_cache")
        return self._engine.extract(uids)

    # Work.

    def next(self) -> tuple[list[PromptResponse], list[BatchResponse]]:
        """One round of the rows that decode, then prompts: at most ``prefill_step_size`` tokens.

        Returns:
            How far prompts were read, and the tokens, several of a request in their order.

        Raises:
            ClosedError: after ``close``.
        """
        self._check("next")
        self._inside = True
        try:
            return self._engine.step()
        finally:
            self._inside = False

    def next_generated(self) -> list[BatchResponse]:
        """Go on until there are tokens; an empty list where no request is left."""
        while self.has_work:
            answers = self.next()[1]
            if answers:
                return answers
        return []

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """What is done while the block runs; complete when the block is left."""
        stats = BatchStats()
        start = Moment.of(self._engine.counters)
        try:
            yield stats
        finally:
            Moment.of(self._engine.counters).since(start, stats)

    # Ends.

    def close(self) -> None:
        """Cancel everything, any number of times; a drafter that it loaded itself is closed."""
        if self._closed:
            return
        self._check("close")
        self._closed = True
        try:
            self._engine.close()
        finally:
            if self._own is not None:
                self._own.close()
            if self._old_wired_limit is not None:
                mx.synchronize(self._stream)
                mx.set_wired_limit(self._old_wired_limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _check(self, verb: str, *, inside: bool = False) -> None:
        if self._closed:
            raise ClosedError(verb, "batch generator")
        if self._inside and not inside:
            raise RoundOpenError(verb)
