"""Text as windows of tokens, in an order that follows from a seed and the number of a step.

Nothing is kept between steps, so a run that goes on after an interruption reads what it would have
read without one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx

from specdec.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["TextWindows", "read_texts", "read_tokens"]

_SUFFIXES: Final = (".txt", ".md", ".py", ".jsonl")


def read_texts(folder: Path) -> Iterator[str]:
    """The texts of a folder and those below it, by path.

    Args:
        folder: with ``.txt``, ``.md``, ``.py`` and ``.jsonl`` files; each line of the last is an
            object with ``text``.

    Raises:
        ArtifactError: no such folder, no such file in it, or a line without ``text``.
    """
    if not folder.is_dir():
        raise ArtifactError(f"the text folder {folder} is no folder; give one with text files")
    files = sorted(f for f in folder.rglob("*") if f.suffix in _SUFFIXES and f.is_file())
    if not files:
        raise ArtifactError(
            f"the text folder {folder} has no {', '.join(_SUFFIXES)} files; give one that has"
        )
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix != ".jsonl":
            yield text
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _text_of(line, file, number)


def _text_of(line: str, file: Path, number: int) -> str:
    try:
        found = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise ArtifactError(f'{file}: line {number} is no JSON object with a "text"; mend it')
    return found


def read_tokens(folder: Path, tokenizer: Any, vocab_size: int) -> mx.array:
    """All texts of a folder as one stream of ids ``[T]``, each followed by the end of a text.

    Args:
        folder: see :func:`read_texts`.
        tokenizer: the target's.
        vocab_size: V of the target.

    Raises:
        ArtifactError: as :func:`read_texts`, or ids that the target does not have.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    ids = array("i")
    with _without_length_warning():
        for text in read_texts(folder):
            ids.extend(tokenizer.encode(text))
            if isinstance(end, int):
                ids.append(end)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ArtifactError(
            f"the tokenizer gives ids {min(ids)} to {max(ids)}, but the target has 0 to "
            f"{vocab_size - 1}; give the target's own tokenizer"
        )
    held: Any = memoryview(ids)  # MLX's types leave buffers out
    return mx.array(held, mx.int32) if ids else mx.zeros((0,), mx.int32)


@contextmanager
def _without_length_warning() -> Iterator[None]:
    """Keep transformers from warning of texts beyond the model's context: they are cut later."""
    logger = logging.getLogger("transformers.tokenization_utils_base")

    def is_other(record: logging.LogRecord) -> bool:
        return "sequence length is longer" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class TextWindows:
    """Windows of a stream, shuffled anew in each epoch, from a start that moves with the epoch.

    Args:
        tokens: ``[T]`` ids.
        length: L, tokens of a window.
        seed: of the order.

    Raises:
        ArtifactError: there is less than one window.
    """

    def __init__(self, tokens: mx.array, length: int, seed: int) -> None:
        if tokens.size < length:
            raise ArtifactError(
                f"the text has {tokens.size} tokens, fewer than one window of {length}; give more "
                "text, or a smaller length"
            )
        self._tokens = tokens
        self._length = length
        self._seed = seed
        self._count = max(tokens.size // length - 1, 1)
        self._order: tuple[int, list[int]] = (-1, [])
        self._identity: str | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return self._tokens.size

    @property
    def identity(self) -> str:
        """How many tokens, and what tells them from others."""
        if self._identity is None:
            held: Any = memoryview(cast("Any", self._tokens))
            self._identity = f"{self.tokens} tokens, {hashlib.sha256(held).hexdigest()[:12]}"
        return self._identity

    def batch(self, step: int, rows: int) -> mx.array:
        """The windows ``[rows, L]`` of a step."""
        starts = [self._start(step * rows + row) for row in range(rows)]
        index = mx.array(starts, mx.int32)[:, None] + mx.arange(self._length)
        return self._tokens[index]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self._count)
        if self._order[0] != epoch:
            drawn = random.Random(f"{self._seed}:{epoch}")
            spare = self._tokens.size - self._count * self._length
            first = drawn.randint(0, spare)
            starts = [first + self._length * each for each in range(self._count)]
            drawn.shuffle(starts)
            self._order = epoch, starts
        return self._order[1][place]
