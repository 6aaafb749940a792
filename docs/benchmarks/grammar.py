"""Tokens per target forward under a JSON schema: forced continuations, n-gram drafts, both.

    python docs/benchmarks/grammar.py --limit 100 --max-tokens 128
    python docs/benchmarks/grammar.py --schema nested --drafter ngram --width 4

Each prompt is cut to its first tokens and continued four times with JSON of a schema: plainly, with
what the schema forces as drafts, with a drafter behind those, and with the drafter alone. The four
texts must be the same, and each must be JSON of the schema, which is checked by hand. On a CPU a
position of a window costs about as much as a window, so the figure to look at is tokens per
forward; tokens per second say what a window costs on this host.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from attrs import define

import specdec
from specdec.cli.bench import read_prompts
from specdec.grammar import Grammar
from specdec.plugins import LoadRequest, default_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.contract import DraftProvider
    from specdec.grammar import BoundGrammar
    from specdec.targets import Target

TICKET = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["bug", "feature", "question"]},
        "votes": {"type": "integer", "minimum": 0, "maximum": 9999},
        "author": {"type": "string", "maxLength": 12},
        "is_open": {"type": "boolean"},
    },
    "required": ["title", "kind", "votes", "author", "is_open"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "maxLength": 10},
                "country": {"enum": ["Austria", "Brazil", "Canada", "Denmark"]},
            },
            "required": ["first_name", "country"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 10},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["product_name", "quantity"],
                "additionalProperties": False,
            },
        },
        "status": {"enum": ["open", "paid", "shipped"]},
    },
    "required": ["customer", "items", "status"],
    "additionalProperties": False,
}


def _text(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def is_ticket(value: Any) -> bool:
    """Whether a value is what ``TICKET`` describes."""
    return (
        isinstance(value, dict)
        and list(value) == ["title", "kind", "votes", "author", "is_open"]
        and _text(value["title"], 16)
        and value["kind"] in {"bug", "feature", "question"}
        and _whole(value["votes"], 0, 9999)
        and _text(value["author"], 12)
        and isinstance(value["is_open"], bool)
    )


def is_nested(value: Any) -> bool:
    """Whether a value is what ``NESTED`` describes."""
    if not isinstance(value, dict) or list(value) != ["customer", "items", "status"]:
        return False
    customer, items = value["customer"], value["items"]
    return (
        isinstance(customer, dict)
        and list(customer) == ["first_name", "country"]
        and _text(customer["first_name"], 10)
        and customer["country"] in {"Austria", "Brazil", "Canada", "Denmark"}
        and isinstance(items, list)
        and 2 <= len(items) <= 3
        and all(
            isinstance(item, dict)
            and list(item) == ["product_name", "quantity"]
            and _text(item["product_name"], 10)
            and _whole(item["quantity"], 1, 99)
            for item in items
        )
        and value["status"] in {"open", "paid", "shipped"}
    )


SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "ticket": (TICKET, is_ticket),
    "nested": (NESTED, is_nested),
}


@define
class Total:
    """Sums over the prompts of one way to run them."""

    tokens: int = 0
    forwards: int = 0
    forced: int = 0
    accepted: int = 0
    drafted: int = 0
    seconds: float = 0.0

    def add(self, stats: specdec.GenerationStats) -> None:
        """Count one request."""
        self.tokens += stats.emitted
        self.forwards += stats.target_forwards
        self.forced += stats.forced
        self.accepted += stats.accepted
        self.drafted += stats.drafted

    def line(self, name: str) -> str:
        """One line of the table."""
        return (
            f"{name:30} {self.tokens / self.forwards:7.3f} {self.tokens:7} {self.forwards:8} "
            f"{self.forced:7} {self.drafted:8} {self.accepted:9} {self.tokens / self.seconds:7.1f}"
        )


def run(
    target: Target,
    prompts: list[tuple[int, ...]],
    bound: BoundGrammar,
    drafting: tuple[DraftProvider | None, int, int],
    ending: tuple[frozenset[int], int],
) -> tuple[list[specdec.Row], float]:
    """A batch and its seconds of decoding; ``drafting`` is drafter, width, forced tokens."""
    provider, width, forced = drafting
    group = specdec.VerifyGroup(target, provider)
    requests = [
        specdec.Request(
            prompt=prompt,
            sampling=specdec.SamplingOptions(),
            max_tokens=ending[1],
            end_tokens=ending[0],
            num_draft_tokens=width,
            constraint=bound,
            num_forced_tokens=forced,
        )
        for prompt in prompts
    ]
    rows = group.admit(requests)
    started = time.perf_counter()
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    seconds = time.perf_counter() - started
    group.close()
    for row in rows:
        if row.error is not None:
            raise row.error
    return rows, seconds


def check(text: str, is_valid: Callable[[Any], bool]) -> bool:
    """Whether a text is JSON that a schema describes."""
    try:
        return is_valid(json.loads(text))
    except ValueError:
        return False


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--start", type=int, default=0, help="prompts to leave out")
    parser.add_argument("--limit", type=int, help="prompts to take")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--schema", choices=tuple(SCHEMAS), default="ticket")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--forced", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="rows that decode together")
    args = parser.parse_args()
    model, tokenizer = specdec.load_model(args.model)
    target = specdec.bind_target(model)
    kind = default_registry().select(kind=args.drafter)
    provider = kind.load(LoadRequest(kind=kind.name, target=target)).provider
    schema, is_valid = SCHEMAS[args.schema]
    ends = frozenset(tokenizer.eos_token_ids)
    bound = Grammar.json_schema(schema).bind(tokenizer, target.vocab_size, sorted(ends))
    ways: dict[str, tuple[DraftProvider | None, int, int]] = {
        "(a) grammar alone": (None, 0, 0),
        "(b) forced": (None, 0, args.forced),
        f"(c) forced, {args.drafter} behind": (provider, args.width, args.forced),
        f"(d) {args.drafter} alone": (provider, args.width, 0),
    }
    texts = read_prompts(args.prompts)[args.start :][: args.limit]
    prompts = [tuple(tokenizer.encode(text)[: args.prompt_tokens]) for text in texts]
    totals = {name: Total() for name in ways}
    outputs: list[set[tuple[int, ...]]] = []
    ending = (ends, args.max_tokens)
    run(target, prompts[:1], bound, (provider, args.width, args.forced), ending)  # warms up
    for start in range(0, len(prompts), args.batch):
        batch = prompts[start : start + args.batch]
        fresh: list[set[tuple[int, ...]]] = [set() for _ in batch]
        for name, drafting in ways.items():
            rows, seconds = run(target, batch, bound, drafting, ending)
            totals[name].seconds += seconds
            for row, texts_of_row in zip(rows, fresh, strict=True):
                totals[name].add(row.stats)
                texts_of_row.add(row.emitted)
        outputs += fresh
    same = sum(len(each) == 1 for each in outputs)
    valid = sum(all(check(tokenizer.decode(one), is_valid) for one in each) for each in outputs)
    print(
        f"{len(texts)} prompts of {args.prompt_tokens} tokens, {args.model}, {args.schema} schema, "
        f"batch {args.batch}"
    )
    head = f"{'':30} {'TOK/FWD':>7} {'TOKENS':>7} {'FORWARDS':>8} {'FORCED':>7} {'DRAFTED':>8}"
    print(f"{head} {'ACCEPTED':>9} {'TOK/S':>7}")
    for name, total in totals.items():
        print(total.line(name))
    print(f"same text four times: {same} of {len(texts)}; valid: {valid} of {len(texts)}")


if __name__ == "__main__":
    main()
