"""Mutants of chains of drafters and of ``auto``: who is asked, who reads and declares what.

None of them can change a token of the text; they cost drafts, and some the target's distribution
under rejection.
"""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["DRAFTER_CHAIN_MUTANTS"]

ROUNDS = "specdec/chain/rounds.py"
TURN = "specdec/chain/turn.py"
MEMBERS = "specdec/chain/members.py"
PROVIDER = "specdec/chain/provider.py"
ATTACHMENT = "specdec/chain/attachment.py"
AUTOMATIC = "specdec/automatic.py"
CHAINED = "specdec/chained.py"

OF_ROWS = "tests/test_chain_rows.py::"
OF_TEXTS = "tests/test_chain_in_executor.py::"
OF_LOADING = "tests/test_chain_loading.py::"
OF_AUTO = "tests/test_automatic.py::"
FIRST_WINS = OF_ROWS + "test_the_first_that_proposes_wins_each_row_and_the_others_read_what_it_won"
NOT_ASKED = (
    OF_ROWS + "test_a_member_that_no_row_needs_is_not_asked_and_reads_pending_and_accepted_tokens"
)
IN_STEP = (
    OF_ROWS + "test_after_any_interleaving_each_member_is_where_it_is_alone_behind_the_same_text"
)
STATES = OF_ROWS + "test_every_token_comes_with_the_hidden_states_at_its_own_position"
COMPOSED = OF_ROWS + "test_drafts_of_host_and_device_are_one_proposal_and_each_reads_all_of_it"
ANY_TEXT = OF_TEXTS + "test_whatever_members_propose_the_text_is_the_targets_and_all_follow_it"

