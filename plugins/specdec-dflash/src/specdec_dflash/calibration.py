"""From a run, the confidence that each draft of a block must have to be worth a verification.

A confidence head is trained to tell the probability that a slot is accepted, and is off by more
and more along the block. What it said and what became of it, over a run of the drafter with all of
its drafts, gives each slot a threshold under which the share of accepted drafts is too low.

Shapes: d slots of a block.
"""

from __future__ import annotations

import json
import math
import os
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, OptionError, one_line
from specdec.plugins.headers import read_object
from specdec.sampling import SamplingOptions
from specdec.verify import Request, VerifyGroup
from specdec_dflash.confidence import heard
from specdec_dflash.dspark_config import CONFIG_NAME, read_dspark
from specdec_dflash.files import read_files
from specdec_dflash.loading import CALIBRATED
from specdec_dflash.packagings import read_config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from specdec import LoadedDrafter
    from specdec_dflash.confidence import ConfidenceHead

__all__ = ["LEAST_SAMPLES", "calibrate", "collect", "store"]

LEAST_SAMPLES: Final = 50
"""Drafts of a slot under which nothing is said of it."""

Pairs = list[list[tuple[float, bool]]]
"""Per slot, how sure the drafter was, and whether the draft was accepted."""


def calibrate(
    pairs: Sequence[Sequence[tuple[float, bool]]],
    target: float,
    least_samples: int = LEAST_SAMPLES,
) -> tuple[float, ...]:
    """The thresholds of a run.

    Of the confidences that a slot has seen, its threshold is the smallest τ at which
    ``(accepted + 1) / (drafts + 2)`` over the drafts of confidence τ or more reaches the target.
    The first slot is always drafted, so its threshold is 0; so is that of a slot with too few
    drafts. A slot that reaches the target nowhere gets 1.

    Args:
        pairs: per slot, confidence and whether the draft was accepted; of a confidence that is no
            number nothing is learnt.
        target: share of accepted drafts that is wanted, above 0 and at most 1.
        least_samples: drafts of a slot that are enough.

    Returns:
        d thresholds of 0 to 1.

    Raises:
        OptionError: a target or a number that makes no sense.
    """
    if not isinstance(target, int | float) or not 0 < target <= 1:
        raise OptionError(f"target is {target!r}; give a share above 0, at most 1, such as 0.8")
    if not isinstance(least_samples, int) or least_samples < 1:
        raise OptionError(f"least_samples is {least_samples!r}; give 1 or more")
    found = [_threshold(slot, target, least_samples) for slot in pairs[1:]]
    return (0.0, *found) if pairs else ()


def _threshold(pairs: Sequence[tuple[float, bool]], target: float, least: int) -> float:
    known = sorted((pair for pair in pairs if math.isfinite(pair[0])), reverse=True)
    if len(known) < least:
        return 0.0
    reached = 1.0
    hits = accumulate(accepted for _, accepted in known)
    for count, ((confidence, _), accepted) in enumerate(zip(known, hits, strict=True), 1):
        # Equal confidences stand or fall together: only the last of them says so.
        last = count == len(known) or known[count][0] < confidence
        if last and (accepted + 1) / (count + 2) >= target:
            reached = confidence
    return reached


def collect(
    drafter: LoadedDrafter,
    prompts: Iterable[Sequence[int]],
    *,
    end_tokens: Collection[int] = (),
    max_tokens: int = 256,
) -> Pairs:
    """Let a drafter draft for greedy texts, and note how sure it was and what was accepted.

    A draft counts as accepted where all before it in its block were, too. What stands behind the
    end of a text counts for nothing.

    Args:
        drafter: loaded with ``confidence="measure"``, so that no draft is cut.
        prompts: token ids.
        end_tokens: that end a text.
        max_tokens: of each text.

    Returns:
        Per slot of a block, its pairs.

    Raises:
        ArtifactError: the drafter fails, or tells no confidence.
        OptionError: a number that makes no sense.
    """
    width = drafter.max_draft_tokens or drafter.num_draft_tokens  # every slot of a block
    pairs: Pairs = [[] for _ in range(width)]
    group = VerifyGroup(drafter.target, drafter.provider, drafter=drafter.kind)
    try:
        with heard(_head_of(drafter)) as told:
            for prompt in prompts:
                request = Request(
                    prompt=prompt,
                    max_tokens=max_tokens,
                    sampling=SamplingOptions(),
                    end_tokens=end_tokens,
                    num_draft_tokens=width,
                )
                _follow(group, request, told, pairs)
    finally:
        group.close()
    return pairs


def _follow(group: VerifyGroup, request: Request, told: list[Any], pairs: Pairs) -> None:
    """One text, round by round."""
    [row] = group.admit([request])
    stats = row.stats
    while row.finish is None:
        told.clear()
        drafted, accepted = stats.drafted, stats.accepted
        with group.round() as verified:
            for _ in verified.deliver(0):
                pass
        drafted, accepted = stats.drafted - drafted, stats.accepted - accepted
        if stats.last_draft_error is not None:
            raise ArtifactError(f"the drafter failed ({stats.last_draft_error})")
        if not drafted:
            continue
        if not told:
            raise _untold()
        sure: list[float] = told[-1][0].tolist()
        for slot in range(drafted):
            pairs[slot].append((sure[slot], slot < accepted))
    if row.error is not None:
        raise row.error


def _head_of(drafter: LoadedDrafter) -> ConfidenceHead:
    grouped: Any = getattr(drafter.provider, "grouped", None)
    method = grouped.method_for(drafter.target) if hasattr(grouped, "method_for") else None
    head: ConfidenceHead | None = getattr(method, "confidence_head", None)
    if head is None:
        raise _untold()
    return head


def _untold() -> ArtifactError:
    return ArtifactError(
        "the drafter told no confidence; load one that has a confidence head, and with "
        'confidence="measure"'
    )


def store(folder: Path, thresholds: Sequence[float], target: float, samples: int) -> Path:
    """Leave thresholds in a drafter's config, which is replaced at once, never half written.

    As many are written as its loader wants: a ``dspark.json`` has one for each column, and the
    first column drafts nothing in some; in a ``config.json``, a draft that a reading other than
    its own adds has none, and is never cut.

    Args:
        folder: of the drafter.
        thresholds: one for each draft of a block.
        target: that they were found for.
        samples: drafts that they were found from.

    Returns:
        The file that was changed.

    Raises:
        ArtifactError: it cannot be read or written.
    """
    own = folder / CONFIG_NAME
    file = own if own.exists() else folder / "config.json"
    described = dict(read_object(file))
    if file == own:
        columns = read_dspark(read_files(folder, CONFIG_NAME)).gamma
        each = [0.0] * (columns - len(thresholds)) + list(thresholds)
        sts = {"thresholds": each, "target": target, "samples": samples}
        described["config"] = {**described["config"], "sts": sts}
    else:
        slots = read_config(str(file), described).longest
        described[CALIBRATED] = [*thresholds, *[0.0] * slots][:slots]
    new = file.with_name(f"{file.name}.new")
    try:
        new.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        os.replace(new, file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ArtifactError(f"{file} cannot be written ({one_line(error)})") from error
    return file
