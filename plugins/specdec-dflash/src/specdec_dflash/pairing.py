"""Whether a block drafter belongs to a target, as far as its config tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import ArtifactError

if TYPE_CHECKING:
    from specdec.contract import HiddenTaps
    from specdec_dflash.config import BlockConfig

__all__ = ["check_pairing", "refused"]


def refused(what: str, key: str, own: object, target: object) -> ArtifactError:
    """The error for a drafter and a target that differ.

    Args:
        what: names the drafter.
        key: of its config.
        own: its value there.
        target: what the target has.
    """
    return ArtifactError(
        f"{what}: {key} is {own}, but the target has {target}; give the drafter of this target"
    )


def check_pairing(what: str, config: BlockConfig, port: HiddenTaps, vocab_size: int) -> None:
    """Check sizes that drafter and target must share.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        port: the target's.
        vocab_size: V of the target.

    Raises:
        ArtifactError: they differ; names the key and both values.
    """
    if config.hidden_size != port.hidden_size:
        raise refused(what, "hidden_size", config.hidden_size, port.hidden_size)
    if config.vocab_size != vocab_size:
        raise refused(what, "vocab_size", config.vocab_size, vocab_size)
    if config.target_layers is not None and config.target_layers != port.layer_count:
        raise refused(what, "num_target_layers", config.target_layers, f"{port.layer_count} layers")
    taps = f"[{', '.join(map(str, config.taps))}]"
    if len(set(config.taps)) != len(config.taps):
        raise ArtifactError(
            f"{what}: target_layer_ids is {taps}, with a layer twice; give an intact release"
        )
    if max(config.taps) > port.layer_count:
        raise refused(what, "target_layer_ids", taps, f"layers 0 to {port.layer_count}")
    if config.mask_token >= vocab_size:
        raise refused(what, "mask_token_id", config.mask_token, f"ids 0 to {vocab_size - 1}")
    if config.heads % config.kv_heads:
        raise ArtifactError(
            f"{what}: num_attention_heads is {config.heads}, which num_key_value_heads "
            f"{config.kv_heads} does not divide; give an intact release"
        )
