"""Rows of target state: caches whose rows differ in length and roll back one by one.

``row_state`` gives the state for a list of mlx-lm caches: :class:`RaggedState` where every cache
type has a row form, else :class:`NativeState`, which decodes without speculation and says why.
"""

from specdec.state.forms import row_state, types_without_row_form
from specdec.state.native import NativeState
from specdec.state.ragged import RaggedState
from specdec.state.rows import RowState

__all__ = ["NativeState", "RaggedState", "RowState", "row_state", "types_without_row_form"]
