"""``specdec new-drafter``: write a package that holds the smallest whole drafter."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import scaffold
from specdec.errors import OptionError
from specdec.plugins.scan import ENTRY_POINT_GROUP, scan

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "run_new_drafter"]

_NEXT = """\
wrote {folder}; it works as it is:
  cd {folder}
  pip install -e ".[test]"
  python -m pytest
  specdec generate --model demo --drafter {name} --prompt "one two three one two"
Then make src/{package}/history.py your own."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("new-drafter", help="write the package of a new drafter")
    parser.add_argument("name", metavar="NAME", help="its kind, such as my-drafter")
    parser.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to put the folder specdec-NAME; here if not given",
    )
    parser.set_defaults(run=run_new_drafter)


def run_new_drafter(args: argparse.Namespace) -> int:
    """Write the package ``specdec-NAME``, and say what to do with it.

    Args:
        args: ``name`` and ``directory``.

    Raises:
        OptionError: a name that cannot be used or is taken, or a place that cannot be written;
            nothing was written.
    """
    contents = scaffold.render(args.name)
    check_free(args.name)
    parent = Path(args.directory)
    if not parent.is_dir():
        raise OptionError(f"there is no folder {parent}; make it first, or choose another")
    folder = parent / f"specdec-{args.name}"
    scaffold.write(contents, folder)
    package = f"specdec_{args.name.replace('-', '_')}"
    print(_NEXT.format(folder=folder, name=args.name, package=package))
    return 0


def check_free(name: str) -> None:
    """Check that no installed distribution has the name, and no plugin the kind.

    Raises:
        OptionError: one has; the message says which.
    """
    report = scan(strict=False)
    owners = [
        plugin.origin.distribution
        for plugin in report.loaded
        if name in {kind.name for kind in plugin.kinds}
    ]
    # A plugin that is broken or disabled cannot say its kinds, but its entry point has a name.
    owners += [
        entry.dist.name
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        if entry.dist is not None
    ]
    with suppress(metadata.PackageNotFoundError):
        owners.append(metadata.distribution(f"specdec-{name}").name)
    if owners:
        raise OptionError(
            f"{name!r} is taken by {owners[0]}, which is installed; choose another name, or "
            f"pip uninstall {owners[0]}"
        )
