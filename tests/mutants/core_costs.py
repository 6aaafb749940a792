"""Mutants of what is measured of a machine, and of what is kept of it."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["COST_MUTANTS"]

COSTS = "specdec/cost/costs.py"
CURVE = "specdec/cost/curve.py"
MEASURE = "specdec/cost/measure.py"
STORE = "specdec/cost/store.py"
OF_COSTS = "tests/test_costs.py::"
OF_MEASURING = "tests/test_measuring.py::"
OF_PACE_CHOICES = "tests/test_pace_choices.py::"

COST_MUTANTS = (
    Mutant(
        name="each-number-of-rows-is-measured",
        file=COSTS,
        old=("        size = bucket(rows)\n        if size in self._tried:"),
        new=("        size = rows\n        if size in self._tried:"),
        killed_by=OF_COSTS + "test_each_power_of_two_is_measured_once_and_remembered",
        why="Every row that joins makes all others wait for a measurement.",
    ),
    Mutant(
        name="failed-measuring-is-tried-again",
        file=COSTS,
        old=("        self._tried.add(size)\n        if size in self._plain"),
        new="        if size in self._plain",
        killed_by=OF_COSTS + "test_a_measuring_that_fails_is_logged_once_and_raises_nothing",
        why="A measurement that fails is repeated in every round.",
    ),
    Mutant(
        name="rounds-of-another-drafter-are-recalled",
        file=COSTS,
        old="self.times.recall(kept.rounds.get(self._drafter, {}))",
        new=("for each in kept.rounds.values():\n            self.times.recall(each)"),
        killed_by=OF_COSTS + "test_rounds_are_remembered_by_drafter",
        why="What one drafter takes is believed of another.",
    ),
    Mutant(
        name="rows-share-nothing",
        file=COSTS,
        old="self._rows[row] = Survival(self._shared)",
        new="self._rows[row] = Survival(Survival())",
        killed_by=OF_PACE_CHOICES
        + "test_a_row_has_what_it_has_seen_and_begins_with_what_others_have",
        why="Each row finds out for itself what the drafter is worth.",
    ),
    Mutant(
        name="plain-windows-are-padded-as-easily",
        file=COSTS,
        old="limit = _CHEAPER_PLAIN if needed == 1 else _CHEAPER",
        new="limit = _CHEAPER",
        killed_by=OF_PACE_CHOICES
        + "test_a_plain_window_is_padded_for_a_larger_gain_than_one_of_drafts",
        why="Plain rounds wait for each other for a gain that does not make up for it.",
    ),
    Mutant(
        name="forgotten-times-stay-on-disk",
        file=COSTS,
        old=("            self._store.forget(self._identity)\n"),
        new=("            pass\n"),
        killed_by=OF_COSTS + "test_each_power_of_two_is_measured_once_and_remembered",
        why="Measuring anew lasts until the next process.",
    ),
    Mutant(
        name="windows-are-padded-without-end",
        file=CURVE,
        old="if needed < w <= most)]",
        new="if needed < w)]",
        killed_by=OF_PACE_CHOICES + "test_no_window_is_padded_beyond_what_a_drafter_may_ask_for",
        why="A window is wider than any that the rows have room for.",
    ),
    Mutant(
        name="times-fall-behind-the-last-width",
        file=CURVE,
        old="slope = max(0.0, (last - before) / (known[-1] - known[-2]))",
        new="slope = (last - before) / (known[-1] - known[-2])",
        killed_by=OF_PACE_CHOICES + "test_beyond_the_last_width_a_time_does_not_fall",
        why="Behind a step down windows take no time at all.",
    ),
    Mutant(
        name="file-of-another-identity-is-read",
        file=STORE,
        old=' or found["identity"] != identity:',
        new=":",
        killed_by=OF_COSTS + "test_a_file_of_another_identity_is_not_read",
        why="Whatever has the file's name is believed.",
    ),
    Mutant(
        name="the-last-process-overwrites",
        file=STORE,
        old="held = self.read(identity)",
        new="held = Kept()",
        killed_by=OF_COSTS + "test_two_processes_add_to_each_other_and_the_last_measurement_counts",
        why="What another process measured meanwhile is lost.",
    ),
    Mutant(
        name="unwritten-files-are-left",
        file=STORE,
        old=("                os.unlink(path)\n                raise\n"),
        new=("                raise\n"),
        killed_by=OF_COSTS + "test_a_folder_that_cannot_be_written_stops_nobody",
        why="Each process leaves a file that nobody reads.",
    ),
    Mutant(
        name="nested-files-are-read-to-the-end",
        file=STORE,
        old=("    ArithmeticError,\n    RecursionError,\n"),
        new=("    ArithmeticError,\n"),
        killed_by=OF_COSTS + "test_what_is_no_file_of_times_counts_as_nothing_and_is_replaced",
        why="A broken file ends requests.",
    ),
    Mutant(
        name="counts-are-not-looked-at",
        file=STORE,
        old="if type(value) is not int or not 0 <= value < 1 << 53]",
        new="if value is None]",
        killed_by=OF_COSTS + "test_what_is_no_file_of_times_counts_as_nothing_and_is_replaced",
        why="Words are taken for numbers of rows.",
    ),
    Mutant(
        name="types-are-no-part-of-an-identity",
        file=STORE,
        old='f"{name} {a.shape} {a.dtype}"',
        new='f"{name} {a.shape}"',
        killed_by=OF_COSTS + "test_equal_models_have_one_identity_and_others_another",
        why="A model in 16 bits has the times of one in 32.",
    ),
    Mutant(
        name="first-turn-counts",
        file=MEASURE,
        old=("            if turn:\n"),
        new=("            if turn >= 0:\n"),
        killed_by=OF_MEASURING + "test_a_time_is_the_median_of_all_turns_but_the_first",
        why="Making kernels is timed as if every window did so.",
    ),
    Mutant(
        name="widths-take-no-turns",
        file=MEASURE,
        old="widths[(place + turn) % len(widths)]",
        new="widths[place]",
        killed_by=OF_MEASURING + "test_a_time_is_the_median_of_all_turns_but_the_first",
        why="What follows the widest window is always the same one.",
    ),
    Mutant(
        name="measured-rows-keep-a-position",
        file=MEASURE,
        old="state.rollback([0] * state.row_count)",
        new="state.rollback([1] * state.row_count)",
        killed_by=OF_MEASURING + "test_rows_are_as_they_were_after_windows_of_all_widths",
        why="The rows grow while they are timed.",
    ),
    Mutant(
        name="measuring-ends-before-its-turns",
        file=MEASURE,
        old="done = min(1.0, passed, turn / (1 + _LEAST))",
        new="done = min(1.0, passed)",
        killed_by=OF_MEASURING + "test_a_time_is_the_median_of_all_turns_but_the_first",
        why="A slow target has no time of some widths.",
    ),
    Mutant(
        name="first-plain-rounds-count",
        file=MEASURE,
        old="statistics.median(spent[3:])",
        new="statistics.median(spent)",
        killed_by=OF_MEASURING + "test_a_plain_round_is_a_median_without_the_first_ones",
        why="Plain decoding looks slower than it is.",
    ),
    Mutant(
        name="wide-windows-of-rows-that-cannot-roll-back",
        file=MEASURE,
        old=("    if not state.can_roll_back:\n        widths = (1,)\n"),
        new="",
        killed_by=OF_MEASURING
        + "test_of_a_target_that_cannot_roll_back_single_positions_are_timed",
        why="Rows that take one position at a time are given several.",
    ),
    Mutant(
        name="another-row-is-measured",
        file=MEASURE,
        old="for _ in range(batch - 1)]",
        new="for _ in range(batch)]",
        killed_by=OF_MEASURING + "test_rows_are_as_they_were_after_windows_of_all_widths",
        why="A batch is timed with one row too many.",
    ),
)
