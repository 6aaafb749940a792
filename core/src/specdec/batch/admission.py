"""From the arguments of ``insert`` to requests: every one is checked before any is taken."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.batch.entry import Entry
from specdec.batch.leftovers import Leftover, Reader
from specdec.batch.options import Stops, per_prompt, sampling_of, whole_number
from specdec.drafters import LoadedDrafter, check_adapters
from specdec.errors import OptionError, SpecdecError, one_line
from specdec.requests import bind_grammar, check_ids, encode_prompt, token_ids
from specdec.verify import Request, Row
from specdec.verify.prefill import why_apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specdec.batch.memory import MemoryPlan
    from specdec.batch.settings import Settings
    from specdec.targets import Target

__all__ = ["Admission"]


@frozen
class Admission:
    """Makes requests for one generator.

    Attributes:
        target: the bound model.
        drafter: drafts, or ``None``.
        settings: what requests get that do not say.
        memory: what fits.
        reader: completes the caches of ended rows.
    """

    target: Target
    drafter: LoadedDrafter | None
    settings: Settings
    memory: MemoryPlan
    reader: Reader

    def entries(
        self, segments: Sequence[Sequence[Any]], first_uid: int, options: Mapping[str, Any]
    ) -> list[Entry]:
        """One entry per prompt, all or none.

        Args:
            segments: of each prompt.
            first_uid: number of the first one.
            options: by name, ``None`` or one entry per prompt.

        Raises:
            OptionError: names the prompt that does not fit, and why.
            AdapterError: the model runs under an adapter that the drafter does not support.
        """
        asked = per_prompt(options, len(segments))
        entries = []
        for index, (prompt, each) in enumerate(zip(segments, asked, strict=True)):
            with _naming(index):
                entries.append(self._entry(prompt, first_uid + index, each))
        drafter = self.drafter
        if drafter is not None and any(e.row.request.num_draft_tokens for e in entries):
            check_adapters(drafter.provider, drafter.kind, self.target)
        return entries

    def _entry(self, segments: Sequence[Any], uid: int, options: dict[str, Any]) -> Entry:
        if isinstance(segments, str):
            raise OptionError(f"segments is {one_line(repr(segments))}; give a list of segments")
        parts = [self._ids(each, first=not place) for place, each in enumerate(segments)]
        ends = tuple(accumulate(len(part) for part in parts if part))
        leftover = Leftover(self.reader, self.settings.return_prompt_caches)
        request = self._request(sum(parts, ()), ends, options, leftover)
        apart = why_apart(self.target, request)
        held = self._held(request)
        # What a grammar forces stands in front of the drafts.
        forced = 0 if request.constraint is None else request.num_forced_tokens
        entry = Entry(
            uid,
            Row.of(request, self.target.vocab_size),
            leftover,
            apart,
            held + len(request.prompt) + max(0, request.max_tokens),
            1 + request.num_draft_tokens + forced,
            # As in mlx-lm, the last token is a segment of its own.
            (*ends[:-1], len(request.prompt) - 1, len(request.prompt)),
        )
        self.memory.check(entry)
        return entry

    def _request(
        self,
        prompt: tuple[int, ...],
        ends: tuple[int, ...],
        options: dict[str, Any],
        leftover: Leftover,
    ) -> Request:
        target, settings = self.target, self.settings
        tokenizer = settings.tokenizer
        check_ids(prompt, target)
        stops = settings.stops
        if options["stop_sequences"] is not None:
            stops = Stops.of(options["stop_sequences"])
        caches, grammar = options["caches"], options["grammars"]
        if tokenizer is None and hasattr(grammar, "bind"):
            raise OptionError("a grammar was given without a tokenizer; give tokenizer=")
        prefix_cache = settings.prefix_cache if caches is None else None
        snapshots = ends[:-1] if prefix_cache is not None else ()
        history = token_ids(_or(options["all_tokens"], ()), "all_tokens")
        check_ids(history, target, "all_tokens")
        width, adaptive = self._drafts(options["num_draft_tokens"])
        return Request(
            cache_options=settings.cache_options,
            prompt=prompt,
            max_tokens=_or(options["max_tokens"], settings.max_tokens),
            sampling=sampling_of(options, settings.draws, target.vocab_size),
            end_tokens=stops.end_tokens,
            stop_sequences=stops.rule,
            stop_strings=_or(options["stop"], ()),
            min_tokens=_or(options["min_tokens"], 0),
            tokenizer=tokenizer,
            processors=_or(options["logits_processors"], settings.logits_processors),
            constraint=bind_grammar(grammar, tokenizer, target, stops.end_tokens),
            num_forced_tokens=_or(options["num_forced_tokens"], 16),
            logprobs=options["logprobs"],
            num_draft_tokens=width,
            adaptive=adaptive,
            history=history,
            continue_from=None if caches is None else deepcopy(list(caches)),
            prefix_cache=prefix_cache,
            snapshot_at=_or(options["snapshot_at"], snapshots),
            publish=leftover.publish if leftover.wanted else None,
        )

    def _ids(self, prompt: Any, *, first: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return token_ids(prompt, "the prompt")
        tokenizer = self.settings.tokenizer
        if tokenizer is None:
            raise OptionError("the prompt is text, and there is no tokenizer; give tokenizer=")
        if first:
            return encode_prompt(prompt, tokenizer)
        return tuple(tokenizer.encode(prompt, add_special_tokens=False))

    def _drafts(self, asked: int | None) -> tuple[int, bool]:
        """Drafts a round, and whether there may be fewer."""
        if asked is not None:
            whole_number("num_draft_tokens", asked, least=0)
        wanted = self.settings.num_draft_tokens if asked is None else asked
        if self.drafter is None:
            return 0, False
        return self.drafter.drafts(wanted, self.settings.adaptive)

    def _held(self, request: Request) -> int:
        """Positions that the request's caches hold already.

        Raises:
            OptionError: they are not those of ``all_tokens``.
        """
        history, caches = len(request.history), request.continue_from
        if caches is None:
            if history:
                raise OptionError(
                    f"all_tokens has {history} tokens, but there are no caches that hold them; "
                    "give caches, or put the tokens into the prompt"
                )
            return 0
        held = self.target.state_of(caches, request.cache_options).lengths[0]
        # Recurrent caches alone cannot tell.
        tells = held or any(isinstance(getattr(c, "offset", None), int) for c in caches)
        if history and tells and held != history:
            raise OptionError(
                f"all_tokens has {history} tokens, but the caches hold {held}; "
                "give the tokens that the caches hold"
            )
        return max(held, history)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt an option was given for.

    Raises:
        OptionError: with the prompt's number in front.
    """
    try:
        yield
    except OptionError as error:
        raise OptionError(f"prompt {index}: {error}") from error
    except (SpecdecError, KeyboardInterrupt):
        raise
    except Exception as error:  # a tokenizer, a grammar or a processor of the caller's
        raise OptionError(f"prompt {index}: {one_line(error)}") from error
