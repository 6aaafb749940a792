"""Results as pictures, to be shared: speed over plain decoding, and growth. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.bench.figures import Result
    from specdec.bench.growth import GrowthPoint

__all__ = ["check_picture", "draw_growth", "draw_ratios"]

# Okabe and Ito's colours, told apart by people with any colour vision; black is plain decoding.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_KINDS = (".png", ".svg", ".pdf")
_BOUND = "bound E / (v + d + o)"


def check_picture(name: str) -> None:
    """Check that a picture can be written, before anything is run.

    Raises:
        OptionError: an ending that is no picture's, a folder that is not there, or no matplotlib.
    """
    path = Path(name)
    if path.suffix.lower() not in _KINDS:
        raise OptionError(f"picture {name} ends in no {', '.join(_KINDS)}; give one of these")
    if not path.parent.is_dir():
        raise OptionError(f"picture {name}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise OptionError(f"picture {name} is a folder; give a file in it")
    _figure(1, 1, 1, 1)


def draw_ratios(results: Sequence[Result], name: str, title: str, below: str) -> None:
    """Bars of the speed over plain decoding, with quartiles and the bound, by prompt set.

    Args:
        results: of a comparison; one panel per batch size.
        name: the file, PNG, SVG or PDF.
        title: what was run.
        below: the line under the picture, such as machine and versions.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    _check_any(results, name)
    batches = list(dict.fromkeys(result.batch for result in results))
    sets = list(dict.fromkeys(result.prompt_set for result in results))
    labels = list(dict.fromkeys(r.label for r in results if r.name != "plain" and r.ratios))
    wide = max(6.5, 1.6 + 0.42 * len(sets) * (len(labels) + 1))
    figure, panels = _figure(len(batches), 1, wide, 1.0 + 3.1 * len(batches))
    for panel, batch in zip(panels, batches, strict=True):
        here = [result for result in results if result.batch == batch]
        _bars(panel, here, sets, labels)
        panel.set_title(f"batch {batch}" if len(batches) > 1 else "", fontsize=10, loc="left")
    panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1.08), ncol=4, fontsize=8, frameon=False)
    _finish(figure, name, title, below)


def draw_growth(points: Sequence[GrowthPoint], name: str, title: str, below: str) -> None:
    """Lines of tokens per second over the batch, one panel per context.

    Args:
        points: of :func:`specdec.bench.growth.grow`.
        name: the file, PNG, SVG or PDF.
        title: what was run.
        below: the line under the picture.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    _check_any(points, name)
    contexts = list(dict.fromkeys(point.context for point in points))
    names = list(dict.fromkeys(point.name for point in points))
    figure, panels = _figure(1, len(contexts), 1.5 + 3.1 * len(contexts), 4.2, sharey=True)
    for panel, context in zip(panels, contexts, strict=True):
        for each in names:
            line = [p for p in points if (p.context, p.name) == (context, each) and p.speed]
            panel.plot(
                [p.batch for p in line],
                [p.speed for p in line],
                marker="o",
                markersize=4,
                label=each,
                color=_colour(each, names),
            )
        batches = sorted({p.batch for p in points})
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.yaxis.set_major_formatter(lambda speed, _: f"{speed:g}")
        panel.minorticks_off()
        panel.set_title(f"context {context}", fontsize=10)
        panel.set_xlabel("batch")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens per second, all rows")
    panels[0].legend(fontsize=8, frameon=False)
    _finish(figure, name, title, below)


def _bars(panel: Any, here: Sequence[Result], sets: Sequence[str], labels: Sequence[str]) -> None:
    """One panel: a group of bars for each prompt set."""
    named: set[str] = set()  # what the legend has
    for number, label in enumerate(labels):
        for place, each in enumerate(sets):
            found = [r for r in here if (r.label, r.prompt_set) == (label, each) and r.ratios]
            if not found:
                continue
            at = place + (number - (len(labels) - 1) / 2) * 0.8 / len(labels)
            shown = None if label in named else label
            _bar(panel, at, 0.76 / len(labels), found[0], color=_colour(label, labels), label=shown)
            named.add(label)
            if found[0].share:
                _mark(panel, at, found[0], None if _BOUND in named else _BOUND)
                named.add(_BOUND)
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
    panel.set_xticks(range(len(sets)), sets)
    panel.set_ylabel("speed over plain")
    panel.set_ylim(bottom=0)
    panel.margins(y=0.12)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def _bar(panel: Any, at: float, width: float, result: Result, **style: Any) -> None:
    """A ratio with its quartiles, and its number above them."""
    ratio, (low, high) = result.ratio or 0.0, result.quartiles or (0.0, 0.0)
    thin = {"elinewidth": 1, "ecolor": "#333333", "capsize": 2}
    spread = [[ratio - low], [high - ratio]]
    panel.bar(at, ratio, width, yerr=spread, error_kw=thin, **style)
    panel.annotate(
        f"{ratio:.2f}",
        (at, high),
        (0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=7,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
    )


def _mark(panel: Any, at: float, result: Result, label: str | None) -> None:
    """The bound, as a multiple of plain decoding's speed."""
    bound = (result.ratio or 0.0) / (result.share or 1.0)
    panel.plot(at, bound, "_", color="black", markersize=12, markeredgewidth=1.5, label=label)


def _check_any(what: Sequence[Any], name: str) -> None:
    if not what:
        raise OptionError(f"picture {name}: there is nothing to draw; run something first")


def _colour(name: str, names: Sequence[str]) -> str:
    if name == "plain":
        return "black"
    return _COLOURS[[each for each in names if each != "plain"].index(name) % len(_COLOURS)]


def _figure(rows: int, columns: int, width: float, height: float, **shared: Any) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            'a picture needs matplotlib; pip install "specdec-core[bench]" brings it'
        ) from error
    # No pyplot: it would choose a window system, and keep every figure.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    return figure, list(panels.flat)


def _finish(figure: Any, name: str, title: str, below: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(below, fontsize=7, color="#555555")
    try:
        figure.savefig(name, dpi=160)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OptionError(
            f"picture {name} cannot be written ({reason}); give another file"
        ) from error
