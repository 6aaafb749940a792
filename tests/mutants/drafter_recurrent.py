"""Mutants of the recurrent drafter: parallel lists of state that is written in place."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["RECURRENT", "RECURRENT_MUTANTS"]

RECURRENT = "tests/drafters/recurrent.py"

RECURRENT_MUTANTS = (
    # What a provider says of itself.
    Mutant(
        name="recurrent-namespace-of-one-process",
        file=RECURRENT,
        old='f"{SCHEMA}:{verbs.fingerprint(weights)}"',
        new='f"{SCHEMA}:{id(weights):x}"',
        killed_by="namespace_is_stable",
        why="The weights are told apart by where they are in memory.",
    ),
    Mutant(
        name="recurrent-port-is-missed-when-it-is-used",
        file=RECURRENT,
        old="""        port = require_port(target, "recurrent_mtp", "the recurrent drafter")
        if port.hidden_size""",
        new="""        port: Any = target.recurrent_mtp
        if port is not None and port.hidden_size""",
        killed_by="missing_port_is_refused_at_once",
        why="A group opens on a target without its port, and fails at the first chunk.",
    ),
    Mutant(
        name="recurrent-port-is-missed-in-decode-groups",
        file=RECURRENT,
        old="""        port = require_port(target, "recurrent_mtp", "the recurrent drafter")
        if port.hidden_size""",
        new="""        port: Any = target.recurrent_mtp
        if sampling is None:
            require_port(target, "recurrent_mtp", "the recurrent drafter")
        if port is not None and port.hidden_size""",
        killed_by="missing_port_is_refused_at_once",
        why="Only open_prefill() asks for the port.",
    ),
    # The life of a group.
    Mutant(
        name="recurrent-cold-rows-share-their-zeros",
        file=RECURRENT,
        old="            return 0, mx.zeros((memory_size,)), mx.zeros((hidden_size,))\n",
        new="""            zeros = self._weights.setdefault("zeros", mx.zeros((memory_size,)))
            return 0, zeros, mx.zeros((hidden_size,))
