"""The ``specdec`` command. Each sub-command imports what it needs when it runs."""

from specdec.cli.main import main

__all__ = ["main"]
