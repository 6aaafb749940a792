"""Options that more than one command has, and what they mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import OptionError

if TYPE_CHECKING:
    import argparse

__all__ = [
    "add_adapter_path",
    "add_drafter_options",
    "add_sampling",
    "check_sampling",
    "check_text",
    "drafter_options",
    "read_text",
]


_AS_IN_PYTHON = {"True": True, "False": False}
# What load_drafter takes itself; the commands have options of their own for it.
_NOT_OF_A_KIND = ("drafter", "model", "tokenizer", "kind", "num_draft_tokens")


def add_adapter_path(parser: argparse.ArgumentParser) -> None:
    """Add ``--adapter-path``, an adapter for the model, named as in mlx-lm's commands."""
    parser.add_argument(
        "--adapter-path",
        metavar="DIR",
        help="a folder with a LoRA or DoRA adapter of mlx-lm's to load on the model",
    )


def add_drafter_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--option NAME=VALUE``, a setting of the drafter's kind."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the drafter's kind, such as max_ngram=4, in a chain ngram.max_ngram=4; "
        "may be given several times",
    )


def drafter_options(args: argparse.Namespace) -> dict[str, Any]:
    """The drafter's settings; values are read as JSON where they are JSON, else as text.

    Truth values may be written as Python does, since messages of plugins do so.

    Raises:
        OptionError: an option without a name or a value.
    """
    options: dict[str, Any] = {}
    for text in args.option:
        name, found, value = text.partition("=")
        if not name or not found:
            missing = "value" if name else "name"
            raise OptionError(f"--option {text} has no {missing}; write it as NAME=VALUE")
        if name in _NOT_OF_A_KIND:
            raise OptionError(f"--option {name} is no setting of a drafter's kind")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):  # no JSON, or brackets within brackets without end
            options[name] = _AS_IN_PYTHON.get(value, value)
    return options


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add ``--temp``, ``--top-p``, ``--min-p``, ``--top-k`` and ``--seed``."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=0.0, help="temperature; 0 is greedy")
    group.add_argument("--top-p", type=float, default=0.0, help="nucleus mass; 0 keeps all")
    group.add_argument("--min-p", type=float, default=0.0, help="share of the top; 0 keeps all")
    group.add_argument("--top-k", type=int, default=0, help="tokens to keep; 0 keeps all")
    group.add_argument("--seed", type=int, help="same seed, same text")


def check_sampling(args: argparse.Namespace) -> dict[str, float | int | None]:
    """The sampling options as keywords, checked before a model is loaded.

    Raises:
        OptionError: a value out of range.
    """
    from specdec.sampling import SamplingOptions

    options = {name: getattr(args, name) for name in ("temp", "top_p", "min_p", "top_k", "seed")}
    SamplingOptions(**options)
    return options


def check_text(text: str, what: str) -> str:
    """A prompt that can be tokenized.

    Args:
        text: the prompt.
        what: where it is from, for the message.

    Raises:
        OptionError: it is empty, or holds what is no Unicode text.
    """
    if not text:
        raise OptionError(f"{what} is empty; give some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(f"{what} is no Unicode text; give it as UTF-8") from error
    return text


def read_text(name: str) -> str:
    """A text file, or standard input for ``-``.

    Raises:
        OptionError: the file is missing or is no UTF-8 text.
    """
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise OptionError(f"file {name} cannot be read ({reason})") from error
