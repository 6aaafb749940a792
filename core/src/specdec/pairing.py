"""A drafter and the model that it was loaded for: tried once, before anybody relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import mlx.core as mx

from specdec.contract import Greedy, PrefillMode, validate_provider
from specdec.cost import WIDTHS, AdaptivePace, Costs, CostStore, measuring_seconds
from specdec.errors import AdapterError, OptionError, one_line
from specdec.verify.lane import DraftLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from specdec.contract import DraftProvider, Selection
    from specdec.plugins import LoadedDraft
    from specdec.targets import Target

__all__ = ["LoadedDrafter", "check_adapters", "check_adaptive", "check_number", "tried"]


class LoadedDrafter:
    """A drafter that was loaded for one model, and fits it.

    Attributes:
        kind: its kind.
        provider: the drafter.
        target: the bound model.
        num_draft_tokens: the most drafts a round, unless a request asks for another number.
        max_draft_tokens: what no request may exceed, or ``None``.
        adaptive: whether requests that do not say leave it to what is measured how many of these
            a round has; so where no number was given when it was loaded.
        measuring_seconds: what measuring rounds of one batch size may take, about, the first time
            that this machine runs the model; 0 lets rounds alone tell. The environment's
            ``SPECDEC_MEASURING_SECONDS``, if it is set.
        progress: told of the share of such a measurement that is done.
    """

    most_adaptive: Final = WIDTHS[-1] - 1

    def __init__(self, kind: str, loaded: LoadedDraft, target: Target) -> None:
        self.kind = kind
        self.provider: DraftProvider = loaded.provider
        self.target = target
        self.num_draft_tokens = loaded.num_draft_tokens
        self.max_draft_tokens = loaded.max_draft_tokens
        self.adaptive = False
        self.measuring_seconds = measuring_seconds()
        self.progress: Callable[[float], None] | None = None
        self._costs: Costs | None = None

    @property
    def costs(self) -> Costs:
        """What is known of rounds with this drafter on this machine."""
        if self._costs is None:
            self._costs = Costs(
                self.target,
                self.kind,
                default=self.num_draft_tokens,
                most=self._most,
                store=CostStore(),
                seconds=self.measuring_seconds,
                progress=self.progress,
            )
        return self._costs

    def pace(self) -> AdaptivePace:
        """A pace for one group of rows."""
        return AdaptivePace(self.costs)

    def drafts(self, asked: int | None, adaptive: bool | None = None) -> tuple[int, bool]:
        """How many drafts a round of a request may have, and whether it may have fewer.

        Args:
            asked: the most that it asks for, or ``None``.
            adaptive: whether it leaves the number to what is measured; ``None`` does so where
                nobody has given one.
        """
        if adaptive is None:
            adaptive = self.adaptive and asked is None
        if not adaptive or asked == 0:
            return self.width(asked), False
        if asked is None and self.adaptive:
            return self._most, True
        return min(self.width(asked), self.most_adaptive), True

    @property
    def _most(self) -> int:
        limit = self.max_draft_tokens
        return self.most_adaptive if limit is None else min(limit, self.most_adaptive)

    def width(self, asked: int | None) -> int:
        """Drafts a round for a request that asked for a number, or for none."""
        wanted = self.num_draft_tokens if asked is None else asked
        limit = self.max_draft_tokens
        return wanted if limit is None else min(wanted, limit)

    def close(self) -> None:
        """Keep what was measured, and release the drafter's weights."""
        if self._costs is not None:
            self._costs.keep()
        self.provider.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def tried(name: str, loaded: LoadedDraft, target: Target, owner: str) -> LoadedDrafter:
    """Open a pairing once; a drafter that does not fit is closed.

    Args:
        name: its kind.
        loaded: the drafter.
        target: the bound target.
        owner: the plugin that made it, for messages.

    Raises:
        ProviderError: it is no whole drafter.
        AdapterError: the target runs under an adapter, which it does not support.
        SpecdecError: what it raises itself where it does not fit.
    """
    try:
        validate_provider(loaded.provider, owner)
        check_adapters(loaded.provider, name, target)
        _open_once(loaded.provider, name, target)
    except BaseException:
        # What is no whole provider may still hold weights.
        getattr(loaded.provider, "close", lambda: None)()
        raise
    return LoadedDrafter(name, loaded, target)


def check_number(num_draft_tokens: object) -> None:
    """Check a number of drafts a round, or none.

    Raises:
        OptionError: it is no positive whole number.
    """
    if num_draft_tokens is not None and (
        not isinstance(num_draft_tokens, int)
        or isinstance(num_draft_tokens, bool)
        or num_draft_tokens < 1
    ):
        raise OptionError(f"num_draft_tokens is {num_draft_tokens!r}; give 1 or more")


def check_adaptive(adaptive: object) -> None:
    """Check whether a number of drafts is the most that a round may have, or nobody says.

    Raises:
        OptionError: it is neither ``True`` nor ``False`` nor ``None``.
    """
    if adaptive is not None and not isinstance(adaptive, bool):
        raise OptionError(
            f"adaptive is {one_line(repr(adaptive))}; give True for as many drafts as pay, "
            "False for a fixed number, or None"
        )


def check_adapters(provider: DraftProvider, kind: str, target: Target) -> None:
    """Check that a drafter may draft for its target as the target is now.

    To be asked when a drafter is loaded and for each request: mlx-lm replaces layers of a live
    model, so an adapter may have come since. Allocates nothing, and costs a walk over the modules,
    or nothing where the drafter supports adapters.

    Args:
        provider: the drafter.
        kind: its kind, for the message.
        target: the target it drafts for.

    Raises:
        AdapterError: the target runs under an adapter, and the drafter does not support that.
    """
    if provider.grouped.supports_adapters:
        return
    adapters = target.adapters
    if adapters:
        raise AdapterError(kind, adapters)


def _open_once(provider: DraftProvider, name: str, target: Target) -> None:
    """Open a prefill and a decode group of one row, and close them again.

    A drafter that shares the whole prompt decodes only behind a token, so it reads one.
    """
    DraftLane(provider, name, target)
    prefill = provider.grouped.open_prefill(target=target, checkpoints=[None])
    try:
        if prefill.prefill_mode is PrefillMode.FULL:
            token, state = mx.zeros((1, 1), mx.int32), target.new_state()
            state.begin_round(1, reading=True)
            context = target.forward(token, state, prefill.context, prefill.tap_layers).context
            prefill.prefill(token, context)
        checkpoint = prefill.capture(0)
    finally:
        prefill.close()
    rows = provider.grouped.open(target=target, sampling=_Probe(), checkpoints=[checkpoint])
    rows.close()


class _Probe:
    """Sampling of a group that is opened but never drafts."""

    @property
    def selection(self) -> Selection:
        return Greedy()

    @property
    def rejecting(self) -> bool:
        return False

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise NotImplementedError("a group that is opened on trial drafts nothing")

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise NotImplementedError("a group that is opened on trial drafts nothing")
