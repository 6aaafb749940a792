"""Reading a config key by key, so that what is missing or wrong is named with its level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Keys", "shown"]

_MOST: Final = 2**31 - 1  # an axis of MLX's arrays has no more
_LARGEST: Final = 3.4e38  # float32 has no larger one


def shown(value: object) -> str:
    """Any value in a message, on one line."""
    try:
        return one_line(repr(value))
    except ValueError:  # Python writes no whole number of thousands of digits
        return f"a {type(value).__name__} of too many digits"


class Keys:
    """One level of a config.

    Args:
        what: names the drafter in messages.
        level: its keys.
        path: of the level in the config, with a dot behind it.
    """

    def __init__(self, what: str, level: Mapping[str, Any], path: str = "") -> None:
        self._what = what
        self._level = level
        self._path = path

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self._level.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where there is none.

        Raises:
            ArtifactError: there is neither.
        """
        found = self._level.get(key)
        if found is None:
            found = default
        if found is None:
            raise ArtifactError(f"{self._what} has no {self._path}{key}; give a complete release")
        return found

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number.

        Raises:
            ArtifactError: it is missing, or something else.
        """
        found = self.get(key, default)
        if type(found) is not int or not least <= found <= _MOST:
            raise self.wrong(key, f"a whole number of {least} or more")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            ArtifactError: it is missing, or something else.
        """
        found = self.get(key, default)
        numeric = isinstance(found, int | float) and not isinstance(found, bool)
        if not numeric or not 0 < found <= _LARGEST:
            raise self.wrong(key, "a number above 0")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ArtifactError: something else.
        """
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self.wrong(key, "true or false")
        return found

    def words(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """A list of known words, one at least.

        Raises:
            ArtifactError: it is missing, empty, or holds another word.
        """
        found = self.get(key)
        whole = isinstance(found, list | tuple) and found
        if not whole or not all(isinstance(each, str) and each in known for each in found):
            raise self.wrong(key, f"a list of {' and '.join(known)}")
        return tuple(found)

    def must_be(self, key: str, *known: Any) -> None:
        """Check that a key is absent or has one of these values.

        Raises:
            ArtifactError: it has another one.
        """
        found = self._level.get(key)
        if found is not None and not any(type(found) is type(k) and found == k for k in known):
            raise self.wrong(key, " or ".join(map(shown, known)) + ", or absent")

    def level(self, key: str) -> Keys:
        """The level under a key.

        Raises:
            ArtifactError: it is missing, or something else.
        """
        found = self.get(key)
        if not isinstance(found, Mapping):
            raise self.wrong(key, "a mapping")
        return Keys(self._what, found, f"{self._path}{key}.")

    def wrong(self, key: str, wanted: str) -> ArtifactError:
        """The error for a value that cannot be used."""
        found = shown(self._level.get(key))
        return ArtifactError(f"{self._what}: {self._path}{key} is {found}; it must be {wanted}")
