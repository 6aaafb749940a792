"""``specdec check``: what specdec can do with a model, tried on it."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from specdec.cli.options import add_adapter_path
from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.check import ModelReport, WidthReport

__all__ = ["add_parser", "run_check"]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("check", help="try what specdec can do with a model")
    parser.add_argument(
        "model", nargs="?", help="a folder, a bundled model (demo) or a hub id; --model is the same"
    )
    parser.add_argument("--model", dest="named", metavar="MODEL", help=argparse.SUPPRESS)
    add_adapter_path(parser)
    parser.add_argument(
        "--drafter", help="a kind, a folder, auto or a chain, in place of all kinds"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Bind the model, run the probes, and print what was found.

    Returns:
        1 if dropping part of a window changes more than rounding does, or if the drafter that was
        asked for does not fit; else 0.

    Raises:
        SpecdecError: the model cannot be loaded or driven.
    """
    from specdec.check import check_model
    from specdec.drafters import check_drafter
    from specdec.models import load_model

    name = _model(args)
    if args.drafter is not None:
        check_drafter(args.drafter)
    model, tokenizer = load_model(name, adapter_path=args.adapter_path)
    report = check_model(model, tokenizer, drafter=args.drafter)
    print(json.dumps(_as_object(report), indent=2) if args.json else "\n".join(_lines(report)))
    refused = args.drafter is not None and not all(fit.fits for fit in report.drafters)
    return 1 if refused or not report.sound else 0


def _model(args: argparse.Namespace) -> str:
    """The model that is named, in place or, as other commands have it, with ``--model``."""
    names: set[str] = {args.model, args.named} - {None}
    if len(names) > 1:
        raise OptionError(f"there are two models, {args.model} and {args.named}; give one")
    if not names:
        raise OptionError("no model is named; give a folder, a bundled model (demo) or a hub id")
    return names.pop()


def _lines(report: ModelReport) -> Iterator[str]:
    caches = ", ".join(f"{count} x {name}" for name, count in report.caches.items())
    yield f"model: {report.model_type}, {report.vocab_size} ids"
    yield f"caches: {caches}"
    if report.reason is not None:
        yield f"speculation: no ({report.reason})"
    else:
        yield f"speculation: yes; in one call: {report.together}"
    for name, how in report.recurrent.items():
        yield f"recurrent: {name}, {how}"
    for port, what in report.ports.items():
        yield f"port {port}: {what or 'missing'}"
    for fit in report.drafters:
        words = {True: "fits", False: "does not fit", None: "not tried"}[fit.fits]
        yield f"drafter {fit.kind}: {words}{f' ({fit.message})' if fit.message else ''}"
    ways = [*report.widths[1:], *([] if report.rollback is None else [report.rollback])]
    for way in ways:
        yield f"{way.name}: {_difference(way)}"
    if not report.sound:
        yield "rollback is not sound: it changes more than the width of windows does"
    elif report.reason is not None:
        return  # there is one way alone
    elif report.exact:
        yield "exact: every way gives the same bits"
    else:
        yield (
            f"not exact: texts may part where two tokens are within {report.tie_margin:.3g} "
            "of each other"
        )


def _difference(way: WidthReport) -> str:
    flips = ", ".join(f"at {flip.position} (ahead by {flip.margin:.3g})" for flip in way.flips)
    said = f"largest difference {way.difference:.3g}, "
    return said + (f"{len(way.flips)} best tokens differ: {flips}" if flips else "no token differs")


def _as_object(report: ModelReport) -> dict[str, Any]:
    from attrs import asdict

    found = asdict(report)
    told = found | {"exact": report.exact, "sound": report.sound, "tie_margin": report.tie_margin}
    finite: dict[str, Any] = _finite(told)
    return finite


def _finite(value: Any) -> Any:
    """The same with ``None`` for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
