"""The conformance kit: whether a drafter keeps the contract, by one pytest class.

A drafter's whole test file::

    from specdec.testing import DraftRowContract, PluginContract

    class TestRows(DraftRowContract):
        def make_provider(self):
            return AcmeProvider.tiny(seed=0)

        def make_other_provider(self):
            return AcmeProvider.tiny(seed=1)

    class TestPlugin(PluginContract):
        distribution = "acme-drafter"

Installed with ``specdec-core[testing]``; nothing else of specdec imports hypothesis or pytest.
"""

try:
    import hypothesis  # noqa: F401  # asked for here, for the message
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"specdec.testing needs {error.name}; pip install 'specdec-core[testing]'", name=error.name
    ) from None

pytest.register_assert_rewrite(
    "specdec.testing.checks",
    "specdec.testing.driven",
    "specdec.testing.harness",
    "specdec.testing.machine",
    "specdec.testing.plugin",
)

from specdec.testing.checks import CHECKS  # noqa: E402
from specdec.testing.contract import DraftRowContract  # noqa: E402
from specdec.testing.kit import Check, Kit  # noqa: E402
from specdec.testing.plugin import PluginContract  # noqa: E402
from specdec.testing.target import TinyTarget  # noqa: E402

__all__ = ["CHECKS", "Check", "DraftRowContract", "Kit", "PluginContract", "TinyTarget"]
