"""How much the kit tries: hypothesis profiles ``specdec-quick``, ``-ci`` and ``-deep``.

``specdec-ci`` is the default and draws the same examples every time. Choose another with the
environment variable ``SPECDEC_PROFILE`` (``quick``, ``ci`` or ``deep``), or by loading a profile of
these names in a ``conftest.py``. No profile has a deadline: the first call of an MLX kernel
compiles it.
"""

from __future__ import annotations

import os
from typing import Final

from attrs import frozen
from hypothesis import HealthCheck, Phase, settings

__all__ = ["PROFILES", "Effort", "active_effort"]

_PREFIX = "specdec-"
_VARIABLE = "SPECDEC_PROFILE"


@frozen
class Effort:
    """How much one profile tries.

    Attributes:
        name: ``quick``, ``ci`` or ``deep``.
        examples: examples of a property, for a drafter that computes on the host alone.
        numeric_examples: the same for a drafter that is given hidden states or owns weights, whose
            every example costs forwards.
        steps: rules of one run of the row machine, for the former.
        numeric_steps: for the latter.
        derandomized: whether the examples are the same every time.
    """

    name: str
    examples: int
    numeric_examples: int
    steps: int
    numeric_steps: int
    derandomized: bool

    def settings(self, *, numeric: bool, shrink: bool = True) -> settings:
        """As hypothesis settings.

        Args:
            numeric: whether an example costs forwards.
            shrink: whether a failing example is made small, which costs many runs.
        """
        return settings(
            settings.get_profile(_PREFIX + self.name),
            max_examples=self.numeric_examples if numeric else self.examples,
            stateful_step_count=self.numeric_steps if numeric else self.steps,
            phases=tuple(Phase) if shrink else (Phase.explicit, Phase.generate),
        )


PROFILES: Final = {
    effort.name: effort
    for effort in (
        Effort("quick", 25, 6, 20, 10, derandomized=False),
        Effort("ci", 100, 30, 30, 15, derandomized=True),
        Effort("deep", 1000, 200, 50, 30, derandomized=False),
    )
}

for _effort in PROFILES.values():
    settings.register_profile(
        _PREFIX + _effort.name,
        deadline=None,
        max_examples=_effort.examples,
        stateful_step_count=_effort.steps,
        derandomize=_effort.derandomized,
        database=None if _effort.derandomized else settings.default.database,  # type: ignore[union-attr]  # set at import
        print_blob=True,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )


def active_effort() -> Effort:
    """The profile that is asked for.

    Raises:
        ValueError: ``SPECDEC_PROFILE`` names none.
    """
    wanted = os.environ.get(_VARIABLE)
    if wanted is not None:
        name = wanted.removeprefix(_PREFIX)
        if name not in PROFILES:
            raise ValueError(f"{_VARIABLE} is {wanted!r}; give {', '.join(PROFILES)}")
        return PROFILES[name]
    loaded = settings.get_current_profile_name()
    name = loaded.removeprefix(_PREFIX) if loaded.startswith(_PREFIX) else "ci"
    return PROFILES.get(name, PROFILES["ci"])
