"""Mutants of the tapped drafter: one batched, padded buffer; drafts on the device."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["TAPPED", "TAPPED_MUTANTS"]

TAPPED = "tests/drafters/tapped.py"
ROWS = "tests/drafters/tapped_rows.py"

TAPPED_MUTANTS = (
    # What a provider says of itself.
    Mutant(
        name="tapped-namespace-of-every-artifact",
        file=TAPPED,
        old='f"{SCHEMA}:{verbs.fingerprint(weights)}"',
        new='f"{SCHEMA}:{sorted(weights)}"',
        killed_by="namespace_tells_artifacts_apart",
        why="The namespace knows the kind of drafter and not its weights.",
    ),
    Mutant(
        name="tapped-layers-in-another-order",
        file=TAPPED,
        old="        return tapped_layers(target)\n",
        new="        return tapped_layers(target)[::-1]\n",
        killed_by="taps_are_declared_once",
        why="The provider declares its layers in another order than its rows read them.",
    ),
    Mutant(
        name="tapped-one-layer-twice",
        file=TAPPED,
        old="        return tapped_layers(target)\n",
        new="        return (*tapped_layers(target), 0)\n",
        killed_by="taps_are_declared_once",
        why="A layer is tapped twice.",
    ),
    # The life of a group.
    Mutant(
        name="tapped-group-closes-its-provider",
        file=ROWS,
        old="        self._closed = True\n",
        new="        self._closed = True\n        self._weights.clear()\n",
        killed_by="provider_outlives_its_groups",
        why="close() of a group lets the weights of its provider go.",
    ),
    Mutant(
        name="tapped-draws-from-the-global-state",
        file=ROWS,
        old="        return sampling.sample(logprobs, steps).astype(mx.int32)\n",
        new="        return mx.random.categorical(logprobs).astype(mx.int32)\n",
        killed_by="random_state_is_left_alone",
        why="Drafts are drawn with MLX's global random state.",
    ),
    # Prompts.
    Mutant(
        name="tapped-second-chunk-overwrites-the-first",
        file=ROWS,
        old="[self._lengths[row] + at for row, at in places]",
        new="[at for _, at in places]",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="Every chunk is written to the start of the buffer.",
    ),
    Mutant(
        name="tapped-chunk-begins-on-the-last-token",
        file=ROWS,
        old="[self._lengths[row] + at for row, at in places]",
        new="[max(0, self._lengths[row] - 1) + at for row, at in places]",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="A chunk overwrites the last position of the one before.",
    ),
    Mutant(
        name="tapped-growing-forgets",
        file=ROWS,
        old="            self._values = _padded(self._values, capacity)\n",
        new="            self._keys = self._values = mx.zeros_like(self._keys)\n",
        killed_by="rows_draft_as_cold_rows",
        why="A larger buffer is made, and what the smaller one held is not copied.",
    ),
    Mutant(
        name="tapped-prefill-takes-no-context",
        file=ROWS,
        old="""        held = self._checked("prefill", context, width)
""",
        new="""        zeros = mx.zeros((self.row_count, width, self._features))
        held = zeros if context is None else context
""",
        killed_by="prefill_refuses_wrong_shapes",
        why="A context that is missing is taken for zeros.",
    ),
    # Rounds.
    Mutant(
        name="tapped-as-deep-as-the-shallowest-row",
        file=ROWS,
        old="        for depth in range(max(asked, default=0)):\n",
        new="        for depth in range(min(asked, default=0)):\n",
        killed_by="rows_draft_as_alone",
        why="A row of depth 0 ends the drafts of all others.",
    ),
    Mutant(
        name="tapped-pending-is-not-asked",
        file=ROWS,
        old="        last = mx.array(heads, mx.int32)\n",
        new="        last = mx.zeros((count,), mx.int32)\n",
        killed_by="drafts_depend_on_the_pending_token",
        why="The chain begins with a fixed token in place of the pending one.",
    ),
    Mutant(
        name="tapped-longest-row-for-all",
        file=ROWS,
        old="        age = mx.array(self._lengths, mx.int32)[:, None]",
        new="        age = mx.array([[max(self._lengths)]] * self.row_count, mx.int32)",
        killed_by="rows_draft_as_alone",
        why="Attention is masked with the length of the longest row.",
    ),
    Mutant(
        name="tapped-mask-is-one-too-long",
        file=ROWS,
        old="        scores = mx.where(age > 0, scores, -mx.inf)\n",
        new="        scores = mx.where(age >= 0, scores, -mx.inf)\n",
        killed_by="rows_draft_as_alone",
        why="Attention reads one position of the padding, where there is one.",
    ),
    Mutant(
        name="tapped-kept-as-many-as-the-best-row",
        file=ROWS,
        old="            [head, *draft[:count]]\n",
        new="            [head, *draft[: max(counts)]]\n",
        killed_by="processed_tokens_count_what_was_read",
        why="Every row keeps as many drafts as the row that kept most.",
    ),
    Mutant(
        name="tapped-commit-reads-the-end-of-the-window",
        file=ROWS,
        old="            self._write(windows, held)\n",
        new="            self._write(windows, held[:, -width:])\n",
        killed_by="padding_is_never_read",
        why="The last positions of the window are stored in place of the first.",
    ),
    Mutant(
        name="tapped-tokens-are-stored-one-behind",
        file=ROWS,
        old="            [head, *draft[:count]]\n",
        new="            [head, *[head, *draft][:count]]\n",
        killed_by="rows_draft_as_cold_rows",
        why="The pending token is stored twice, and every draft one position late.",
    ),
    Mutant(
        name="tapped-commit-takes-any-context",
        file=ROWS,
        old="""            held = self._checked("commit", context, width)
