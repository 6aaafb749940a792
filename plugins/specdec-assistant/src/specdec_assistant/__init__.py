"""Gemma assistants: drafters without keys and values of their own, which borrow the target's."""

__all__ = ["__version__"]

__version__ = "0.1.0"
