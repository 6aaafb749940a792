"""A batch generator's settings: limits, and what requests get that do not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import Attribute, Factory, field, frozen
from attrs.validators import optional

from specdec.batch.options import Stops, from_sampler, whole_number
from specdec.checkpoints import PrefixCache
from specdec.drafters import check_adaptive
from specdec.errors import OptionError, one_line
from specdec.requests import wrapped
from specdec.sampling import SamplingOptions
from specdec.sampling.processors import Processors

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from specdec.state import CacheOptions

__all__ = ["Settings"]


def _one_or_more(_instance: object, attribute: Attribute[int], value: object) -> None:
    whole_number(attribute.name, value, least=1)


def _none_or_more(_instance: object, attribute: Attribute[Any], value: object) -> None:
    whole_number(attribute.name, value, least=0)


def _token_limit(_instance: object, attribute: Attribute[int], value: object) -> None:
    if value != -1 or isinstance(value, bool):
        whole_number(attribute.name, value, least=1)


def _adaptive(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    check_adaptive(value)


def _prefix_cache(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, PrefixCache):
        raise OptionError(
            f"prefix_cache is {one_line(repr(value))}; give a specdec.PrefixCache(max_bytes)"
        )


def _wrapped(tokenizer: Any) -> Any:
    return None if tokenizer is None else wrapped(tokenizer)


def _chain(value: Any) -> tuple[Any, ...]:
    return tuple(Processors(() if value is None else value).chain)


def _stops(settings: Settings) -> Stops:
    given = settings.stop_tokens
    if given is None and settings.tokenizer is not None:
        given = [[token] for token in sorted(settings.tokenizer.eos_token_ids)]
    return Stops.of(given)


def _draws(settings: Settings) -> SamplingOptions:
    sampling, sampler = settings.sampling, settings.sampler
    if sampling is not None and sampler is not None:
        raise OptionError("sampling and a sampler were given; give one or the other")
    if sampling is not None and not isinstance(sampling, SamplingOptions):
        raise OptionError(
            f"sampling is {one_line(repr(sampling))}; give specdec.SamplingOptions(temp=...)"
        )
    if sampler is not None:
        return from_sampler(sampler)
    return SamplingOptions() if sampling is None else sampling


@frozen(kw_only=True, eq=False)
class Settings:
    """The settings, checked; named as the arguments of ``BatchGenerator``.

    Attributes:
        stops: what ``stop_tokens`` or the tokenizer says.
        draws: what ``sampling`` or ``sampler`` says.

    Raises:
        OptionError: a value that makes no sense; names it.
    """

    tokenizer: Any = field(converter=_wrapped)
    num_draft_tokens: int | None = field(validator=optional(_none_or_more))
    adaptive: bool | None = field(validator=_adaptive)
    max_tokens: int = field(validator=_token_limit)
    stop_tokens: Any
    sampler: Callable[[mx.array], mx.array] | None
    sampling: SamplingOptions | None
    logits_processors: tuple[Any, ...] = field(converter=_chain)
    completion_batch_size: int = field(validator=_one_or_more)
    prefill_batch_size: int = field(validator=_one_or_more)
    prefill_step_size: int = field(validator=_one_or_more)
    cache_options: CacheOptions
    memory_limit: int | None = field(validator=optional(_one_or_more))
    prefix_cache: PrefixCache | None = field(validator=_prefix_cache)
    return_prompt_caches: bool
    stops: Stops = field(init=False, default=Factory(_stops, takes_self=True))
    draws: SamplingOptions = field(init=False, default=Factory(_draws, takes_self=True))
