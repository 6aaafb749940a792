"""Expecting a verb to refuse something, with a message that says what a drafter did instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["must_raise"]


def must_raise(error: type[Exception], call: Callable[[], object], what: str) -> None:
    """Call something that the contract forbids.

    Args:
        error: what it must raise.
        call: the call.
        what: the call in words, for the message.

    Raises:
        AssertionError: it raised something else, or nothing.
    """
    try:
        call()
    except error:
        return
    except Exception as other:
        raise AssertionError(
            f"{what} raised {type(other).__name__} ({other}); the contract asks for "
            f"{error.__name__}, before anything is changed"
        ) from other
    raise AssertionError(f"{what} was allowed; the contract asks for {error.__name__}")
