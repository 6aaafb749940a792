"""What the turns of one run come to: speeds, ratios, acceptance, phases, memory."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.bench.phases import Phases
    from specdec.bench.turns import Turn
    from specdec.verify import GenerationStats

__all__ = ["Result", "quartiles"]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; the value itself where there is one."""
    if len(values) < 2:
        return (values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (low, high)


@define
class Result:
    """One run over all prompts of a set, at one batch size.

    Attributes:
        name: ``mlx-lm``, ``plain``, or a drafter.
        width: drafts a round, where that is fixed.
        adaptive: whether specdec chose the drafts of each round.
        prompt_set: the prompts' name.
        batch: prompts that were decoded at the same time.
        turns: one per prompt, or per group of ``batch`` prompts.
        ratios: decoding speed over plain decoding's, per turn.
        over_mlx_lm: likewise over mlx-lm's, where that was run.
        same: prompts whose tokens equal the reference's: mlx-lm's where it was run and decodes
            greedily, else plain decoding's at the same seed; ``None`` for the reference and where
            there is none.
        differing: prompts whose tokens differ.
        phases: what its rounds were spent on; ``None`` where that was not looked at.
        shares: of the turns whose phases were looked at, the speed over the turn's bound.
        error: what ended the run, in one line.
    """

    name: str
    width: int | None = None
    adaptive: bool = False
    prompt_set: str = "prompts"
    batch: int = 1
    turns: list[Turn] = field(factory=list)
    ratios: list[float] = field(factory=list)
    over_mlx_lm: list[float] = field(factory=list)
    same: int | None = None
    differing: int = 0
    phases: Phases | None = None
    shares: list[float] = field(factory=list)
    error: str | None = None

    @property
    def label(self) -> str:
        """The run in short: ``ngram@4`` has a fixed width, and a folder is its last name."""
        parts = [part.rstrip("/").rpartition("/")[2] for part in self.name.split(",")]
        return ",".join(parts) + ("" if self.width is None else f"@{self.width}")

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Tokens per prompt, an end token included."""
        return [row for turn in self.turns for row in turn.tokens]

    @property
    def stats(self) -> list[GenerationStats]:
        """Counters per prompt; none of mlx-lm's."""
        return [stats for turn in self.turns for stats in turn.stats]

    @property
    def tokens_per_second(self) -> float | None:
        """All tokens over all decoding seconds; ``None`` where nothing ran."""
        seconds = sum(turn.seconds for turn in self.turns)
        return sum(turn.counted for turn in self.turns) / seconds if seconds else None

    @property
    def ratio(self) -> float | None:
        """Median of ``ratios``."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """First and third quartile of ``ratios``."""
        return quartiles(self.ratios) if self.ratios else None

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per target forward and row, over all prompts."""
        forwards = sum(s.target_forwards for s in self.stats)
        return sum(s.emitted for s in self.stats) / forwards if forwards else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of all drafts, or ``None`` where nothing was drafted."""
        drafted = sum(s.drafted for s in self.stats)
        return sum(s.accepted for s in self.stats) / drafted if drafted else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted share of the drafts at each place of a draft, first place first."""
        drafted = _summed([s.drafted_per_position for s in self.stats])
        accepted = _summed([s.accepted_per_position for s in self.stats])
        return [a / d for a, d in zip(accepted, drafted, strict=False) if d]

    @property
    def widths(self) -> dict[int, int]:
        """Rounds by the drafts that were asked for; empty where that was not counted."""
        total: dict[int, int] = {}
        for stats in self.stats:
            for width, rounds in getattr(stats, "widths", {}).items():
                total[width] = total.get(width, 0) + rounds
        return dict(sorted(total.items()))

    @property
    def asked(self) -> float | None:
        """Drafts that a round asked for, on average; ``None`` without a drafter."""
        rounds = sum(self.widths.values())
        if not rounds or self.name == "plain":
            return None
        return sum(width * count for width, count in self.widths.items()) / rounds

    @property
    def time_to_first_token(self) -> float | None:
        """Median seconds from the call to the first token, the prompts' reading included."""
        return statistics.median(turn.first for turn in self.turns) if self.turns else None

    @property
    def peak_memory(self) -> int:
        """Bytes at most while it ran, the weights of everything loaded included."""
        return max((turn.peak for turn in self.turns), default=0)

    @property
    def remarks(self) -> list[str]:
        """Why drafters stopped, or parts of them, each reason once."""
        found = [s.reason for s in self.stats if s.reason] if self.name != "plain" else []
        return sorted(set(found))

    @property
    def share(self) -> float | None:
        """Median of ``shares``; ``None`` where phases were not looked at."""
        return statistics.median(self.shares) if self.shares else None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        spread = self.quartiles
        return {
            "name": self.name,
            "width": self.width,
            "adaptive": self.adaptive,
            "prompt_set": self.prompt_set,
            "batch": self.batch,
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "quartiles": None if spread is None else list(spread),
            "ratios": self.ratios,
            "over_mlx_lm": statistics.median(self.over_mlx_lm) if self.over_mlx_lm else None,
            "ratios_over_mlx_lm": self.over_mlx_lm,
            "tokens_per_forward": self.tokens_per_forward,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_per_position": self.acceptance_per_position,
            "asked": self.asked,
            "widths": {str(width): rounds for width, rounds in self.widths.items()},
            "pauses": sum(getattr(s, "pauses", 0) for s in self.stats),
            "time_to_first_token": self.time_to_first_token,
            "peak_memory": self.peak_memory,
            "phases": None if self.phases is None else self.phases.as_dict(),
            "share_of_bound": self.share,
            "same": self.same,
            "differing": self.differing,
            "remarks": self.remarks,
            "error": self.error,
        }


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max(map(len, lists), default=0)
    for counts in lists:
        for place, count in enumerate(counts):
            total[place] += count
    return total
