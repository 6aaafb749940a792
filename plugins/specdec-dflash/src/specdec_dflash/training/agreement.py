"""How far a drafter in training agrees with its target, as loading it will find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec.drafting.probe import FLOOR, probe_tokens
from specdec_dflash.basis import basis_of
from specdec_dflash.method import BlockDrafting, Drafting
from specdec_dflash.model import BlockModel, folded
from specdec_dflash.packagings import read_config
from specdec_dflash.probe import How, probe_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from specdec_dflash.config import BlockConfig
    from specdec_dflash.training.teacher import Teacher

__all__ = ["Agreement", "agreement_of"]

_WHAT = "the drafter in training"


@frozen
class Agreement:
    """What the probe at loading finds.

    Attributes:
        share: of the places at which both expect the same token, 0 to 1.
        best: the same under the reading that agrees best; loading decides by this one.
        places: how many were compared.
    """

    share: float
    best: float
    places: int

    @property
    def is_refused(self) -> bool:
        """Whether loading takes the drafter for another model's."""
        return self.best < FLOOR

    def __str__(self) -> str:
        """One line."""
        says = f"expects {self.share:.0%} of {self.places} tokens of a short text that the target "
        says += "expects"
        if self.is_refused:
            says += f"; loading refuses less than {FLOOR:.0%}; train on, or load with probe=false"
        return says


def agreement_of(
    teacher: Teacher, described: Mapping[str, Any], model: BlockModel
) -> Agreement | None:
    """Try a drafter as loading does, at the precision of its release.

    Args:
        teacher: its target.
        described: its ``config.json``.
        model: its network, which stays as it is.

    Returns:
        ``None`` where loading would not try it: the target's tokenizer cannot read the text, or
        the target cannot be run from outside.
    """
    tokens = probe_tokens(teacher.tokenizer, teacher.vocab_size)
    if tokens is None:
        return None
    config = read_config(_WHAT, described)
    with without_drawing():
        released = BlockModel(config, own_embedding=False, own_head=False)
    weights = {name: array.astype(mx.bfloat16) for name, array in parameters_of(model).items()}
    load_module(_WHAT, released, weights)
    basis = basis_of(teacher.target, _WHAT)

    def make(config: BlockConfig) -> BlockDrafting:
        tried = released if basis is None else folded(released, basis, config.taps)
        return BlockDrafting(config, tried, teacher.port, Drafting(), basis=basis)

    probe = probe_blocks(teacher.target, config, make, tokens)
    if probe is None:
        return None
    share = probe.agreement[How(0, config.from_anchor)]
    return Agreement(share, probe.agreement[probe.best], probe.positions)
