"""``python -m specdec_dflash.calibrate``: find a drafter's confidence thresholds from a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from specdec.cli.bench import read_prompts
from specdec.cli.options import add_drafter_options, drafter_options
from specdec.drafters import check_drafter, load_drafter
from specdec.errors import OptionError, SpecdecError, one_line
from specdec.models import load_model
from specdec.requests import encode_prompt, wrapped
from specdec_dflash.calibration import LEAST_SAMPLES, calibrate, collect, store
from specdec_dflash.confidence import MEASURE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]

_KINDS: Final = ("dspark", "deepspec")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = _Parser(
        prog="specdec_dflash.calibrate",
        description="Find the confidence under which drafts are not worth a verification.",
    )
    add = parser.add_argument
    add("--model", required=True, help="the target: a folder, a bundled model or a hub id")
    add("--drafter", required=True, help="its drafter's folder (kind dspark or deepspec)")
    add("--prompts", required=True, help='JSON Lines of {"text": ...}, or a bundled file')
    add("--limit", type=int, help="use the first prompts only")
    add("--target", type=float, default=0.8, help="share of accepted drafts that is wanted")
    add("--max-tokens", type=int, default=256, help="of each text")
    add("--least-samples", type=int, default=LEAST_SAMPLES, help="drafts of a slot that are enough")
    add_drafter_options(parser)
    add("--write", action="store_true", help="leave the thresholds in the drafter's config")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: print what was found as one JSON object.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        0; 2 for a mistake of the user's, in one line; 130 where it was interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except SpecdecError as error:
        print(f"specdec_dflash.calibrate: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specdec_dflash.calibrate: interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    calibrate([], args.target, args.least_samples)  # its mistakes, before anything is loaded
    if args.max_tokens < 1:
        raise OptionError(f"--max-tokens is {args.max_tokens}; give 1 or more")
    options = drafter_options(args)
    if "confidence" in options:
        raise OptionError("--option confidence is this command's own; leave it out")
    options["confidence"] = MEASURE
    texts = read_prompts(args.prompts, args.limit)
    kind, folder = check_drafter(args.drafter)
    if kind is None or kind.name not in _KINDS or folder is None:
        said = "no single drafter" if kind is None else f"of kind {kind.name}"
        raise OptionError(
            f"--drafter {args.drafter} is {said}, which has no confidence to calibrate; "
            f"give a folder of kind {' or '.join(_KINDS)}"
        )
    model, tokenizer = load_model(args.model)
    tokenizer = wrapped(tokenizer)
    with load_drafter(folder, model, tokenizer, **options) as drafter:
        pairs = collect(
            drafter,
            [encode_prompt(text, tokenizer) for text in texts],
            end_tokens=frozenset(tokenizer.eos_token_ids),
            max_tokens=args.max_tokens,
        )
    thresholds = calibrate(pairs, args.target, args.least_samples)
    samples = [len(slot) for slot in pairs]
    shown = {
        "thresholds": list(thresholds),
        "target": args.target,
        "drafted": samples,
        "accepted": [sum(accepted for _, accepted in slot) for slot in pairs],
    }
    print(json.dumps(shown))
    if args.write:
        file = store(Path(folder), thresholds, args.target, sum(samples))
        print(f"the thresholds are in {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
