"""What a trained drafter's drafts are worth: acceptance by place, and its readings.

For each reading and width: emitted tokens per target forward, the share accepted at each place of
the draft, and how many texts are those of plain decoding. With ``--temp`` the drafts are drawn
with the target's own noise, and once more with noise of their own, which is what drafters without
coupled noise do. With ``--vocabulary`` drafts come from that share of the ids, the most frequent
ones first.

    python docs/benchmarks/draft_acceptance.py --limit 50 --tokens 64 --widths 1,2,3,4
    python docs/benchmarks/draft_acceptance.py --temp 0.8 --widths 3
    python docs/benchmarks/draft_acceptance.py --vocabulary 0.25 --widths 3
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec import bind_target, load_drafter, load_model, stream_generate
from specdec.cli.bench import read_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec import LoadedDrafter
    from specdec.contract import RowSampling, Selection

_APART = 1 << 20  # steps that no text reaches: their noise has nothing to do with the target's


class OwnNoise:
    """A group's draws with noise that is not the target's."""

    def __init__(self, sampling: RowSampling) -> None:
        self._sampling = sampling

    @property
    def selection(self) -> Selection:
        """As the rows select."""
        return self._sampling.selection

    @property
    def rejecting(self) -> bool:
        """As the rows judge."""
        return self._sampling.rejecting

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Draws at steps that are nobody's."""
        return self._sampling.sample(logprobs, [step + _APART for step in steps])

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """What is drawn from does not depend on noise, XTC's coin apart."""
        return self._sampling.log_distribution(logprobs, [step + _APART for step in steps])


def uncouple(drafter: LoadedDrafter) -> None:
    """Let a drafter draw with noise of its own from now on."""
    grouped: Any = drafter.provider.grouped
    opened = grouped.open
    grouped.open = lambda *, sampling, **kwargs: opened(sampling=OwnNoise(sampling), **kwargs)


@define
class Sum:
    """Counters over all prompts."""

    emitted: int = 0
    forwards: int = 0
    same: int = 0
    texts: int = 0
    drafted: list[int] = field(factory=list)
    accepted: list[int] = field(factory=list)

    def add(self, stats: Any, same: bool) -> None:
        """Count one text."""
        self.emitted += stats.emitted
        self.forwards += stats.target_forwards
        self.same += same
        self.texts += 1
        for held, new in (
            (self.drafted, stats.drafted_per_position),
            (self.accepted, stats.accepted_per_position),
        ):
            held.extend([0] * (len(new) - len(held)))
            for place, count in enumerate(new):
                held[place] += count

    def line(self) -> str:
        """In words."""
        places = " ".join(
            f"{accepted / drafted:.2f}"
            for accepted, drafted in zip(self.accepted, self.drafted, strict=False)
            if drafted
        )
        return (
            f"{self.emitted / self.forwards:.2f} tokens per forward; accepted by place {places}; "
            f"{self.same} of {self.texts} texts as plain decoding"
        )


def frequent(share: float, texts: Sequence[list[int]], vocab_size: int) -> list[int]:
    """The most frequent ids of some texts, then the lowest: merges are numbered by frequency."""
    ranked = [
        token for token, _ in Counter(token for text in texts for token in text).most_common()
    ]
    known = set(ranked)
    ranked += [token for token in range(vocab_size) if token not in known]
    return sorted(ranked[: int(share * vocab_size)])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-qwen3_5")
    parser.add_argument("--drafter", default="mtp", help="a kind, a bundled drafter, or a folder")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--widths", default="1,2,3,4")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--vocabulary", type=float)
    parser.add_argument("--options", default="{}", help="JSON, or a list of JSON objects")
    return parser.parse_args()


def main() -> None:
    """Run every reading at every width and print a line for each."""
    asked = arguments()
    model, tokenizer = load_model(asked.model)
    texts = read_prompts(asked.prompts, None)
    prompts = [tokenizer.encode(text) for text in texts[: asked.limit]]
    others = [tokenizer.encode(text) for text in texts[asked.limit :]]
    readings: Any = json.loads(asked.options)
    sampled = {"temp": asked.temp, "seed": 11} if asked.temp else {}

    def run(drafter: LoadedDrafter | None, width: int | None) -> list[tuple[list[int], Any]]:
        done = []
        for prompt in prompts:
            responses = list(
                stream_generate(
                    model,
                    tokenizer,
                    prompt,
                    asked.tokens,
                    drafter=drafter,
                    num_draft_tokens=width,
                    **sampled,
                )
            )
            done.append(([each.token for each in responses], responses[-1].stats))
        return done

    plain = run(None, None)
    for options in readings if isinstance(readings, list) else [readings]:
        for coupled in (True, False) if asked.temp else (True,):
            given = dict(options)
            if asked.vocabulary:
                given["draft_vocab"] = frequent(
                    asked.vocabulary, others or prompts, bind_target(model).vocab_size
                )
            drafter = load_drafter(asked.drafter, model, tokenizer, **given)
            if not coupled:
                uncouple(drafter)
            for width in map(int, asked.widths.split(",")):
                total = Sum()
                for (tokens, stats), (want, _) in zip(run(drafter, width), plain, strict=True):
                    total.add(stats, tokens == want)
                noise = "" if coupled else " own noise"
                print(f"{options}{noise} width {width}: {total.line()}", flush=True)


if __name__ == "__main__":
    main()
