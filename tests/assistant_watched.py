"""Every round of an assistant's groups, held to a float64 assistant over mlx-lm's own caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from assistant_targets import bound, model_of
from attrs import define, field
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from oracles.assistant_plain import PlainAssistant

from specdec_assistant.rows import AssistantGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

__all__ = ["Watched", "borrowed"]

_CACHES = (("full_attention", KVCache), ("sliding_attention", RotatingKVCache))


def borrowed(name: str, text: Sequence[int]) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """The keys and values of mlx-lm's caches after a text, and its last hidden state."""
    model = model_of(name)
    caches = make_prompt_cache(model)
    hidden = model.model(mx.array([list(text)]), cache=caches)
    kv = {}
    for kind, wanted in _CACHES:
        held = [cache for cache in caches if type(cache) is wanted]
        if held:
            keys, values = held[-1].keys, held[-1].values
            kv[kind] = (np.array(keys[0, :, : len(text)]), np.array(values[0, :, : len(text)]))
    return kv, np.array(hidden[0, -1], np.float64)


@define
class Watched:
    """What groups drafted: of each row its length, its pending token and its drafts."""

    rows: list[tuple[int, int, list[int]]] = field(factory=list)

    @classmethod
    def start(cls, monkeypatch: pytest.MonkeyPatch) -> Watched:
        """Watch from now on; previews count, too."""
        watched, plain = cls(), AssistantGroup._drafted

        def drafted(group: AssistantGroup, asked: Any) -> Any:
            found = plain(group, asked)
            ids: Any = found.tokens.tolist()
            told = zip(group._tokens, asked.pending, asked.depths, ids, strict=True)
            watched.rows += [(at, token, row[:depth]) for at, token, depth, row in told if depth]
            return found

        monkeypatch.setattr(AssistantGroup, "_drafted", drafted)
        return watched

    def check(
        self,
        name: str,
        release: tuple[dict[str, Any], Mapping[str, Any]],
        texts: Sequence[Sequence[int]],
        every: int,
    ) -> int:
        """Compare some of the drafts; returns how many.

        Args:
            name: of the target.
            release: the assistant's config and tensors.
            texts: what the rows have read and written; a row is one of those that go on like it.
            every: of so many drafts one.
        """
        oracle, port = PlainAssistant.of(*release), bound(name).hidden_taps
        assert port is not None
        table = np.array(port.embed(mx.arange(bound(name).vocab_size)[None])[0], np.float64)
        checked = self.rows[::every]
        for length, pending, ids in checked:
            likely = {
                tuple(text[:length])
                for text in texts
                if [pending] == list(text[length : length + 1])
            }
            wanted = []
            for text in likely:
                kv, hidden = borrowed(name, text)
                wanted.append(oracle.draft(kv, hidden, table[pending], table, len(ids))[0])
            assert ids in wanted
        return len(checked)
