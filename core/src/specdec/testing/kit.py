"""What a check is given: one drafter, ways to make others, and how many examples to try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from hypothesis import given

from specdec.testing.drive import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis import settings
    from hypothesis.strategies import SearchStrategy

    from specdec.contract import DraftProvider
    from specdec.testing.target import TinyTarget

__all__ = ["Check", "Kit", "check"]


class Kit(Harness):
    """A drafter under test.

    Args:
        make_provider: makes the drafter, the same each time it is called.
        make_other_provider: makes one with another artifact or other settings.
        target: the tiny target.
        settings: how much a property tries.
        max_rows: rows that a group has at most.
        max_depth: drafts that a row is asked for at most.
        history: whether a row's state follows from its tokens alone.
    """

    def __init__(
        self,
        make_provider: Callable[[], DraftProvider],
        make_other_provider: Callable[[], DraftProvider],
        target: TinyTarget,
        settings: Callable[[bool], settings],
        *,
        max_rows: int,
        max_depth: int,
        history: bool,
    ) -> None:
        super().__init__(make_provider(), target, max_rows=max_rows, max_depth=max_depth)
        self.make_provider = make_provider
        self.history = history
        self.make_other_provider = make_other_provider
        self.settings = settings(self.numeric)

    def examples(self, run: Callable[..., None], **strategies: SearchStrategy[Any]) -> None:
        """Run a property over drawn arguments.

        The property is built here and not by a decorator: hypothesis refuses a ``@given`` method
        that two classes inherit.
        """

        def example(**drawn: Any) -> None:
            run(**drawn)

        example.__name__ = example.__qualname__ = run.__name__
        self.settings(given(**strategies)(example))()

    def close(self) -> None:
        """Close the drafter."""
        self.provider.close()


@frozen
class Check:
    """One named invariant.

    Attributes:
        name: after ``test_`` in the contract class.
        run: raises where the drafter breaks it.
        needs: the optional verb it is about; without it the check is skipped.
        history_only: whether it holds only where the state is the history of tokens.
    """

    name: str
    run: Callable[[Kit], None]
    needs: str | None = None
    history_only: bool = False

    @property
    def doc(self) -> str:
        """What must hold."""
        return self.run.__doc__ or ""


def check(
    *, needs: str | None = None, history_only: bool = False
) -> Callable[[Callable[[Kit], None]], Check]:
    """Make a function a named check of the kit."""
    return lambda run: Check(run.__name__, run, needs, history_only)
