"""The drafter that docs/block-drafters.md shows is held to the kit, and drafts from the text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis

from specdec.testing import DraftRowContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting import ProjectedProvider

PAGE = Path(__file__).parents[1] / "docs" / "block-drafters.md"


@cache
def shown() -> dict[str, Any]:
    """What the page's one block of code defines."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


class TestTheExample(DraftRowContract):
    settings = hypothesis.settings(
        max_examples=8, stateful_step_count=15, deadline=None, derandomize=True, database=None
    )

    def make_provider(self) -> ProjectedProvider:
        made: ProjectedProvider = shown()["provider"]()
        return made

    def make_other_providers(self) -> Sequence[ProjectedProvider]:
        return [shown()["provider"](seed=1)]
