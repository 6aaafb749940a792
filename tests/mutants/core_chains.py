"""Mutants of chains: what is remembered of windows that are taken back, and for how long."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["CHAIN_MUTANTS"]

CHAINS = "specdec/state/chains.py"
CHUNKED = "specdec/state/chunked.py"
COMPOSITE = "specdec/state/composite.py"
NATIVE = "specdec/state/native.py"
RAGGED = "specdec/state/ragged.py"
RECURRENT = "specdec/state/recurrent.py"
WINDOWS = "specdec/state/windows.py"
OF_CHAINS = "tests/test_state_chains.py::"
BACK = OF_CHAINS + "test_rows_that_went_back_are_rows_that_read_the_kept_tokens_only"
ENDS = OF_CHAINS + "test_a_chain_ends"
LONGEST = OF_CHAINS + "test_a_chain_is_as_long_as_its_caches_can_take_back"
REFUSED = OF_CHAINS + "test_a_count_that_a_row_has_not_kept_is_refused_and_changes_nothing"
STAYS = OF_CHAINS + "test_one_row_goes_back_to_the_start_of_the_chain_and_another_stays"

CHAIN_MUTANTS = (
    Mutant(
        name="chain-counts-windows-that-a-row-dropped",
        file=RECURRENT,
        old="count -= chain[number].kept[row]",
        new="count -= 1",
        killed_by=BACK + "[gated delta]",
        why="A row that kept nothing of a window goes back too few of its own positions.",
    ),
    Mutant(
        name="chain-goes-back-with-the-first-row",
        file=RECURRENT,
        old="places = None, [numbers.index(n) for n in links]",
        new="places = None, [numbers.index(links[0]) for n in links]",
        killed_by=STAYS + "[short convolution]",
        why="Every row becomes what the first one was so many windows ago.",
    ),
    Mutant(
        name="chain-is-lost-where-rows-come-together",
        file=RECURRENT,
        old="if len(chains) == len(parts) and",
        new="if len(chains) > len(parts) and",
        killed_by=BACK + "[mamba]",
        why="A row that had read nothing joins the others in a chain, and all forget it.",
    ),
    Mutant(
        name="chain-of-recurrent-rows-never-ends",
        file=RECURRENT,
        old='"""Only what was there before the last window is kept."""\n        self._chain = None',
        new='"""Only what was there before the last window is kept."""',
        killed_by=ENDS + "[mamba and attention-a wider window]",
        why="Plain decoding keeps the arrays of every window from then on.",
    ),
    Mutant(
        name="chain-drops-a-chunk-that-a-row-comes-back-to",
        file=CHUNKED,
        old="        if self._chaining:\n            return\n",
        new="",
        killed_by=OF_CHAINS + "test_a_row_that_went_ahead_by_more_than_a_chunk_still_holds_its_own",
        why="What the last window does not see is dropped, although a row goes back behind it.",
    ),
    Mutant(
        name="chain-is-longer-than-the-slack-of-a-ring",
        file=WINDOWS,
        old="return SLACK + 1",
        new="return SLACK + 2",
        killed_by=LONGEST + "[window]",
        why="The last window overwrites a position that the first one's query sees.",
    ),
    Mutant(
        name="chain-goes-on-when-it-is-full",
        file=RAGGED,
        old="(width > 1 or self._chain.is_full)",
        new="width > 1",
        killed_by=LONGEST + "[list]",
        why="More windows are taken back than the rings have slack for.",
    ),
    Mutant(
        name="chain-takes-back-what-a-row-did-not-keep",
        file=RAGGED,
        old="return self._chain.kept[row]",
        new="return self._chain.windows",
        killed_by=REFUSED + "[attention]",
        why="A row that dropped a window goes back behind the start of the chain.",
    ),
    Mutant(
        name="chain-outlives-a-row-that-joins",
        file=RAGGED,
        old="self._single, self._chain = single, chain\n            self._end_chain()",
        new="self._single, self._chain = single, None",
        killed_by=ENDS + "[chunked-rows join an empty state]",
        why="Layers believe that a chain is open that nobody will end.",
    ),
    Mutant(
        name="chain-leaves-rows-quantized-that-came-back",
        file=RAGGED,
        old="older = {} if chain is None else chain.unquantized(counts)",
        new="older: dict[int, Any] = {}",
        killed_by=BACK + "[quantized]",
        why="A row before the place where it is quantized sees quantized keys.",
    ),
    Mutant(
        name="chain-forgets-how-long-ago-rows-were-quantized",
        file=CHAINS,
        old="counts[row] - (self.kept[row] - at)",
        new="counts[row]",
        killed_by=BACK + "[quantized]",
        why="The row that is plain again goes back further than it went ahead.",
    ),
    Mutant(
        name="chain-is-not-told-to-the-parts-of-a-list",
        file=COMPOSITE,
        old="            part.begin_chain()",
        new="            part.end_chain()",
        killed_by=STAYS + "[list]",
        why="Recurrent caches inside of lists remember one window alone.",
    ),
    Mutant(
        name="chain-of-native-rows-goes-back-one-window",
        file=NATIVE,
        old="in self._kept[row][-count]:",
        new="in self._kept[row][-1]:",
        killed_by=OF_CHAINS + "test_native_rows_go_back_by_a_chain[gated delta]",
        why="The length goes back by all positions and the caches by one.",
    ),
)
