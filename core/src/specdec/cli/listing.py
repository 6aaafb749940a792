"""``specdec plugins`` and ``specdec detect``: what is installed, and what it says of a folder.

Both work where no MLX is installed, and write plain aligned text that pipes well.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.plugins.hooks import API_VERSION, SUPPORTED_API
from specdec.plugins.kinds import Artifact
from specdec.plugins.models import find_model
from specdec.plugins.registry import Registry
from specdec.plugins.scan import is_strict, scan

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from specdec.plugins.kinds import DraftKind
    from specdec.plugins.registry import Detection
    from specdec.plugins.scan import Broken, Origin, PluginReport

__all__ = ["add_parsers", "run_detect", "run_plugins"]


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-commands ``plugins`` and ``detect``."""
    plugins = subparsers.add_parser("plugins", help="list the installed drafters and their faults")
    plugins.add_argument("--json", action="store_true", help="write JSON")
    plugins.add_argument("--strict", action="store_true", help="exit 1 if there is any fault")
    plugins.add_argument("--verbose", action="store_true", help="add tracebacks of broken plugins")
    plugins.set_defaults(run=run_plugins)
    detect = subparsers.add_parser("detect", help="say which drafter a folder is for")
    detect.add_argument("path", help="the drafter's folder, or a bundled one's name")
    detect.add_argument("--json", action="store_true", help="write JSON")
    detect.set_defaults(run=run_detect)


def run_plugins(args: argparse.Namespace) -> int:
    """List every kind, broken plugin, disabled plugin and conflict.

    Args:
        args: ``json``, ``strict`` and ``verbose``.

    Returns:
        1 if a fault was found in strict mode, else 0.
    """
    report = scan(strict=False)  # the list is how one finds the fault, so it is always shown
    if args.json:
        print(json.dumps(_report_json(report, args.verbose), indent=2, default=repr))
    else:
        rows = [*_kind_rows(report), *_other_rows(report)]
        if rows:
            print(_table(["KIND", "PLUGIN", "VERSION", "API", "ARTIFACT", "STATUS"], rows))
        else:
            print("no plugins are installed; start with: pip install specdec-ngram")
        if args.verbose:
            for broken in report.broken:
                print(f"\n{broken.origin}:\n{_trace(broken)}", end="")
    faults = bool(report.broken or report.conflicts)
    return 1 if faults and (args.strict or is_strict()) else 0


def run_detect(args: argparse.Namespace) -> int:
    """Print each detector's answer about a folder, and the choice that follows.

    Args:
        args: ``path`` and ``json``.

    Raises:
        ArtifactError: nothing readable is at the path; nothing was printed.
        ModelNotFoundError: a package that registers the name fails to give the folder.
        PluginError: no kind can be chosen; the answers were printed.
    """
    artifact = Artifact(_folder(args.path))
    artifact.require_readable()
    registry = Registry(scan())
    answers = registry.detect(artifact)
    chosen: DraftKind | None = None
    problem: SpecdecError | None = None
    try:
        chosen = registry.select(artifact)
    except SpecdecError as error:
        problem = error
    if args.json:
        print(json.dumps(_detect_json(artifact, registry, answers, chosen, problem), indent=2))
    else:
        _print_answers(registry, answers, chosen)
    if problem is not None:
        raise problem
    return 0


def _folder(name: str) -> Path:
    """What is at the path, else the bundled drafter of this name, as for generating."""
    path = Path(name)
    return path if path.exists() else find_model(name) or path


def _print_answers(
    registry: Registry, answers: Iterable[Detection], chosen: DraftKind | None
) -> None:
    rows = [[a.kind.name, str(a.origin), a.message] for a in answers]
    rows += [["-", str(b.origin), f"not asked: {b.message}"] for b in registry.report.broken]
    if rows:
        print(_table(["KIND", "PLUGIN", "ANSWER"], rows))
    if chosen is not None:
        how = " (fallback)" if chosen.fallback else ""
        print(f"choice: {chosen.name}, by {registry.owner(chosen.name)}{how}")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    widths.append(0)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _artifact_words(kind: DraftKind) -> str:
    words = ["detects"] if kind.detect else []
    words += ["fallback"] if kind.fallback else []
    words += ["bundled"] if kind.bundled_at else []
    words += ["native"] if kind.create else []
    if not kind.artifact:
        words.insert(0, "none")
    if not kind.detect and not kind.fallback:
        words.append("by name")
    return ", ".join(words)


