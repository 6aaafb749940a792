"""Whether two tokenizers give the same ids: asked of a text in many scripts, not of their files.

A vocabulary of another padded size, added special tokens or another file format do not matter; a
draft model that writes other ids for the same text would be wrong in every draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TEXT", "check_tokenizers"]

TEXT: Final = (
    "The quick brown fox can't jump over 13 lazy dogs; it's 1234567890 past 3.14.\n"
    "Ça a été déjà vu à l'hôtel, Größe und Straße, señor niño, Łódź, Ağaç, tiếng Việt.\n"
    "Съешь ещё этих мягких французских булок, да выпей чаю.\n"
    "敏捷的棕色狐狸跳过懒狗。日本語の文章を書きます。한국어 문장도 있어요.\n"
    "نص حكيم له سر قاطع ١٢٣ וגם עברית, हिन्दी में भी, ภาษาไทย.\n"
    "🙂👩‍👩‍👧‍👦🇫🇮 naïve café — “quotes” … ½ ≤ ∞\n"
    'def f(x: int = 0) -> dict[str, list[int]]:\n    """Doc."""\n\treturn {"a_b": [x ** 2, ~x]}\n'
    "\n\n\n   three spaces,\t\ttabs\r\n"
    "        <b>&amp;</b> https://example.org/a?b=c#d \\n HTTPServer\n"
)
"""Latin with accents, Cyrillic, Han, kana, Hangul, Arabic, Hebrew, Thai, emoji, code, blanks."""


def check_tokenizers(what: str, target: Any, draft: Any) -> None:
    """Check that both give the same ids.

    Args:
        what: names the draft model in messages.
        target: the target's tokenizer.
        draft: the draft model's.

    Raises:
        ArtifactError: they do not; shows the first difference.
    """
    wanted, found = _ids("the target", target), _ids(what, draft)
    if wanted == found:
        return
    place = next(
        (at for at, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )
    raise ArtifactError(
        f"{what} has another tokenizer: token {place} of a test text is "
        f"{_shown(target, wanted, place)} for the target, but {_shown(draft, found, place)} for "
        "the draft model; give a draft model of the same tokenizer, or check_tokenizer=False"
    )


def _ids(what: str, tokenizer: Any) -> list[int]:
    try:
        try:
            found = tokenizer.encode(TEXT, add_special_tokens=False)
        except TypeError:  # a tokenizer of somebody's own, without special tokens
            found = tokenizer.encode(TEXT)
        return [int(token) for token in found]
    except Exception as error:
        raise ArtifactError(
            f"the tokenizer of {what} cannot encode a test text ({one_line(error)}); give "
            "another one, or check_tokenizer=False"
        ) from error


def _shown(tokenizer: Any, ids: Sequence[int], place: int) -> str:
    """A token's id and text."""
    if place >= len(ids):
        return "none at all"
    try:
        text = repr(tokenizer.decode([ids[place]]))
    except Exception as error:  # a message is given all the same
        text = one_line(error)
    return f"{ids[place]} ({text})"
