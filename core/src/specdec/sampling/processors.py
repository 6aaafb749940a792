"""A row's logits processors over a whole verify window, each position with its own history.

The logits at position ``i`` of a window follow the history and the window up to and including
``i``: later drafts are not part of what a processor may see there, and a rejected draft is part of
no later window's history. Window tokens may still be on the device, so nothing here reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, runtime_checkable

import mlx.core as mx
from attrs import field, frozen

from specdec.errors import ContractError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "LogitsProcessor",
    "Processors",
    "VocabularyBound",
    "WindowProcessor",
    "WindowView",
    "stateless",
]

LogitsProcessor: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""As in mlx-lm: ``(tokens [n], logits [1, V]) -> [1, V]``."""

_MLX_LM = "mlx_lm.sample_utils"
_MARK = "__specdec_stateless__"


@frozen(eq=False)
class WindowView:
    """What precedes each position of one row's window.

    Attributes:
        tokens: ``[n + W]`` ids, int32 or uint32, below the vocabulary: the history, then the
            window. Borrowed: do not assign into it, and do not read it on the host.
        width: W, 1 or more.
        emitted: content tokens that were emitted before the window's first draw.

    Raises:
        ContractError: the width does not fit the tokens.
    """

    tokens: mx.array
    width: int
    emitted: int

    def __attrs_post_init__(self) -> None:
        if self.tokens.ndim != 1 or not 1 <= self.width <= self.tokens.size:
            raise ContractError(
                f"a window of width {self.width} over tokens of shape {self.tokens.shape}; "
                "give [n + W] tokens and W from 1"
            )

    @property
    def history(self) -> int:
        """Tokens before the window, n."""
        return self.tokens.size - self.width

    def at(self, position: int) -> mx.array:
        """The ``[n + 1 + position]`` tokens that the logits at a position follow.

        Raises:
            ContractError: the window has no such position.
        """
        if not 0 <= position < self.width:
            raise ContractError(f"position {position}; the window has 0 to {self.width - 1}")
        return self.tokens[: self.history + 1 + position]

    def context(self, size: int) -> tuple[mx.array, mx.array | None]:
        """The last ``size`` tokens before the draw at each position, for all positions at once.

        Args:
            size: tokens to look back, 1 or more.

        Returns:
            Ids ``[W, C]``, the latest first, C = min(size, n + W), and which of them are real,
            ``[W, C]`` bools. Where a position has fewer tokens than C, the row is filled up with
            the first token, which is among them anyway: sets of ids need no mask. ``None``
            instead of the mask where no row is filled up.
        """
        count = min(size, self.tokens.size)
        ends = mx.arange(self.history, self.tokens.size)[:, None]
        places = ends - mx.arange(count)[None]
        if count <= self.history + 1:
            return self.tokens[places], None
        return self.tokens[mx.maximum(places, 0)], places >= 0


@runtime_checkable
class WindowProcessor(Protocol):
    """A processor of all positions of a window in one graph."""

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        """Change the logits of a window.

        Position ``i`` may depend on ``view.at(i)`` and on ``view.emitted + i``, and on no later
        token.

        Args:
            view: the tokens before each position.
            logits: ``[W, V]``; the processor may assign into it.

        Returns:
            ``[W, V]``, not evaluated.
        """
        ...


@runtime_checkable
class VocabularyBound(Protocol):
    """A processor that names token ids, and can say before it runs whether they exist."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``OptionError`` for an id at or above the vocabulary, and name it."""
        ...


@frozen(eq=False)
class _Stateless:
    function: LogitsProcessor

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.function(tokens, logits)


def stateless(function: LogitsProcessor) -> LogitsProcessor:
    """Declare that a processor's result depends on its two arguments alone.

    It is then called for every position of a window, before it is known which drafts are accepted.
    A class may be declared too: that holds for its own instances, not for a derived class's.

    Args:
        function: ``(tokens [n], logits [1, V]) -> [1, V]``, of one dtype at every position.

    Returns:
        The function itself, marked; a wrapper where it takes no attribute.

    Raises:
        OptionError: not a callable.
    """
    if not callable(function):
        raise OptionError(f"stateless was given {function!r}; give a callable (tokens, logits)")
    with suppress(AttributeError, TypeError, ValueError):
        # The mark says whom it was given to: functools.wraps copies attributes to wrappers,
        # which may well hold state.
        setattr(function, _MARK, id(function))
    return function if _declared(function) else _Stateless(function)


def _declared(function: object) -> bool:
    owners = (function, type(function), getattr(function, "__func__", function))
    return getattr(function, _MARK, None) in {id(owner) for owner in owners}