""",
        new="""            held = mx.zeros((len(windows), width, self._features))
            held = held if context is None else context[..., : self._features]
""",
        killed_by="commit_refuses_a_wrong_context",
        why="A commit without a context stores zeros.",
    ),
    Mutant(
        name="tapped-pending-list-is-kept",
        file=ROWS,
        old="        return _Round(heads, asked), drafts\n",
        new="        return _Round(pending, asked), drafts\n",
        killed_by="arguments_are_borrowed",
        why="The caller's list is kept by reference until the commit.",
    ),
    Mutant(
        name="tapped-step-stands-still",
        file=ROWS,
        old="[step + depth for step in drawn]",
        new="drawn",
        killed_by="draws_count_on_from_the_rows_step",
        why="All drafts of a round are drawn with the noise of the first.",
    ),
    Mutant(
        name="tapped-step-of-the-first-row",
        file=ROWS,
        old="[step + depth for step in drawn]",
        new="[drawn[0] + depth] * count",
        killed_by="draws_count_on_from_the_rows_step",
        why="Every row draws with the step of row 0.",
    ),
    # Membership.
    Mutant(
        name="tapped-joined-rows-come-first",
        file=ROWS,
        old="mx.concatenate([getattr(self, name), *fresh], axis=0)",
        new="mx.concatenate([*fresh, getattr(self, name)], axis=0)",
        killed_by="rows_join_behind_the_others",
        why="Joining rows are put before the live ones, their lengths behind them.",
    ),
    Mutant(
        name="tapped-joined-rows-are-as-long-as-the-buffer",
        file=ROWS,
        old="*(keys.shape[0] for keys, _ in joining)]",
        new="*(capacity for _ in joining)]",
        killed_by="processed_tokens_count_what_was_read",
        why="A joined row's length is that of its padded keys.",
    ),
    Mutant(
        name="tapped-filter-forgets-the-values",
        file=ROWS,
        old="        self._values = mx.take(self._values, kept, axis=0)\n",
        new="        self._values = self._values[: len(keep)]\n",
        killed_by="filter_keeps_and_reorders",
        why="Keys are gathered, values are only cut.",
    ),
    Mutant(
        name="tapped-filter-forgets-the-lengths",
        file=ROWS,
        old="self._lengths = [self._lengths[row] for row in keep]",
        new="self._lengths = self._lengths[: len(keep)]",
        killed_by="filter_keeps_and_reorders",
        why="The buffer is reordered, the lengths of its rows are only cut.",
    ),
    Mutant(
        name="tapped-filter-checks-too-late",
        file=ROWS,
        old="""        check_keep(keep, self.row_count)
        kept = mx.array(list(keep), mx.int32)
        self._keys = mx.take(self._keys, kept, axis=0)
""",
        new="""        kept = mx.array(list(keep), mx.int32)
        self._keys = mx.take(self._keys, kept, axis=0)
        check_keep(keep, self.row_count)
""",
        killed_by="filter_refuses_wrong_rows",
        why="The keys are gathered before the list is looked at.",
    ),
    Mutant(
        name="tapped-capture-takes-any-row",
        file=ROWS,
        old='self._lengths[verbs.row_of("capture", row, self.row_count)]',
        new="self._lengths[row]",
        killed_by="filter_refuses_wrong_rows",
        why="capture() counts negative rows from the end, as a Python list does.",
    ),
    # Checkpoints.
    Mutant(
        name="tapped-capture-of-the-longest-row",
        file=ROWS,
        old='self._lengths[verbs.row_of("capture", row, self.row_count)]',
        new='max(self._lengths[verbs.row_of("capture", row, self.row_count)], *self._lengths)',
        killed_by="processed_tokens_count_what_was_read",
        why="A captured row is as long as the longest of its group.",
    ),
    Mutant(
        name="tapped-capture-of-the-first-rows-values",
        file=ROWS,
        old='"values": mx.contiguous(self._values[row, :length])',
        new='"values": mx.contiguous(self._values[0, :length])',
        killed_by="restored_row_goes_on_the_same",
        why="The values of another row are captured.",
    ),
    Mutant(
        name="tapped-schema-of-any-version",
        file=ROWS,
        old="        if checkpoint.attachment.schema != SCHEMA:\n",
        new="        if not checkpoint.attachment.schema.startswith(SCHEMA):\n",
        killed_by="wrong_schema_is_refused",
        why="The schema is compared by how it begins.",
    ),
    Mutant(
        name="tapped-length-of-the-keys-themselves",
        file=ROWS,
        old="        shape = (checkpoint.processed_tokens, self._size)\n",
        new="        shape = (len(checkpoint.attachment.arrays['keys']), self._size)\n",
        killed_by="misaligned_checkpoint_is_refused",
        why="The arrays are compared with each other and not with processed_tokens.",
    ),
    Mutant(
        name="tapped-shape-of-the-values-is-not-checked",
        file=ROWS,
        old="""        verbs.check_arrays(checkpoint, {"keys": shape, "values": shape})
