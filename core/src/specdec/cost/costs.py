"""All that is known of a drafter's costs and worth on this machine, shared by its groups."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import mlx.core as mx

from specdec.cost.account import Account
from specdec.cost.curve import Curve, Point
from specdec.cost.measure import WIDTHS, measure
from specdec.cost.store import CostStore, Kept, identity_of
from specdec.cost.survival import Survival
from specdec.cost.times import RoundTimes, bucket
from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.targets import Target

__all__ = ["Costs", "measuring_seconds"]

_SECONDS: Final = 1.5
_VARIABLE: Final = "SPECDEC_MEASURING_SECONDS"

_CONTEXT: Final = 512
_CHEAPER = 0.9  # a window is padded where that takes less than this share of the needed width
_CHEAPER_PLAIN = 0.85
_GUESS = 0.1  # of a plain round, what another position takes where nothing was measured
_FEW: Final = (1, 2, 4, 8, 16)

log = logging.getLogger("specdec")


def measuring_seconds() -> float:
    """What measuring rounds of one batch size may take, about: as the environment says, else 1.5.

    Raises:
        OptionError: the environment's ``SPECDEC_MEASURING_SECONDS`` is no number of seconds.
    """
    said = os.environ.get(_VARIABLE)
    if said is None:
        return _SECONDS
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise OptionError(f"{_VARIABLE} is {said!r}; give a number of seconds, or 0 for none")
    return seconds


class Costs:
    """Times of rounds and chances of drafts.

    Args:
        target: the target.
        drafter: what the drafter is called, in what is kept on disk.
        default: drafts a round that the drafter's kind gives where nobody asks.
        most: drafts a round that it may be asked for.
        store: where times are kept; ``None`` keeps nothing.
        seconds: what measuring one batch size may take, about; 0 measures nothing.
        progress: told of the share of a measurement that is done.

    Attributes:
        times: of rounds.
        account: what trying may cost.
        default: see above.
        depths: numbers of drafts to choose from, ascending.
    """

    def __init__(
        self,
        target: Target,
        drafter: str,
        *,
        default: int,
        most: int,
        store: CostStore | None = None,
        seconds: float = _SECONDS,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._store = store
        self._seconds = seconds
        self._progress = progress
        self._identity = None if store is None else identity_of(target.identity)
        self._curve: Curve | None = None
        self._plain: dict[int, float] = {}
        self._tried: set[int] = set()
        self._shared = Survival()
        self._rows: WeakKeyDictionary[Any, Survival] = WeakKeyDictionary()
        self._padded: dict[tuple[int, int], int] = {}
        self._most_width = 1 + most
        self.times = RoundTimes(self.window)
        self.account = Account()
        self.default = max(1, min(default, most))
        self._widths = _FEW if _plans_by_shape() else WIDTHS
        ladder = {width - 1 for width in self._widths if 1 < width <= 1 + most}
        self.depths: Sequence[int] = sorted(ladder | {self.default, most})
        self._recall()

    # What the target takes.

    def prepare(self, rows: int) -> None:
        """Measure a batch of this size if nobody has; at most once for each power of two."""
        size = bucket(rows)
        if size in self._tried:
            return
        self._tried.add(size)
        if size in self._plain or self._seconds <= 0:
            return
        log.info("measuring what rounds of %d rows cost (once for this machine and model)", size)
        try:
            found = measure(
                self._target,
                size,
                _CONTEXT,
                widths=sorted({*self._widths, 1 + self.default}),
                seconds=self._seconds,
                progress=self._progress,
            )
        except Exception as error:  # a scratch row must not end a request; rounds tell as well
            log.warning("the cost of rounds could not be measured", exc_info=error)
            return
        self._add(Kept(dict(found.windows), {size: found.plain}))
        self.keep()

    def window(self, size: int, width: int) -> float:
        """Milliseconds of the target's part of a round, as it was measured.

        Args:
            size: rows, a power of two.
            width: positions.
        """
        measured, seen = self._plain.get(size), self.times.plain_seen(size)
        if width == 1 and measured is not None:
            return seen or measured
        if self._curve is None:
            return (seen or 1.0) * (1 + _GUESS * (width - 1))
        # The machine may have been another one when it was measured: what is right is the ratio.
        scale = seen / measured if seen and measured else 1.0
        return scale * self._at(size, width)

    def knows_plain(self, rows: int) -> bool:
        """Whether it is known what plain rounds of a batch take: all else is compared with them."""
        size = bucket(rows)
        return size in self._plain or self.times.plain_age(size) < 1 << 30

    def _at(self, size: int, width: int) -> float:
        assert self._curve is not None
        return self._curve.at(size, width, _CONTEXT)

    def padded(self, rows: int, needed: int) -> int:
        """The width to give a window: as needed, or a wider one that was measured to be cheaper."""
        size = bucket(rows)
        if self._curve is None or size not in self._plain:
            return needed
        found = self._padded.get((size, needed))
        if found is None:
            wider, time = self._curve.cheapest(size, needed, self._most_width, _CONTEXT)
            # Plain windows follow each other without a wait, which a wider one has to make up for.
            limit = _CHEAPER_PLAIN if needed == 1 else _CHEAPER
            found = needed if time >= limit * self._at(size, needed) else wider
            self._padded[size, needed] = found
        return found

    # What drafts are worth.

    def survival(self, row: object) -> Survival:
        """What is known of a row's drafts."""
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = Survival(self._shared)
        return found

    # What is kept.

    def keep(self) -> None:
        """Write down what is known now."""
        if self._store is None or self._identity is None:
            return
        windows = {} if self._curve is None else dict(self._curve.times)
        rounds = {self._drafter: self.times.as_dict()}
        self._store.write(self._identity, Kept(windows, dict(self._plain), rounds))

    def forget(self) -> None:
        """Measure anew, and let rounds tell again what they take."""
        if self._store is not None and self._identity is not None:
            self._store.forget(self._identity)
        self._curve, self._plain = None, {}
        self._padded, self._tried = {}, set()
        self.times = RoundTimes(self.window)

    def _recall(self) -> None:
        if self._store is None or self._identity is None:
            return
        kept = self._store.read(self._identity)
        self._add(kept)
        self.times.recall(kept.rounds.get(self._drafter, {}))

    def _add(self, kept: Kept) -> None:
        windows = {} if self._curve is None else dict(self._curve.times)
        windows |= {
            Point(point.batch, point.width, point.context): time
            for point, time in kept.windows.items()
        }
        self._curve = Curve(windows) if windows else None
        self._plain |= kept.plain
        self._padded = {}


def _plans_by_shape() -> bool:
    """Whether the first window of a shape takes as long as dozens of others, as on CUDA."""
    return bool(mx.cuda.is_available()) and mx.default_device().type == mx.DeviceType.gpu
