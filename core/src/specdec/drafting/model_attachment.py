"""Rows of a draft model as checkpoints, whatever kinds of cache the model has.

A row's mlx-lm caches are stored as the prefix cache stores them: named arrays, and one text that
says which array is what. Restoring compares them with a row of one position that the model itself
has read, so that what another model stored is refused before a forward runs over it.

Schema ``standalone-draft-1``: arrays ``cache.0`` and on; metadata ``tokens`` (the row's tokens),
``unread`` (the last of them where the model has not read it, else -1), ``ended`` (whether the row
has no caches any more because the model's context was full) and ``caches`` (the text).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import frozen
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from specdec.checkpoints.entry import PrefixEntry, decode_state, encode
from specdec.contract import Attachment, RowCheckpoint
from specdec.drafting.row_arrays import check_identity
from specdec.errors import CheckpointError, OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state import RowState
    from specdec.targets import Target

__all__ = ["SCHEMA", "ModelRow", "RowShapes", "restore", "store"]

SCHEMA: Final = "standalone-draft-1"
"""Persistent name of the layout of a row."""

_PLACES = ("offset", "_idx", "start_position")  # where a cache stands, not what it is
_SOME = 5  # positions that tell what grows
_AGAIN = "read the text again"


@frozen
class ModelRow:
    """A row on the host.

    Attributes:
        tokens: that it has processed.
        unread: the last of them, where the model has not read it.
        ended: whether the model's context is full: the row has no caches, and drafts no more.
    """

    tokens: int = 0
    unread: int | None = None
    ended: bool = False

    @property
    def read(self) -> int:
        """Positions that the model's caches hold, if there are any."""
        return self.tokens - (self.unread is not None)


@frozen(eq=False)
class RowShapes:
    """What the caches of one row are, told by rows that the model has read.

    Attributes:
        caches: of a row of one position.
        longer: of a row of some more; other state than keys may grow, too, up to a size.
    """

    caches: Sequence[Any]
    longer: Sequence[Any]

    @classmethod
    def of(cls, target: Target) -> RowShapes:
        """The shapes of a draft model's rows; it reads a few positions."""
        return cls(_read(target, 1), _read(target, _SOME))

    def check(self, caches: Sequence[Any], positions: int) -> None:
        """Check that caches are of this model, and hold so many positions.

        Raises:
            CheckpointError: they are not.
        """
        if len(caches) != len(self.caches):
            raise CheckpointError(
                f"the checkpoint has {len(caches)} caches, but the draft model has "
                f"{len(self.caches)}; {_AGAIN}"
            )
        own = zip(self.caches, self.longer, strict=True)
        for number, (pair, given) in enumerate(zip(own, caches, strict=True)):
            _check(f"cache {number} of the checkpoint", pair, given, positions)


def store(row: ModelRow, caches: Sequence[Any], namespace: str) -> RowCheckpoint:
    """A row in memory of its own, evaluated.

    Args:
        row: the row.
        caches: mlx-lm's, as a state extracts them; not looked at where the row holds nothing.
        namespace: the provider's ``checkpoint_namespace``.

    Raises:
        CheckpointError: a cache of a class that cannot be stored.
    """
    arrays: dict[str, mx.array] = {}
    metadata: dict[str, str | int | float | bool] = {
        "tokens": row.tokens,
        "unread": -1 if row.unread is None else row.unread,
        "ended": row.ended,
    }
    if row.read and not row.ended:
        arrays, header = encode(PrefixEntry((), caches), namespace)
        arrays = {name: array for name, array in arrays.items() if name.startswith("cache.")}
        metadata["caches"] = header["caches"]
        mx.eval(arrays)
    return RowCheckpoint(
        namespace=namespace,
        processed_tokens=row.tokens,
        attachment=Attachment(schema=SCHEMA, arrays=arrays, metadata=metadata),
    )


def restore(
    checkpoint: RowCheckpoint, namespace: str, target: Target, shapes: RowShapes, vocab_size: int
) -> tuple[ModelRow, RowState | None]:
    """The row that a checkpoint holds, and its state; none for a row that has ended.

    Args:
        checkpoint: borrowed; the arrays of the state are objects of their own.
        namespace: the provider's ``checkpoint_namespace``.
        target: the draft model.
        shapes: of its rows.
        vocab_size: ids below it are tokens.

    Raises:
        CheckpointError: it is of another drafter, or does not fit.
    """
    attachment = check_identity(checkpoint, namespace, SCHEMA)
    row = _row(checkpoint, vocab_size)
    arrays, text = attachment.arrays, attachment.metadata.get("caches")
    if row.ended or not row.read:
        if arrays or text is not None:
            raise CheckpointError(f"the checkpoint has arrays of a row that holds none; {_AGAIN}")
        return row, None if row.ended else target.new_state()
    if not isinstance(text, str):
        raise CheckpointError(f"the checkpoint does not say what its arrays are; {_AGAIN}")
    caches, _ = decode_state(arrays, {"caches": text}, "the checkpoint")
    if len(arrays) != len(set(_numbers(json.loads(text)))):
        raise CheckpointError(f"the checkpoint has arrays that are of no cache; {_AGAIN}")
    shapes.check(caches, row.read)
    try:
        return row, target.state_of(caches)
    except OptionError as error:
        raise CheckpointError(f"the checkpoint does not fit ({error}); {_AGAIN}") from error


