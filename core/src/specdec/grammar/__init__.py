"""Output that follows a grammar: JSON of a schema, a regular expression, a Lark grammar.

A ``Grammar`` is what a user writes down; bound to a model's vocabulary it makes one
``TokenConstraint`` per row. The grammar engine is llguidance, an extra of this package
(``pip install 'specdec-core[grammar]'``) that is imported when a grammar is bound.
"""

from specdec.grammar.grammar import BoundGrammar, Grammar

__all__ = ["BoundGrammar", "Grammar"]
