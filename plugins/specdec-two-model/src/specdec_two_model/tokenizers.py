"""Whether two tokenizers give the same ids: asked of a text in many scripts, not of their files.

A vocabulary of another padded size, special tokens that only one of them has or another file format
do not matter; a draft model that writes other ids for the same text would be wrong in every draft.
A test text has no special tokens, so those that both have are compared by their ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    "DON'T! I'LL WE\u2019RE, $ % + @ ^ ` | BCFJKMQUXYZ jkqvwxz\n"
    "cafe\u0301 か\u3099 \ufb01 שָׁ क\u094dष \U00020bb7 \U00013080 \ue000 \u200b\u00ad\n"
    "a\u00a0b \u00a0 c\u3000d\u2028e\x0bf  \n \n\t end  \n"
)
"""Latin with accents, Cyrillic, Han, kana, Hangul, Arabic, Hebrew, Thai, emoji, code, all of ASCII,
marks behind their letters, rare and private characters, blanks of every kind."""


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
    if not found:
        raise ArtifactError(
            f"the tokenizer of {what} gives no ids for a test text; give a whole model with its "
            "tokenizer, or the option check_tokenizer=False"
        )
    if wanted == found:
        _compare_added(what, _added(target), _added(draft))
        return
    place = next(
        (at for at, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )
    raise ArtifactError(
        f"{what} has another tokenizer: token {place} of a test text is "
        f"{_shown(target, wanted, place)} for the target, but {_shown(draft, found, place)} for "
        "the draft model; give a draft model of the same tokenizer, or the option "
        "check_tokenizer=False"
    )


def _compare_added(what: str, target: Mapping[str, int], draft: Mapping[str, int]) -> None:
    """Check that special tokens of the same text have the same id.

    Raises:
        ArtifactError: one has not; names it.
    """
    both = sorted((number, text) for text, number in target.items() if text in draft)
    for number, text in both:
        if draft[text] != number:
            raise ArtifactError(
                f"{what} has another tokenizer: {one_line(repr(text))} is token {number} for the "
                f"target, but {draft[text]} for the draft model; give a draft model of the same "
                "tokenizer, or the option check_tokenizer=False"
            )


def _added(tokenizer: Any) -> Mapping[str, int]:
    """Ids of the tokens that were added to a vocabulary, by their text, where a tokenizer tells."""
    try:
        return {str(text): int(number) for text, number in tokenizer.get_added_vocab().items()}
    except Exception:  # one of somebody's own kind has none, or another such method
        return {}


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
            "another one, or the option check_tokenizer=False"
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