def _row(checkpoint: RowCheckpoint, vocab_size: int) -> ModelRow:
    said = checkpoint.attachment.metadata
    tokens, unread, ended = said.get("tokens"), said.get("unread"), said.get("ended")
    if tokens != checkpoint.processed_tokens or type(tokens) is not int:
        raise CheckpointError(
            f"the checkpoint is of {checkpoint.processed_tokens} tokens, but its state says "
            f"{one_line(repr(tokens))}; {_AGAIN}"
        )
    if type(unread) is not int or not -1 <= unread < vocab_size or (unread >= 0 and tokens < 2):
        said_unread = one_line(repr(unread))
        raise CheckpointError(f"the checkpoint's unread token is {said_unread}; {_AGAIN}")
    if type(ended) is not bool:
        raise CheckpointError(f"the checkpoint's ended is {one_line(repr(ended))}; {_AGAIN}")
    return ModelRow(tokens, unread if unread >= 0 else None, ended)


def _numbers(node: Any) -> list[int]:
    """The arrays that a description names."""
    if isinstance(node, list):
        return [number for part in node for number in _numbers(part)]
    if isinstance(node, dict):
        named = [node["array"]] if "array" in node else []
        return named + [number for part in node.values() for number in _numbers(part)]
    return []


def _read(target: Target, positions: int) -> Sequence[Any]:
    state = target.new_state()
    for _ in range(positions):
        state.begin_round(1)
        target.forward(mx.zeros((1, 1), mx.int32), state)
        state.commit_round()
    return state.extract_row(0)


def _check(what: str, pair: tuple[Any, Any], given: Any, positions: int) -> None:
    """Check one cache against the model's own, of one position and of some.

    Raises:
        CheckpointError: it differs in more than its length.
    """
    own, longer = pair
    if type(own) is not type(given):
        raise CheckpointError(
            f"{what} is a {type(given).__name__}, but the draft model's is a "
            f"{type(own).__name__}; {_AGAIN}"
        )
    if isinstance(own, CacheList):
        if len(own.caches) != len(given.caches):
            raise CheckpointError(f"{what} has {len(given.caches)} parts; {_AGAIN}")
        parts = zip(own.caches, longer.caches, strict=True)
        for part, held in zip(parts, given.caches, strict=True):
            _check(what, part, held, positions)
        return
    if _settings(own) != _settings(given):
        raise CheckpointError(
            f"{what} has the settings {_settings(given)}, not {_settings(own)}; {_AGAIN}"
        )
    found = _shapes(given)
    if isinstance(own, ArraysCache) or not _shapes(own):  # a layer may not use its cache
        wanted = _grown(_shapes(own), _shapes(longer), found, positions)
    else:
        wanted = _of_length(_shapes(own), _held(what, given, positions))
    if found != wanted:
        raise CheckpointError(f"{what} holds {found}, not {wanted}; {_AGAIN}")


def _held(what: str, cache: Any, positions: int) -> int:
    """Positions that a cache's arrays have to hold.

    Raises:
        CheckpointError: it says that it stands somewhere else.
    """
    places = {name: value for name, value in vars(cache).items() if name in _PLACES}
    held, start = positions, places.get("start_position", 0)
    if isinstance(cache, RotatingKVCache):
        held = min(positions, cache.max_size)
    elif isinstance(cache, ChunkedKVCache):
        held = positions - start if type(start) is int else -1
    sound = all(type(value) is int for value in places.values())
    if not sound or cache.offset != positions or not 0 <= held <= positions:
        raise CheckpointError(
            one_line(f"{what} stands at {places}, but the row has {positions} positions; {_AGAIN}")
        )
    if not 0 <= places.get("_idx", 0) <= held:
        raise CheckpointError(one_line(f"{what} stands at {places} of {held}; {_AGAIN}"))
    return held


def _settings(cache: Any) -> dict[str, Any]:
    """Plain values of a cache that do not move with its row."""
    return {
        name: value
        for name, value in vars(cache).items()
        if isinstance(value, int | float | str) and name not in _PLACES
    }


_Shapes = dict[str, tuple[tuple[int, ...], str]]


def _shapes(cache: Any) -> _Shapes:
    """Shape and type of a cache's arrays, by their place in its state."""
    state: Any = tree_flatten(list(cache.state))
    return {
        name: (tuple(value.shape), str(value.dtype))
        for name, value in state
        if isinstance(value, mx.array)
    }


def _of_length(shapes: _Shapes, held: int) -> _Shapes:
    """Shapes ``[1, heads, held, D]`` of keys and values."""
    return {name: ((*shape[:-2], held, shape[-1]), kind) for name, (shape, kind) in shapes.items()}


def _grown(shapes: _Shapes, longer: _Shapes, found: _Shapes, positions: int) -> _Shapes:
    """Shapes of a state; axes that grow with the text may be anything up to its length."""
    wanted = {}
    for name, (shape, kind) in shapes.items():
        more, (given, _) = longer[name][0], found.get(name, (shape, kind))
        sizes = zip(shape, more, given, strict=False)
        free = [g if own != other and 0 < g <= positions else own for own, other, g in sizes]
        wanted[name] = (tuple(free), kind)
    return wanted