def _from_mlx_lm(function: object) -> bool:
    # functools.wraps copies __module__ as well; the globals are the code's own.
    return (
        isinstance(function, FunctionType)
        and function.__module__ == _MLX_LM
        and function.__globals__.get("__name__") == _MLX_LM
    )


def _name(member: object) -> str:
    if isinstance(member, _Stateless):
        return _name(member.function)
    name = getattr(member, "__qualname__", None)
    return name if isinstance(name, str) else type(member).__qualname__


def _chain(members: Iterable[object]) -> tuple[LogitsProcessor | WindowProcessor, ...]:
    try:
        chain = tuple(members)
    except TypeError:
        raise OptionError(f"logits_processors is {members!r}; give a list of processors") from None
    for member in chain:
        if isinstance(member, type):
            raise OptionError(
                f"logits processor {_name(member)} is a class; give an instance of it"
            )
        if not callable(member) and not callable(getattr(member, "process_window", None)):
            raise OptionError(
                f"logits processor {member!r} is neither callable nor a WindowProcessor; "
                "give a callable (tokens, logits)"
            )
    return cast("tuple[LogitsProcessor | WindowProcessor, ...]", chain)


@frozen(eq=False)
class Processors:
    """One row's chain of processors, applied in order; immutable.

    Attributes:
        chain: three kinds in any order. A :class:`WindowProcessor` takes a window at once.
            Callables that hold no state (declared with :func:`stateless`, or mlx-lm's own) are
            called once per position, in one graph. Any other callable may hold state.

    Raises:
        OptionError: a member is neither callable nor a ``WindowProcessor``.
    """

    chain: tuple[LogitsProcessor | WindowProcessor, ...] = field(converter=_chain, default=())
    _stateful: tuple[str, ...] = field(init=False, repr=False)

    @_stateful.default
    def _names_of_stateful(self) -> tuple[str, ...]:
        return tuple(
            _name(member)
            for member in self.chain
            if not isinstance(member, WindowProcessor | _Stateless)
            and not (_declared(member) or _from_mlx_lm(member))
        )

    @property
    def positional(self) -> bool:
        """Whether a member may hold state, so that windows have to be of width 1, in order."""
        return bool(self._stateful)

    def __bool__(self) -> bool:
        return bool(self.chain)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Compare the ids that members name with the target's vocabulary.

        Args:
            vocab_size: V, the width of the target's logits.

        Raises:
            OptionError: an id at or above it; MLX itself would read and write out of bounds.
        """
        for member in self.chain:
            if isinstance(member, VocabularyBound):
                member.check_vocabulary(vocab_size)

    def apply(self, view: WindowView, logits: mx.array) -> mx.array:
        """Run the chain over a window, without evaluating anything.

        Args:
            view: the tokens before each position.
            logits: ``[W, V]``; stays as it is.

        Returns:
            ``[W, V]``, in the dtype that the last member returned.

        Raises:
            ContractError: the chain is positional and W is above 1.
            OptionError: a member returned something of the wrong shape, or different dtypes
                within the window.
        """
        if self.positional and view.width > 1:
            raise ContractError(
                f"logits processor {self._stateful[0]} may hold state and was given a window of "
                f"width {view.width}; apply it position by position, or declare it stateless"
            )
        for member in self.chain:
            if isinstance(member, WindowProcessor):
                # Indexing makes an array of its own: an assignment into it changes no other.
                logits = _checked(member, member.process_window(view, logits[:]), logits.shape)
            else:
                logits = _each(member, view, logits)
        return logits


def _each(member: LogitsProcessor, view: WindowView, logits: mx.array) -> mx.array:
    rows = [
        _checked(member, member(view.at(i), logits[i : i + 1]), (1, logits.shape[1]))
        for i in range(view.width)
    ]
    dtypes = {str(row.dtype) for row in rows}
    if len(dtypes) > 1:
        # Joined, one position's dtype would round another's logits otherwise than alone.
        raise OptionError(
            f"logits processor {_name(member)} returned {' and '.join(sorted(dtypes))} in one "
            "window; return one dtype"
        )
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def _checked(member: object, out: object, shape: tuple[int, ...]) -> mx.array:
    if not isinstance(out, mx.array):
        raise OptionError(
            f"logits processor {_name(member)} returned {type(out).__name__}; "
            f"return an array of shape {list(shape)}"
        )
    if out.shape != shape:
        raise OptionError(
            f"logits processor {_name(member)} returned shape {list(out.shape)}; "
            f"return the shape it was given, {list(shape)}"
        )
    return out
