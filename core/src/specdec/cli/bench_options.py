"""The options of ``specdec bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.cli.bench_inputs import BUILT_IN
from specdec.cli.options import add_adapter_path, add_drafter_options, add_sampling

if TYPE_CHECKING:
    import argparse

__all__ = ["GROWTH_BATCHES", "add_options"]

GROWTH_BATCHES: Final = "1,2,4,8,16,32"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all of them."""
    _add_runs(parser)
    add_drafter_options(parser)
    _add_simulation(parser)
    _add_growth(parser)
    add_sampling(parser)
    _add_output(parser)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help="a folder, a bundled model (demo) or a hub id"
    )
    add_adapter_path(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        help="a kind, a drafter's folder, auto or a chain (ngram,mtp); may be given several times "
        "(default: every installed drafter that needs no folder; none: only plain decoding)",
    )
    parser.add_argument(
        "--prompts",
        help=f"one or more, with commas: {', '.join(BUILT_IN)}, a JSON Lines file with "
        '"text" in each line, or a bundled one (demo, demo-copy) (default: all of the first)',
    )
    parser.add_argument("--limit", type=int, help="use the first prompts of each set only")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--widths",
        default="",
        help="fixed drafts a round to time as well, such as 1,2,4; default stands for each "
        "drafter's own number",
    )
    parser.add_argument(
        "--batch", help="prompts that are decoded at the same time, such as 1,8 (default: 1)"
    )
    parser.add_argument("--compare", choices=("mlx-lm",), help="time mlx-lm's own decoding as well")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument(
        "--turns",
        type=int,
        help="prompts, or groups of a batch, to time at least; they come again for that "
        "(default: all prompts once, and 4 groups)",
    )
    parser.add_argument(
        "--warmup", type=int, default=1, help="turns that are thrown away; on CUDA take several"
    )
    parser.add_argument(
        "--phases",
        type=int,
        default=4,
        metavar="N",
        help="prompts that are run once more for what rounds are spent on; 0 for none",
    )


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "simulated drafters", "what a drafter would bring that is right as often as this"
    )
    group.add_argument(
        "--simulate-acceptance",
        default="",
        metavar="A,B",
        help="chances that a draft is right, such as 0.6,0.8",
    )
    group.add_argument(
        "--simulate-drafts", type=int, default=8, metavar="K", help="drafts a round at most"
    )
    group.add_argument(
        "--simulate-cost", type=float, default=0.0, metavar="MS", help="milliseconds per draft"
    )


def _add_growth(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("growth")
    group.add_argument(
        "--growth",
        action="store_true",
        help="instead of comparing prompts: tokens per second of all rows, over batch "
        f"({GROWTH_BATCHES}, or --batch) and context",
    )
    group.add_argument(
        "--contexts", default="1024,4096,16384", help="tokens that each row holds before"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print one object instead of a table, or write it to a file",
    )
    output.add_argument("--markdown", metavar="FILE", help="write the tables as Markdown")
    output.add_argument("--picture", metavar="FILE", help="draw them, as PNG, SVG or PDF")
