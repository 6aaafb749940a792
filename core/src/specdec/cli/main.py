"""Parsing the command line, and turning errors into one line."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from specdec.cli import bench, check, generate, listing, new_drafter
from specdec.errors import SpecdecError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def _said_in_a_line(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning without the line of code that gave it."""
    print(f"specdec: warning: {one_line(message)}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands; each sets ``run``, a function of the parsed arguments."""
    parser = _Parser(
        prog="specdec",
        description="Speculative decoding for MLX: the same tokens in fewer forwards.",
    )
    subparsers: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    generate.add_parser(subparsers)
    bench.add_parser(subparsers)
    check.add_parser(subparsers)
    listing.add_parsers(subparsers)
    new_drafter.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        The exit status: 0; 1 where a check failed; 2 for a mistake of the user's, in one line.
    """
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets a stand-in, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _said_in_a_line
            status: int = args.run(args)
        sys.stdout.flush()
    except SpecdecError as error:
        print(f"specdec: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Warning as warning:  # those that -W error made exceptions
        print(f"specdec: {one_line(warning)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; Python would complain once more when it flushes at exit.
        sys.stdout = None
        return 1
    except OSError as error:
        if error.filename is None:
            raise  # of no file that was named
        name = one_line(str(error.filename))
        print(f"specdec: {error.strerror or type(error).__name__}: {name}", file=sys.stderr)
        return 2
    return status
