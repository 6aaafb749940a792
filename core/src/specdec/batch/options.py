"""What ``insert`` may be given: one entry per prompt, checked whole before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from attrs import evolve, field, frozen
from mlx_lm.sample_utils import greedy_sampler

from specdec.errors import OptionError, one_line
from specdec.sampling import SamplingOptions
from specdec.verify.ends import StopRule, stop_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import mlx.core as mx

__all__ = [
    "PromptOptions",
    "Stops",
    "from_sampler",
    "listed",
    "per_prompt",
    "sampling_of",
    "whole_number",
]


OF_MLX_LM = (
    "max_tokens",
    "caches",
    "all_tokens",
    "samplers",
    "logits_processors",
    "stop_sequences",
)
"""Options of mlx-lm's ``insert``, in its order."""


class PromptOptions(TypedDict, total=False):
    """Options of ``insert`` that mlx-lm has not: one entry per prompt, ``None`` for the default.

    Attributes:
        sampling: how to draw, in place of ``samplers``.
        seeds: the requests' seeds.
        acceptance: ``"match"`` or ``"rejection"``.
        draft_temps: temperatures that drafts are drawn at.
        draft_filters: whether drafts are drawn with the filters.
        num_draft_tokens: drafts a round, or the most of them where the generator is adaptive; 0
            for no drafter.
        min_tokens: tokens before which neither an end token nor a stop ends the output.
        stop: texts that end the output; need a tokenizer.
        grammars: what the outputs obey.
        num_forced_tokens: the most tokens a round that a grammar itself drafts; 0 for none.
        logprobs: how many alternatives to report with every token.
        snapshot_at: numbers of prompt tokens after which the row is left in the prefix cache.
    """

    sampling: Sequence[SamplingOptions | None] | None
    seeds: Sequence[int | None] | None
    acceptance: Sequence[Literal["match", "rejection"] | None] | None
    draft_temps: Sequence[float | None] | None
    draft_filters: Sequence[bool | None] | None
    num_draft_tokens: Sequence[int | None] | None
    min_tokens: Sequence[int | None] | None
    stop: Sequence[str | Sequence[str] | None] | None
    grammars: Sequence[Any] | None
    num_forced_tokens: Sequence[int | None] | None
    logprobs: Sequence[int | None] | None
    snapshot_at: Sequence[Sequence[int] | None] | None


def listed(prompts: Any) -> list[Any]:
    """The prompts, or an error.

    Raises:
        OptionError: no list.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
        raise OptionError(f"prompts is {one_line(repr(prompts))}; give a list of prompts")
    return list(prompts)


def per_prompt(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Options as one mapping per prompt, with ``None`` for those that were not given.

    Args:
        options: by name, ``None`` or one entry per prompt; ``max_tokens`` may be one number.
        count: the number of prompts.

    Raises:
        OptionError: a list of another length, or none at all.
    """
    unknown = set(options) - set(OF_MLX_LM) - set(PromptOptions.__annotations__)
    if unknown:
        raise TypeError(f"insert() got unexpected keyword arguments {sorted(unknown)}")
    options = {**dict.fromkeys((*OF_MLX_LM, *PromptOptions.__annotations__)), **options}
    if hasattr(options["max_tokens"], "__index__"):
        options["max_tokens"] = [options["max_tokens"]] * count
    for name, values in options.items():
        if values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise OptionError(f"{name} is {one_line(repr(values))}; give a list, one per prompt")
        if len(values) != count:
            raise OptionError(
                f"{name} has {len(values)} entries for {count} prompts; give one per prompt"
            )
    if options["logits_processors"] is not None:  # as in mlx-lm, None in the list is no default
        options["logits_processors"] = [each or () for each in options["logits_processors"]]
    return [
        {name: None if values is None else values[index] for name, values in options.items()}
        for index in range(count)
    ]


def whole_number(name: str, value: object, *, least: int) -> int:
    """A number, or an error that names it.

    Raises:
        OptionError: no whole number of ``least`` or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} is {one_line(repr(value))}; give {least} or more")
    return value


def sampling_of(
    options: Mapping[str, Any], default: SamplingOptions, vocab_size: int
) -> SamplingOptions:
    """The sampling that a prompt asks for.

    Args:
        options: the prompt's.
        default: the generator's.
        vocab_size: the model's.

    Raises:
        OptionError: a sampler and sampling options together, or something that is neither.
    """
    asked, sampler = options["sampling"], options["samplers"]
    if asked is not None and sampler is not None:
        raise OptionError("sampling and a sampler were given; give one or the other")
    if asked is not None and not isinstance(asked, SamplingOptions):
        raise OptionError(
            f"sampling is {one_line(repr(asked))}; give specdec.SamplingOptions(temp=...)"
        )
    base = asked if asked is not None else default
    if sampler is not None:
        base = from_sampler(sampler)
    names = {
        "seeds": "seed",
        "acceptance": "acceptance",
        "draft_temps": "draft_temp",
        "draft_filters": "draft_filters",
    }
    changes = {ours: options[n] for n, ours in names.items() if options[n] is not None}
    sampling = evolve(base, **changes) if changes else base
    sampling.check_vocabulary(vocab_size)
    return sampling


def from_sampler(sampler: Callable[[mx.array], mx.array]) -> SamplingOptions:
    """How mlx-lm's sampler draws; its greedy one, by name, needs no call per token.

    Raises:
        OptionError: it cannot be called.
    """
    if sampler is greedy_sampler:
        return SamplingOptions()
    if not callable(sampler):
        raise OptionError(f"sampler is {one_line(repr(sampler))}; give a function")
    return SamplingOptions(sampler=sampler)


@frozen
class Stops:
    """Stop sequences as mlx-lm takes them: those of one token are end tokens.

    Attributes:
        end_tokens: ids that end a row and are no content.
        rule: the longer sequences, or mlx-lm's own automaton, whose tokens all are content.
    """

    end_tokens: frozenset[int] = frozenset()
    rule: StopRule = field(factory=lambda: stop_rule(None))

    @classmethod
    def of(cls, value: Any) -> Stops:
        """Split what a caller gives.

        Args:
            value: sequences of ids, single ids among them, or an object with ``matcher()``.

        Raises:
            OptionError: neither.
        """
        if callable(getattr(value, "matcher", None)):
            return cls(rule=stop_rule(value))
        if isinstance(value, list | tuple | set | frozenset):
            value = [[each] if isinstance(each, int) else each for each in value]
        checked: Any = stop_rule(value)
        sequences: tuple[tuple[int, ...], ...] = checked.sequences
        ends = frozenset(each[0] for each in sequences if len(each) == 1)
        return cls(ends, stop_rule([each for each in sequences if len(each) > 1]))
