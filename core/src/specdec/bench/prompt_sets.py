"""Prompt sets that come with specdec: what speculation likes, what it does not, and noise.

``code``, ``prose`` and ``chat`` are short beginnings; ``copy-heavy`` prompts end where a text that
stands in them begins once more; ``random`` prompts are random tokens, of which no drafter can learn
anything: the worst case, in which nothing should be lost.
"""

from __future__ import annotations

import json
import random
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Prompt = str | Sequence[int]

__all__ = ["BUILT_IN", "built_in", "random_prompts", "special_ids"]

RANDOM: Final = "random"

BUILT_IN: Final = ("code", "prose", "copy-heavy", "chat", RANDOM)
"""Names of the sets."""

RANDOM_COUNT: Final = 8
RANDOM_LENGTH: Final = 64


def built_in(
    name: str, tokenizer: Any, vocab_size: int, *, limit: int | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts of a set.

    Args:
        name: one of :data:`BUILT_IN`.
        tokenizer: mlx-lm's wrapper; ``None`` will do for ``random``.
        vocab_size: the model's; random ids are below it.
        limit: the first prompts only.
        seed: of the random ids.

    Returns:
        Texts, or ids where they come from a chat template or from nowhere.

    Raises:
        OptionError: no such set, or one of texts without a tokenizer.
    """
    if name not in BUILT_IN:
        raise OptionError(f"there is no prompt set {name!r}; there are {', '.join(BUILT_IN)}")
    if name == RANDOM:
        known = vocab_size if tokenizer is None else min(vocab_size, _size(tokenizer, vocab_size))
        found: list[Prompt] = list(random_prompts(known, seed=seed, without=special_ids(tokenizer)))
        return found[:limit]
    if tokenizer is None:
        raise OptionError(f"prompt set {name} is of texts; give a tokenizer, or use {RANDOM}")
    lines = files("specdec.bench").joinpath("prompts", f"{name}.jsonl").read_text("utf-8")
    entries = [json.loads(line) for line in lines.splitlines()]
    return [_prompt(entry, tokenizer) for entry in entries[:limit]]


def random_prompts(
    vocab_size: int,
    *,
    count: int = RANDOM_COUNT,
    length: int = RANDOM_LENGTH,
    seed: int = 0,
    without: Collection[int] = (),
) -> list[list[int]]:
    """Prompts of random ids.

    Args:
        vocab_size: ids are below it.
        count: prompts.
        length: ids of each.
        seed: same seed, same ids.
        without: ids that do not occur, such as special tokens.

    Raises:
        OptionError: no id is left.
    """
    draw, left = random.Random(seed), vocab_size - len({i for i in without if 0 <= i < vocab_size})
    if left < 1:
        raise OptionError(f"of {vocab_size} ids none is left for random prompts; exclude fewer")
    prompts = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            token = draw.randrange(vocab_size)
            if token not in without:
                ids.append(token)
        prompts.append(ids)
    return prompts


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of a tokenizer's special and end tokens, and of all others that it was given as such."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {*getattr(tokenizer, "all_special_ids", ()), *added}
    return frozenset(found | set(getattr(tokenizer, "eos_token_ids", ())))


def _size(tokenizer: Any, vocab_size: int) -> int:
    """Ids below which the tokenizer has tokens; models are often padded beyond them."""
    try:
        return max(tokenizer.get_vocab().values(), default=vocab_size - 1) + 1
    except AttributeError:
        return vocab_size


def _prompt(entry: dict[str, str], tokenizer: Any) -> Prompt:
    text = entry.get("text")
    if text is not None:
        return text
    said = entry["chat"]
    if not getattr(tokenizer, "has_chat_template", False):
        return f"User: {said}\n\nAssistant:"
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True
    )
    return ids
