"""What a check is given: one drafter, ways to make others, and how many examples to try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from hypothesis import given

from specdec.testing.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis import settings
    from hypothesis.strategies import SearchStrategy

    from specdec.contract import DraftProvider
    from specdec.testing.target import TinyTarget

__all__ = ["Check", "Kit", "check"]


class Kit(Harness):
    """A drafter under test.

    Args:
        make_provider: makes the drafter, the same each time it is called.
        make_other_providers: makes some that differ from it in one thing each.
        target: the tiny target.
        settings: how much a property tries.
        max_rows: rows that a group has at most.
        max_depth: drafts that a row is asked for at most.
        history: whether a row's state follows from its tokens alone.
    """

    def __init__(
        self,
        make_provider: Callable[[], DraftProvider],
        make_other_providers: Callable[[], Sequence[DraftProvider]],
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
        self.make_other_providers = make_other_providers
        self.settings = settings(self.numeric)

    def other_namespaces(self) -> list[str]:
        """Namespaces of the drafters that differ from this one; they are closed again."""
        others = self.make_other_providers()
        try:
            return [other.grouped.checkpoint_namespace for other in others]
        finally:
            for other in others:
                other.close()

    def examples(self, run: Callable[..., None], **strategies: SearchStrategy[Any]) -> None:
        """Run a property over drawn arguments.

        The property is built here and not by a decorator: hypothesis refuses a ``@given`` method
        that two classes inherit.
        """

        def example(**drawn: Any) -> None:
            run(**drawn)

        example.__name__ = example.__qualname__ = run.__name__
        self.settings(given(**strategies)(example))()

    def again(self) -> Harness:
        """The same drafter, made anew; close its provider."""
        return Harness(
            self.make_provider(), self.target, max_rows=self.max_rows, max_depth=self.max_depth
        )

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
