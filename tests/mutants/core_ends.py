"""Mutants of ends, text and grammars: where a row stops, what it shows, and what it may emit."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["END_MUTANTS"]

ENDS = "specdec/verify/ends.py"
MARKER = "specdec/grammar/marker.py"
MATCHER = "specdec/grammar/matcher.py"
TEXT = "specdec/verify/text.py"
VOCABULARY = "specdec/grammar/vocabulary.py"
OF_ENDS = "tests/test_ends.py::"
OF_GAPS = "tests/test_core_mutants_gaps.py::"
OF_GRAMMAR = "tests/test_grammar.py::"
OF_TEXT = "tests/test_text.py::"

END_MUTANTS = (
    Mutant(
        name="floor-is-one-token-too-high",
        file=ENDS,
        old="may_stop = self._count >= self._min_tokens",
        new="may_stop = self._count > self._min_tokens",
        killed_by=OF_ENDS + "test_nothing_stops_a_row_below_min_tokens",
        why="A row that has min_tokens tokens is not allowed to end with the last of them.",
    ),
    Mutant(
        name="floor-is-ignored-by-sequences",
        file=ENDS,
        old="ends = completed and may_stop\n",
        new="ends = completed\n",
        killed_by=OF_ENDS + "test_nothing_stops_a_row_below_min_tokens",
        why="A stop sequence ends a row before its floor.",
    ),
    Mutant(
        name="text-of-a-sequence-is-shown",
        file=ENDS,
        old="held = matcher.matched if ends else matcher.open",
        new="held = 0",
        killed_by=OF_ENDS + "test_the_text_of_a_stop_sequence_is_held_back_until_it_is_decided",
        why="The beginning of a stop sequence is shown before it is known what follows.",
    ),
    Mutant(
        name="sequence-drops-what-is-still-open",
        file=ENDS,
        old="held = matcher.matched if ends else matcher.open",
        new="held = matcher.open",
        killed_by=OF_ENDS + "test_rows_end_and_show_what_a_plain_search_says_at_every_count",
        why="A completed sequence is part of no longer one, so nothing of its text is cut off.",
    ),
    Mutant(
        name="sequences-inside-others-are-missed",
        file=ENDS,
        old="node.matched = node.matched or node.fail.matched",
        new="node.matched = node.matched",
        killed_by=OF_ENDS + "test_sequences_that_overlap_themselves_and_each_other_are_seen",
        why="A sequence that ends inside the beginning of a longer one is not seen.",
    ),
    Mutant(
        name="matcher-starts-again-after-a-mismatch",
        file=ENDS,
        old="            node = node.fail\n        return node.children[symbol]",
        new="            node = node.fail if node.fail.fail is None else node.fail.fail\n"
        "        return node.children[symbol]",
        killed_by=OF_ENDS + "test_sequences_that_overlap_themselves_and_each_other_are_seen",
        why="A beginning that overlaps the one that failed is passed over.",
    ),
    Mutant(
        name="finished-patterns-stay-open",
        file=ENDS,
        old="node.open = node.depth if node.children else node.fail.open",
        new="node.open = node.depth",
        killed_by=OF_ENDS + "test_rows_end_and_show_what_a_plain_search_says_at_every_count",
        why="Text of a sequence that came below the floor is held back for nothing.",
    ),
    Mutant(
        name="stop-string-does-not-end-the-row",
        file=ENDS,
        old="return ends or stopped",
        new="return ends",
        killed_by=OF_ENDS + "test_a_stop_string_anywhere_in_a_long_accepted_run_is_seen",
        why="The text is cut, and the row goes on.",
    ),
    Mutant(
        name="beginnings-of-stop-strings-are-shown",
        file=TEXT,
        old="start is not None else self._ends[-1] - self._matcher.open",
        new="start is not None else self._ends[-1]",
        killed_by=OF_TEXT + "test_stop_strings_end_rows_where_a_plain_search_says",
        why="Half of a stop string has been shown when the other half comes.",
    ),
    Mutant(
        name="cut-is-behind-the-stop-string",
        file=TEXT,
        old="            self._cut = start\n",
        new="            self._cut = start + self._matcher.matched\n",
        killed_by=OF_TEXT + "test_stop_strings_cut_the_text_at_their_first_character",
        why="The stop string itself is shown.",
    ),
    Mutant(
        name="cut-is-where-the-first-stop-string-ended",
        file=TEXT,
        old="return min(starts, default=None)",
        new="return starts[0] if starts else None",
        killed_by=OF_GAPS + "test_of_two_stop_strings_in_one_token_the_one_that_begins_first_cuts",
        why="Of two stop strings in one token's text, not the one that begins first counts.",
    ),
    Mutant(
        name="held-tokens-are-shown",
        file=TEXT,
        old="        if held:\n            sure",
        new="        if held > 1:\n            sure",
        killed_by=OF_ENDS + "test_the_text_of_a_stop_sequence_is_held_back_until_it_is_decided",
        why="The first token of what may be a stop sequence is shown at once.",
    ),
    Mutant(
        name="floor-is-ignored-at-the-end-of-the-text",
        file=TEXT,
        old="if cut is None or not self._may_stop[kept - 1]:",
        new="if cut is None:",
        killed_by=OF_TEXT
        + "test_a_stop_string_that_only_the_end_completes_cuts_unless_it_came_too_early",
        why="What the detokenizer releases last is cut below the floor too.",
    ),
    Mutant(
        name="flush-shows-what-was-cut",
        file=TEXT,
        old="        if ended and self._cut is not None:\n",
        new="        if not ended and self._cut is not None:\n",
        killed_by=OF_TEXT + "test_stop_strings_cut_the_text_at_their_first_character",
        why="The rest of the text comes with the stop string in it.",
    ),
    Mutant(
        name="looking-at-a-draft-moves-the-marker",
        file=MATCHER,
        old="        return self._marker.found_at(self._matched, draft)\n",
        new="        found = self._marker.found_at(self._matched, draft)\n"
        "        for token in draft if found is None else ():\n"
        "            self._matched = self._marker.step(self._matched, token)\n"
        "        return found\n",
        killed_by=OF_GAPS + "test_a_draft_moves_no_half_of_a_marker",
        why="Drafts that are rejected count as emitted for the marker.",
    ),
    Mutant(
        name="looking-at-a-draft-consumes-it",
        file=MATCHER,
        old="    if draft:\n        fill_next_token_bitmask_par",
        new="    if len(draft) > 1:\n        matcher.try_consume_tokens(draft[:1])\n"
        "        draft = draft[1:]\n    if draft:\n        fill_next_token_bitmask_par",
        killed_by=OF_GRAMMAR + "test_looking_changes_nothing",
        why="The grammar is advanced by masks.",
    ),
    Mutant(
        name="drafted-marker-begins-the-grammar",
        file=MATCHER,
        old="        return self._marker.found_at(self._matched, draft)\n",
        new="        found = self._marker.found_at(self._matched, draft)\n"
        "        self.active = found is not None\n"
        "        return found\n",
        killed_by=OF_GRAMMAR + "test_a_marker_that_is_drafted_and_rejected_restricts_nothing",
        why="A marker that was drafted and rejected restricts the row from then on.",
    ),
    Mutant(
        name="marker-keeps-a-false-beginning",
        file=MARKER,
        old="            matched = self._border[matched - 1]\n",
        new="            return matched\n",
        killed_by=OF_GRAMMAR + "test_a_longer_marker_is_found_behind_any_false_beginning",
        why="The marker's tokens are found with others between them.",
    ),
    Mutant(
        name="marker-forgets-its-overlap",
        file=MARKER,
        old="borders[place] = length + (tokens[length] == tokens[place])",
        new="borders[place] = 0",
        killed_by=OF_GRAMMAR + "test_a_longer_marker_is_found_behind_any_false_beginning",
        why="A marker that begins inside a false beginning is not found.",
    ),
    Mutant(
        name="marker-is-found-one-token-early",
        file=MARKER,
        old="enumerate(stream, start=1)",
        new="enumerate(stream)",
        killed_by=OF_GRAMMAR
        + "test_a_marker_as_a_middle_draft_restricts_what_is_drafted_behind_it",
        why="The position that draws the marker's last token is restricted already.",
    ),
    Mutant(
        name="free-drafts-are-cut",
        file=MATCHER,
        old="return self._vocabulary.on_device(bits), free + allowed",
        new="return self._vocabulary.on_device(bits), allowed",
        killed_by=OF_GRAMMAR + "test_a_marker_as_the_last_draft_restricts_the_bonus",
        why="Drafts before the marker are not counted as allowed.",
    ),
    Mutant(
        name="end-is-always-allowed",
        file=VOCABULARY,
        old="bits[may_end == 1] |= self.ends",
        new="bits |= self.ends",
        killed_by=OF_GRAMMAR
        + "test_an_end_is_allowed_exactly_where_the_grammar_accepts_even_beyond_the_tokenizer",
        why="An output may end in the middle of its grammar.",
    ),
    Mutant(
        name="end-is-never-allowed",
        file=VOCABULARY,
        old="        bits[may_end == 1] |= self.ends\n",
        new="",
        killed_by=OF_GRAMMAR
        + "test_an_end_is_allowed_exactly_where_the_grammar_accepts_even_beyond_the_tokenizer",
        why="A row whose output is complete cannot end.",
    ),
    Mutant(
        name="special-tokens-are-text",
        file=VOCABULARY,
        old="        bits &= self.text\n",
        new="",
        killed_by=OF_GRAMMAR
        + "test_without_end_tokens_an_output_ends_where_it_is_complete_and_only_there",
        why="What the engine allows is taken as it is, whatever the model's vocabulary.",
    ),
    Mutant(
        name="any-spelling-of-a-draft-is-allowed",
        file=MATCHER,
        old="            and _has(bits, allowed, draft[allowed])\n",
        new="",
        killed_by=OF_GRAMMAR + "test_a_spelling_that_the_mask_does_not_prefer_is_cut_from_a_draft",
        why="A draft is kept that the mask at its place forbids.",
    ),
    Mutant(
        name="unfit-token-reaches-the-engine",
        file=MATCHER,
        old="        fits = fits and self._matcher.validate_tokens([token]) == 1\n",
        new="",
        killed_by=OF_GRAMMAR
        + "test_a_token_that_is_not_allowed_raises_and_leaves_everything_usable",
        why="A token that does not fit breaks the matcher for good.",
    ),
    Mutant(
        name="mended-matcher-forgets-the-output",
        file=MATCHER,
        old="        self._matcher.try_consume_tokens(self._emitted)\n",
        new="",
        killed_by=OF_GAPS + "test_a_matcher_that_drafts_have_broken_goes_on_behind_the_output",
        why="A matcher that is made anew begins the grammar again.",
    ),
    Mutant(
        name="grammar-forces-before-its-marker",
        file=MATCHER,
        old="        if not self.active or max_tokens < 1:\n",
        new="        if max_tokens < 1:\n",
        killed_by=OF_GAPS + "test_what_a_grammar_forces_is_not_forced_before_its_marker",
        why="A grammar's first tokens are forced while the model still thinks.",
    ),
    Mutant(
        name="rows-share-their-matcher",
        file=MATCHER,
        old="        self._matcher = self._template.deep_copy()\n        self.active",
        new="        self._matcher = self._template\n        self.active",
        killed_by=OF_GRAMMAR + "test_rows_of_one_grammar_are_independent",
        why="One row's output moves the grammar of another.",
    ),
)
