"""``PluginContract``: an installed plugin registers, lists and loads as it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any, ClassVar

from specdec.contract import validate_provider
from specdec.plugins import LoadRequest, scan
from specdec.plugins.scan import ENTRY_POINT_GROUP
from specdec.testing.target import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

    from specdec.plugins import DraftKind
    from specdec.plugins.scan import Origin

__all__ = ["PluginContract"]

_WITHOUT_MLX = """
import sys
for name in ("mlx", "mlx.core", "mlx.nn", "mlx_lm", "transformers", "tokenizers"):
    sys.modules[name] = None
from specdec.plugins import scan
found = [p for p in scan().broken if p.origin.distribution in sys.argv[1:]]
sys.exit("; ".join(p.message for p in found) or 0)
"""


def _normalized(name: str) -> str:
    """A distribution's name as package indices compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class PluginContract:
    """Subclass it as ``Test…`` and name the distribution.

    Attributes:
        distribution: the installed distribution's name, such as ``"acme-drafter"``.
        options: by kind, the options that it cannot be loaded without.
    """

    distribution: ClassVar[str]
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("test_") and hasattr(PluginContract, name):
                raise TypeError(f"{cls.__name__} overrides {name} of the kit")

    def entries(self) -> list[EntryPoint]:
        """The distribution's entry points for drafters."""
        try:
            found = distribution(self.distribution)
        except PackageNotFoundError:
            raise AssertionError(
                f"{self.distribution} is not installed; pip install -e . in its folder"
            ) from None
        return [entry for entry in found.entry_points if entry.group == ENTRY_POINT_GROUP]

    def kinds(self) -> list[DraftKind]:
        """The kinds that the distribution registers, at least one."""
        found = [
            kind
            for plugin in scan(strict=False).loaded
            if self.owns(plugin.origin)
            for kind in plugin.kinds
        ]
        assert found, f"{self.distribution} registers no kind"
        return found

    def owns(self, origin: Origin) -> bool:
        """Whether a plugin is of the distribution, however its name is spelt."""
        return _normalized(origin.distribution) == _normalized(self.distribution)

    def test_registers_under_the_entry_point_group(self) -> None:
        """The distribution has an entry point in ``specdec.providers``."""
        assert self.entries(), (
            f"{self.distribution} has no entry point in the group {ENTRY_POINT_GROUP!r}"
        )

    def test_scans_clean(self) -> None:
        """The plugin imports, speaks a supported API, and its kinds are well formed."""
        report = scan(strict=False)
        broken = [b for b in report.broken if self.owns(b.origin)]
        assert not broken, "; ".join(each.message for each in broken)
        names = {kind.name for kind in self.kinds()}
        contested = [each.message for each in report.conflicts if each.name in names]
        assert not contested, "; ".join(contested)

    def test_is_listed_without_mlx(self) -> None:
        """Listing and detecting import no MLX: heavy imports wait for ``load``."""
        names = {p.origin.distribution for p in scan(strict=False).loaded if self.owns(p.origin)}
        assert names, f"{self.distribution} registers no kind"
        done = subprocess.run(
            [sys.executable, "-c", _WITHOUT_MLX, *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.strip() or "scanning failed without MLX"

    def test_kinds_without_an_artifact_load(self) -> None:
        """A kind that needs no files loads a whole provider, at the width that is asked."""
        target = TinyTarget()
        for kind in self.kinds():
            if kind.artifact:
                continue
            request = LoadRequest(
                kind=kind.name,
                target=target,
                num_draft_tokens=2,
                options=self.options.get(kind.name, {}),
            )
            loaded = kind.load(request)
            validate_provider(loaded.provider, self.distribution)
            width = min(2, loaded.max_draft_tokens or 2)
            assert loaded.num_draft_tokens == width, (
                f"{kind.name} was asked for 2 drafts a round and gives {loaded.num_draft_tokens}"
            )
            loaded.provider.close()

    def test_kinds_say_what_they_do(self) -> None:
        """Each kind has a line for ``specdec plugins``."""
        for kind in self.kinds():
            assert kind.summary, f"{kind.name} has no summary"
