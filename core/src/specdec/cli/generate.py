"""``specdec generate``: stream a text, then say what ran."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from specdec.cli.caching import add_caching, caching
from specdec.cli.options import (
    add_adapter_path,
    add_drafter_options,
    add_sampling,
    check_sampling,
    check_text,
    drafter_options,
    read_text,
)
from specdec.cli.progress import measuring_progress, prompt_progress
from specdec.cli.shaping import add_shaping, shaping
from specdec.errors import OptionError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from specdec.drafters import LoadedDrafter
    from specdec.generation import GenerationResponse
    from specdec.verify import GenerationStats, TokenLogprobs

__all__ = ["add_parser", "run_generate"]

_CACHE_BYTES = 4 << 30


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("generate", help="generate a text with a drafter")
    parser.add_argument(
        "--model", default="demo", help="a folder, a bundled model (demo) or a hub id"
    )
    add_adapter_path(parser)
    parser.add_argument(
        "--drafter",
        default="none",
        help="a kind (ngram, mtp), native, a drafter's folder, auto, a chain (ngram,mtp), or none",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt")
    source.add_argument("--prompt-file", help="a file with the prompt; - for standard input")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=256, help="-1 for no limit")
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        help="drafts a round, the same in all; 0 runs plain (default: as many as pay, by what "
        "rounds are measured to cost here)",
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="take --num-draft-tokens as the most that a round may have",
    )
    parser.add_argument(
        "--measure-costs",
        action="store_true",
        help="measure anew what rounds cost here, in place of what is remembered",
    )
    add_drafter_options(parser)
    add_sampling(parser)
    add_shaping(parser)
    add_caching(parser)
    parser.add_argument(
        "--prefix-cache",
        metavar="DIR",
        help="keep what was read and generated in this folder, and begin from there next time",
    )
    parser.add_argument(
        "--prefix-cache-bytes",
        type=int,
        help="the most that the folder may hold (default: 4 GiB)",
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of text")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Generate, and print the text with a summary, or one JSON object.

    Raises:
        SpecdecError: a mistake of the user's, found before anything is printed.
    """
    sampling = check_sampling(args)
    _check_numbers(args)
    prompt = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    check_text(prompt, "the prompt")
    options, shaped = drafter_options(args), {**shaping(args), **caching(args)}
    from specdec.checkpoints import PrefixCache
    from specdec.drafters import check_drafter
    from specdec.generation import stream_generate
    from specdec.models import load_model

    if args.drafter != "none":
        check_drafter(args.drafter, options=options)
    elif options or args.num_draft_tokens or args.adaptive or args.measure_costs:
        raise OptionError(
            "--option, --num-draft-tokens, --adaptive and --measure-costs need a --drafter; "
            "name one"
        )
    cache = None
    if args.prefix_cache is not None:
        cache = PrefixCache(args.prefix_cache_bytes or _CACHE_BYTES, args.prefix_cache)
    model, tokenizer = load_model(args.model, adapter_path=args.adapter_path)
    drafter = _load(args, model, tokenizer, options)
    responses = stream_generate(
        model,
        tokenizer,
        _with_template(prompt, tokenizer) if args.chat else prompt,
        max_tokens=args.max_tokens,
        drafter=drafter,
        num_draft_tokens=args.num_draft_tokens,
        adaptive=args.adaptive or None,
        prefix_cache=cache,
        prompt_progress_callback=prompt_progress(),
        **sampling,  # type: ignore[arg-type]  # checked above
        **shaped,
    )
    parts: list[str] = []
    tokens: list[int] = []
    reports: list[TokenLogprobs | None] = []
    last: GenerationResponse | None = None
    for response in responses:
        if not args.json:
            print(response.text, end="", flush=True)
        parts.append(response.text)
        tokens.append(response.token)
        reports.append(response.token_logprobs)
        last = response
    assert last is not None
    assert last.stats is not None
    # An end token is the last response's, but no content.
    tokens = tokens[: last.stats.emitted]
    if args.json:
        shown = _as_object("".join(parts), tokens, last, last.stats)
        if args.logprobs is not None:
            shown["logprobs"] = [_report(each) for each in reports]
        print(json.dumps(shown))
    else:
        print(f"\n{'=' * 10}\n{_summary(last, last.stats)}", flush=True)
    if drafter is not None:
        drafter.close()
    if cache is not None:
        cache.close()  # waits for what is being written
        if cache.stats.last_error:
            print(f"prefix cache: not all was kept: {cache.stats.last_error}", file=sys.stderr)
    return 0


