"""Rows of target state: caches whose rows differ in length and roll back one by one.

``row_state`` gives the state for a list of mlx-lm caches: :class:`RaggedState` where every cache
type has a row form, else :class:`NativeState`, which decodes without speculation and says why. A
third party gives its own cache type a row form with :func:`register_row_form`.
"""

from specdec.state.batch import KvQuantization, RowBatch
from specdec.state.buffers import room_for
from specdec.state.cache_rows import CacheRows
from specdec.state.composite import ListRows
from specdec.state.donors import LendsRows, kinds_lent, read_donors
from specdec.state.forms import register_row_form, types_without_row_form
from specdec.state.native import NativeState
from specdec.state.options import CacheOptions
from specdec.state.quantized import Format
from specdec.state.ragged import RaggedState, Together, row_state
from specdec.state.recurrent import RecurrentRows, Replay
from specdec.state.rows import RowState

__all__ = [
    "CacheOptions",
    "CacheRows",
    "Format",
    "KvQuantization",
    "LendsRows",
    "ListRows",
    "NativeState",
    "RaggedState",
    "RecurrentRows",
    "Replay",
    "RowBatch",
    "RowState",
    "Together",
    "kinds_lent",
    "read_donors",
    "register_row_form",
    "room_for",
    "row_state",
    "types_without_row_form",
]
