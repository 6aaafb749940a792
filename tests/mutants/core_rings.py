"""Mutants of sliding windows: places in a ring, masks over it, what is kept of wide windows."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["RING_MUTANTS"]

RINGS = "specdec/state/rings.py"
WINDOWS = "specdec/state/windows.py"
OF_GAPS = "tests/test_core_mutants_gaps_state.py::"
OF_WINDOWS = "tests/test_row_forms_windows.py::"
DROPPED = OF_WINDOWS + "test_a_window_is_dropped_at_every_place_of_the_ring"
TAKEN_OVER = OF_WINDOWS + "test_a_cache_that_mlx_lm_advanced_is_taken_over_where_it_stands"
IN_CHUNKS = OF_WINDOWS + "test_a_prompt_in_chunks_sees_what_mlx_lm_shows_it"

RING_MUTANTS = (
    Mutant(
        name="ring-has-a-place-too-few",
        file=RINGS,
        old="self.size = max_size + SLACK\n",
        new="self.size = max_size + SLACK - 1\n",
        killed_by=DROPPED + "[0-33-False]",
        why="The widest window in place overwrites a position that its first query sees.",
    ),
    Mutant(
        name="window-in-place-is-a-position-too-wide",
        file=RINGS,
        old="self._positions.width <= SLACK + 1",
        new="self._positions.width <= SLACK + 2",
        killed_by=DROPPED + "[0-34-False]",
        why="A window that the slack does not suffice for is written before it is known.",
    ),
    Mutant(
        name="lone-rows-place-forgets-what-is-kept",
        file=RINGS,
        old="return self.keep + (position - self.keep) % (self.size - self.keep)",
        new="return position % self.size",
        killed_by=OF_GAPS + "test_a_lone_row_is_written_around_the_end_of_its_ring[4]",
        why="The first positions, which every query sees, are overwritten.",
    ),
    Mutant(
        name="rows-places-forget-what-is-kept",
        file=RINGS,
        old="turned = self.keep + (positions - self.keep) % (self.size - self.keep)",
        new="turned = positions % self.size",
        killed_by=DROPPED + "[4-5-False]",
        why="The same where rows differ in length.",
    ),
    Mutant(
        name="ring-shows-one-position-too-far-back",
        file=RINGS,
        old="(held > queries - size + self.keep)",
        new="(held >= queries - size + self.keep)",
        killed_by=DROPPED + "[0-5-False]",
        why="The edge of the window is off by one.",
    ),
    Mutant(
        name="wide-window-shows-one-position-too-far-back",
        file=RINGS,
        old="(keys > own - size + self.keep)",
        new="(keys >= own - size + self.keep)",
        killed_by=DROPPED + "[0-60-False]",
        why="The edge of the window is off by one where it is not written in place.",
    ),
    Mutant(
        name="chunk-sees-one-position-too-few",
        file=RINGS,
        old="return self.max_size - 1 - self.keep",
        new="return self.max_size - 2 - self.keep",
        killed_by=IN_CHUNKS + "[chunks1-0]",
        why="The oldest position that a chunk's first query sees is left out.",
    ),
    Mutant(
        name="ring-is-read-as-if-nothing-were-kept",
        file=RINGS,
        old="turn = self.size - self.keep\n",
        new="turn = self.size\n",
        killed_by=DROPPED + "[4-5-False]",
        why="The mask takes places for those of other positions.",
    ),
    Mutant(
        name="first-positions-go-out-of-sight",
        file=RINGS,
        old="shown = shown | ((places < self.keep) & (places <= queries))",
        new="shown = shown | ((places < self.keep - 1) & (places <= queries))",
        killed_by=DROPPED + "[4-5-False]",
        why="The last of the kept positions is hidden once the window has left it.",
    ),
    Mutant(
        name="full-window-is-not-masked",
        file=RINGS,
        old="if longest + width <= size and",
        new="if longest + width <= size + 1 and",
        killed_by=DROPPED + "[0-2-False]",
        why="The first position that leaves the window is still shown.",
    ),
    Mutant(
        name="ring-goes-on-at-its-first-place",
        file=WINDOWS,
        old="self._buffers.write(ring.keep, [array[..., until:, :] for array in new])",
        new="self._buffers.write(0, [array[..., until:, :] for array in new])",
        killed_by=OF_GAPS + "test_a_lone_row_is_written_around_the_end_of_its_ring[4]",
        why="A window that goes around the end overwrites what is kept.",
    ),
    Mutant(
        name="chunk-stands-before-what-it-sees",
        file=WINDOWS,
        old="mx.concatenate([mx.take(array, index, axis=2), own], axis=2)",
        new="mx.concatenate([own, mx.take(array, index, axis=2)], axis=2)",
        killed_by=IN_CHUNKS + "[chunks0-0]",
        why="The mask is that of a chunk behind the earlier positions.",
    ),
    Mutant(
        name="wide-window-is-kept-by-the-largest-count",
        file=WINDOWS,
        old="last = counts - most + mx.arange(most, dtype=mx.int32)",
        new="last = mx.max(counts) - most + mx.arange(most, dtype=mx.int32)",
        killed_by=DROPPED + "[0-60-False]",
        why="A row that keeps less than its neighbour loses the oldest of them.",
    ),
    Mutant(
        name="wide-window-loses-the-first-positions",
        file=WINDOWS,
        old="first.shape[1]) | (at < ring.keep))",
        new="first.shape[1]) | (at < 0))",
        killed_by=DROPPED + "[4-60-False]",
        why="What is kept for ever is not written where a wide window brings it.",
    ),
    Mutant(
        name="callers-ring-is-adopted-without-its-first-positions",
        file=WINDOWS,
        old="rows._store(held, cache.offset, kept=cache.keep)",
        new="rows._store(held, cache.offset, kept=0)",
        killed_by=TAKEN_OVER + "[4-0-60]",
        why="They are taken for the oldest of the last ones.",
    ),
    Mutant(
        name="extracted-ring-writes-over-its-newest",
        file=WINDOWS,
        old="cache.offset, cache._idx = length, kept + length - first",
        new="cache.offset, cache._idx = length, length - first",
        killed_by=TAKEN_OVER + "[4-0-60]",
        why="mlx-lm goes on writing in the middle of what it was given.",
    ),
    Mutant(
        name="rings-with-and-without-kept-positions-are-joined",
        file=WINDOWS,
        old="return self._ring.max_size, self._ring.keep",
        new="return self._ring.max_size",
        killed_by=OF_WINDOWS + "test_windows_of_different_size_do_not_share_a_ring",
        why="Rows whose places differ share a buffer.",
    ),
)
