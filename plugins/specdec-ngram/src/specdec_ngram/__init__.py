"""The n-gram drafter of specdec: it proposes what followed the last tokens when they came before.

It has no weights and needs no port of the target. ``plugin`` registers the kind, ``provider`` and
``rows`` implement the draft contract, and ``history`` holds the method: one row's tokens and an
index over them. Importing this package imports no MLX.
"""