def _kind_rows(report: PluginReport) -> list[list[str]]:
    contested = {conflict.name: conflict.message for conflict in report.conflicts}
    rows = []
    for plugin in report.loaded:
        origin = plugin.origin
        for kind in plugin.kinds:
            status = f"conflict: {contested[kind.name]}" if kind.name in contested else "ok"
            cells = [kind.name, origin.distribution, origin.version, str(plugin.api)]
            rows.append([*cells, _artifact_words(kind), status])
    return sorted(rows)


def _other_rows(report: PluginReport) -> list[list[str]]:
    rows = []
    for plugin in report.loaded:
        if not plugin.kinds:
            rows.append(_bare_row(plugin.origin, str(plugin.api), "ok, without a kind"))
    for broken in report.broken:
        api = "-" if broken.api is None else str(broken.api)
        rows.append(_bare_row(broken.origin, api, broken.message))
    for disabled in report.disabled:
        rows.append(_bare_row(disabled.origin, "-", f"disabled by {disabled.variable}"))
    return sorted(rows)


def _bare_row(origin: Origin, api: str, status: str) -> list[str]:
    return ["-", origin.distribution, origin.version, api, "-", status]


def _trace(broken: Broken) -> str:
    return "".join(traceback.format_exception(broken.error))


def _origin_json(origin: Origin) -> dict[str, Any]:
    return {"plugin": origin.distribution, "version": origin.version, "entry": origin.name}


def _report_json(report: PluginReport, verbose: bool) -> dict[str, Any]:
    contested = {conflict.name for conflict in report.conflicts}
    kinds = [
        {"kind": kind.name}
        | _origin_json(plugin.origin)
        | {
            "api": plugin.api,
            "artifact": kind.artifact,
            "detects": kind.detect is not None,
            "fallback": kind.fallback,
            "native": kind.create is not None,
            "bundled_at": kind.bundled_at,
            "default_width": kind.default_width,
            "summary": kind.summary,
            "status": "conflict" if kind.name in contested else "ok",
        }
        for plugin in report.loaded
        for kind in plugin.kinds
    ]
    broken = [
        _origin_json(fault.origin)
        | {"api": fault.api, "stage": fault.stage, "message": fault.message}
        | ({"traceback": _trace(fault)} if verbose else {})
        for fault in report.broken
    ]
    return {
        "api": API_VERSION,
        "supported_api": sorted(SUPPORTED_API),
        "plugins": [_origin_json(plugin.origin) | {"api": plugin.api} for plugin in report.loaded],
        "kinds": sorted(kinds, key=lambda kind: (kind["kind"], kind["plugin"])),
        "broken": broken,
        "disabled": [
            _origin_json(item.origin) | {"variable": item.variable} for item in report.disabled
        ],
        "conflicts": [
            {"kind": item.name, "owners": [_origin_json(owner) for owner in item.owners]}
            for item in report.conflicts
        ],
    }


def _detect_json(
    artifact: Artifact,
    registry: Registry,
    answers: Iterable[Detection],
    chosen: DraftKind | None,
    problem: SpecdecError | None,
) -> dict[str, Any]:
    return {
        "path": str(artifact.path),
        "answers": [
            {"kind": a.kind.name}
            | _origin_json(a.origin)
            | {"answer": a.answer, "message": a.message}
            for a in answers
        ],
        "not_asked": [
            _origin_json(fault.origin) | {"message": fault.message}
            for fault in registry.report.broken
        ],
        "choice": None if chosen is None else chosen.name,
        "error": None if problem is None else str(problem),
    }
