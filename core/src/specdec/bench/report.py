"""Results as people read them: a table on a terminal, Markdown, one JSON object."""

from __future__ import annotations

import platform
import statistics
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec.bench.figures import Result
    from specdec.bench.growth import GrowthPoint

__all__ = ["as_json", "growth_table", "machine", "markdown", "notes", "table"]

_HEAD = ("RUN", "TOK/S", "RATIO", "QUARTILES", "TOK/FWD", "ASKED", "ACCEPTED")
_PHASES = ("DRAFT", "VERIFY", "ROLLBACK", "HOST", "BOUND", "SHARE")
_TAIL = ("FIRST", "MEMORY", "SAME TOKENS")
_NONE = "-"


def machine() -> dict[str, str]:
    """Where this runs, and with which versions."""
    info: Any = mx.device_info()
    return {
        "device": str(info.get("device_name") or platform.machine()),
        "system": platform.system(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "specdec": version("specdec-core"),
    }


def table(results: Sequence[Result]) -> str:
    """All results for a terminal, one table per prompt set and batch size."""
    parts, groups = [], list(_groups(results))
    for group in groups:
        lines = _aligned(_rows(group))
        title = f"{group[0].prompt_set}, batch {group[0].batch}"
        parts.append("\n".join([*([title] if len(groups) > 1 else []), *lines]))
    return "\n\n".join(parts)


def markdown(results: Sequence[Result], about: Sequence[str]) -> str:
    """All results as Markdown.

    Args:
        results: of a comparison.
        about: lines on what was run.
    """
    lines = ["# specdec bench", "", *about, ""]
    for group in _groups(results):
        lines += [f"## {group[0].prompt_set}, batch {group[0].batch}", ""]
        lines += [*_piped(_rows(group)), ""]
        places = [(r.label, r.acceptance_per_position) for r in group if r.acceptance_per_position]
        if places:
            most = max(len(shares) for _, shares in places)
            head = ("accepted at place", *map(str, range(1, most + 1)))
            rows = [
                (label, *(_percent(share) for share in shares), *[_NONE] * (most - len(shares)))
                for label, shares in places
            ]
            lines += [*_piped([head, *rows]), ""]
    said = notes(results)
    lines += [f"- {each}" for each in said] + ([""] if said else [])
    lines += [
        "Ratios are of decoding speed to plain decoding's, per prompt (per group of prompts at a "
        "batch above 1): the median and the quartiles. Phases are milliseconds per round. Share is "
        "what was reached of E / (v + d + o); see docs/benchmarking.md.",
        "",
    ]
    return "\n".join(lines)


def as_json(
    results: Sequence[Result], growth: Sequence[GrowthPoint], **about: Any
) -> dict[str, Any]:
    """One object.

    Args:
        results: of a comparison.
        growth: points of batch and context, if they were run.
        about: what was run.
    """
    found: dict[str, Any] = {**about, "machine": machine()}
    found["results"] = [result.as_dict() for result in results]
    if growth:
        found["growth"] = [point.as_dict() for point in growth]
    return found


def notes(results: Iterable[Result]) -> list[str]:
    """What should be known of some runs, one line each: failures and drafters that stopped."""
    lines = []
    for result in results:
        where = f"{result.label} ({result.prompt_set}, batch {result.batch})"
        if result.error is not None:
            lines.append(f"{where} failed: {result.error}")
        lines += [f"{where}: {remark}" for remark in result.remarks]
        if result.differing:
            lines.append(f"{where}: {result.differing} texts differ from the reference's")
    return list(dict.fromkeys(lines))


def growth_table(points: Sequence[GrowthPoint]) -> str:
    """Tokens per second by batch and context."""
    names = list(dict.fromkeys(point.name for point in points))
    rows = [("CONTEXT", "BATCH", *(name.upper() for name in names), "BEST OVER PLAIN")]
    for context, batch in dict.fromkeys((p.context, p.batch) for p in points):
        here = {p.name: p for p in points if (p.context, p.batch) == (context, batch)}
        speeds = [here[name].speed if name in here else None for name in names]
        plain = here["plain"].speed if "plain" in here else None
        others = [p.speed for name, p in here.items() if name != "plain" and p.speed]
        best = f"{max(others) / plain:.2f}" if others and plain else _NONE
        told = [_NONE if speed is None else f"{speed:.1f}" for speed in speeds]
        rows.append((str(context), str(batch), *told, best))
    return "\n".join(_aligned(rows))


def _groups(results: Sequence[Result]) -> Iterable[list[Result]]:
    keys = dict.fromkeys((result.prompt_set, result.batch) for result in results)
    for key in keys:
        yield [result for result in results if (result.prompt_set, result.batch) == key]


def _rows(group: Sequence[Result]) -> list[tuple[str, ...]]:
    beside = any(result.over_mlx_lm for result in group)
    looked = any(result.phases is not None for result in group)
    head = (*_HEAD[:4], *(("/MLX-LM",) if beside else ()), *_HEAD[4:])
    rows = [(*head, *(_PHASES if looked else ()), *_TAIL)]
    for result in group:
        if not result.turns:
            rows.append((result.label, "failed", *[_NONE] * (len(rows[0]) - 2)))
            continue
        rows.append(
            (
                *_speeds(result, beside),
                *(_phases(result) if looked else ()),
                *_rest(result),
            )
        )
    return rows


def _speeds(result: Result, beside: bool) -> tuple[str, ...]:
    spread, rate = result.quartiles, result.acceptance_rate
    over = statistics.median(result.over_mlx_lm) if result.over_mlx_lm else None
    return (
        result.label,
        _number(result.tokens_per_second, 1),
        _number(result.ratio),
        _NONE if spread is None else f"{spread[0]:.2f}-{spread[1]:.2f}",
        *((_number(over),) if beside else ()),
        f"{result.tokens_per_forward:.2f}",
        _number(result.asked, 1),
        _NONE if rate is None else _percent(rate),
    )


def _phases(result: Result) -> tuple[str, ...]:
    seen = result.phases
    if seen is None:
        return (_NONE,) * len(_PHASES)
    parts = (seen.draft, seen.verify, seen.rollback, seen.host)
    times = [f"{seen.per_round(part):.2f}" for part in parts]
    return (*times, f"{seen.bound:.1f}", _number(result.share))


def _rest(result: Result) -> tuple[str, ...]:
    first = result.time_to_first_token
    return (
        _NONE if first is None else f"{1000 * first:.0f}ms",
        f"{result.peak_memory / 1e9:.2f}GB",
        _NONE if result.same is None else f"{result.same}/{result.same + result.differing}",
    )


def _number(value: float | None, places: int = 2) -> str:
    return _NONE if value is None else f"{value:.{places}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    spans = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(s) for c, s in zip(row, spans, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def _piped(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0].lower(), "|" + "---|" * len(rows[0]), *lines[1:]]
