"""A drafter that is right as often as it is told: what speculation would bring to a model.

It is given the texts that the target writes, and proposes what comes next in them, each draft right
with a given chance, through the executor like any other. Whether a place of a text is drafted right
is drawn from seed, prompt and place alone: the same in every round, at every width and batch, so
runs of several widths can be compared. What is drafted wrong is verified and rejected, so the
tokens are the target's own. A place that was judged is never drafted again, so rounds see
independent draws (the model of Leviathan et al. 2023, arXiv:2211.17192, section 3.1).

A target may part from the text that it wrote before, where two tokens are nearly tied and windows
have other widths. The rows then go on with another text that begins as theirs does, if one was
learned, else with the same places of the first.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from specdec.bench.simulated_rows import SimulatedRows
from specdec.errors import OptionError, one_line
from specdec.pairing import LoadedDrafter, tried
from specdec.plugins import LoadedDraft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, RowConstraints, RowSampling, TargetView
    from specdec.targets import Target

__all__ = ["Coins", "Script", "Simulated", "SimulatedProvider", "Texts"]


def _share(_: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise OptionError(f"{attribute.name} is {one_line(repr(value))}; give a number of 0 to 1")


def _drafts(_: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{attribute.name} is {one_line(repr(value))}; give 1 or more")


def _cost(_: object, attribute: Any, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise OptionError(f"{attribute.name} is {one_line(repr(value))}; give 0 or more")


@frozen
class Simulated:
    """A drafter to be simulated.

    Attributes:
        acceptance: the chance that a draft is right, if all before it are; 0 to 1.
        drafts: the most drafts a round, whatever a run asks for.
        cost_ms: milliseconds that the host spends for each position that it drafts, in place of a
            drafter that would compute so long.
        seed: of the draws.

    Raises:
        OptionError: a number out of range.
    """

    acceptance: float = field(validator=_share)
    drafts: int = field(default=8, validator=_drafts)
    cost_ms: float = field(default=0.0, validator=_cost)
    seed: int = 0

    @property
    def name(self) -> str:
        """As tables name it, and as what is learned of its rounds is kept."""
        cost = f"+{self.cost_ms:g}ms" if self.cost_ms else ""
        return f"simulated-{self.acceptance:g}{cost}"

    def load(self, target: Target, texts: Texts) -> LoadedDrafter:
        """The drafter, for a target.

        Args:
            target: the bound model.
            texts: what it writes.
        """
        loaded = LoadedDraft(SimulatedProvider(self, texts), self.drafts, self.drafts)
        drafter = tried(self.name, loaded, target, "specdec bench")
        drafter.adaptive = True
        return drafter


@define(eq=False)
class Texts:
    """What a target writes behind each prompt, as far as it was seen."""

    _written: dict[tuple[int, ...], list[list[int]]] = field(factory=dict)

    def learn(self, prompt: Sequence[int], text: Sequence[int]) -> bool:
        """Add a text.

        Args:
            prompt: its ids.
            text: ids that the target wrote, an end token included.

        Returns:
            Whether it was new.
        """
        held, text = self.of(prompt), list(text)
        if any(each[: len(text)] == text for each in held):
            return False
        held.append(text)
        return True

    def of(self, prompt: Sequence[int]) -> list[list[int]]:
        """All texts behind a prompt; one that is learned later is added to the same list."""
        return self._written.setdefault(tuple(prompt), [])


@frozen(eq=False)
class Script:
    """What to propose behind one prompt.

    Attributes:
        texts: what the target writes there; the first one counts where none begins as the row does.
        right: by place, whether the draft is right.
    """

    texts: list[list[int]]
    right: Coins

    def drafts(self, emitted: list[int], depth: int, vocab_size: int) -> list[int]:
        """Drafts of one row, none where nothing is known.

        Args:
            emitted: what the target wrote so far.
            depth: drafts at most.
            vocab_size: the target's; a wrong draft is another id below it.
        """
        done = len(emitted)
        fallback = self.texts[0] if self.texts else []
        text = next((each for each in self.texts if each[:done] == emitted), fallback)
        return [
            token if self.right[done + place] else (token + 1) % vocab_size
            for place, token in enumerate(text[done : done + depth])
        ]


class Coins:
    """A row of independent draws that are true with a chance, of any length.

    Args:
        chance: of each.
        seed: same seed, same draws.
    """

    def __init__(self, chance: float, seed: str) -> None:
        self._chance = chance
        self._draw = random.Random(seed)
        self._drawn: list[bool] = []

    def __getitem__(self, place: int) -> bool:
        while place >= len(self._drawn):
            self._drawn.append(self._draw.random() < self._chance)
        return self._drawn[place]


@define(eq=False)
class SimulatedProvider:
    """The simulated drafter as a provider; it is also the factory of its groups.

    Attributes:
        what: its settings.
        texts: what it proposes from.
    """

    what: Simulated
    texts: Texts
    _scripts: dict[tuple[int, ...], Script] = field(factory=dict)

    @property
    def id(self) -> str:
        """Its name."""
        return self.what.name

    @property
    def weight_bytes(self) -> int:
        """0: there are no weights."""
        return 0

    @property
    def grouped(self) -> SimulatedProvider:
        """Itself."""
        return self

    @property
    def checkpoint_namespace(self) -> str:
        """Of the tokens that a row has read, and of what is proposed behind them."""
        return f"specdec-bench.{self.what.name}:seed{self.what.seed}"

    @property
    def supports_adapters(self) -> bool:
        """Always: the state is made of tokens alone."""
        return True

    def close(self) -> None:
        """Nothing to release."""

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> SimulatedRows:
        """A group that reads prompts."""
        return self._open(target, checkpoints, cold_rows=True)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,  # noqa: ARG002  what is proposed is certain
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002
    ) -> SimulatedRows:
        """A group that decodes."""
        return self._open(target, checkpoints, cold_rows=False)

    def script(self, prompt: Sequence[int]) -> Script:
        """What to propose behind a prompt.

        Args:
            prompt: its ids.
        """
        key = tuple(prompt)
        if key not in self._scripts:
            coins = Coins(self.what.acceptance, f"{self.what.seed} {key}")
            self._scripts[key] = Script(self.texts.of(key), coins)
        return self._scripts[key]

    def spend(self, depth: int) -> None:
        """Let the time pass that a drafter would take for so many positions."""
        end = time.perf_counter() + depth * self.what.cost_ms / 1000
        while time.perf_counter() < end:  # sleeping is too coarse for parts of a millisecond
            pass

    def _open(
        self, target: TargetView, checkpoints: Sequence[RowCheckpoint | None], *, cold_rows: bool
    ) -> SimulatedRows:
        rows = SimulatedRows(self, target.vocab_size, cold_rows=cold_rows)
        rows.prepare_append(checkpoints).commit()
        return rows
