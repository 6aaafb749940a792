"""Reading a drafter's config key by key, so that what is missing or wrong is named. No MLX here.

A key with the value ``null`` counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Keys", "shown"]

_MISSING: Final = object()
_MOST: Final = 2**31 - 1  # an axis of MLX's arrays has no more
_LARGEST: Final = 3.4e38  # float32 has no larger one


def shown(value: object) -> str:
    """Any value in a message, on one line."""
    try:
        return one_line(repr(value))
    except ValueError:  # Python writes no whole number of thousands of digits
        return f"a {type(value).__name__} of too many digits"


class Keys:
    """Levels of a config, searched in order.

    Args:
        where: names the config in messages.
        levels: mappings; the first that has a key with a value wins.
        path: of the levels in the config, with a dot behind it, for messages.
    """

    def __init__(self, where: str, *levels: Mapping[str, Any], path: str = "") -> None:
        self._where = where
        self._levels: Sequence[Mapping[str, Any]] = levels
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default where no level has one."""
        for level in self._levels:
            found = level.get(key)
            if found is not None:
                return found
        return default

    def has(self, key: str) -> bool:
        """Whether a level has a value for a key."""
        return self.get(key, _MISSING) is not _MISSING

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """A whole number.

        Raises:
            ArtifactError: it is missing, less than ``least`` or more than ``most``.
        """
        found = self._given(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.wrong(key, f"a whole number of {least} or more")
        if found > most:
            raise self.wrong(key, f"a whole number of {most} at most")
        return found

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None
    ) -> float:
        """A finite number that float32 has.

        Raises:
            ArtifactError: it is missing, none, or not above what it has to be above.
        """
        found = self._given(key, default)
        numeric = isinstance(found, int | float) and not isinstance(found, bool)
        if (  # whole numbers may be larger than any float: compared, and converted afterwards
            not numeric
            or not -_LARGEST <= found <= _LARGEST
            or (above is not None and found <= above)
        ):
            raise self.wrong(key, "a number" if above is None else f"a number above {above:g}")
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

    def counts(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers, one at least.

        Raises:
            ArtifactError: it is missing, empty, or holds something else.
        """
        found = self._given(key, None)
        if (
            not isinstance(found, list | tuple)
            or not found
            or not all(isinstance(n, int) and not isinstance(n, bool) for n in found)
            or not least <= min(found) <= max(found) <= _MOST
        ):
            raise self.wrong(key, f"a list of whole numbers of {least} or more")
        return tuple(found)

    def words(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """A list of known words, one at least.

        Raises:
            ArtifactError: it is missing, empty, or holds another word.
        """
        found = self._given(key, None)
        whole = isinstance(found, list | tuple) and found
        if not whole or not all(isinstance(each, str) and each in known for each in found):
            raise self.wrong(key, f"a list of {' and '.join(known)}")
        return tuple(found)

    def one_of(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        """One of the known words.

        Raises:
            ArtifactError: another.
        """
        found = self._given(key, default)
        if not isinstance(found, str) or found not in known:
            raise self.wrong(key, " or ".join(known))
        return found

    def must_be(self, key: str, *known: Any) -> None:
        """Check that a key is absent or has one of these values.

        Raises:
            ArtifactError: it has another one.
        """
        found = self.get(key)
        if found is not None and not any(type(found) is type(k) and found == k for k in known):
            raise self.wrong(key, " or ".join(map(shown, known)) + ", or absent")

    def level(self, key: str) -> Mapping[str, Any]:
        """A mapping, empty where there is none.

        Raises:
            ArtifactError: it is something else.
        """
        found = self.get(key, {})
        if not isinstance(found, Mapping):
            raise self.wrong(key, "a mapping")
        return found

    def under(self, key: str) -> Keys:
        """The level under a key that must be there, and nothing behind it.

        Raises:
            ArtifactError: it is missing, or no mapping.
        """
        self._given(key, None)
        return Keys(self._where, self.level(key), path=f"{self._path}{key}.")

    def within(self, level: Mapping[str, Any]) -> Keys:
        """The same levels behind another one."""
        return Keys(self._where, level, *self._levels, path=self._path)

    def alone(self, level: Mapping[str, Any]) -> Keys:
        """Another level of the same config, and nothing behind it."""
        return Keys(self._where, level, path=self._path)

    def wrong(self, key: str, wanted: str) -> ArtifactError:
        """The error for a value that cannot be used."""
        found = shown(self.get(key))
        return ArtifactError(f"{self._where}: {self._path}{key} is {found}; it must be {wanted}")

    def _given(self, key: str, default: Any) -> Any:
        found = self.get(key, default)
        if found is None:
            raise ArtifactError(f"{self._where} has no {self._path}{key}; give a complete release")
        return found
