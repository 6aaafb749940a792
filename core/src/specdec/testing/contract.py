"""``DraftRowContract``: the checks as the test methods of one class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from hypothesis.stateful import run_state_machine_as_test

from specdec.contract import (
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsLookup,
    SupportsPreview,
    SupportsStandDown,
)
from specdec.testing.checks import CHECKS
from specdec.testing.kit import Kit
from specdec.testing.machine import row_machine
from specdec.testing.profiles import active_effort
from specdec.testing.target import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import hypothesis

    from specdec.contract import DraftProvider
    from specdec.testing.kit import Check

__all__ = ["DraftRowContract"]

_OPTIONAL = {
    "preview": SupportsPreview,
    "draft_device": SupportsDeviceDraft,
    "look_up": SupportsLookup,
    "consume": SupportsConsume,
    "stood_down": SupportsStandDown,
}
_MACHINE = "row_machine"


class DraftRowContract:
    """Subclass it as ``Test…``, say how the drafter is made, and run pytest.

    Each ``test_<check>`` is one invariant of the contract; its docstring says which. They run from
    the simple to the whole, so the first failure is the one to look at. ``test_row_machine`` comes
    last and tries any legal sequence of verbs.

    Attributes:
        vocab_size: of the tiny target; small, so that texts repeat.
        max_rows: rows that a group has at most; 3 or more.
        max_depth: drafts that a row is asked for at most; 2 or more.
        state_is_history: whether a row's state follows from its tokens alone. False where it
            depends on what was drafted, as in heads that chain their own output.
        expected_failures: check name to the reason why it fails; such a check must fail.
        settings: hypothesis settings in place of the profile's (see ``specdec.testing.profiles``).
        shrink: whether failing examples are made small.
    """

    vocab_size: ClassVar[int] = 8
    max_rows: ClassVar[int] = 4
    max_depth: ClassVar[int] = 4
    state_is_history: ClassVar[bool] = True
    expected_failures: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[hypothesis.settings | None] = None
    shrink: ClassVar[bool] = True

    def make_provider(self) -> DraftProvider:
        """The drafter: small, seeded, without a download; a new object at each call."""
        raise NotImplementedError(f"{type(self).__name__} needs make_provider()")

    def make_other_provider(self) -> DraftProvider:
        """The same drafter with another artifact or another setting that shapes its state."""
        raise NotImplementedError(
            f"{type(self).__name__} needs make_other_provider(): another artifact or setting; "
            "stored state of the one must not be taken for the other's"
        )

    def make_other_providers(self) -> Sequence[DraftProvider]:
        """Drafters that differ from this one in one thing each: the artifact, and every setting.

        Override it where there are several; by default the one of :meth:`make_other_provider`.
        """
        return [self.make_other_provider()]

    def make_target(self) -> TinyTarget:
        """The target; override for another size."""
        return TinyTarget(self.vocab_size)

    # Nothing below is meant to be overridden.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, test in _TESTS.items():
            history_only = name in _HISTORY_TESTS
            if getattr(cls, name) not in ((test, None) if history_only else (test,)):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of the kit; a check that does not hold goes "
                    "into expected_failures with a reason"
                )
            if history_only:  # without a history it makes no claim that could hold
                setattr(cls, name, test if cls.state_is_history else None)
        unknown = sorted(set(cls.expected_failures) - {*CHECKS, _MACHINE})
        if unknown:
            raise TypeError(
                f"{cls.__name__}.expected_failures names no check: {', '.join(unknown)}; "
                f"the checks are {', '.join([*CHECKS, _MACHINE])}"
            )

    @pytest.fixture(autouse=True)
    def _expected_failure(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname.removeprefix("test_")
        reason = self.expected_failures.get(name)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def kit(self) -> Iterator[Kit]:
        """The drafter under test, closed afterwards."""
        kit = self.make_kit()
        yield kit
        kit.close()

    def make_kit(self) -> Kit:
        """What the checks are given."""
        if self.max_rows < 3 or self.max_depth < 2:
            raise ValueError("the checks need max_rows of 3 and max_depth of 2 at least")

        def settings(numeric: bool) -> hypothesis.settings:
            if self.settings is not None:
                return self.settings
            return active_effort().settings(numeric=numeric, shrink=self.shrink)

        return Kit(
            self.make_provider,
            self.make_other_providers,
            self.make_target(),
            settings,
            max_rows=self.max_rows,
            max_depth=self.max_depth,
            history=self.state_is_history,
        )

    def run_check(self, name: str) -> None:
        """Run one check by name, outside pytest."""
        kit = self.make_kit()
        try:
            if name == _MACHINE:
                run_machine(kit)
            else:
                run_one(kit, CHECKS[name])
        finally:
            kit.close()

    @classmethod
    def check_names(cls) -> tuple[str, ...]:
        """The checks of this class in the order they run."""
        names = [
            each.name for each in CHECKS.values() if cls.state_is_history or not each.history_only
        ]
        return (*names, _MACHINE)


def run_one(kit: Kit, each: Check) -> None:
    """Run a check, or skip it where the drafter does not offer the verb it is about."""
    if each.needs is not None:
        with kit.open([kit.cold((0,))]) as rows:
            if not isinstance(rows.group, _OPTIONAL[each.needs]):
                pytest.skip(f"the drafter offers no {each.needs}, which is optional")
    each.run(kit)


def run_machine(kit: Kit) -> None:
    """Any legal sequence of verbs."""
    run_state_machine_as_test(row_machine(kit), settings=kit.settings)


def _method(each: Check) -> Callable[[DraftRowContract, Kit], None]:
    def test(self: DraftRowContract, kit: Kit) -> None:  # noqa: ARG001  # a method
        run_one(kit, each)

    test.__name__ = f"test_{each.name}"
    test.__qualname__ = f"DraftRowContract.test_{each.name}"
    test.__doc__ = each.doc
    return test


def _test_row_machine(self: DraftRowContract, kit: Kit) -> None:  # noqa: ARG001  # a method
    """Any legal sequence of verbs leaves every row drafting as it drafts alone."""
    run_machine(kit)


_TESTS: Final = {
    **{f"test_{each.name}": _method(each) for each in CHECKS.values()},
    f"test_{_MACHINE}": _test_row_machine,
}
_HISTORY_TESTS: Final = {f"test_{each.name}" for each in CHECKS.values() if each.history_only}

for _name, _test in _TESTS.items():
    setattr(DraftRowContract, _name, _test)