DRAFTER_CHAIN_MUTANTS = (
    Mutant(
        name="chain-asks-for-rows-that-are-won",
        file=ROUNDS,
        old="min(depth, member.width) if winner is None and down is None else 0",
        new="min(depth, member.width) if down is None else 0",
        killed_by=FIRST_WINS,
        why="A later member drafts for a row that an earlier one has won, and takes it.",
    ),
    Mutant(
        name="chain-asks-for-more-than-a-member-drafts",
        file=ROUNDS,
        old="min(depth, member.width) if winner",
        new="depth if winner",
        killed_by=OF_ROWS + "test_each_member_drafts_at_most_what_it_was_loaded_with",
        why="A member is asked for as many drafts as the widest one makes.",
    ),
    Mutant(
        name="chain-asks-who-stood-down",
        file=ROUNDS,
        old="if winner is None and down is None else 0",
        new="if winner is None else 0",
        killed_by=OF_ROWS
        + "test_a_member_that_stood_down_is_asked_no_more_and_a_row_only_when_all_have",
        why="A member that has stood down for a row is asked for it again.",
    ),
    Mutant(
        name="chain-asks-everybody",
        file=ROUNDS,
        old="        if not any(own):\n            return\n        member, asked",
        new="        member, asked",
        killed_by=NOT_ASKED,
        why="Members that no row needs run for nothing.",
    ),
    Mutant(
        name="chain-shows-losers-nothing",
        file=ROUNDS,
        old="rest = [[] if my else ids for my, ids in zip(mine, kept, strict=True)]",
        new="rest = [[] for _ in kept]",
        killed_by=ANY_TEXT,
        why="A member that was asked misses what another won in the same round.",
    ),
    Mutant(
        name="chain-leaves-out-the-pending-token",
        file=ROUNDS,
        old="[[p, *ids] for p, ids in zip(pending, kept, strict=True)]",
        new="[[*ids] for _, ids in zip(pending, kept, strict=True)]",
        killed_by=NOT_ASKED,
        why="A member that was not asked never reads the token that the window began with.",
    ),
    Mutant(
        name="chain-shifts-the-losers-context",
        file=ROUNDS,
        old="self._read(number, rest, None if part is None else part[:, 1:])",
        new="self._read(number, rest, part)",
        killed_by=STATES,
        why="Tokens that others won come with the hidden states of the position before.",
    ),
    Mutant(
        name="chain-asks-twice-after-none",
        file=ROUNDS,
        old="begun = len(self._members) - 1 if self._asking else 0",
        new="begun = 0",
        killed_by=OF_ROWS + "test_after_none_the_host_draft_asks_nobody_twice",
        why="After a device draft that came to nothing the first members are asked again.",
    ),
    Mutant(
        name="chain-waits-for-drafts-that-are-no-ids",
        file=TURN,
        old="return [(*ids, self.vocab_size).index(self.vocab_size) for ids in known]",
        new="return [len(ids) for ids in known]",
        killed_by=ANY_TEXT,
        why="A window is expected to be as wide as a proposal whose ids the executor has cut.",
    ),
    Mutant(
        name="chain-loses-the-host-drafts",
        file=TURN,
        old="return mx.where(won, mx.array(rows, mx.int32), padded)",
        new="return padded",
        killed_by=COMPOSED,
        why="Rows that were won on the host show the device's ids.",
    ),
    Mutant(
        name="chain-forgets-the-device-lengths",
        file=TURN,
        old="return mx.where(won, counts, mx.minimum(lengths.astype(mx.int32), counts))",
        new="return counts",
        killed_by=COMPOSED,
        why="Rows that the last member drafted less for than it was asked count its padding.",
    ),
    Mutant(
        name="chain-resolves-with-the-wide-rows",
        file=TURN,
        old="for token in read[row * width : row * width + own]",
        new="for token in read[row * own : row * own + own]",
        killed_by=OF_ROWS + "test_a_host_draft_may_be_longer_than_those_on_the_device",
        why="The last member is shown ids of another row where the proposal is wider than its own.",
    ),
    Mutant(
        name="chain-declares-a-copy-as-drawn",
        file=TURN,
        old="mine = mx.array([winner == member for winner in self.winners])[:, None, None]",
        new="mine = mx.array([True for _ in self.winners])[:, None, None]",
        killed_by=OF_ROWS
        + "test_drafts_without_a_distribution_are_certain_beside_those_that_have_one",
        why="A certain draft is said to be drawn from another member's distribution.",
    ),
    Mutant(
        name="chain-taps-the-wrong-layer-before-the-norm",
        file=MEMBERS,
        old="return (layer_count - (wanted.context is ContextKind.PRE_NORM),)",
        new="return (layer_count - 1,)",
        killed_by=OF_ROWS + "test_members_of_one_kind_of_context_share_it_and_others_share_taps",
        why="States after the final norm are taken for those before it.",
    ),
    Mutant(
        name="chain-hands-out-anothers-layer",
        file=MEMBERS,
        old="None if layers is None else tuple(union.index(layer) for layer in layers)",
        new="None if layers is None else tuple(range(len(layers)))",
        killed_by=IN_STEP,
        why="A member is given the first layers of the union in place of its own.",
    ),
    Mutant(
        name="chain-lists-for-all",
        file=PROVIDER,
        old="sampling=sampling if lists else _WholeVocabulary(sampling),",
        new="sampling=sampling,",
        killed_by=OF_ROWS + "test_a_member_that_lists_no_ids_is_shown_no_listed_selection",
        why="A member that scores all ids is told to draw over another one's list.",
    ),
    Mutant(
        name="chain-takes-the-first-vocabulary",
        file=PROVIDER,
        old="return listed.pop() if len(listed) == 1 else None",
        new="return listed.pop() if listed else None",
        killed_by=OF_ROWS + "test_a_chain_declares_the_one_vocabulary_of_its_members",
        why="One member's list is declared for another that has a list of its own.",
    ),
    Mutant(
        name="chain-lets-the-deaf-in",
        file=PROVIDER,
        old="if not isinstance(group, SupportsConsume):",
        new="if group is None:",
        killed_by=OF_ROWS
        + "test_a_member_without_consume_is_refused_by_name_and_everything_closed",
        why="A member that cannot follow stands in a chain, and fails in the first round.",
    ),
    Mutant(
        name="chain-stores-rows-that-differ",
        file=ATTACHMENT,
        old="    if len(counts) != 1:\n",
        new="    if not counts:\n",
        killed_by=OF_ROWS + "test_members_that_read_different_numbers_of_tokens_make_no_checkpoint",
        why="A row whose members have come apart is kept for later requests.",
    ),
    Mutant(
        name="chain-leaves-loaded-members-open",
        file=CHAINED,
        old="        for each in loaded:\n            with suppress",
        new="        for each in loaded[:0]:\n            with suppress",
        killed_by=OF_LOADING + "test_a_member_that_does_not_load_or_follow_closes_the_others",
        why="Weights of the first members stay where a later one does not load.",
    ),
    Mutant(
        name="auto-prefers-a-folder-over-the-declared-head",
        file=AUTOMATIC,
        old="    if declared is not None:\n",
        new="    if declared is not None and target.folder is None:\n",
        killed_by=OF_AUTO + "test_what_the_folder_holds_decides",
        why="The head that the checkpoint declares is not the first choice.",
    ),
    Mutant(
        name="auto-tries-a-kind-twice",
        file=AUTOMATIC,
        old="        if choice.kind.name in tried:\n",
        new="        if choice.kind.name in tried and choice.path is None:\n",
        killed_by=OF_AUTO + "test_a_head_that_does_not_load_is_passed_over_with_one_line",
        why="A head that has failed is loaded again from the place where it was found.",
    ),
    Mutant(
        name="auto-says-nothing",
        file=AUTOMATIC,
        old="            _pass_over(choice.what, error)\n",
        new="            del error\n",
        killed_by=OF_AUTO + "test_a_head_that_does_not_load_is_passed_over_with_one_line",
        why="Nobody learns that the model's own head could not be used.",
    ),
)
