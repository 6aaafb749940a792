"""What a request's rounds did, trimmed to what was emitted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from specdec.errors import one_line

if TYPE_CHECKING:
    from specdec.verify.accept import Acceptance

__all__ = ["GenerationStats", "log"]

log = logging.getLogger("specdec")  # a drafter's author wants the traceback; users get one line


@define(kw_only=True)
class GenerationStats:
    """Counters of one request.

    Attributes:
        prompt_tokens: tokens of the prompt that were read.
        cached_tokens: tokens that were not read again: those of the prompt that a prefix cache
            held, or those before it in the caller's prompt cache.
        time_to_first_token: seconds from admission to the first emitted token; ``None`` before.
        drafter: kind of the drafter that ran, or ``None``.
        reason: why no drafter ran, why it stopped, or which part of a chain has; ``None`` if all
            of it ran to the end.
        num_draft_tokens: the most drafts a round could have; 0 without a drafter.
        adaptive: whether rounds had as many of them as paid, by what was measured.
        rounds: verify windows whose samples were used.
        target_forwards: target forwards that gave tokens. A forward that only reads the last
            token into a caller's cache is not counted.
        drafted: drafts that were verified, as far as the output goes.
        accepted: drafts that were emitted.
        forced: tokens that were emitted as the request's constraint forced them, without a draft of
            the drafter's; not counted in ``drafted`` and ``accepted``.
        emitted: content tokens that were emitted; an end token is none.
        consumed: content tokens that were chosen from outside; not counted in ``emitted``.
        drafted_per_position: ``drafted`` by place in the draft, first place first.
        accepted_per_position: ``accepted`` by place in the draft.
        widths: rounds by the number of drafts that they asked for; 0 for plain ones.
        pauses: times the drafter was set to rest because plain decoding was faster.
        draft_errors: times the drafter raised.
        invalid_drafts: rounds in which it proposed something that is no valid draft.
        last_draft_error: what it last did wrong, in one line.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    time_to_first_token: float | None = field(default=None, eq=False)
    drafter: str | None = None
    reason: str | None = None
    num_draft_tokens: int = 0
    adaptive: bool = False
    rounds: int = 0
    target_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    emitted: int = 0
    consumed: int = 0
    drafted_per_position: list[int] = field(factory=list)
    accepted_per_position: list[int] = field(factory=list)
    widths: dict[int, int] = field(factory=dict, eq=False)
    pauses: int = field(default=0, eq=False)
    draft_errors: int = 0
    invalid_drafts: int = 0
    last_draft_error: str | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per target forward; 1 is plain decoding."""
        return self.emitted / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of what was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counters and ``tokens_per_forward``, for JSON."""
        return {**asdict(self), "tokens_per_forward": self.tokens_per_forward}

    def count_draft_error(self, error: Exception) -> None:
        """Count an exception of the drafter that this row has met."""
        log.debug("a drafter raised", exc_info=error)
        self.draft_errors += 1
        self.last_draft_error = one_line(error)

    def count_width(self, asked: int) -> None:
        """Count a window that asked for so many drafts."""
        self.widths[asked] = self.widths.get(asked, 0) + 1

    def count_round(
        self, drafted: int, acceptance: Acceptance, delivered: int, forced: int = 0
    ) -> None:
        """Count one round of this row.

        Args:
            drafted: ids that were verified.
            acceptance: the walk's result.
            delivered: how many of its tokens were delivered.
            forced: how many of the drafted ids a constraint forced; the first ones.
        """
        self.rounds += 1
        self.target_forwards += 1
        self.emitted += delivered
        if not drafted:
            return
        content = len(acceptance.tokens)
        end_was_drafted = acceptance.end_token is not None and acceptance.accepted > content
        matched = acceptance.accepted - end_was_drafted
        emitted_drafts = min(matched, delivered)
        # Where the output ends inside the accepted run, what was drafted behind it never counted.
        ends_in_run = end_was_drafted or (
            acceptance.ending is not None and acceptance.end_token is None and matched == content
        )
        verified = emitted_drafts if ends_in_run or delivered < content else drafted
        self.forced += min(forced, emitted_drafts)
        verified, emitted_drafts = max(0, verified - forced), max(0, emitted_drafts - forced)
        self.drafted += verified
        self.accepted += emitted_drafts
        _count(self.drafted_per_position, verified)
        _count(self.accepted_per_position, emitted_drafts)


def _count(per_position: list[int], upto: int) -> None:
    per_position.extend([0] * (upto - len(per_position)))
    for position in range(upto):
        per_position[position] += 1
