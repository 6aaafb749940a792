"""The conformance kit over the kinds of block drafter, and over every way to use a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import hypothesis

from specdec.testing import DraftRowContract, PluginContract
from specdec_dflash.config import Convolutions, Markov, Rope, Selector, Style
from specdec_dflash.method import Drafting
from specdec_dflash.tiny import tiny_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting import ProjectedProvider

# The kinds share their rows: the first class looks closely, the others at what differs.
FEWER = hypothesis.settings(
    max_examples=4, stateful_step_count=10, deadline=None, derandomize=True, database=None
)

DFLASH2: Final[dict[str, Any]] = {
    "windows": (None, 5),
    "causal": (False, True),
    "convolutions": Convolutions(kernel_size=3, group_size=8),
    "selector": Selector(rank=4, top_k=3),
}
DSPARK: Final[dict[str, Any]] = {
    "style": Style.GEMMA,
    "block_size": 4,
    "from_anchor": True,
    "windows": (6, None),
    "markov": Markov(rank=8, kind="rnn"),
    "confidence": True,
    "confidence_of_markov": True,
    "own_embedding": True,
    "ids": (0, 2, 3, 5, 6),
}
WHOLE = Drafting(whole_block=True)
# Rows propose anything from nothing to the whole block.
CUT = Drafting(thresholds=(0.1, 0.2, 0.3, 0.4))


class TestBlockRows(DraftRowContract):
    """DFlash: all slots at once, over the whole text, with the target's embedding and head."""

    def make_provider(self) -> ProjectedProvider:
        return tiny_block()

    def make_other_providers(self) -> Sequence[ProjectedProvider]:
        return [
            tiny_block(seed=1),
            tiny_block(windows=(None, 5)),
            tiny_block(taps=(1, 0)),
            tiny_block(rope=Rope(500.0)),
            tiny_block(eps=1e-2),
            tiny_block(shared_values=True),
        ]


class TestRowsOfDflash2(DraftRowContract):
    """Windows, a causal layer, convolutions, a walk; a block is as wide as it was trained."""

    settings = FEWER

    def make_provider(self) -> ProjectedProvider:
        return tiny_block(drafting=WHOLE, **DFLASH2)

    def make_other_provider(self) -> ProjectedProvider:
        return tiny_block(drafting=WHOLE, **{**DFLASH2, "windows": (None, 6)})


class TestRowsThatConfidenceCuts(DraftRowContract):
    """DSpark: the anchor drafts too, a recurrent head over listed ids, and doubtful drafts end."""

    settings = FEWER

    def make_provider(self) -> ProjectedProvider:
        return tiny_block(drafting=CUT, **DSPARK)

    def make_other_provider(self) -> ProjectedProvider:
        return tiny_block(seed=1, drafting=CUT, **DSPARK)


class TestBlockPlugin(PluginContract):
    distribution = "specdec-dflash"
