"""Mutants of the block drafters' plugin: mistakes that cost acceptance, and never a token.

Where a reference says what a block drafts (z-lab's package as it was recorded, plain float64
computations), a test is named; where only the verbs of its rows are wrong, a check of the kit.
"""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["DFLASH", "DFLASH_MUTANTS"]

DFLASH = "plugins/specdec-dflash/src/specdec_dflash"
TESTS = "plugins/specdec-dflash/tests"
PACKAGE = f"{TESTS}/test_dflash_parity.py::test_one_row_drafts_what_the_package_drafts"
PLAIN = f"{PACKAGE}[plain-2]"
SCALED = f"{PACKAGE}[scaled-2]"
SLIDING = f"{PACKAGE}[sliding-2]"
SECOND = f"{PACKAGE}[second-2]"
OF_DEEPSPEC = (
    f"{TESTS}/test_deepspec_parity.py::test_rows_draft_as_the_plain_computation_from_equal_logits"
)
CUT = f"{TESTS}/test_deepspec_parity.py::test_a_block_ends_before_its_first_doubtful_slot"
PACKAGINGS = f"{TESTS}/test_packagings.py::"
NUMBERS = f"{TESTS}/test_speculators.py::test_numbers_of_hidden_states_are_one_more_than_layers"

DFLASH_MUTANTS = (
    # The block.
    Mutant(
        name="dflash-slot-is-the-one-before",
        file=f"{DFLASH}/method.py",
        old="            first = 0 if config.from_anchor else 1\n",
        new="            first = 0\n",
        killed_by=PLAIN,
        why="The pending token's own column drafts the first token.",
    ),
    Mutant(
        name="dflash-anchor-drafts-nothing",
        file=f"{DFLASH}/method.py",
        old="            first = 0 if config.from_anchor else 1\n",
        new="            first = 1\n",
        killed_by=f"{OF_DEEPSPEC}[qwen-1]",
        why="Slots of a drafter that drafts from its anchor are off by one.",
    ),
    Mutant(
        name="dflash-block-is-a-column-too-narrow",
        file=f"{DFLASH}/method.py",
        old="return depth if self._config.from_anchor else depth + 1",
        new="return depth",
        killed_by=PLAIN,
        why="A block has no column for its last draft.",
    ),
    Mutant(
        name="dflash-mask-is-the-token-before",
        file=f"{DFLASH}/method.py",
        old="context.width - 1), config.mask_token, pending.dtype)",
        new="context.width - 1), config.mask_token - 1, pending.dtype)",
        killed_by=PLAIN,
        why="The columns that draft are filled with another token.",
    ),
    Mutant(
        name="dflash-longest-block-is-its-columns",
        file=f"{DFLASH}/config.py",
        old="return self.block_size if self.from_anchor else self.block_size - 1",
        new="return self.block_size",
        killed_by=f"{TESTS}/test_block_generation.py::"
        "test_widths_are_pinned_to_what_the_block_was_trained_for",
        why="A block is wider than it was trained for.",
    ),
    Mutant(
        name="dflash-embedding-is-not-scaled",
        file=f"{DFLASH}/method.py",
        old="        return _scaled(given, config.embedding_scale)\n",
        new="        return given\n",
        killed_by=SCALED,
        why="input_embedding_scale is passed over.",
    ),
    Mutant(
        name="dflash-soft-cap-is-not-multiplied-back",
        file=f"{DFLASH}/method.py",
        old="        return logits if cap is None else mx.tanh(logits / cap) * cap\n",
        new="        return logits if cap is None else mx.tanh(logits / cap)\n",
        killed_by=SCALED,
        why="A soft cap is not multiplied back.",
    ),
    Mutant(
        name="dflash-namespace-lacks-the-weights",
        file=f"{DFLASH}/loading.py",
        old='f"{weights_identity(binding.model)}:',
        new='f"{name[:4]}:',
        killed_by="namespace_tells_artifacts_apart",
        why="Rows stored by one drafter are restored by another.",
    ),
    # Layers.
    Mutant(
        name="dflash-context-is-normed-by-the-layer",
        file=f"{DFLASH}/model.py",
        old="return [layer.self_attn.keys_and_values(context, positions) for layer in self.layers]",
        new="return [\n"
        "            layer.self_attn.keys_and_values(layer.input_layernorm(context), positions)\n"
        "            for layer in self.layers\n"
        "        ]",
        killed_by=PLAIN,
        why="The context is treated as if it were the block's own stream.",
    ),
    Mutant(
        name="dflash-context-is-not-normed",
        file=f"{DFLASH}/model.py",
        old="        context = self.hidden_norm(self.fc(taps))\n",
        new="        context = self.fc(taps)\n",
        killed_by=PLAIN,
        why="The combined taps lack their norm.",
    ),
    Mutant(
        name="dflash-context-positions-begin-anew",
        file=f"{DFLASH}/model.py",
        old="keys_and_values(context, positions) for layer",
        new="keys_and_values(context, 0) for layer",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="Every chunk's context stands at the text's start.",
    ),
    Mutant(
        name="dflash-queries-stand-one-behind",
        file=f"{DFLASH}/layers.py",
        old="        queries = self._rope(queries, offset=context.positions)\n",
        new="        queries = self._rope(queries, offset=context.positions + 1)\n",
        killed_by=PLAIN,
        why="Positions of the block are off by one against the context.",
    ),
    Mutant(
        name="dflash-causal-is-the-other-way-round",
        file=f"{DFLASH}/layers.py",
        old="scale=self._scale, causal=self._causal",
        new="scale=self._scale, causal=not self._causal",
        killed_by=PLAIN,
        why="Layers see one way what they should see both ways.",
    ),
    Mutant(
        name="dflash-keys-are-not-normed",
        file=f"{DFLASH}/layers.py",
        old="self._rope(self.k_norm(keys).swapaxes(1, 2), offset=positions)",
        new="self._rope(keys.swapaxes(1, 2), offset=positions)",
        killed_by=PLAIN,
        why="The norm of the keys' heads is left out.",
    ),
    Mutant(
        name="dflash-gemma-scores-are-scaled",
        file=f"{DFLASH}/layers.py",
        old="self._scale = 1.0 if self._gemma else config.head_dim**-0.5",
        new="self._scale = config.head_dim**-0.5",
        killed_by=f"{OF_DEEPSPEC}[gemma-1]",
        why="Gemma's queries are normed, so its scores are not scaled.",
    ),
    Mutant(
        name="dflash-gemma-values-are-as-projected",
        file=f"{DFLASH}/layers.py",
        old="            values = mx.fast.rms_norm(values, None, self._eps)\n",
        new="            values = values * 1.0\n",
        killed_by=f"{OF_DEEPSPEC}[gemma-1]",
        why="The norm of the values, which has no weights, is left out.",
    ),
    Mutant(
        name="dflash-window-is-one-too-small",
        file=f"{DFLASH}/method.py",
        old="tuple(ContextLayer(window) for window in config.windows)",
        new="tuple(ContextLayer(window and window - 1) for window in config.windows)",
        killed_by=SLIDING,
        why="The edge of a context window is off by one.",
    ),
    # DFlash 2.
    Mutant(
        name="dflash-convolution-looks-ahead",
        file=f"{DFLASH}/convolution.py",
        old="mx.pad(grouped[:, : width - back], [(0, 0), (back, 0), (0, 0), (0, 0)])",
        new="mx.pad(grouped[:, back:], [(0, 0), (0, back), (0, 0), (0, 0)])",
        killed_by=SECOND,
        why="A column is summed with those behind it.",
    ),
    Mutant(
        name="dflash-convolution-taps-are-swapped",
        file=f"{DFLASH}/convolution.py",
        old="shifted * (fixed[back] + ",
        new="shifted * (fixed[self._taps - 1 - back] + ",
        killed_by=SECOND,
        why="The fixed kernel is read from its other end.",
    ),
    Mutant(
        name="dflash-convolutions-share-their-weights",
        file=f"{DFLASH}/convolution.py",
        old="self.base_kernel[0]), weights[:, :, 1]",
        new="self.base_kernel[0]), weights[:, :, 0]",
        killed_by=SECOND,
        why="The dynamic kernel before a part is used again behind it.",
    ),
    Mutant(
        name="dflash-selector-follows-the-pending-token",
        file=f"{DFLASH}/selector.py",
        old="            last = choices.next(scores[:, slot] + edges, candidates[:, slot])\n"
        "            chosen.append(last)\n",
        new="            ids = candidates[:, slot]\n"
        "            chosen.append(choices.next(scores[:, slot] + edges, ids))\n",
        killed_by=SECOND,
        why="Every slot is chosen as if it came after the pending token.",
    ),
    Mutant(
        name="dflash-selector-forgets-the-logits",
        file=f"{DFLASH}/selector.py",
        old="choices.next(scores[:, slot] + edges, candidates[:, slot])",
        new="choices.next(edges, candidates[:, slot])",
        killed_by=SECOND,
        why="A candidate's own score does not count.",
    ),
    # DSpark.
    Mutant(
        name="dflash-markov-follows-the-pending-token",
        file=f"{DFLASH}/markov.py",
        old="            embedded = self.embed(last)\n",
        new="            embedded = self.embed(pending)\n",
        killed_by=f"{OF_DEEPSPEC}[qwen-1]",
        why="The bias of every slot is that of the pending token.",
    ),
    Mutant(
        name="dflash-markov-forgets-its-state",
        file=f"{DFLASH}/markov.py",
        old="self.step(embedded, hidden[:, slot], state)",
        new="self.step(embedded, hidden[:, slot], None)",
        killed_by=f"{OF_DEEPSPEC}[qwen rnn-1]",
        why="A recurrent head begins anew at each slot.",
    ),
    Mutant(
        name="dflash-markov-state-and-token-are-exchanged",
        file=f"{DFLASH}/markov.py",
        old="mx.concatenate([state, before, hidden], axis=-1)",
        new="mx.concatenate([before, state, hidden], axis=-1)",
        killed_by=f"{OF_DEEPSPEC}[qwen rnn-1]",
        why="The joint map's columns are exchanged.",
    ),
    Mutant(
        name="dflash-gate-sees-the-token-first",
        file=f"{DFLASH}/markov.py",
        old="self.gate_proj(mx.concatenate([hidden, before], axis=-1))",
        new="self.gate_proj(mx.concatenate([before, hidden], axis=-1))",
        killed_by=f"{OF_DEEPSPEC}[qwen gated-1]",
        why="The gate's columns are exchanged.",
    ),
    Mutant(
        name="dflash-doubtful-slots-are-proposed",
        file=f"{DFLASH}/confidence.py",
        old="sure = confidence >= mx.array",
        new="sure = confidence <= mx.array",
        killed_by=CUT,
        why="The comparison with a threshold is flipped.",
    ),
    Mutant(
        name="dflash-drafts-go-on-behind-a-doubtful-one",
        file=f"{DFLASH}/confidence.py",
        old="return mx.cumprod(sure.astype(mx.int32), axis=1).sum(axis=1)",
        new="return sure.astype(mx.int32).sum(axis=1)",
        killed_by=CUT,
        why="Sure slots are counted, not those before the first doubtful one.",
    ),
    Mutant(
        name="dflash-ids-of-the-drafters-head-are-the-targets",
        file=f"{DFLASH}/method.py",
        old="logits, pending, choices, self._ids)",
        new="logits, pending, choices)",
        killed_by=f"{OF_DEEPSPEC}[speculators dspark listed-1]",
        why="Places in a draft vocabulary are taken for ids.",
    ),
    # Packagings.
    Mutant(
        name="dflash-numbers-of-hidden-states-are-layers",
        file=f"{DFLASH}/packagings.py",
        old="taps=[number - 1 for number in numbers],",
        new="taps=list(numbers),",
        killed_by=NUMBERS,
        why="Taps of a speculator are off by one.",
    ),
    Mutant(
        name="dflash-layers-of-a-window-see-both-ways",
        file=f"{DFLASH}/packagings.py",
        old="return tuple(sliding and window is not None for window in windows)",
        new="return tuple(False for _ in windows)",
        killed_by=PACKAGINGS + "test_layers_of_a_window_are_causal_unless_the_config_says_so",
        why="What holds where no key tells is the other way round.",
    ),
    Mutant(
        name="dflash-block-counts-the-anchor-twice",
        file=f"{DFLASH}/packagings.py",
        old="        block_size=drafts if from_anchor else drafts + 1,\n",
        new="        block_size=drafts,\n",
        killed_by=f"{OF_DEEPSPEC}[lfm2 bonus-1]",
        why="A block that does not draft from its anchor loses its last slot.",
    ),
    Mutant(
        name="dflash-keys-inside-count-last",
        file=f"{DFLASH}/packagings.py",
        old='keys = flat.within(flat.level("dflash_config"))\n    windows',
        new="keys = flat\n    windows",
        killed_by=PACKAGINGS + "test_a_key_counts_at_the_top_and_inside_and_inside_first",
        why="Keys of dflash_config are not read.",
    ),
)
