"""What a probe says about a head: how it is to be read, or that it is not this target's."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.drafting.probe import FLOOR, MARGIN, probe_tokens
from specdec.errors import ArtifactError, SpecdecDrafterWarning
from specdec_mtp.find import HeadKind
from specdec_mtp.norms import NORM_NAMES, shifted
from specdec_mtp.probe import How, probe_head, set_norms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import mlx.core as mx

    from specdec.plugins import LoadRequest
    from specdec_mtp.heads import HeadModule
    from specdec_mtp.norms import NormEvidence
    from specdec_mtp.probe import Probe

__all__ = ["Wanted", "agreed"]


@frozen(kw_only=True)
class Wanted:
    """How a head is to be read, as far as that is known before it is tried.

    Attributes:
        how: the reading.
        fixed: names of the options that the user has given: ``"hidden"``, ``"norm_shift"``.
        evidence: of its norm weights.
    """

    how: How
    fixed: Collection[str]
    evidence: NormEvidence


def agreed(
    request: LoadRequest,
    kind: HeadKind,
    head: HeadModule,
    stored: Mapping[str, mx.array],
    wanted: Wanted,
) -> How:
    """Try a head, and say how it is to be read.

    Args:
        request: knows the target and its tokenizer.
        kind: of the head.
        head: with the norm weights that ``wanted`` says; changed to those of the answer.
        stored: its tensors as they are in the file, by name; the norm weights are looked at.
        wanted: how it would be read.

    Raises:
        ArtifactError: it agrees with the target under no reading.

    Warns:
        SpecdecDrafterWarning: another reading agrees far better. It is used, unless options say
            otherwise.
    """
    tokens = probe_tokens(request.tokenizer, request.target.vocab_size)
    if tokens is None:
        return wanted.how
    norms = _readings(kind, stored, wanted.evidence)
    probe = probe_head(request.target, head, tokens, norms)
    if probe is None:
        return wanted.how
    if probe.agreement[probe.best] < FLOOR:
        raise ArtifactError(
            f"the {kind} head expects {_percent(probe, probe.best)} of {probe.positions} tokens of "
            "a short text that its target expects, however it is read: it is another model's; "
            "give the head of this target, or probe=false to draft with it all the same"
        )
    chosen = _chosen(probe, wanted)
    set_norms(head, norms[chosen.shift])
    return chosen


def _readings(
    kind: HeadKind, stored: Mapping[str, mx.array], evidence: NormEvidence
) -> dict[str, dict[str, mx.array]]:
    """Norm weights of the head under each reading of the file."""
    if kind is HeadKind.NEXTN:
        return {"never": {}}  # as they are
    norms = {name: stored[name] for name in NORM_NAMES}
    found = {
        "never": norms,
        "once": shifted(norms, 1.0),
        "twice": shifted(norms, 2.0),
    }
    if evidence.mixed:
        found["in part"] = shifted(norms, 1.0, evidence.mixed)
    return found


def _chosen(probe: Probe, wanted: Wanted) -> How:
    """The wanted reading, or one that agrees far better."""
    open_to = [
        how
        for how in probe.agreement
        if not ("hidden" in wanted.fixed and how.context is not wanted.how.context)
        and not ("norm_shift" in wanted.fixed and how.shift != wanted.how.shift)
    ]
    if not wanted.evidence.certain:  # then what was read in the file is a guess
        alike = [how for how in open_to if how.context is wanted.how.context]
        guess = max(alike, key=lambda how: probe.agreement[how])
        wanted = Wanted(how=guess, fixed=wanted.fixed, evidence=wanted.evidence)
    better = max(open_to, key=lambda how: probe.agreement[how])
    far = probe.agreement[probe.best] - probe.agreement[wanted.how] > MARGIN
    if not far:
        return wanted.how
    used = better if probe.agreement[better] - probe.agreement[wanted.how] > MARGIN else wanted.how
    says = f"the head agrees with its target at {_percent(probe, wanted.how)} with {wanted.how}, "
    says += f"and at {_percent(probe, probe.best)} with {probe.best}; "
    if used == wanted.how:
        says += "the former is used, as asked"
    else:
        says += "the latter is used" if used == probe.best else f"{used} is used, as far as asked"
    warnings.warn(says, SpecdecDrafterWarning, stacklevel=2)
    return used


def _percent(probe: Probe, how: How) -> str:
    return f"{100 * probe.agreement[how]:.0f} %"