""",
        killed_by="groups_share_nothing",
        why="One array of zeros is kept with the provider, and rows write into it.",
    ),
    Mutant(
        name="recurrent-round-ends-before-it-is-checked",
        file=RECURRENT,
        old="        opened = self._round\n",
        new="        opened, self._round = self._round, None\n",
        killed_by="commit_refuses_wrong_counts",
        why="A refused commit has ended the round.",
    ),
    # Prompts.
    Mutant(
        name="recurrent-chunk-begins-without-a-hidden",
        file=RECURRENT,
        old="memory, before = mx.stack(self._memories), mx.stack(self._hiddens)",
        new="memory, before = mx.stack(self._memories), mx.zeros_like(mx.stack(self._hiddens))",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="The hidden before a chunk is lost.",
    ),
    Mutant(
        name="recurrent-first-token-of-every-chunk-is-skipped",
        file=RECURRENT,
        old="mx.array([[count + at > 0] for count in self._counts])",
        new="mx.array([[at > 0]] * self.row_count)",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="Every chunk is taken for the start of a text.",
    ),
    Mutant(
        name="recurrent-all-rows-begin-with-the-first",
        file=RECURRENT,
        old="mx.array([[count + at > 0] for count in self._counts])",
        new="mx.array([[self._counts[0] + at > 0]] * self.row_count)",
        killed_by="prompts_read_together_equal_prompts_read_alone",
        why="Whether a row has read anything is asked of row 0 for all.",
    ),
    # Rounds.
    Mutant(
        name="recurrent-ids-of-a-longer-vocabulary",
        file=RECURRENT,
        old="        drafts = [row[:depth] for row, depth in zip(ids, asked, strict=True)]\n",
        new="        drafts = [[i + 4 for i in r[:d]] for r, d in zip(ids, asked, strict=True)]\n",
        killed_by="drafts_fit_their_depth",
        why="Ids are those of a vocabulary that begins with four more tokens.",
    ),
    Mutant(
        name="recurrent-ids-past-the-depth",
        file=RECURRENT,
        old="        drafts = [row[:depth] for row, depth in zip(ids, asked, strict=True)]\n",
        new="        drafts = [list(row) for row in ids]\n",
        killed_by="drafts_fit_their_depth",
        why="Rows are not cut to their own depth.",
    ),
    Mutant(
        name="recurrent-pending-is-not-counted",
        file=RECURRENT,
        old="            self._keep(memory, last, [1 + n for n in counts])\n",
        new="            self._keep(memory, last, counts)\n",
        killed_by="processed_tokens_count_what_was_read",
        why="A round adds its accepted drafts and not its pending token.",
    ),
    Mutant(
        name="recurrent-processed-tokens-count-the-pending-token",
        file=RECURRENT,
        old="            return 0, mx.zeros((memory_size,)), mx.zeros((hidden_size,))\n",
        new="            return 1, mx.zeros((memory_size,)), mx.zeros((hidden_size,))\n",
        killed_by="processed_tokens_count_what_was_read",
        why="The first sample of a full prefill is counted before anything has read it.",
    ),
    Mutant(
        name="recurrent-memory-behind-all-drafts",
        file=RECURRENT,
        old="            return opened.memories[accepted][row]\n",
        new="            return opened.memories[len(draft) - 1][row]\n",
        killed_by="rejected_drafts_leave_no_trace",
        why="The memory behind the last draft is kept, whatever was accepted.",
    ),
    Mutant(
        name="recurrent-memory-one-step-too-far",
        file=RECURRENT,
        old="            return opened.memories[accepted][row]\n",
        new="            return opened.memories[min(accepted + 1, len(draft) - 1)][row]\n",
        killed_by="rejected_drafts_leave_no_trace",
        why="The memory has read the first rejected draft, where it was fed back.",
    ),
    Mutant(
        name="recurrent-last-hidden-of-the-window",
        file=RECURRENT,
        old="            last = mx.stack([hiddens[row, n] for row, n in enumerate(counts)])\n",
        new="            last = hiddens[:, -1]\n",
        killed_by="padding_is_never_read",
        why="The last position of the window is kept, which may be padding.",
    ),
    Mutant(
        name="recurrent-last-hidden-of-the-best-row",
        file=RECURRENT,
        old="            last = mx.stack([hiddens[row, n] for row, n in enumerate(counts)])\n",
        new="            last = hiddens[:, max(counts)]\n",
        killed_by="rows_draft_as_alone",
        why="Every row keeps the hidden at the most that any row accepted.",
    ),
    Mutant(
        name="recurrent-every-row-draws-as-the-first",
        file=RECURRENT,
        old="self._chosen(hidden, [step + at for step in drawn])",
        new="self._chosen(hidden, [drawn[0] + at] * len(drawn))",
        killed_by="draws_follow_the_row",
        why="All rows draw with the step of row 0.",
    ),
    Mutant(
        name="recurrent-steps-count-from-the-next-draw",
        file=RECURRENT,
        old="self._chosen(hidden, [step + at for step in drawn])",
        new="self._chosen(hidden, [step + at + 1 for step in drawn])",
        killed_by="draws_count_on_from_the_rows_step",
        why="A draft is drawn with the noise of the position after it.",
    ),
    Mutant(
        name="recurrent-scores-are-declared",
        file=RECURRENT,
        old="mx.where(certain, 0.0, -mx.inf)",
        new="certain.astype(mx.float32)",
        killed_by="declared_distributions_fit_their_drafts",
        why="What is declared are probabilities, not their logarithms.",
    ),
    Mutant(
        name="recurrent-declared-one-position-late",
        file=RECURRENT,
        old="        certain = mx.stack(tokens, axis=1)[..., None]",
        new="        certain = mx.stack([tokens[0], *tokens[:-1]], axis=1)[..., None]",
        killed_by="declared_distributions_fit_their_drafts",
        why="Each draft is declared with the distribution of the one before.",
    ),
    # Membership.
    Mutant(
        name="recurrent-filter-forgets-the-hiddens",
        file=RECURRENT,
        old="self._hiddens = [self._hiddens[row] for row in keep]",
        new="self._hiddens = self._hiddens[: len(keep)]",
        killed_by="filter_keeps_and_reorders",
        why="One of three parallel lists is cut and not reordered.",
    ),
    Mutant(
        name="recurrent-drained-is-closed",
        file=RECURRENT,
        old="        check_keep(keep, self.row_count)\n",
        new="""        check_keep(keep, self.row_count)
        if not keep:
            return self.close()
