"""A new drafter's package, written from a template: ``render`` its files, then ``write`` them.

The template is the folder ``template``: the package's files, named as there but for the suffix
``.tmpl`` (so that no tool takes them for sources of the core) and the folder ``package``. In them
``$name`` is the drafter's kind, ``$package`` its import package, and ``${title}`` the kind as the
beginning of a class name.

``docs/examples/specdec-echo`` is what the template gives for the name ``echo``; a test holds that.
To change either, edit the template, and write the example again::

    rm -r docs/examples/specdec-echo && specdec new-drafter echo --directory docs/examples
"""

from __future__ import annotations

import keyword
import re
import shutil
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Final

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable
    from pathlib import Path

__all__ = ["check_name", "render", "write"]

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME: Final = 40
_RESERVED: Final = {
    "core": "specdec-core is specdec itself",
    "none": "`--drafter none` means no drafter",
}
_SUFFIX: Final = ".tmpl"


def check_name(name: str) -> None:
    """Check that a drafter, a distribution and an import package can have this name.

    Raises:
        OptionError: they cannot; the message says why.
    """
    if _NAME.fullmatch(name) is None or len(name) > _LONGEST_NAME:
        raise OptionError(
            f"{name!r} is no name for a drafter; use lower-case letters, digits and single hyphens "
            f"between them, a letter first, {_LONGEST_NAME} characters at most, such as my-drafter"
        )
    if name in _RESERVED:
        raise OptionError(f"{name!r} is taken: {_RESERVED[name]}; choose another name")
    if keyword.iskeyword(name):
        raise OptionError(f"{name!r} is a word of Python itself; choose another, such as my-{name}")


def render(name: str) -> dict[str, str]:
    """The files of a new drafter's package.

    Args:
        name: the drafter's kind.

    Returns:
        Text by path, relative to the package's folder, with ``/``.

    Raises:
        OptionError: no drafter can have this name.
    """
    check_name(name)
    package = f"specdec_{name.replace('-', '_')}"
    words = {
        "name": name,
        "package": package,
        "title": "".join(part.capitalize() for part in name.split("-")),
    }
    return {
        path.replace("/package/", f"/{package}/"): Template(text).substitute(words)
        for path, text in _template(files("specdec.scaffold") / "template")
    }


def _template(folder: Traversable, place: str = "") -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _template(entry, f"{place}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield place + entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")


def write(contents: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder that is new or empty: all of them, or none.

    They are written beside it first, and moved there as a whole.

    Args:
        contents: text by relative path.
        folder: where to; what it is in must exist.

    Raises:
        OptionError: the folder holds something, or cannot be written.
    """
    staging = folder.with_name(f".{folder.name}.partial")
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise OptionError(f"{folder} exists and is no folder; choose another place")
        if folder.exists() and any(folder.iterdir()):
            raise OptionError(
                f"{folder} is not empty, and nothing is overwritten; choose another place or name"
            )
        staging.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        for path, text in contents.items():
            target = staging / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
        if folder.exists():
            folder.rmdir()  # refuses if somebody has put something there meanwhile
        staging.rename(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> OptionError:
    reason = error.strerror or type(error).__name__
    return OptionError(
        f"{folder} cannot be written ({reason}: {error.filename}); choose another place"
    )
