"""Mutants of what is learned of rounds and drafts, and of what is chosen by it."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["PACE_MUTANTS"]

ACCOUNT = "specdec/cost/account.py"
CHOOSE = "specdec/cost/choose.py"
PACE = "specdec/cost/pace.py"
SURVIVAL = "specdec/cost/survival.py"
TIMES = "specdec/cost/times.py"
OF_CHOICES = "tests/test_cost_choices.py::"
OF_PACE = "tests/test_adaptive_pace.py::"
OF_PACE_CHOICES = "tests/test_pace_choices.py::"
OF_REQUESTS = "tests/test_adaptive_requests.py::"

PACE_MUTANTS = (
    Mutant(
        name="behind-a-wrong-draft-is-judged",
        file=SURVIVAL,
        old="judged = min(asked, accepted + 1)",
        new="judged = asked",
        killed_by=OF_CHOICES + "test_what_stands_behind_a_wrong_draft_is_not_judged",
        why="Drafts behind a wrong one count as wrong, though nobody has looked at them.",
    ),
    Mutant(
        name="other-rows-learn-nothing",
        file=SURVIVAL,
        old="self.shared.add(asked, accepted)",
        new="self.shared.rest()",
        killed_by=OF_CHOICES + "test_a_new_row_begins_with_what_others_have_seen",
        why="A new row begins with the first guess, whatever the drafter is worth.",
    ),
    Mutant(
        name="survival-is-the-last-chance",
        file=SURVIVAL,
        old=("                product *= chance\n                known.append(product)"),
        new=("                product = chance\n                known.append(product)"),
        killed_by=OF_CHOICES + "test_chances_are_chances_and_survival_never_grows_with_depth",
        why="That all drafts are accepted is taken to be as likely as that the last one is.",
    ),
    Mutant(
        name="rest-keeps-old-chances",
        file=SURVIVAL,
        old=(
            "        self._right = [count * share for count in self._right]\n"
            "        self._chances, self._surviving = [], []\n"
        ),
        new=("        self._right = [count * share for count in self._right]\n"),
        killed_by=OF_CHOICES + "test_at_rest_a_row_forgets_slowly",
        why="Chances that were computed before a rest stay as they were.",
    ),
    Mutant(
        name="kept-depth-has-to-be-better",
        file=CHOOSE,
        old="round_.speed * (1 + margin)",
        new="round_.speed * (1 - margin)",
        killed_by=OF_CHOICES + "test_no_other_depth_is_faster_but_by_the_margin",
        why="The choice swings between depths that are about as good.",
    ),
    Mutant(
        name="tokens-of-the-rows-themselves-are-forgotten",
        file=CHOOSE,
        old="len(surviving) + gained",
        new="1 + gained",
        killed_by=OF_CHOICES + "test_no_other_depth_is_faster_but_by_the_margin",
        why="A round of many rows is taken to give one token beside its drafts.",
    ),
    Mutant(
        name="slowest-first-round-is-believed",
        file=TIMES,
        old="self.time = min(time, self.time)",
        new="self.time = max(time, self.time)",
        killed_by=OF_CHOICES + "test_the_first_round_of_a_shape_is_not_believed",
        why="What it took to make kernels counts as what a round takes.",
    ),
    Mutant(
        name="slow-round-is-believed-whole",
        file=TIMES,
        old="time = min(max(time, self.time / _SPIKE), self.time * _SPIKE)",
        new="time = max(time, self.time / _SPIKE)",
        killed_by=OF_CHOICES + "test_a_single_slow_round_changes_little",
        why="One disturbed round changes what is known.",
    ),
    Mutant(
        name="drift-is-not-followed",
        file=TIMES,
        old="self.drift *= off**_FOLLOWS",
        new="self.drift *= 1.0",
        killed_by=OF_CHOICES + "test_a_machine_that_slows_down_does_so_for_all_rounds",
        why="Kinds of rounds that are not run keep the times of a faster machine.",
    ),
    Mutant(
        name="silent-rounds-are-the-others",
        file=TIMES,
        old="full = silent * empty + (1 - silent) * full",
        new="full = silent * full + (1 - silent) * empty",
        killed_by=OF_CHOICES
        + "test_a_drafter_that_is_often_silent_costs_what_its_rounds_take_on_average",
        why="Rounds without a draft are taken to cost what those with drafts do.",
    ),
    Mutant(
        name="bucket-of-a-power-of-two-is-the-next",
        file=TIMES,
        old="1 << max(0, rows - 1).bit_length()",
        new="1 << max(0, rows).bit_length()",
        killed_by=OF_CHOICES + "test_what_was_seen_is_recalled",
        why="Four rows are timed as eight.",
    ),
    Mutant(
        name="what-is-beside-a-window-is-computed-once",
        file=TIMES,
        old="self._beside.pop(size, None)",
        new="self._beside.pop(-1, None)",
        killed_by=OF_CHOICES + "test_what_the_drafter_takes_is_carried_over_to_other_depths",
        why="What the drafter takes is not learned after the first look.",
    ),
    Mutant(
        name="losses-cost-a-share",
        file=ACCOUNT,
        old="self._add(_OF_GAINS * gain if gain > 0 else gain)",
        new="self._add(_OF_GAINS * gain)",
        killed_by=OF_CHOICES + "test_an_account_that_is_spent_fills_slowly",
        why="Five times what is there may be lost.",
    ),
    Mutant(
        name="account-has-no-upper-end",
        file=ACCOUNT,
        old="self.balance = min(_MOST, max(_LEAST, self.balance + amount))",
        new="self.balance = max(_LEAST, self.balance + amount)",
        killed_by=OF_PACE_CHOICES + "test_what_was_gained_on_one_text_is_not_lost_on_the_next",
        why="What was gained on one text is lost on the next.",
    ),
    Mutant(
        name="looks-at-any-price",
        file=PACE,
        old="return found.depth if costs.account.affords(price) else None",
        new="return found.depth",
        killed_by=OF_PACE_CHOICES + "test_a_look_that_costs_more_than_there_is_is_not_taken",
        why="A drafter that never pays is tried over and over.",
    ),
    Mutant(
        name="never-looks-again",
        file=PACE,
        old=("        if not costs.account.affords(1):\n            return None\n"),
        new=("        if costs.account.affords(-1e9):\n            return None\n"),
        killed_by=OF_PACE_CHOICES
        + "test_a_drafter_that_nobody_has_seen_do_well_is_looked_at_now_and_then",
        why="A drafter that was bad once rests for good.",
    ),
    Mutant(
        name="rows-without-drafts-are-not-in-the-batch",
        file=PACE,
        old="others: list[Sequence[float]] = [[]] * (count - len(adaptive))",
        new="others: list[Sequence[float]] = []",
        killed_by=OF_PACE_CHOICES
        + "test_a_row_that_has_drafts_does_not_make_up_for_those_that_want_none",
        why="The time of all rows is weighed against the tokens of some.",
    ),
    Mutant(
        name="nothing-is-measured",
        file=PACE,
        old=("        self._costs.prepare(len(rows))\n"),
        new="",
        killed_by=OF_REQUESTS
        + "test_a_measuring_changes_no_token_of_the_request_that_waits_for_it",
        why="Costs are guesses until rounds have told them all.",
    ),
)
