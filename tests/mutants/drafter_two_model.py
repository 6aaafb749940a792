"""Mutants of core's draft-model rows: mistakes that cost acceptance, and never a token.

Each is held to the conformance kit over a model of convolutions and attention, whose rows end
after some tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mutants.edits import Mutant

from specdec.targets import MlxLmTarget
from specdec_two_model.tiny import tiny_model

if TYPE_CHECKING:
    from specdec.contract import DraftProvider

__all__ = ["MODEL", "MODEL_FILES", "MODEL_MUTANTS", "draft_model"]

MODEL = "core/src/specdec/drafting"
MODEL_FILES = ("model_attachment.py", "model_live.py", "model_provider.py", "model_rows.py")
LIVE, ROWS = f"{MODEL}/model_live.py", f"{MODEL}/model_rows.py"
LIMIT = 30


def draft_model(made: Any, other: bool) -> DraftProvider:
    """The drafter of a copy of the provider module, or another one."""
    target = MlxLmTarget(tiny_model("hybrid", seed=int(other)))
    found: DraftProvider = made.DraftModelProvider("tiny", target, weight_bytes=1, limit=LIMIT)
    return found


MODEL_MUTANTS = (
    Mutant(
        name="model-last-draft-is-forgotten",
        file=LIVE,
        old="if count > read and not held.ended else None",
        new="if count > read + 1 and not held.ended else None",
        killed_by="rows_draft_as_alone",
        why="After full acceptance the draft that the model has not read is left out of its text.",
    ),
    Mutant(
        name="model-rejected-draft-stays",
        file=LIVE,
        old="self._live.take_back([read - min(accepted[row], read) for row in rows])",
        new="self._live.take_back([max(read - accepted[row] - 1, 0) for row in rows])",
        killed_by="rows_draft_as_alone",
        why="The first draft that was rejected stays in the caches.",
    ),
    Mutant(
        name="model-rows-go-back-alike",
        file=LIVE,
        old="self._live.take_back([read - min(accepted[row], read) for row in rows])",
        new="self._live.take_back([read - min(*accepted, read)] * len(rows))",
        killed_by="rows_draft_as_alone",
        why="Every row goes back as far as the one that accepted least.",
    ),
    Mutant(
        name="model-logits-of-the-windows-end",
        file=LIVE,
        old="if len(set(needed)) == 1:\n            return self._fitted(logits[:, needed[0] - 1])",
        new="if needed:\n            return self._fitted(logits[:, width - 1])",
        killed_by="rows_draft_as_alone",
        why="A row without an unread token drafts from the padding beside it.",
    ),
    Mutant(
        name="model-unread-in-front-of-every-row",
        file=LIVE,
        old="shift = mx.array([[int(token is not None)] for token in unread], mx.int32)",
        new="shift = mx.array([[1] for token in unread], mx.int32)",
        killed_by="rows_draft_as_alone",
        why="A row that has read everything reads token 0 in front of its pending one.",
    ),
    Mutant(
        name="model-preview-is-remembered",
        file=LIVE,
        old="state.rollback(needed if keep else [0] * len(rows))",
        new="state.rollback(needed)",
        killed_by="preview_changes_nothing",
        why="A preview leaves the pending token in the caches.",
    ),
    Mutant(
        name="model-chosen-text-is-read-with-its-padding",
        file=LIVE,
        old="state.rollback([min(max(count - begin, 0), width) for count in wanted])",
        new="state.rollback([width for count in wanted])",
        killed_by="consumed_tokens_count_as_committed",
        why="Rows of shorter texts keep the padding behind them.",
    ),
    Mutant(
        name="model-filter-keeps-the-order",
        file=LIVE,
        old="self._retain([places[row] for row in keep if row in places])",
        new="self._retain(sorted(places[row] for row in keep if row in places))",
        killed_by="filter_keeps_and_reorders",
        why="Rows change places on the host alone.",
    ),
    Mutant(
        name="model-chain-stays-on-its-first-draft",
        file=ROWS,
        old="live.ahead(self._of_live(ids[-1]))",
        new="live.ahead(self._of_live(ids[0]))",
        killed_by="rows_draft_as_alone",
        why="Every step of a chain reads the first draft.",
    ),
    Mutant(
        name="model-depth-zero-reads-nothing",
        file=ROWS,
        old="self._live.first([asked.pending[row] for row in live])\n",
        new="pass\n",
        killed_by="depth_zero_reads_the_pending_token",
        why="A round without drafts does not read its pending token.",
    ),
    Mutant(
        name="model-draws-ignore-the-step",
        file=ROWS,
        old="return Asked(asked.pending, cut, asked.steps)",
        new="return Asked(asked.pending, cut, [0] * len(cut))",
        killed_by="draws_count_on_from_the_rows_step",
        why="Drafts are drawn with the noise of the request's first token.",
    ),
    Mutant(
        name="model-unread-is-not-stored",
        file=f"{MODEL}/model_attachment.py",
        old='"unread": -1 if row.unread is None else row.unread,',
        new='"unread": -1,',
        killed_by="restored_row_goes_on_the_same",
        why="A checkpoint loses the draft that the model has not read.",
    ),
    Mutant(
        name="model-every-row-has-stood-down",
        file=ROWS,
        old="return [reason if row.ended else None for row in self._live.rows]",
        new="return [reason for row in self._live.rows]",
        killed_by="stood_down_rows_stay_down",
        why="Rows that are drafted for are said to be drafted for no more.",
    ),
    Mutant(
        name="model-reasons-of-the-ended-rows-alone",
        file=ROWS,
        old="return [reason if row.ended else None for row in self._live.rows]",
        new="return [reason for row in self._live.rows if row.ended]",
        killed_by="stood_down_rows_stay_down",
        why="There are fewer entries than rows.",
    ),
    Mutant(
        name="model-reasons-stay-in-their-places",
        file=ROWS,
        old="return [reason if row.ended else None for row in self._live.rows]",
        new='self._ended = getattr(self, "_ended", [row.ended for row in self._live.rows])\n'
        "        return [reason if end else None for end in self._ended[: self.row_count]]",
        killed_by="stood_down_rows_stay_down",
        why="Who has ended is looked up once.",
    ),
    Mutant(
        name="model-count-of-a-checkpoint-is-not-read",
        file=f"{MODEL}/model_attachment.py",
        old="if tokens != checkpoint.processed_tokens or type(tokens) is not int:",
        new="if type(tokens) is not int:",
        killed_by="misaligned_checkpoint_is_refused",
        why="A checkpoint of another number of tokens is taken.",
    ),
    Mutant(
        name="model-namespace-is-every-models",
        file=f"{MODEL}/model_provider.py",
        old='return f"{SCHEMA}:{self.model.state_identity()}; {limit}"',
        new='return f"{SCHEMA}:{limit}"',
        killed_by="namespace_tells_artifacts_apart",
        why="Rows of another draft model are taken for this one's.",
    ),
)
