"""``specdec bench``: plain decoding against drafters, interleaved, as ratios."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.cli import bench_inputs
from specdec.cli.bench_inputs import BUILT_IN, check_file, read_prompts
from specdec.cli.bench_options import GROWTH_BATCHES, add_options
from specdec.cli.options import check_sampling, drafter_options
from specdec.errors import OptionError

if TYPE_CHECKING:
    import argparse

    from specdec.bench import GrowthPoint, Result, Simulated

__all__ = ["add_parser", "read_prompts", "run_bench"]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time drafters against plain decoding",
        description="Times plain decoding and each drafter on every prompt in turn, and prints "
        "ratios of decoding speed. Exit status 1: a drafter changed a text.",
    )
    add_options(parser)
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Run the benchmark and print a table or one JSON object.

    Raises:
        SpecdecError: a mistake of the user's, found before a model is loaded.
    """
    asked = _asked(args)
    from specdec.bench import BUILT_IN as SETS
    from specdec.bench import built_in
    from specdec.drafters import bind_target
    from specdec.models import load_model

    model, tokenizer = load_model(args.model, adapter_path=args.adapter_path)
    if args.dtype:
        import mlx.core as mx

        model.set_dtype(getattr(mx, args.dtype))
    vocab_size = bind_target(model, tokenizer).vocab_size
    seed = asked.common["sampling"]["seed"] or 0
    prompts = {
        name: built_in(name, tokenizer, vocab_size, limit=args.limit, seed=seed)
        if texts is None and name in SETS
        else texts
        for name, texts in asked.sets.items()
    }
    run = _grow if args.growth else _compare
    return run(args, asked, model, tokenizer, prompts)


@frozen
class _Asked:
    """The command line, checked.

    Attributes:
        sets: texts by name, ``None`` for built-in sets.
        batches: rows.
        contexts: tokens that rows hold before.
        simulate: drafters to simulate.
        common: keywords of both ways to run.
    """

    sets: dict[str, list[str] | None]
    batches: list[int]
    contexts: list[int]
    simulate: list[Simulated]
    common: dict[str, Any]


def _asked(args: argparse.Namespace) -> _Asked:
    """Check everything that can be checked without a model."""
    sampling = check_sampling(args)
    if sampling["temp"] and sampling["seed"] is None:
        sampling["seed"] = 0
    for name, value, least in (
        ("--max-tokens", args.max_tokens, 2),
        ("--warmup", args.warmup, 0),
        ("--phases", args.phases, 0),
        ("--turns", args.turns or 1, 1),
    ):
        if value < least:
            raise OptionError(f"{name} is {value}; give {least} or more")
    widths, options = bench_inputs.widths(args.widths), drafter_options(args)
    batches, contexts = _batches(args), bench_inputs.numbers("--contexts", args.contexts, 2)
    chances = bench_inputs.shares("--simulate-acceptance", args.simulate_acceptance)
    if args.growth and chances:
        raise OptionError("--growth times real drafters; leave --simulate-acceptance out")
    sets = bench_inputs.prompt_sets(_set_names(args), args.limit)
    _check_files(args)
    drafters = bench_inputs.drafters(args.drafter, simulated=bool(chances))
    from specdec.bench import Simulated, options_for
    from specdec.drafters import check_drafter

    simulate = [
        Simulated(chance, drafts=args.simulate_drafts, cost_ms=args.simulate_cost)
        for chance in chances
    ]
    for drafter in drafters:
        check_drafter(drafter, options=options_for(drafter, drafters, options))
    common = {
        "drafters": drafters,
        "widths": widths,
        "options": options,
        "max_tokens": args.max_tokens,
        "sampling": sampling,
        "show_progress": sys.stderr.isatty(),
    }
    return _Asked(sets, batches, contexts, simulate, common)


def _batches(args: argparse.Namespace) -> list[int]:
    usual = GROWTH_BATCHES if args.growth else "1"
    return bench_inputs.numbers("--batch", usual if args.batch is None else args.batch)


def _set_names(args: argparse.Namespace) -> str:
    usual = "copy-heavy" if args.growth else ",".join(BUILT_IN)
    return usual if args.prompts is None else str(args.prompts)


def _check_files(args: argparse.Namespace) -> None:
    for option, file in (("--json", args.json), ("--markdown", args.markdown)):
        if file not in {None, "-"}:
            check_file(option, file)
    if args.picture is not None:
        from specdec.bench.picture import check_picture

        check_picture(args.picture)


def _compare(
    args: argparse.Namespace, asked: _Asked, model: Any, tokenizer: Any, prompts: Any
) -> int:
    from specdec.bench import compare
    from specdec.bench.report import markdown, notes, table

    results = compare(
        model,
        tokenizer,
        prompts,
        batches=asked.batches,
        simulate=asked.simulate,
        with_mlx_lm=args.compare == "mlx-lm",
        warmup=args.warmup,
        phase_turns=args.phases,
        turns=args.turns,
        **asked.common,
    )
    count = sum(map(len, prompts.values()))
    _write_json(args, results, [], prompts=count)
    if args.json != "-":
        print("\n".join([table(results), *notes(results)]))
    if args.markdown:
        about = [_title(args), _below(), f"{count} prompts, {args.max_tokens} tokens each"]
        Path(args.markdown).write_text(markdown(results, [f"- {each}" for each in about]), "utf-8")
    if args.picture:
        from specdec.bench.picture import draw_ratios

        draw_ratios(results, args.picture, _title(args), _below())
    # A drafter may never change a token; at a fixed seed that can be seen.
    return 1 if any(result.differing for result in results) else 0


def _grow(args: argparse.Namespace, asked: _Asked, model: Any, tokenizer: Any, prompts: Any) -> int:
    from specdec.bench import grow
    from specdec.bench.report import growth_table
    from specdec.requests import encode_prompt

    text = [
        token
        for texts in prompts.values()
        for each in texts
        for token in encode_prompt(each, tokenizer)
    ]
    points = grow(
        model, tokenizer, text, batches=asked.batches, contexts=asked.contexts, **asked.common
    )
    _write_json(args, [], points)
    told = [growth_table(points), *(f"{p.name}: {p.error}" for p in points if p.error)]
    if args.json != "-":
        print("\n".join(told))
    if args.markdown:
        lines = [
            "# specdec bench --growth",
            "",
            _title(args),
            "",
            _below(),
            "",
            "```",
            *told,
            "```",
        ]
        Path(args.markdown).write_text("\n".join([*lines, ""]), "utf-8")
    if args.picture:
        from specdec.bench.picture import draw_growth

        draw_growth(points, args.picture, _title(args), _below())
    return 0


def _write_json(
    args: argparse.Namespace, results: list[Result], points: list[GrowthPoint], **more: Any
) -> None:
    if args.json is None:
        return
    from specdec.bench.report import as_json

    about = {"model": args.model, "adapter_path": args.adapter_path, **more}
    found = json.dumps(as_json(results, points, **about, max_tokens=args.max_tokens))
    if args.json == "-":
        print(found)
    else:
        Path(args.json).write_text(found + "\n", "utf-8")


def _title(args: argparse.Namespace) -> str:
    dtype = f", {args.dtype}" if args.dtype else ""
    adapter = f", adapter {args.adapter_path}" if args.adapter_path else ""
    return f"{args.model}{dtype}{adapter}"


def _below() -> str:
    from specdec.bench.report import machine

    here = machine()
    versions = ", ".join(f"{name} {here[name]}" for name in ("specdec", "mlx", "mlx_lm"))
    return f"{here['device']}, {here['system']}; {versions}"
