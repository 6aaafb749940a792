"""What a provider says of itself before a row is opened."""

from __future__ import annotations

from functools import partial

from attrs import evolve

from specdec.contract import (
    ContextKind,
    DeclaresTaps,
    DeclaresVocabulary,
    PrefillMode,
    validate_provider,
)
from specdec.errors import TargetLacksError
from specdec.sampling import RowSamplers
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Turn
from specdec.testing.target import PORTS


@check()
def provider_is_complete(kit: Kit) -> None:
    """A provider has every member of the contract, of the declared type."""
    provider = kit.provider
    validate_provider(provider, type(provider).__name__)
    assert isinstance(provider.id, str), f"id is {provider.id!r}; it must be a name for people"
    assert provider.id, "id is empty; name the drafter for people"
    assert isinstance(provider.weight_bytes, int), "weight_bytes must be an int"
    assert provider.weight_bytes >= 0, f"weight_bytes is {provider.weight_bytes}"
    assert isinstance(kit.grouped.supports_adapters, bool), "supports_adapters must be a bool"


@check()
def groups_say_what_their_provider_says(kit: Kit) -> None:
    """Both kinds of group carry the provider's namespace, taps and kind of context."""
    with kit.prefill_group([None]) as prefill, kit.open([kit.cold((0,))]) as rows:
        PrefillMode(prefill.prefill_mode)
        for group in (prefill, rows.group):
            assert group.namespace == kit.grouped.checkpoint_namespace
            assert tuple(group.tap_layers) == kit.taps
            assert ContextKind(group.context) is kit.kind
            assert group.row_count == 1


@check()
def namespace_is_stable(kit: Kit) -> None:
    """Two loads of one artifact have one namespace, known before a row is opened."""
    namespace = kit.grouped.checkpoint_namespace
    assert isinstance(namespace, str), "checkpoint_namespace must be a string"
    assert namespace.strip(), "checkpoint_namespace is empty; name the artifact and its settings"
    again = kit.make_provider()
    try:
        assert again is not kit.provider, "make_provider() returned the same object twice"
        assert again.grouped.checkpoint_namespace == namespace, (
            "loading the same artifact twice gives two namespaces, so stored state is never found"
        )
    finally:
        again.close()


@check()
def namespace_tells_artifacts_apart(kit: Kit) -> None:
    """Another artifact, or a setting that shapes the state, has another namespace."""
    own = kit.grouped.checkpoint_namespace
    others = kit.other_namespaces()
    assert others, "make_other_providers() gave none"
    assert own not in others, (
        "another artifact or setting has the same checkpoint_namespace, so its stored state "
        "would be restored into this drafter; put what differs into the namespace"
    )
    assert len(set(others)) == len(others), f"two of the others share a namespace: {others}"


@check()
def taps_are_declared_once(kit: Kit) -> None:
    """Tapped layers are unique, within the target, and the same wherever they are asked."""
    declared: tuple[int, ...] = ()
    if isinstance(kit.grouped, DeclaresTaps):
        declared = tuple(kit.grouped.target_tap_layers(kit.target))
        assert declared == tuple(kit.grouped.target_tap_layers(kit.target))
    assert declared == kit.taps, (
        f"the provider declares taps {declared}, but its groups say {kit.taps}; implement "
        "target_tap_layers()"
    )
    assert len(set(declared)) == len(declared), f"a layer is tapped twice: {declared}"
    assert kit.target.can_tap(declared), f"the target has no such layers: {declared}"
    assert (kit.kind is ContextKind.TAPS) == bool(declared)


@check()
def draft_vocabulary_ascends(kit: Kit) -> None:
    """A declared draft vocabulary has ascending ids of the target."""
    if not isinstance(kit.grouped, DeclaresVocabulary):
        return
    ids = kit.grouped.draft_vocabulary(kit.target)
    if ids is None:
        return
    assert list(ids) == sorted(set(ids)), "draft_vocabulary() must ascend without repetition"
    assert all(0 <= token < kit.vocab_size for token in ids), "an id outside the vocabulary"


@check()
def missing_port_is_refused_at_once(kit: Kit) -> None:
    """A target without a port is refused as such when a group is opened, or never missed."""
    cold = kit.cold((0, 1))
    broken = evolve(cold.checkpoint, namespace="another drafter's")
    for port in PORTS:
        target = kit.target.without(port)
        try:
            lacking = kit.on(target)
        except TargetLacksError:
            # What is missing is said before anything of a checkpoint is looked at.
            must_raise(
                TargetLacksError,
                partial(kit.grouped.open_prefill, target=target, checkpoints=[broken]),
                f"open_prefill() on a target without {port}, with a broken checkpoint",
            )
            must_raise(
                TargetLacksError,
                partial(
                    kit.grouped.open, target=target, sampling=RowSamplers(), checkpoints=[broken]
                ),
                f"open() on a target without {port}, with a broken checkpoint",
            )
            continue
        turn = Turn((1,), (kit.max_depth,), (0,))
        with lacking.open([lacking.cold((0, 1))]) as rows:
            rows.draft(turn.pending, turn.depths)
            rows.commit(turn.accepted)
