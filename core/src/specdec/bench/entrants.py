"""Who takes part in a comparison: loaded once, closed when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Self

from attrs import define, field, frozen

from specdec.bench.figures import Result
from specdec.bench.simulated import Texts
from specdec.bench.turns import Way
from specdec.chained import members_of
from specdec.drafters import LoadedDrafter, bind_target, load_drafter
from specdec.errors import SpecdecError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.bench.simulated import Simulated
    from specdec.bench.turns import Setting

    Width = int | None | Literal["default"]

__all__ = ["DEFAULT", "Entrant", "Entrants", "load_entrants", "options_for"]

DEFAULT: Final = "default"
"""In place of a width: the drafter's own."""


@frozen
class Entrant:
    """One run of a comparison.

    Attributes:
        name: ``mlx-lm``, ``plain``, or a drafter.
        way: how it generates.
        texts: what a simulated drafter has to learn; ``None`` for all others.
        error: why it cannot run at all.
    """

    name: str
    way: Way
    texts: Texts | None = None
    error: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is specdec's plain decoding."""
        return self.error is None and self.way == Way()

    def result(self, prompt_set: str, batch: int) -> Result:
        """A result without figures."""
        return Result(
            self.name,
            self.way.width,
            adaptive=self.way.drafter is not None and self.way.width is None,
            prompt_set=prompt_set,
            batch=batch,
            error=self.error,
        )


@define
class Entrants:
    """All runs, and the drafters that are closed with them.

    Attributes:
        all: mlx-lm first where it runs, then plain decoding, then the drafters.
        own: drafters that were loaded for this.
    """

    all: list[Entrant] = field(factory=list)
    own: list[LoadedDrafter] = field(factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for drafter in self.own:
            drafter.close()


def load_entrants(
    setting: Setting,
    drafters: Sequence[str | LoadedDrafter],
    widths: Sequence[Width],
    simulate: Sequence[Simulated] = (),
    *,
    options: Mapping[str, Any],
    with_mlx_lm: bool,
) -> Entrants:
    """Load everybody.

    Args:
        setting: model and tokenizer.
        drafters: names, or loaded ones.
        widths: of each drafter.
        simulate: drafters to simulate, at the same widths.
        options: settings of the drafters' kinds.
        with_mlx_lm: whether mlx-lm runs as well.

    Raises:
        SpecdecError: of drafters that were named, none can be loaded.
    """
    found = Entrants([Entrant("mlx-lm", Way(mlx_lm=True))] if with_mlx_lm else [])
    found.all.append(Entrant("plain", Way()))
    failures: list[SpecdecError] = []
    try:
        for each in drafters:
            try:
                drafter = _loaded(each, setting, drafters, widths, options)
            except SpecdecError as error:
                failures.append(error)
                name = each if isinstance(each, str) else each.kind
                found.all.append(Entrant(name, Way(), error=one_line(error)))
                continue
            if drafter is not each:
                found.own.append(drafter)
            name = each if isinstance(each, str) else drafter.kind
            found.all += [Entrant(name, Way(drafter, w)) for w in _of(drafter, widths)]
        if failures and len(failures) == len(drafters):
            raise failures[0]
        target, texts = bind_target(setting.model, setting.tokenizer), Texts()
        for what in simulate:
            drafter = what.load(target, texts)
            found.own.append(drafter)
            found.all += [Entrant(what.name, Way(drafter, w), texts) for w in _of(drafter, widths)]
    except BaseException:
        found.__exit__()
        raise
    return found


def _loaded(
    drafter: str | LoadedDrafter,
    setting: Setting,
    drafters: Sequence[str | LoadedDrafter],
    widths: Sequence[Width],
    options: Mapping[str, Any],
) -> LoadedDrafter:
    if isinstance(drafter, LoadedDrafter):
        return drafter
    names = [each for each in drafters if isinstance(each, str)]
    # A chain's members are as wide as they were loaded, whatever a request asks for.
    number = _widest(widths) if members_of(drafter) else None
    own = options_for(drafter, names, options)
    return load_drafter(drafter, setting.model, setting.tokenizer, num_draft_tokens=number, **own)


def _of(drafter: LoadedDrafter, widths: Sequence[Width]) -> list[int | None]:
    """The widths that a drafter has: those beyond its limit are its limit, once."""
    numbers = [None if width == DEFAULT else width for width in widths]
    own = [
        None if width is None else drafter.width(number)
        for width, number in zip(widths, numbers, strict=True)
    ]
    return list(dict.fromkeys(own))


def _widest(widths: Sequence[Width]) -> int | None:
    """The largest number; none where a drafter's own is wanted as well."""
    numbers = [width for width in widths if isinstance(width, int)]
    return max(numbers, default=None) if len(numbers) == len(widths) else None


def options_for(name: str, drafters: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are one drafter's.

    Where there are chains and others, options with a member's name in front (``ngram.max_ngram``)
    are the chains', and those without the others'. Else every drafter gets all of them, so that
    none is passed over silently.

    Args:
        name: the drafter.
        drafters: all of them.
        options: all settings.
    """
    in_chain = members_of(name) is not None
    if all((members_of(each) is not None) == in_chain for each in drafters):
        return dict(options)
    return {key: value for key, value in options.items() if ("." in key) == in_chain}
