"""Mutants of the n-gram drafter: state on the host, a list of tokens for each row."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["NGRAM", "NGRAM_MUTANTS"]

NGRAM = "plugins/specdec-ngram/src/specdec_ngram"
ROWS = f"{NGRAM}/rows.py"
HISTORY = f"{NGRAM}/history.py"
ATTACHMENT = f"{NGRAM}/attachment.py"
PROVIDER = f"{NGRAM}/provider.py"

NGRAM_MUTANTS = (
    # What a provider says of itself.
    Mutant(
        name="ngram-adapters-are-not-mentioned",
        file=PROVIDER,
        old="    def supports_adapters(self) -> bool:",
        new="    def supports_adapter(self) -> bool:",
        killed_by="provider_is_complete",
        why="The provider does not say whether its state stays valid under an adapter.",
    ),
    Mutant(
        name="ngram-namespace-lacks-a-setting",
        file=PROVIDER,
        old='return f"{SCHEMA}:max{self.max_ngram}:min{self.min_ngram}"',
        new='return f"{SCHEMA}:max{self.max_ngram}"',
        killed_by="namespace_tells_artifacts_apart",
        why="Rows stored under one setting are restored under another.",
    ),
    Mutant(
        name="ngram-namespace-of-one-process",
        file=PROVIDER,
        old='return f"{SCHEMA}:max{self.max_ngram}:min{self.min_ngram}"',
        new='return f"{SCHEMA}:max{self.max_ngram}:min{self.min_ngram}:{id(self)}"',
        killed_by="namespace_is_stable",
        why="Every load has a namespace of its own, so what was stored is never found.",
    ),
    # The order of verbs.
    Mutant(
        name="ngram-draft-inside-a-round",
        file=ROWS,
        old="""        self._between_rounds("draft")
""",
        new="",
        killed_by="verbs_keep_their_order",
        why="A second draft silently replaces the open round.",
    ),
    Mutant(
        name="ngram-commit-without-a-round",
        file=ROWS,
        old="""            raise NoOpenRoundError("commit")
""",
        new="""            return
""",
        killed_by="verbs_keep_their_order",
        why="A commit that belongs to no round is taken for an empty one.",
    ),
    Mutant(
        name="ngram-second-close-raises",
        file=ROWS,
        old="""        self._closed = True
        self._round = None
""",
        new="""        if self._closed:
            raise ClosedError("close")
        self._closed = True
        self._round = None
""",
        killed_by="close_is_final",
        why="close() may be called once only.",
    ),
    Mutant(
        name="ngram-verbs-work-after-close",
        file=ROWS,
        old="""        if self._closed:
            raise ClosedError(verb)
        if self._round is not None:
""",
        new="""        if self._round is not None:
""",
        killed_by="close_is_final",
        why="A closed group is an empty group that takes rows again.",
    ),
    Mutant(
        name="ngram-index-in-a-default-argument",
        file=HISTORY,
        old="""        min_ngram: int = DEFAULT_MIN_NGRAM,
    ) -> None:
        check_sizes(max_ngram, min_ngram)
        self._max = max_ngram
        self._min = min_ngram
        self._tokens: list[int] = []
        # N-gram to the place after its last occurrence. Right after the history that place is
        # empty: there the pending token will stand.
        self._followers: dict[tuple[int, ...], int] = {}
""",
        new="""        min_ngram: int = DEFAULT_MIN_NGRAM,
        followers: dict[tuple[int, ...], int] = {},
    ) -> None:
        check_sizes(max_ngram, min_ngram)
        self._max = max_ngram
        self._min = min_ngram
        self._tokens: list[int] = []
        self._followers = followers
""",
        killed_by="groups_share_nothing",
        why="A mutable default argument: all rows of all groups write one index.",
    ),
    # Prompts.
    Mutant(
        name="ngram-rounds-are-indexed-apart",
        file=HISTORY,
        old="        first = max(0, before - n + 1)\n",
        new="        first = before\n",
        killed_by="rows_draft_as_cold_rows",
        why="N-grams across the boundary of two rounds are not in the index.",
    ),
    Mutant(
        name="ngram-cold-rows-share-a-history",
        file=ROWS,
        old="        joining = [self._build(checkpoint) for checkpoint in checkpoints]\n",
        new="""        made = {id(each): self._build(each) for each in checkpoints}
        joining = [made[id(each)] for each in checkpoints]
