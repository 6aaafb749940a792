"""What shapes the output besides the draw: where it ends, penalties, a grammar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specdec.cli.options import read_text
from specdec.errors import OptionError

if TYPE_CHECKING:
    import argparse

    from specdec.grammar import Grammar

__all__ = ["add_shaping", "shaping"]

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_GRAMMARS = ("json_schema", "regex", "lark")


def add_shaping(parser: argparse.ArgumentParser) -> None:
    """Add the options of ends, penalties, grammars, acceptance, drafts and log-probabilities."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, taken as it is; may be given several times",
    )
    group.add_argument("--min-tokens", type=int, default=0, help="tokens before which nothing ends")
    group.add_argument("--repetition-penalty", type=float, metavar="P", help="1.0 changes nothing")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="0 changes nothing")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="0 changes nothing")
    group.add_argument(
        "--acceptance",
        choices=("match", "rejection"),
        default="match",
        help="match keeps the seed's text, rejection only its distribution",
    )
    group.add_argument(
        "--draft-temp",
        type=float,
        metavar="T",
        help="temperature of the drafts, if not --temp; 0 drafts greedily; the text is the same",
    )
    group.add_argument(
        "--no-draft-filters",
        action="store_true",
        help="draft without --top-p, --min-p and --top-k; the text is the same",
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: every token's log-probability and the N best alternatives",
    )
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument(
        "--json-schema", metavar="FILE", help="a file with a JSON schema that the text obeys"
    )
    grammar.add_argument("--regex", metavar="PATTERN", help="a regular expression that it matches")
    grammar.add_argument("--lark", metavar="FILE", help="a file with a Lark grammar that it obeys")
    group.add_argument(
        "--grammar-after", metavar="TEXT", help="the grammar begins after this text, as </think>"
    )


def shaping(args: argparse.Namespace) -> dict[str, Any]:
    """The options as keywords of ``stream_generate``, checked before a model is loaded.

    Raises:
        OptionError: a value that makes no sense, or a file that cannot be read.
    """
    if args.min_tokens < 0:
        raise OptionError(f"--min-tokens is {args.min_tokens}; give 0 or more")
    if args.logprobs is not None:
        if args.logprobs < 0:
            raise OptionError(f"--logprobs is {args.logprobs}; give 0 or more")
        if not args.json:
            raise OptionError("--logprobs shows nothing without --json; give both")
    if any(not text for text in args.stop):
        raise OptionError("--stop is empty; give some text")
    from specdec.sampling import SamplingOptions, make_logits_processors

    SamplingOptions(draft_temp=args.draft_temp)
    penalties = {name: getattr(args, name) for name in _PENALTIES}
    return {
        "stop": args.stop,
        "min_tokens": args.min_tokens,
        "logits_processors": make_logits_processors(**penalties),
        "grammar": _grammar(args),
        "acceptance": args.acceptance,
        "draft_temp": args.draft_temp,
        "draft_filters": not args.no_draft_filters,
        "logprobs": args.logprobs,
    }


def _grammar(args: argparse.Namespace) -> Grammar | None:
    given = [name for name in _GRAMMARS if getattr(args, name) is not None]
    if not given:
        if args.grammar_after is not None:
            raise OptionError(
                "--grammar-after needs a grammar; give --json-schema, --regex or --lark"
            )
        return None
    from specdec.grammar import Grammar

    after = args.grammar_after
    if args.regex is not None:
        return Grammar.regex(args.regex, after=after)
    if args.lark is not None:
        return Grammar.lark(read_text(args.lark), after=after)
    text = read_text(args.json_schema)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise OptionError(f"file {args.json_schema} is no JSON ({error})") from error
    return Grammar.json_schema(schema, after=after)