def _load(
    args: argparse.Namespace, model: Any, tokenizer: Any, options: Mapping[str, Any]
) -> LoadedDrafter | None:
    from specdec.drafters import load_drafter

    if args.drafter == "none":
        return None
    # 0 asks for no draft, so the drafter is loaded as it is and the statistics say the rest.
    width = args.num_draft_tokens or None
    drafter = load_drafter(args.drafter, model, tokenizer, num_draft_tokens=width, **options)
    drafter.progress = measuring_progress()
    if args.measure_costs:
        drafter.costs.forget()
    return drafter


def _check_numbers(args: argparse.Namespace) -> None:
    if args.num_draft_tokens is not None and args.num_draft_tokens < 0:
        raise OptionError(
            f"--num-draft-tokens is {args.num_draft_tokens}; give 1 or more, or 0 to run plain"
        )
    if args.max_tokens == 0 or args.max_tokens < -1:
        raise OptionError(f"--max-tokens is {args.max_tokens}; give 1 or more, or -1 for no limit")
    folder, limit = args.prefix_cache, args.prefix_cache_bytes
    if folder == "":
        raise OptionError("--prefix-cache is empty; give a folder")
    if limit is not None and folder is None:
        raise OptionError("--prefix-cache-bytes needs a --prefix-cache; give a folder")
    if limit is not None and limit < 1:
        raise OptionError(f"--prefix-cache-bytes is {limit}; give 1 or more")


def _with_template(prompt: str, tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise OptionError("--chat was given, but the model's tokenizer has no chat template")
    message = [{"role": "user", "content": prompt}]
    ids: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    return ids


def _as_object(
    text: str, tokens: list[int], last: GenerationResponse, stats: GenerationStats
) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": tokens,
        "finish_reason": last.finish_reason,
        **stats.as_dict(),
        "tokens_per_second": last.generation_tps,
        "prompt_tokens_per_second": last.prompt_tps,
        "peak_memory": last.peak_memory,
    }


def _report(report: TokenLogprobs | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {"logprob": report.logprob, "rank": report.rank, "top": [list(t) for t in report.top]}


def _summary(last: GenerationResponse, stats: GenerationStats) -> str:
    lines = []
    if stats.drafter is None:
        lines.append(f"drafter: none ({stats.reason})")
    else:
        why = f" ({stats.reason})" if stats.reason else ""
        drafts = "1 draft" if stats.num_draft_tokens == 1 else f"{stats.num_draft_tokens} drafts"
        most = "up to " if stats.adaptive else ""
        lines.append(f"drafter: {stats.drafter}, {most}{drafts} a round{why}")
        if stats.adaptive:
            rounds = sum(stats.widths.values())
            shares = ", ".join(
                f"{asked} in {100 * count / rounds:.0f}%"
                for asked, count in sorted(stats.widths.items())
            )
            lines.append(f"drafts asked for: {shares} of {rounds} rounds")
    lines.append(
        f"tokens: {stats.emitted} in {stats.target_forwards} forwards, "
        f"{stats.tokens_per_forward:.2f} per forward"
    )
    if stats.drafted:
        accepted = stats.accepted_per_position + [0] * len(stats.drafted_per_position)
        shares = " ".join(
            f"{100 * a / d:.0f}%"
            for a, d in zip(accepted, stats.drafted_per_position, strict=False)
        )
        lines.append(f"accepted: {stats.accepted} of {stats.drafted}; by position {shares}")
    if stats.forced:
        lines.append(f"forced by the grammar: {stats.forced}")
    if stats.draft_errors or stats.invalid_drafts:
        lines.append(
            f"drafter faults: raised {stats.draft_errors} times, {stats.invalid_drafts} invalid "
            f"proposals; last: {stats.last_draft_error}"
        )
    lines.append(
        f"speed: {last.generation_tps:.1f} tokens/s; prompt of {last.prompt_tokens} tokens at "
        f"{last.prompt_tps:.1f} tokens/s; peak memory {last.peak_memory:.2f} GB"
    )
    if stats.time_to_first_token is not None:
        held = (
            f", {stats.cached_tokens} prompt tokens from the cache" if stats.cached_tokens else ""
        )
        lines.append(f"first token: after {1000 * stats.time_to_first_token:.0f} ms{held}")
    return "\n".join(lines)
