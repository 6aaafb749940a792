"""Prompts of ids need no tokenizer: what stands in for it, for mlx-lm's functions as for ours."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from specdec.errors import OptionError
from specdec.requests import wrapped

__all__ = ["text_or_none"]


def text_or_none(tokenizer: Any) -> Any:
    """The tokenizer as mlx-lm wraps it; for ``None`` one that has no texts and no end tokens."""
    if tokenizer is not None:
        return wrapped(tokenizer)
    return TokenizerWrapper(_NoTexts(), detokenizer_class=_NoText)


class _NoTexts:
    """A tokenizer without a token."""

    eos_token_id = None
    bos_token = None
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, **_: Any) -> list[int]:
        raise OptionError(f"prompt {text[:40]!r} is a text, and there is no tokenizer; give ids")

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        raise OptionError("a chat needs a tokenizer; give prompts of ids")

    def decode(self, _ids: Any, **_: Any) -> str:
        return ""


class _NoText(StreamingDetokenizer):  # type: ignore[misc]  # mlx-lm ships no types
    """Every token's text is empty."""

    def __init__(self, _tokenizer: Any) -> None:
        self.reset()

    def reset(self) -> None:
        self.offset = 0
        self.tokens: list[int] = []
        self.text = ""

    def add_token(self, token: int) -> None:
        self.tokens.append(token)

    def finalize(self) -> None:
        """Nothing is held back."""
