"""The accept walk: which of a row's drafts are the target's own tokens. Pure, on plain ints.

Token-match acceptance: a draft is kept if the target, drawing with its own noise at that position,
drew the same token. So the output is the target's, whatever was drafted (Leviathan et al. 2022,
arXiv 2211.17192, at temperature 0; with coupled noise the same holds at any temperature).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

__all__ = ["Acceptance", "Ending", "accept_tokens"]

Ending = Literal["stop", "length"]


@frozen
class Acceptance:
    """What one row takes from one verify window.

    Attributes:
        accepted: drafts that matched; counts an end token that was drafted.
        tokens: content to emit, in order: the accepted drafts, then the correction (after a
            mismatch) or the bonus (after full acceptance), unless the row ends before it.
        end_token: the end token that was reached; it is not content.
        ending: why the row ends here, if it does.
    """

    accepted: int
    tokens: tuple[int, ...]
    end_token: int | None = None
    ending: Ending | None = None


def accept_tokens(
    draft: Sequence[int],
    samples: Iterable[int],
    *,
    end_tokens: Container[int],
    budget: int | None,
    stops: Callable[[int], bool] | None = None,
) -> Acceptance:
    """Walk one row's window from left to right.

    Args:
        draft: the ids that were verified, d of them.
        samples: the target's own token at each position, at least up to the first mismatch; read
            one by one, so that a sampler is called for no position that is not reached.
        end_tokens: ids that end the row.
        budget: content tokens that may still be emitted, 1 or more; ``None`` for no limit.
        stops: told of each content token; true where the row ends with it (a stop sequence, a
            finished grammar).

    Returns:
        The acceptance. An end token wins over the budget when both fall on one token.
    """
    tokens: list[int] = []
    accepted = 0
    for position, token in enumerate(samples):
        matches = position < len(draft) and token == draft[position]
        accepted += matches
        if token in end_tokens:
            return Acceptance(accepted, tuple(tokens), token, "stop")
        tokens.append(token)
        if stops is not None and stops(token):
            return Acceptance(accepted, tuple(tokens), None, "stop")
        if budget is not None and len(tokens) >= budget:
            return Acceptance(accepted, tuple(tokens), None, "length")
        if not matches:
            break
    return Acceptance(accepted, tuple(tokens))
