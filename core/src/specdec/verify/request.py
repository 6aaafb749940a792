"""What one row is asked to do."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import instance_of, optional

from specdec.checkpoints import PrefixCache
from specdec.errors import OptionError, one_line
from specdec.sampling.processors import Processors
from specdec.state import CacheOptions
from specdec.verify.ends import StopRule, StopSequences, stop_rule, stop_strings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import SupportsIndex

    from attrs import Attribute

    from specdec.contract import RowCheckpoint, TokenConstraint
    from specdec.sampling import SamplingOptions
    from specdec.sampling.processors import LogitsProcessor, WindowProcessor
    from specdec.verify.emission import Emission
    from specdec.verify.row import Row

__all__ = ["Request"]


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value)


def _id_set(value: Iterable[int]) -> frozenset[int]:
    return frozenset(value)


def _prompt(
    _instance: object, _attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]
) -> None:
    if not value:
        raise OptionError("the prompt is empty; give at least one token")


def _index(value: Any) -> Any:
    """Whole numbers of any kind as ints; what is none is left to the check."""
    plain = isinstance(value, bool) or not hasattr(value, "__index__")
    return value if plain else operator.index(value)


def _max_tokens(_instance: object, _attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1:
        raise OptionError(f"max_tokens is {value!r}; give a positive number, or -1 for no limit")


def _width(_instance: object, _attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(f"num_draft_tokens is {value!r}; give 1 or more, or 0 to run plain")


def _count(_instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(f"{attribute.name} is {value!r}; give 0 or a positive whole number")


def _constraint(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if value is not None and not callable(value):
        raise OptionError(
            f"constraint is {one_line(repr(value))}; give a callable that makes a row's "
            "TokenConstraint, such as Grammar.regex(...).bind(tokenizer, vocab_size, end_tokens)"
        )


def _processors(value: Iterable[Any] | None) -> tuple[Any, ...]:
    return Processors(() if value is None else value).chain


def _places(value: Iterable[SupportsIndex]) -> tuple[int, ...]:
    hint = "give numbers of prompt tokens, 1 or more"
    try:
        places = tuple(value)
    except TypeError:
        raise OptionError(f"snapshot_at is {one_line(repr(value))}; {hint}") from None
    numbers = []
    for place in places:
        try:
            numbers.append(operator.index(place))
        except TypeError:
            raise OptionError(f"snapshot_at has {one_line(repr(place))}; {hint}") from None
        if numbers[-1] < 1:
            raise OptionError(f"snapshot_at has {numbers[-1]}; {hint}")
    return tuple(numbers)


def _prefix_cache(
    _instance: object, _attribute: Attribute[PrefixCache | None], value: object
) -> None:
    if value is not None and not isinstance(value, PrefixCache):
        raise OptionError(
            f"prefix_cache is {one_line(repr(value))}; give a specdec.PrefixCache(max_bytes)"
        )


@frozen(kw_only=True, eq=False)
class Request:
    """What one row is asked to do; frozen when it is admitted.

    Attributes:
        prompt: token ids, at least one.
        sampling: how it draws.
        max_tokens: content tokens to emit at most; -1 for no limit.
        end_tokens: ids that end the row and are no content; they are not taken from ``tokenizer``.
        min_tokens: content tokens before which nothing but a finished constraint ends the row.
        stop_sequences: token sequences that end the row; their tokens are content, their text is
            not shown.
        stop_strings: texts that end the row; neither they nor what follows is shown.
        tokenizer: mlx-lm's ``TokenizerWrapper``; needed for stop strings, and for the text of
            emissions.
        processors: logits processors, in order; see :mod:`specdec.sampling.processors`.
        constraint: makes the row's :class:`~specdec.contract.TokenConstraint`, such as a bound
            grammar; called once per row.
        num_forced_tokens: the most drafts per round that the constraint itself forces; no drafter
            is needed for them.
        logprobs: how many alternatives to report with every token, 0 for the token's own
            log-probability alone; ``None`` for nothing.
        num_draft_tokens: the most drafts per round.
        adaptive: whether a group with a pace may ask for fewer, or for none, where that is faster.
        history: tokens before the prompt, in the caches that are continued; for processors.
        cache: the caller's mlx-lm prompt cache, continued from and written back; or ``None``.
        continue_from: mlx-lm caches to continue from, which stay as they are; or ``None``.
        cache_options: how its rows are cached, if not as the model's own caches are.
        prefix_cache: where the row's beginning is looked up and the row is left when it ends.
        snapshot_at: numbers of prompt tokens after which the row is left there too, such as the
            length of a system prompt that other requests share.
        consumer: told of each emission by ``Round.deliver_all``; returns ``False`` to stop.
        cancelled: looked at before each token.
        stops: told of each content token in order; true where the row ends with it. Told only of
            tokens that the target emits, so it may keep a history.
        publish: shown the ended row, its target caches and its draft checkpoint before it leaves.
            They cover the first ``row.processed`` tokens of the output and share nothing with
            live state.
        progress: told of ``(prompt tokens read, prompt tokens)``, as in mlx-lm.

    Raises:
        OptionError: a value that makes no sense; names it.
    """

    prompt: tuple[int, ...] = field(converter=_ids, validator=_prompt)
    sampling: SamplingOptions
    max_tokens: int = field(default=256, converter=_index, validator=_max_tokens)
    end_tokens: frozenset[int] = field(default=frozenset(), converter=_id_set)
    min_tokens: int = field(default=0, converter=_index, validator=_count)
    stop_sequences: StopRule = field(default=None, converter=stop_rule)
    stop_strings: tuple[str, ...] = field(default=(), converter=stop_strings_of)
    tokenizer: Any = None
    processors: tuple[LogitsProcessor | WindowProcessor, ...] = field(
        default=(), converter=_processors
    )
    constraint: Callable[[], TokenConstraint] | None = field(default=None, validator=_constraint)
    num_forced_tokens: int = field(default=16, converter=_index, validator=_count)
    logprobs: int | None = field(default=None, converter=_index, validator=optional(_count))
    num_draft_tokens: int = field(default=0, converter=_index, validator=_width)
    adaptive: bool = False
    history: tuple[int, ...] = field(default=(), converter=_ids)
    cache: Sequence[Any] | None = None
    continue_from: Sequence[Any] | None = None
    cache_options: CacheOptions = field(factory=CacheOptions, validator=instance_of(CacheOptions))
    prefix_cache: PrefixCache | None = field(default=None, validator=_prefix_cache)
    snapshot_at: tuple[int, ...] = field(default=(), converter=_places)
    consumer: Callable[[Emission], bool | None] | None = None
    cancelled: Callable[[], bool] | None = None
    stops: Callable[[int], bool] | None = None
    publish: Callable[[Row, list[Any], RowCheckpoint | None], None] | None = None
    progress: Callable[[int, int], None] | None = None

    def __attrs_post_init__(self) -> None:
        if self.snapshot_at and self.prefix_cache is None:
            raise OptionError("snapshot_at was given without a prefix_cache; give one")
        for place in self.snapshot_at:
            if place > len(self.prompt):
                raise OptionError(
                    f"snapshot_at has {place}, but the prompt has {len(self.prompt)} tokens"
                )
        given = {
            "a caller's prompt cache": self.cache,
            "caches to continue from": self.continue_from,
            "a prefix_cache": self.prefix_cache,
        }
        sources = [name for name, source in given.items() if source is not None]
        if len(sources) > 1:
            raise OptionError(f"{' and '.join(sources)} were given; give one or the other")
        if (
            self.cache is not None
            and self.cache_options.kv_bits is not None
            and not isinstance(self.cache, list)
        ):
            raise OptionError(
                f"prompt_cache is a {type(self.cache).__name__}; with kv_bits give a list, in "
                "which caches are replaced by quantized ones"
            )
        if self.stop_strings and self.tokenizer is None:
            raise OptionError("stop strings were given without a tokenizer; give tokenizer=")
        if 0 <= self.max_tokens < self.min_tokens:
            raise OptionError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; "
                "give a smaller min_tokens"
            )

    @property
    def has_stop_sequences(self) -> bool:
        """Whether a sequence of tokens can end the row."""
        rule = self.stop_sequences
        return not isinstance(rule, StopSequences) or bool(rule.sequences)
