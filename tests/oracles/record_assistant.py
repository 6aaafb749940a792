"""Records what transformers and mlx-vlm draft, as the oracles of specdec-assistant.

Run it where mlx-vlm 0.7.10 is installed, and transformers 5.24 with torch::

    python tests/oracles/record_assistant.py mlx-vlm
    python tests/oracles/record_assistant.py transformers

It writes ``mlx_vlm.npz`` and ``transformers.npz`` into ``plugins/specdec-assistant/tests/data``.
Everything is computed in float32. By case, row and layout of the sliding layer's keys there are
``tokens`` [steps], ``logits`` [steps, V] (``-inf`` where nothing was scored) and ``hidden``
[steps, H]. Layouts: ``held``, in which the package sees the config's window (all positions for
mlx-vlm, the window's for transformers), and ``other``, in which it does not. pytest does not
collect this file.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from assistant_synthetic import CASES, LENGTHS, STEPS, WINDOW, Loan, embedding  # noqa: E402

DATA = ROOT / "plugins/specdec-assistant/tests/data"
Chain = tuple[list[int], Any, Any]


class Transformers:
    """The official model, driven as SinglePositionMultiTokenCandidateGenerator drives it."""

    name = "transformers"
    held, other = WINDOW, None

    def __init__(self, folder: Path) -> None:
        self.torch: Any = importlib.import_module("torch")
        package = importlib.import_module("transformers")
        self.model = package.Gemma4AssistantForCausalLM.from_pretrained(
            folder, dtype=self.torch.float32
        ).eval()

    def chain(self, loan: Loan, sliding: int | None) -> Chain:
        """A round's drafts; ``sliding`` columns of the sliding layer's keys, or all."""
        tensor, cat = self.torch.tensor, self.torch.cat
        shared = {
            kind: tuple(tensor(a)[None] for a in kv) for kind, kv in cut(loan, sliding).items()
        }
        position = tensor([[loan.kv["full_attention"][0].shape[1] - 1]])
        hidden, table = tensor(loan.hidden)[None, None], tensor(embedding())
        token, tokens, logits, chained = loan.pending, [], [], []
        for _ in range(STEPS):
            with self.torch.no_grad():
                given = cat([table[token][None, None], hidden], dim=-1)
                out = self.model(
                    inputs_embeds=given, position_ids=position, shared_kv_states=shared
                )
            hidden, scores = out.last_hidden_state, out.logits[0, 0].numpy()
            token = int(scores.argmax())
            tokens.append(token)
            logits.append(scores)
            chained.append(hidden[0, 0].numpy())
        return tokens, np.array(logits), np.array(chained)


class MlxVlm:
    """mlx-vlm's drafter, driven as its own round does."""

    name = "mlx-vlm"
    held, other = None, WINDOW

    def __init__(self, folder: Path) -> None:
        self.mx: Any = importlib.import_module("mlx.core")
        package = importlib.import_module("mlx_vlm.speculative.drafters.gemma4_assistant")
        config = package.ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
        self.model = package.Model(config)
        weights = self.model.sanitize(self.mx.load(str(folder / "model.safetensors")))
        self.model.load_weights(list(weights.items()))
        self.model.eval()

    def chain(self, loan: Loan, sliding: int | None) -> Chain:
        """A round's drafts; ``sliding`` columns of the sliding layer's keys, or all."""
        mx, seen = self.mx, []
        table = mx.array(embedding())

        class Target:
            embed_tokens = staticmethod(lambda ids: table[ids])

        self.model.bind(Target())
        plain = type(self.model)._forward_hidden

        def forward(*args: Any, **more: Any) -> Any:
            hidden, normed = plain(self.model, *args, **more)
            seen.append((np.array(hidden[0, 0]), np.array(self.model._lm_head_fn(normed)[0, 0])))
            return hidden, normed

        self.model._forward_hidden = forward
        shared = {
            kind: tuple(mx.array(a)[None] for a in kv) for kind, kv in cut(loan, sliding).items()
        }
        count = loan.kv["full_attention"][0].shape[1]
        self.model.set_shared_kv(shared, count, position=count - 1, kv_valid_len=count)
        tokens = self.model.draft_block(
            loan.pending,
            mx.array(loan.hidden)[None, None],
            None,
            STEPS + 1,
            lambda scores: mx.argmax(scores, axis=-1),
        )
        del self.model._forward_hidden
        told = np.array(tokens[0]).tolist()
        return told, np.array([s for _, s in seen]), np.array([h for h, _ in seen])


def cut(loan: Loan, columns: int | None) -> dict[str, tuple[Any, Any]]:
    """A loan whose sliding keys have so many columns at most."""
    keys, values = loan.kv["sliding_attention"]
    if columns is not None:
        keys, values = keys[:, -columns:], values[:, -columns:]
    return {**loan.kv, "sliding_attention": (keys, values)}


def main() -> None:
    """Record all cases."""
    kind = Transformers if "transformers" in sys.argv[1:] else MlxVlm
    found: dict[str, Any] = {"made_by": f"{kind.name} {version(kind.name)}"}
    for case, release in CASES.items():
        if kind is MlxVlm and case == "sparse-untied":
            continue  # it looks candidates up in the embedding, tied or not
        with tempfile.TemporaryDirectory() as folder:
            drafter = kind(release.write(Path(folder)))
        for length in LENGTHS:
            for layout, columns in (("held", kind.held), ("other", kind.other)):
                tokens, logits, hidden = drafter.chain(release.loan(length), columns)
                if release.sparse:  # what was not scored is filled with one below the least
                    least = logits.min(axis=-1, keepdims=True)
                    logits = np.where(logits == least, -np.inf, logits)
                at = f"{case}.{length}.{layout}"
                found |= {f"{at}.tokens": tokens, f"{at}.logits": logits, f"{at}.hidden": hidden}
    file = DATA / f"{kind.name.replace('-', '_')}.npz"
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **found)
    print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
