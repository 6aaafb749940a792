"""The drafter keeps the contract: every check of the kit is a test of these classes."""

from specdec.testing import DraftRowContract, PluginContract
from specdec_echo.provider import EchoProvider


class TestRows(DraftRowContract):
    """The kit's texts are short. A memory of 8 tokens makes rows forget some of them."""

    def make_provider(self) -> EchoProvider:
        """The drafter, the same at each call."""
        return EchoProvider(memory=8)

    def make_other_provider(self) -> EchoProvider:
        """One whose rows are not this one's."""
        return EchoProvider(memory=16)


class TestPlugin(PluginContract):
    """What was installed is found, listed and loaded."""

    distribution = "specdec-echo"