""",
        killed_by="drained_group_takes_rows_again",
        why="A group without rows closes itself.",
    ),
    Mutant(
        name="recurrent-second-commit-joins-again",
        file=RECURRENT,
        old="        return Swap(join, joining.clear)\n",
        new="""        change = Swap(join, joining.clear)
        change.commit = join  # type: ignore[method-assign]
        return change
""",
        killed_by="append_counts_once",
        why="A change is committed as often as commit() is called.",
    ),
    Mutant(
        name="recurrent-cold-rows-decode",
        file=RECURRENT,
        old="""            if self._sampling is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
""",
        new="",
        killed_by="cold_rows_join_prefill_groups_alone",
        why="A decode group takes a row that has no hidden to go on from.",
    ),
    # Checkpoints.
    Mutant(
        name="recurrent-metadata-holds-a-shape",
        file=RECURRENT,
        old='metadata={"tokens": self._counts[place]}',
        new='metadata={"tokens": self._counts[place], "shape": self._memories[place].shape}',
        killed_by="checkpoint_is_well_formed",
        why="Metadata holds a tuple, which is not stored.",
    ),
    Mutant(
        name="recurrent-capture-is-the-live-memory",
        file=RECURRENT,
        old='"memory": mx.contiguous(self._memories[place])',
        new='"memory": self._memories[place]',
        killed_by="capture_is_independent",
        why="A checkpoint holds the array that the row writes into.",
    ),
    Mutant(
        name="recurrent-capture-of-another-row",
        file=RECURRENT,
        old='"hidden": mx.contiguous(self._hiddens[place])',
        new='"hidden": mx.contiguous(self._hiddens[-1])',
        killed_by="restored_row_goes_on_the_same",
        why="The hidden of the row that joined last is captured.",
    ),
    Mutant(
        name="recurrent-checkpoint-is-adopted",
        file=RECURRENT,
        old='return count, mx.contiguous(arrays["memory"]),',
        new='return count, arrays["memory"],',
        killed_by="checkpoint_is_borrowed",
        why="A row writes into the array of the checkpoint that it was restored from.",
    ),
    Mutant(
        name="recurrent-capture-starts-the-memory-anew",
        file=RECURRENT,
        old="        mx.eval(arrays)\n",
        new="        mx.eval(arrays)\n        self._memories[place][:] = 0\n",
        killed_by="capture_changes_nothing",
        why="Capturing moves the state out of the row.",
    ),
    Mutant(
        name="recurrent-alignment-is-not-checked",
        file=RECURRENT,
        old='        if checkpoint.attachment.metadata.get("tokens") != count:\n',
        new='        if "tokens" not in checkpoint.attachment.metadata:\n',
        killed_by="misaligned_checkpoint_is_refused",
        why="Nothing says at which position the state is.",
    ),
    Mutant(
        name="recurrent-memory-is-stored-rounded",
        file=RECURRENT,
        old='            "memory": mx.contiguous(self._memories[place]),\n',
        new='            "memory": mx.round(self._memories[place], decimals=2),\n',
        killed_by="restored_row_goes_on_the_same",
        why="State is stored with less precision than it has; the drafts are often the same.",
    ),
)