""",
        killed_by="prompts_read_together_equal_prompts_read_alone",
        why="Equal checkpoints are restored once, and their rows are one row.",
    ),
    # Rounds.
    Mutant(
        name="ngram-draft-runs-over-the-depth",
        file=HISTORY,
        old="return [period[i % len(period)] for i in range(max_tokens)]",
        new="return [period[i % len(period)] for i in range(max_tokens + 1)]",
        killed_by="drafts_fit_their_depth",
        why="One draft more than was asked for.",
    ),
    Mutant(
        name="ngram-depth-of-the-deepest-row",
        file=ROWS,
        old="[row.propose(head, depth) for row, head, depth in rows]",
        new="[row.propose(head, max(asked)) for row, head, depth in rows]",
        killed_by="drafts_fit_their_depth",
        why="Every row drafts as many as the deepest.",
    ),
    Mutant(
        name="ngram-padding-is-drafted",
        file=HISTORY,
        old="return [period[i % len(period)] for i in range(max_tokens)]",
        new="return (period + [-1] * max_tokens)[:max_tokens]",
        killed_by="drafts_fit_their_depth",
        why="Short drafts are filled up with -1, which is no id.",
    ),
    Mutant(
        name="ngram-lookup-is-shorter-than-the-index",
        file=HISTORY,
        old="range(min(self._max, len(tail)), self._min - 1, -1)",
        new="range(self._min - 1, 0, -1)",
        killed_by="draft_answers_the_last_tokens",
        why="The lookup asks for n-grams that are shorter than those in the index.",
    ),
    Mutant(
        name="ngram-one-draft-too-many-is-kept",
        file=ROWS,
        old="*current.drafts[i][: counts[i]]",
        new="*current.drafts[i][: counts[i] + 1]",
        killed_by="processed_tokens_count_what_was_read",
        why="The first rejected draft stays in the history.",
    ),
    Mutant(
        name="ngram-pending-is-not-stored",
        file=ROWS,
        old="row.extend((current.pending[i], *current.drafts[i][: counts[i]]))",
        new="row.extend(current.drafts[i][: counts[i]])",
        killed_by="processed_tokens_count_what_was_read",
        why="A commit stores the accepted drafts and forgets the token they follow.",
    ),
    Mutant(
        name="ngram-correction-in-place-of-the-pending-token",
        file=ROWS,
        old="row.extend((current.pending[i], *current.drafts[i][: counts[i]]))",
        new="row.extend([current.pending[i], *current.drafts[i]][-1 - counts[i] :])",
        killed_by="rows_draft_as_cold_rows",
        why="The right number of tokens is stored, counted from the wrong end.",
    ),
    Mutant(
        name="ngram-rows-without-a-draft-stand-still",
        file=ROWS,
        old="""        for i, row in enumerate(current.rows):
            row.extend(""",
        new="""        for i, row in enumerate(current.rows):
            if current.drafts[i]:
                row.extend(""",
        killed_by="depth_zero_reads_the_pending_token",
        why="A row of depth 0 is left out of the commit, with its pending token.",
    ),
    Mutant(
        name="ngram-round-ends-before-it-is-checked",
        file=ROWS,
        old="        current = self._round\n",
        new="        current, self._round = self._round, None\n",
        killed_by="commit_refuses_wrong_counts",
        why="A refused commit has ended the round.",
    ),
    Mutant(
        name="ngram-pending-list-is-kept",
        file=ROWS,
        old="_Round(tuple(self._rows), heads, [tuple",
        new="_Round(tuple(self._rows), pending, [tuple",  # a list of the caller's
        killed_by="arguments_are_borrowed",
        why="The caller's list is kept by reference until the commit.",
    ),
    # Membership.
    Mutant(
        name="ngram-keep-in-ascending-order",
        file=ROWS,
        old="self._rows = [self._rows[row] for row in kept]",
        new="self._rows = [self._rows[row] for row in sorted(kept)]",
        killed_by="filter_keeps_and_reorders",
        why="filter_rows() selects rows and does not reorder them.",
    ),
    Mutant(
        name="ngram-negative-rows-count-from-the-end",
        file=ROWS,
        old='        kept = checks.kept_rows("filter_rows", keep, self.row_count)\n',
        new="        kept = checks.kept_rows(\n"
        '            "filter_rows", [n + self.row_count * (n < 0) for n in keep], self.row_count\n'
        "        )\n",
        killed_by="filter_refuses_wrong_rows",
        why="A negative row number names a row, as in a Python list.",
    ),
    Mutant(
        name="ngram-a-row-twice-is-kept-twice",
        file=ROWS,
        old='        kept = checks.kept_rows("filter_rows", keep, self.row_count)\n',
        new="        kept = [\n"
        '            checks.row_number("filter_rows", row, self.row_count) for row in keep\n'
        "        ]\n",
        killed_by="filter_refuses_wrong_rows",
        why="One row stands in two places and reads everything twice.",
    ),
    Mutant(
        name="ngram-prepared-rows-are-visible",
        file=ROWS,
        old="        return Swap(join, joining.clear)\n",
        new="        join()\n        return Swap(joining.clear)\n",
        killed_by="append_is_invisible_until_commit",
        why="prepare_append() appends.",
    ),
    Mutant(
        name="ngram-discard-joins",
        file=ROWS,
        old="        return Swap(join, joining.clear)\n",
        new="        return Swap(join, join)\n",
        killed_by="discarded_append_leaves_no_trace",
        why="A discarded change is committed.",
    ),
    Mutant(
        name="ngram-good-rows-of-a-bad-append-stay",
        file=ROWS,
        old="        joining = [self._build(checkpoint) for checkpoint in checkpoints]\n",
        new="""        joining = []
        for checkpoint in checkpoints:
            self._rows.append(self._build(checkpoint))
            joining.append(self._rows[-1])
        self._rows = self._rows[: len(self._rows) - len(joining)]
""",
        killed_by="refused_append_changes_nothing",
        why="Rows are built in the live list; the one that fails leaves those before it.",
    ),
    Mutant(
        name="ngram-cold-rows-decode",
        file=PROVIDER,
        old="return self._open(target, checkpoints, cold_rows=False)",
        new="return self._open(target, checkpoints, cold_rows=True)",
        killed_by="cold_rows_join_prefill_groups_alone",
        why="A decode group takes a row that has not read its prompt.",
    ),
    # Checkpoints.
    Mutant(
        name="ngram-namespace-is-not-compared",
        file=ATTACHMENT,
        old="    if checkpoint.namespace != namespace:\n",
        new="    if not checkpoint.namespace:\n",
        killed_by="wrong_namespace_is_refused",
        why="Rows of another setting are restored.",
    ),
    Mutant(
        name="ngram-schema-is-not-compared",
        file=ATTACHMENT,
        old="    if attachment.schema != SCHEMA:\n",
        new='    if "tokens" not in attachment.arrays:\n',
        killed_by="wrong_schema_is_refused",
        why="A layout is recognised by the name of an array.",
    ),
    Mutant(
        name="ngram-length-is-not-compared",
        file=ATTACHMENT,
        old="tuple(stored.shape) != (count,):",
        new="stored.ndim != 1:",
        killed_by="truncated_attachment_is_refused",
        why="A history with tokens missing is restored as if it were whole.",
    ),
    Mutant(
        name="ngram-processed-tokens-is-not-read",
        file=ATTACHMENT,
        old="    _check_layout(attachment, checkpoint.processed_tokens)\n",
        new="    _check_layout(attachment, int(attachment.metadata['processed_tokens']))\n",
        killed_by="misaligned_checkpoint_is_refused",
        why="The attachment is compared with itself, not with the checkpoint's count.",
    ),
    # Optional verbs.
    Mutant(
        name="ngram-preview-leaves-its-pending-token",
        file=HISTORY,
        old="        start = self._follower(pending)\n",
        new="        start = self._follower(pending)\n"
        "        self._followers[(*self._tokens[-1:], pending)] = 0\n",
        killed_by="preview_changes_nothing",
        why="A lookup writes the pending token into the index, which a preview must not.",
    ),
    Mutant(
        name="ngram-looks-up-one-more",
        file=ROWS,
        old="return self._propose(pending, depths, [0] * len(pending))[1]",
        new="return self._propose(pending, [each + 1 for each in depths], [0] * len(pending))[1]",
        killed_by="look_up_is_the_next_draft",
        why="A look-up is deeper than what is drafted.",
    ),
    Mutant(
        name="ngram-looking-up-stores-the-pending-token",
        file=ROWS,
        old="return self._propose(pending, depths, [0] * len(pending))[1]",
        new="""heads, drafts = self._propose(pending, depths, [0] * len(pending))
        for row, head in zip(self._rows, heads, strict=True):
            row.extend([head])
        return drafts""",
        killed_by="look_up_changes_nothing",
        why="A look-up reads the pending token, which the draft after it reads again.",
    ),
    Mutant(
        name="ngram-looks-up-for-any-number-of-rows",
        file=ROWS,
        old="return self._propose(pending, depths, [0] * len(pending))[1]",
        new="""asked = zip(self._rows, pending, depths, strict=False)
        return [row.propose(head, max(0, depth)) for row, head, depth in asked]""",
        killed_by="look_up_refuses_wrong_lists",
        why="A look-up takes lists of any length, and any depth.",
    ),
    Mutant(
        name="ngram-looks-up-inside-a-round",
        file=ROWS,
        old="""        self._between_rounds("look_up")
""",
        new="""        if self._closed:
            raise ClosedError("look_up")
""",
        killed_by="verbs_keep_their_order",
        why="A look-up is allowed while a round is open, before what it accepted is read.",
    ),
    Mutant(
        name="ngram-looks-up-after-close",
        file=ROWS,
        old="""        self._between_rounds("look_up")
""",
        new="""        if self._round is not None:
            raise RoundOpenError("look_up")
""",
        killed_by="close_is_final",
        why="A closed group answers look-ups.",
    ),
    Mutant(
        name="ngram-consume-reads-the-padding",
        file=ROWS,
        old="kept = [chunk[:length] for chunk, length in zip(chunks, counts, strict=True)]",
        new="kept = [chunk for chunk, _ in zip(chunks, counts, strict=True)]",
        killed_by="consumed_tokens_count_as_committed",
        why="consume() ignores the rows' lengths.",
    ),
    Mutant(
        name="ngram-consume-takes-any-length",
        file=ROWS,
        old='checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)',
        new="list(lengths)",
        killed_by="consume_refuses_wrong_lengths",
        why="Lengths are used as they come: a negative one cuts from the end.",
    ),
)