""",
        new="""        if tuple(checkpoint.attachment.arrays["keys"].shape) != shape:
            raise CheckpointError(f"the checkpoint's keys are not {shape}")
""",
        killed_by="truncated_attachment_is_refused",
        why="One of two arrays is checked.",
    ),
    # Optional verbs.
    Mutant(
        name="tapped-preview-opens-a-round",
        file=ROWS,
        old="        _, tokens = self._proposed(pending, depths, steps)\n",
        new="        self._round, tokens = self._proposed(pending, depths, steps)\n",
        killed_by="preview_changes_nothing",
        why="A preview is a draft that nobody commits.",
    ),
    Mutant(
        name="tapped-preview-of-a-deeper-draft",
        file=ROWS,
        old="        _, tokens = self._proposed(pending, depths, steps)\n",
        new="        _, tokens = self._proposed(pending, [d + 1 for d in depths], steps)\n",
        killed_by="preview_is_the_start_of_a_draft",
        why="A preview is one token deeper than was asked.",
    ),
    Mutant(
        name="tapped-preview-of-the-next-draw",
        file=ROWS,
        old="        _, tokens = self._proposed(pending, depths, steps)\n",
        new="        _, tokens = self._proposed(pending, depths, [step + 1 for step in steps])\n",
        killed_by="preview_is_the_start_of_a_draft",
        why="A preview draws with another step than the draft.",
    ),
    Mutant(
        name="tapped-device-draft-without-lengths",
        file=ROWS,
        old="mx.array(opened.depths, mx.int32) if ragged else None",
        new="None",
        killed_by="device_drafts_equal_host_drafts",
        why="Rows of different depth are left uncut.",
    ),
    Mutant(
        name="tapped-device-draft-of-one-depth",
        file=ROWS,
        old="""        self._between_rounds("draft_device")
        opened, tokens = self._proposed(pending, depths, steps)
""",
        new="""        self._between_rounds("draft_device")
        opened, tokens = self._proposed(pending, [max(depths)] * len(depths), steps)
""",
        killed_by="device_drafts_have_one_shape",
        why="On the device every row drafts as deep as the deepest.",
    ),
    Mutant(
        name="tapped-device-draft-is-padded",
        file=ROWS,
        old="            tokens, resolve, lengths=",
        new="            mx.pad(tokens, [(0, 0), (0, 1)]), resolve, lengths=",
        killed_by="device_drafts_have_one_shape",
        why="The device draft is one wider than the deepest row.",
    ),
    Mutant(
        name="tapped-resolve-reads-columns",
        file=ROWS,
        old="rows = [list(ids[start : start + width]) for start in range(0, len(ids), width)]",
        new="rows = [list(ids[row :: len(opened.depths)]) for row in range(len(opened.depths))]",
        killed_by="device_drafts_equal_host_drafts",
        why="resolve() takes the row-major ids for column-major ones.",
    ),
    Mutant(
        name="tapped-consume-checks-too-late",
        file=ROWS,
        old="""lengths, [width] * self.row_count)
        held = self._checked("consume", context, width)
        self._write([chunk[:count] for chunk, count in zip(chunks, counts, strict=True)], held)
""",
        new="""[0] * self.row_count, [width] * self.row_count)
        held = self._checked("consume", context, width)
        self._write([c[: max(0, n)] for c, n in zip(chunks, lengths, strict=False)], held)
        verbs.one_each("consume: lengths", lengths, [width] * self.row_count)
""",
        killed_by="consume_refuses_wrong_lengths",
        why="Lengths are checked when the rows have grown.",
    ),
    Mutant(
        name="tapped-consume-begins-at-the-end",
        file=ROWS,
        old="        self._write([chunk[:count] for chunk, count in",
        new="        self._write([chunk[::-1][:count] for chunk, count in",
        killed_by="consumed_tokens_equal_read_tokens",
        why="Consumed tokens are stored in another order than they were read.",
    ),
    # What a newcomer's own mistakes showed.
    Mutant(
        name="tapped-device-draft-keeps-the-callers-list",
        file=ROWS,
        old="            return self._resolve(opened, rows)\n",
        new="            opened.pending[:] = list(pending)\n"
        "            return self._resolve(opened, rows)\n",
        killed_by="arguments_are_borrowed",
        why="A list is read again when the device draft is resolved, after the call.",
    ),
    Mutant(
        name="tapped-weights-seed-the-process",
        file=TAPPED,
        old="        keys = mx.random.split(mx.random.key(seed), ",
        new="        mx.random.seed(seed)\n        keys = mx.random.split(mx.random.key(seed), ",
        killed_by="random_state_is_left_alone",
        why="Making the weights moves the random state of the whole process.",
    ),
)
