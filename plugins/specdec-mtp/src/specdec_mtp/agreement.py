"""What a probe says about a head: how it is to be read, or that it is not this target's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from specdec.drafting.probe import probe_tokens, used_reading
from specdec_mtp.find import HeadKind
from specdec_mtp.norms import NORM_NAMES, shifted
from specdec_mtp.probe import How, probe_head, set_norms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import mlx.core as mx

    from specdec.drafting.probe import Probe
    from specdec.plugins import LoadRequest
    from specdec_mtp.heads import HeadModule
    from specdec_mtp.norms import NormEvidence

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
    chosen = _chosen(f"the {kind} head", probe, wanted)
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


def _chosen(what: str, probe: Probe[How], wanted: Wanted) -> How:
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
    return used_reading(what, probe, wanted.how, open_to)
