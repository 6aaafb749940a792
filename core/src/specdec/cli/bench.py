"""``specdec bench``: plain decoding against drafters, interleaved, as ratios."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from specdec.cli.options import (
    add_adapter_path,
    add_drafter_options,
    add_sampling,
    check_sampling,
    check_text,
    drafter_options,
    read_text,
)
from specdec.errors import OptionError
from specdec.plugins.models import find_prompts, prompt_names

if TYPE_CHECKING:
    import argparse

    from specdec.benchmark import Result

__all__ = ["add_parser", "read_prompts", "run_bench"]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time drafters against plain decoding",
        description="Times mlx-lm, plain decoding and each drafter on every prompt in turn, "
        "and prints ratios of decoding speed to mlx-lm's.",
    )
    parser.add_argument(
        "--model", default="demo", help="a folder, a bundled model (demo) or a hub id"
    )
    add_adapter_path(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        help="a kind, a drafter's folder, auto or a chain (ngram,mtp); may be given several times "
        "(default: every installed drafter that needs no folder; none: only mlx-lm and plain)",
    )
    parser.add_argument(
        "--prompts",
        default="demo",
        help='a JSON Lines file with "text" in each line, or a bundled one (demo, demo-copy)',
    )
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--widths", default="", help="drafts a round, such as 1,2,4 (default: each drafter's own)"
    )
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    add_drafter_options(parser)
    add_sampling(parser)
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Run the benchmark and print a table or one JSON object.

    Raises:
        SpecdecError: a mistake of the user's, found before a model is loaded.
    """
    sampling = check_sampling(args)
    if sampling["temp"] and sampling["seed"] is None:
        sampling["seed"] = 0
    widths, options = _widths(args.widths), drafter_options(args)
    if args.max_tokens < 2:
        raise OptionError(f"--max-tokens is {args.max_tokens}; give 2 or more")
    prompts = read_prompts(args.prompts, args.limit)
    from specdec.benchmark import compare, options_for
    from specdec.drafters import check_drafter
    from specdec.models import load_model

    drafters = _drafters(args.drafter)
    for drafter in drafters:
        check_drafter(drafter, options=options_for(drafter, drafters, options))
    model, tokenizer = load_model(args.model, adapter_path=args.adapter_path)
    if args.dtype:
        import mlx.core as mx

        model.set_dtype(getattr(mx, args.dtype))
    results = compare(
        model,
        tokenizer,
        prompts,
        drafters=drafters,
        widths=widths,
        options=options,
        max_tokens=args.max_tokens,
        sampling=sampling,
        show_progress=sys.stderr.isatty(),
    )
    if args.json:
        summary = {
            "model": args.model,
            "adapter_path": args.adapter_path,
            "prompts": len(prompts),
            "max_tokens": args.max_tokens,
        }
        print(json.dumps({**summary, "results": [result.as_dict() for result in results]}))
    else:
        print(_table(results))
    # A drafter may never change a token; at a fixed seed that can be seen.
    return 1 if any(result.differing for result in results) else 0


def _drafters(asked: list[str] | None) -> list[str]:
    """What is timed: what was asked for, else all that need no folder."""
    if asked is not None:
        return [drafter for drafter in asked if drafter != "none"]
    from specdec.plugins import default_registry

    kinds = default_registry().kinds
    found = [name for name, kind in kinds.items() if not kind.artifact]
    if not found:
        print(
            "specdec: no drafter is timed: none that is installed works without a folder; name one "
            "with --drafter (a folder, mtp, native), or pip install specdec-ngram",
            file=sys.stderr,
        )
    return found


def _widths(text: str) -> list[int | None]:
    if not text:
        return [None]
    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError:
        widths = [0]
    if min(widths) < 1:
        raise OptionError(f"--widths is {text}; give whole numbers of 1 or more, such as 1,2,4")
    return list(widths)


def read_prompts(name: str, limit: int | None = None) -> list[str]:
    """Texts of a JSON Lines file, or of a bundled one.

    Raises:
        OptionError: no such file, a line without ``text``, or a limit below 1.
    """
    bundled = find_prompts(name)
    where = name if bundled is None else str(bundled)
    text = read_text(where) if bundled is not None or name != "demo" else ""
    lines = text.removesuffix("\n").split("\n") if text else []  # JSON may hold other line ends
    if not lines:
        known = ", ".join(prompt_names()) or "none; pip install specdec-demo brings some"
        raise OptionError(f"prompts {name}: nothing is there; give a file (bundled: {known})")
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            text = str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(f'{where}: line {number} is no JSON object with "text"') from error
        prompts.append(check_text(text, f"{where}: line {number}"))
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}; give 1 or more")
    return prompts[:limit]


def _table(results: list[Result]) -> str:
    head = ("RUN", "WIDTH", "TOK/S", "RATIO", "QUARTILES", "TOK/FWD", "ACCEPTED", "SAME TOKENS")
    rows = [head]
    for r in results:
        rows.append(
            (
                r.name,
                "-" if r.width is None else str(r.width),
                f"{r.tokens_per_second:.1f}",
                f"{r.ratio:.2f}",
                f"{r.quartiles[0]:.2f}-{r.quartiles[1]:.2f}",
                f"{r.tokens_per_forward:.2f}",
                "-" if r.acceptance_rate is None else f"{100 * r.acceptance_rate:.0f}%",
                "-" if r.same is None else f"{r.same}/{r.same + r.differing}",
            )
        )
    spans = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(c.ljust(s) for c, s in zip(row, spans, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
