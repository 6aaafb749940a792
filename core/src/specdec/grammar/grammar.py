"""A grammar as a user writes it down, and bound to a model's vocabulary."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import field, frozen

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from llguidance import LLMatcher

    from specdec.contract import TokenConstraint
    from specdec.grammar.marker import Marker
    from specdec.grammar.vocabulary import Vocabulary

__all__ = ["BoundGrammar", "Grammar"]

Kind: TypeAlias = Literal["json_schema", "regex", "lark"]


def _after(after: str | Sequence[int] | None) -> str | tuple[int, ...] | None:
    if after is None or (isinstance(after, str) and after):
        return after
    try:
        ids = () if isinstance(after, str | bytes) else tuple(after)
    except TypeError:
        ids = ()
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise OptionError(
            f"after is {one_line(repr(after))}; give the text or the token ids behind which the "
            "grammar begins, or None"
        )
    return ids


def _text(kind: Kind, text: object) -> str:
    if not isinstance(text, str):
        raise OptionError(f"{kind} is {one_line(repr(text))}; give it as a string")
    return text


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"the JSON schema is no JSON: {one_line(error)}") from error
    if not isinstance(parsed, dict):
        raise OptionError(
            f"the JSON schema is {one_line(text)[:80]}; give an object, as a dict or as JSON text"
        )
    return text


@frozen
class Grammar:
    """What an output must look like; made by one of the three constructors.

    Every constructor takes ``after``, the marker behind which the grammar begins, such as
    ``"</think>"``: as text, or as token ids. Before it nothing is restricted. It is looked for in
    the emitted tokens and not in the prompt, by token ids: text is encoded alone, without special
    tokens. A tokenizer may write the marker's end and what follows as one token, and is then not
    understood, so a marker that is one special token is best. Once begun, the grammar holds to the
    end of the output.

    Attributes:
        kind: ``json_schema``, ``regex`` or ``lark``.
        text: the grammar; a JSON schema as JSON.
        after: where the grammar begins; ``None``: with the first token.
        whitespace: JSON may have whitespace between its parts.
    """

    kind: Kind
    text: str
    after: str | tuple[int, ...] | None = None
    whitespace: bool = False

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | str,
        *,
        whitespace: bool = False,
        after: str | Sequence[int] | None = None,
    ) -> Grammar:
        """JSON that a schema describes, with an object's keys in the schema's order.

        Args:
            schema: a JSON schema, as a dict or as JSON text.
            whitespace: allow spaces and line breaks between the parts. Without, the output is
                compact, ``{"name":"Ada","age":36}``, and long stretches of it are forced: they are
                known without a model, and drafted for nothing.
            after: the marker behind which the grammar begins.

        Raises:
            OptionError: the schema is no JSON object; what is wrong inside it, ``bind`` tells.
        """
        return cls("json_schema", _schema_text(schema), _after(after), bool(whitespace))

    @classmethod
    def regex(cls, pattern: str, *, after: str | Sequence[int] | None = None) -> Grammar:
        r"""Output that a regular expression matches as a whole.

        Args:
            pattern: the syntax is that of Rust's ``regex`` crate: no look-around and no back
                references; ``.`` matches no line break; ``\d`` and ``\w`` are those of Unicode.
            after: the marker behind which the grammar begins.

        Raises:
            OptionError: the pattern is no string; what is wrong inside it, ``bind`` tells.
        """
        return cls("regex", _text("regex", pattern), _after(after))

    @classmethod
    def lark(cls, text: str, *, after: str | Sequence[int] | None = None) -> Grammar:
        """Output of a context-free grammar that begins at its rule ``start``.

        Args:
            text: the grammar in llguidance's dialect of Lark.
            after: the marker behind which the grammar begins.

        Raises:
            OptionError: the grammar is no string; what is wrong inside it, ``bind`` tells.
        """
        return cls("lark", _text("lark", text), _after(after))

    def bind(self, tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> BoundGrammar:
        """Compile the grammar for one model. What depends on the tokenizer alone is kept.

        Args:
            tokenizer: mlx-lm's tokenizer, or a fast tokenizer of transformers.
            vocab_size: V, the width of the model's logits; ids beyond the tokenizer's are never
                allowed.
            end_tokens: the ids that end an output: allowed where the grammar may end. Without
                any, a row goes on until its grammar is complete or its budget is spent.

        Raises:
            OptionError: llguidance is not installed, the tokenizer cannot be read, the grammar is
                wrong, or no marker can be made of ``after``.
        """
        try:
            from specdec.grammar.matcher import compile_grammar
            from specdec.grammar.vocabulary import read_vocabulary
        except ImportError as error:
            raise OptionError(
                f"a grammar needs llguidance, which cannot be imported ({one_line(error)}); "
                "pip install 'specdec-core[grammar]'"
            ) from error
        vocabulary = read_vocabulary(tokenizer, vocab_size, end_tokens)
        marker = self._marker(tokenizer, vocabulary)
        template = compile_grammar(
            self.kind, self.text, whitespace=self.whitespace, vocabulary=vocabulary
        )
        return BoundGrammar(vocabulary, template, marker)

    def _marker(self, tokenizer: Any, vocabulary: Vocabulary) -> Marker | None:
        from specdec.grammar.marker import Marker

        if self.after is None:
            return None
        ids = self.after
        if isinstance(ids, str):
            ids = tuple(tokenizer.encode(ids, add_special_tokens=False))
        if not ids or len(vocabulary.readable(ids)) < len(ids):
            raise OptionError(
                f"after is {self.after!r}, which is {list(ids)} in token ids; give ids from 0 to "
                f"{vocabulary.size - 1}"
            )
        ending = sorted(vocabulary.end_tokens.intersection(ids))
        if ending:
            raise OptionError(
                f"after is {self.after!r}, which holds the end token {ending[0]}: the output would "
                "end before the grammar begins"
            )
        return Marker(ids)


@frozen(eq=False)
class BoundGrammar:
    """A grammar, compiled for one model. Calling it gives the constraint of a new row."""

    _vocabulary: Vocabulary = field(repr=False)
    _template: LLMatcher = field(repr=False)
    _marker: Marker | None

    def __call__(self) -> TokenConstraint:
        """A row's constraint at the beginning of its output, independent of all others."""
        from specdec.grammar.matcher import GrammarRow

        return GrammarRow(self._vocabulary, self._template, self._marker)
