"""A draft model here and in mlx-lm: the same tokens, the same acceptance, and the speed of both.

Every prompt goes through mlx-lm's plain decoding, mlx-lm's speculation and specdec's, at each
width in turn, in rotating order; ratios are taken per prompt. Time runs from the end of the first
round to the last token, so reading the prompt is left out of all three. Compared are the tokens,
and which of them were drafted, so that acceptance is compared round by round.

    python docs/benchmarks/draft_models.py --widths 1,2,3,4 --tokens 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from attrs import define, field, frozen

from specdec import load_drafter, load_model, stream_generate
from specdec.cli.bench import read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable


@frozen
class Text:
    """One generated text.

    Attributes:
        tokens: emitted ids.
        drafted: which of them were drafts.
        seconds: from the end of the first round on.
    """

    tokens: list[int]
    drafted: list[bool]
    seconds: float

    @property
    def rounds(self) -> int:
        """Rounds, each of which ends in a token that was not drafted, the last one perhaps not."""
        return self.drafted.count(False) + int(bool(self.drafted) and self.drafted[-1])

    @property
    def speed(self) -> float:
        """Tokens per second behind the first round."""
        first = self.drafted.index(False) + 1 if False in self.drafted else len(self.drafted)
        return (len(self.tokens) - first) / self.seconds if self.seconds else 0.0


def timed(responses: Iterable[Any]) -> Text:
    """Read a text and the clock."""
    tokens, drafted, first = [], [], 0.0
    for response in responses:
        first = first or time.perf_counter()
        tokens.append(response.token)
        drafted.append(response.from_draft)
    return Text(tokens, drafted, time.perf_counter() - first)


@define
class Column:
    """All texts of one way to generate, and each one's speed over mlx-lm's plain decoding."""

    texts: list[Text] = field(factory=list)
    ratios: list[float] = field(factory=list)

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per target forward."""
        return sum(len(t.tokens) for t in self.texts) / sum(t.rounds for t in self.texts)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-qwen3")
    parser.add_argument("--draft", default="demo-qwen3-draft")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--widths", default="1,2,3,4")
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        help="of which the last is timed; on CUDA a shape that was not seen before costs far more",
    )
    return parser.parse_args()


def main() -> None:
    """Generate every text in three ways and print a line for each width."""
    asked = arguments()
    model, tokenizer = load_model(asked.model)
    draft, _ = load_model(asked.draft)
    prompts = [tokenizer.encode(text) for text in read_prompts(asked.prompts, asked.limit)]
    drafter = load_drafter(asked.draft, model, tokenizer, kind="two-model")
    print(f"{len(prompts)} prompts of {asked.tokens} tokens on {mx.default_device()}")
    for width in map(int, asked.widths.split(",")):
        ways: dict[str, Any] = {
            "plain": lambda prompt: mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=asked.tokens
            ),
            "mlx-lm": lambda prompt, width=width: mlx_lm.stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens=asked.tokens,
                draft_model=draft,
                num_draft_tokens=width,
            ),
            "specdec": lambda prompt, width=width: stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens=asked.tokens,
                drafter=drafter,
                num_draft_tokens=width,
            ),
        }
        columns = {name: Column() for name in ways}
        # What comes before the last pass warms everything up.
        turns = [*prompts[:1], *prompts * asked.passes]
        for turn, prompt in enumerate(turns):
            names = [list(ways)[(turn + at) % len(ways)] for at in range(len(ways))]
            got = {name: timed(ways[name](prompt)) for name in names}
            if turn >= len(turns) - len(prompts):
                for name, text in got.items():
                    columns[name].texts.append(text)
                    columns[name].ratios.append(text.speed / got["plain"].speed)
        print(line(width, columns["mlx-lm"], columns["specdec"]))


def line(width: int, theirs: Column, ours: Column) -> str:
    """What came out at one width."""
    pairs = list(zip(theirs.texts, ours.texts, strict=True))
    tokens = sum(a.tokens == b.tokens for a, b in pairs)
    # mlx-lm drafts the last token of its budget too, which no forward is saved by.
    accepted = sum(a.drafted[:-1] == b.drafted[:-1] for a, b in pairs if a.tokens == b.tokens)
    over = [b.speed / a.speed for a, b in pairs]
    low, middle, high = statistics.quantiles(over, n=4, method="inclusive")
    return (
        f"width {width}: {tokens} of {len(pairs)} texts the same, {accepted} of these with the "
        f"same drafts accepted; tokens per round {theirs.tokens_per_round:.2f} and "
        f"{ours.tokens_per_round:.2f}; over plain: mlx-lm {statistics.median(theirs.ratios):.2f}, "
        f"specdec {statistics.median(ours.ratios):.2f}; specdec over mlx-lm {middle:.2f} "
        f"({low:.2f}-{high:.2f})"
    )


if __name__ == "__main__":
    main()
