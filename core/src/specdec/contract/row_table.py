"""One operation in several forms: a default, and others for given numbers of rows.

A kernel that is made for one row, or for eight, is declared here beside the form that takes any
number, and whoever runs the operation asks for the form of the rows that it has.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attrs import Attribute

__all__ = ["RowTable"]

Op = TypeVar("Op", bound="Callable[..., Any]")
Other = TypeVar("Other", bound="Callable[..., Any]")


def _is_count(rows: object) -> bool:
    return isinstance(rows, int) and not isinstance(rows, bool) and rows >= 1


def _callable(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if not callable(value):
        raise OptionError(f"row table: the default operation is {value!r}; give a callable")


def _by_count(_instance: object, _attribute: Attribute[Any], value: Mapping[int, object]) -> None:
    for rows, operation in value.items():
        if not _is_count(rows):
            raise OptionError(
                f"row table: {rows!r} is no number of rows; give whole numbers of 1 or more"
            )
        if not callable(operation):
            raise OptionError(
                f"row table: the operation for {rows} rows is {operation!r}; give a callable"
            )


def _own(value: Any) -> Mapping[int, Any]:
    try:
        return MappingProxyType(dict(value))
    except (TypeError, ValueError):
        raise OptionError(
            f"row table: the declared operations are {value!r}; give a mapping of numbers of rows "
            "to callables"
        ) from None


@frozen(eq=False)
class RowTable(Generic[Op]):
    """A default operation, and operations declared for exact numbers of rows.

    A table may be called as its operations are: the first axis of the first argument says how
    many rows there are. So it stands wherever one of its operations does.

    Attributes:
        default: takes any number of rows.
        declared: by number of rows; each gives what the default gives, up to rounding.

    Raises:
        OptionError: a number of rows is none, or an operation cannot be called.
    """

    default: Op = field(validator=_callable)
    declared: Mapping[int, Op] = field(default=MappingProxyType({}), converter=_own)

    @declared.validator
    def _check(self, attribute: Attribute[Any], value: Mapping[int, object]) -> None:
        _by_count(self, attribute, value)

    @overload
    @staticmethod
    def of(operation: RowTable[Other]) -> RowTable[Other]: ...

    @overload
    @staticmethod
    def of(operation: Other) -> RowTable[Other]: ...

    @staticmethod
    def of(operation: Any) -> RowTable[Any]:
        """A table as it is; a plain callable as a table that declares nothing."""
        return operation if isinstance(operation, RowTable) else RowTable(operation)

    def at(self, rows: int) -> Op:
        """The operation for so many rows.

        Raises:
            OptionError: that is no number of rows.
        """
        if not _is_count(rows):
            raise OptionError(f"row table: asked for {rows!r} rows; ask for 1 or more")
        return self.declared.get(rows, self.default)

    def map(self, change: Callable[[Op], Other]) -> RowTable[Other]:
        """The table of what ``change`` makes of each operation, once of each."""
        declared = {rows: change(operation) for rows, operation in self.declared.items()}
        return RowTable(change(self.default), declared)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the operation for the rows of the first argument ``[B, ...]``."""
        return self.at(arguments[0].shape[0])(*arguments, **named)
