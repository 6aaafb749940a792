"""Records what the ``dflash`` package's MLX model drafts, as specdec-dflash's oracle.

Run it where specdec is installed; the package alone is added, since it pins what this needs not::

    python -m pip install --no-deps --target zlab dflash==0.1.0
    PYTHONPATH=zlab python tests/oracles/record_dflash.py

It writes ``zlab_dflash.json`` into ``plugins/specdec-dflash/tests/data``. With ``mlx-vlm`` behind
it the drafts of mlx-vlm's ``dflash2`` are written instead, into ``mlx_vlm_dflash2.json``; run that
where mlx-vlm 0.7.10 and ``specdec-core[testing]`` are installed. Everything
is computed in float32. ``CONVENTIONS`` is stored with the figures and says what each of them is.
pytest does not collect this file.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, trim_prompt_cache

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from block_synthetic import CASES, PROMPTS, Release, plan, target_model  # noqa: E402

DATA = ROOT / "plugins/specdec-dflash/tests/data"
KEPT = 3
CONVENTIONS = {
    "cases": "drafters of tests/block_synthetic.py by name, a list of runs each, one a prompt",
    "prompt": "number of the prompt in PROMPTS; the drafter has read all of its tokens",
    "target": "the target's greedy token after the prompt, then its choices in each verify window",
    "pending": "the block's first token, whose hidden states the drafter has not read",
    "depth": "drafts asked for; the block has one column more",
    "logits": f"per draft: the {KEPT} largest by id and value, the mean, the largest magnitude, "
    "and the sum of each logit times the cosine of its id; DFlash 2's before its selector",
    "accepted": "drafts taken as accepted, whatever the target chose; 'pending' of the next round "
    "is the target's choice behind them",
    "as_is": "what the package itself drafts there, only where that differs. It masks a window by "
    "places, but mlx-lm's ring is not in order after one position was put into a full one (a round "
    "that accepts nothing), so all columns but the first are denied wrong positions. The round's "
    "own figures are the package's with rings that answer in temporal order.",
}


def short(value: Any) -> float:
    """Seven digits: a float32 has no more that mean something here."""
    return float(f"{float(value):.7g}")


def summary(logits: Any) -> list[Any]:
    """One draft's logits [V] as numbers of JSON; see CONVENTIONS."""
    best = np.argsort(-logits, kind="stable")[:KEPT]
    wave = np.cos(np.arange(logits.size)) @ logits.astype(np.float64)
    figures = [*logits[best], logits.mean(dtype=np.float64), np.abs(logits).max(), wave]
    return [*best.tolist(), *map(short, figures)]


class Tapped:
    """A target whose layers keep what they gave, each under its number."""

    def __init__(self, layer: Any, number: int, found: dict[int, mx.array]) -> None:
        self._layer, self._number, self._found = layer, number, found

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        output: mx.array = self._layer(*args, **more)
        self._found[self._number] = output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class InOrder(RotatingKVCache):  # type: ignore[misc]  # mlx-lm ships no types
    """A ring that always answers in temporal order."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._update_concat(keys, values)


class Zlab:
    """The package's drafter."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.package: Any = importlib.import_module("dflash.model_mlx")
        # Nothing is downloaded.
        vars(self.package)["snapshot_download"] = lambda *_, **__: str(folder)
        self.draft = self.package.load_draft(str(folder)).bind(model)
        self.seen: list[mx.array] = []
        plain = self.draft.compute_logits

        def compute_logits(hidden: mx.array) -> mx.array:
            self.seen.append(plain(hidden))
            return self.seen[-1]

        self.draft.compute_logits = compute_logits
        self.mask = self.draft.config.mask_token_id

    def caches(self) -> list[list[Any]]:
        """The drafter's with rings in order, and as they are; see CONVENTIONS."""
        plain: list[Any] = self.draft.make_cache()
        rings = [isinstance(cache, RotatingKVCache) for cache in plain]
        ordered = self.draft.make_cache()
        for at, ring in enumerate(rings):
            ordered[at] = InOrder(plain[at].max_size, keep=0) if ring else ordered[at]
        return [ordered, plain] if any(rings) else [plain]

    def block(
        self, pending: int, depth: int, hidden: mx.array, caches: list[Any]
    ) -> tuple[list[int], Any]:
        """Drafts, and logits ``[depth, V]``."""
        ids = mx.array([[pending] + [self.mask] * depth])
        self.seen.clear()
        if isinstance(self.draft, self.package.DFlash2DraftModel):
            tokens, _, _ = self.draft.propose(ids, hidden, caches, 0.0, logits_start=1)
        else:
            tokens = mx.argmax(self.draft(ids, hidden, caches, logits_start=1), axis=-1)
        return np.array(tokens[0]).tolist(), np.array(self.seen[0][0])


class MlxVlm:
    """mlx-vlm's DFlash 2."""

    def __init__(self, folder: Path, model: Any) -> None:
        package = importlib.import_module("mlx_vlm.speculative.drafters.dflash2")
        config = package.ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
        self.draft = package.Model(config)
        weights = mx.load(str(folder / "model.safetensors"))
        self.draft.load_weights(list(self.draft.sanitize(weights).items()))
        self.draft.eval()
        self.draft.embed_tokens, self.draft.lm_head = model.model.embed_tokens, model.lm_head
        self.seen: list[mx.array] = []
        plain = self.draft._logits

        def logits(hidden: mx.array) -> mx.array:
            self.seen.append(plain(hidden))
            return self.seen[-1]

        self.draft._logits = logits

    def caches(self) -> list[list[Any]]:
        """The drafter's."""
        return [self.draft.make_cache()]

    def block(
        self, pending: int, depth: int, hidden: mx.array, caches: list[Any]
    ) -> tuple[list[int], Any]:
        """Drafts, and logits ``[depth, V]``."""
        self.seen.clear()
        tokens = self.draft.draft_block(
            pending, hidden, caches, depth + 1, lambda scores: mx.argmax(scores, axis=-1)
        )
        return np.array(tokens[0]).tolist(), np.array(self.seen[0][0])


def drafted(
    drafter: Any, pending: int, depth: int, hidden: mx.array, caches: list[list[Any]]
) -> dict[str, Any]:
    """One block."""
    told = [drafter.block(pending, depth, hidden, each) for each in caches]
    said = [{"drafts": d, "logits": [summary(each) for each in logits]} for d, logits in told]
    found = {"pending": pending, "depth": depth, **said[0]}
    if len(told) > 1 and np.abs(told[0][1] - told[1][1]).max() > 1e-4:
        found["as_is"] = said[1]
    return found


def run(drafter: Any, release: Release, number: int) -> dict[str, Any]:
    """One prompt's rounds."""
    model, found = target_model(), dict[int, mx.array]()
    taps = release.config["dflash_config"]["target_layer_ids"]
    layers = list(model.model.layers)
    model.model.layers = [Tapped(layer, at, found) for at, layer in enumerate(layers)]
    try:
        caches, own = make_prompt_cache(model), drafter.caches()
        logits = model(mx.array([list(PROMPTS[number])]), cache=caches)
        hidden = mx.concatenate([found[tap] for tap in taps], axis=-1)
        choices = [[int(np.array(mx.argmax(logits[0, -1])))]]
        pending, rounds = choices[0][0], []
        for depth, accepted in plan(release, number):
            rounds.append(drafted(drafter, pending, depth, hidden, own) | {"accepted": accepted})
            logits = model(mx.array([[pending, *rounds[-1]["drafts"]]]), cache=caches)
            hidden = mx.concatenate([found[tap] for tap in taps], axis=-1)[:, : accepted + 1]
            trim_prompt_cache(caches, depth - accepted)
            choices.append(np.array(mx.argmax(logits[0], axis=-1)).tolist())
            pending = choices[-1][accepted]
    finally:
        model.model.layers = layers
    return {"prompt": number, "target": choices, "rounds": rounds}


def main() -> None:
    """Record all drafters."""
    vlm = "mlx-vlm" in sys.argv[1:]
    names = [n for n, r in CASES.items() if not vlm or r.kind == "dflash2"]
    if vlm:  # it takes no window into account where a block sees itself both ways
        names = [name for name in names if CASES[name].config.get("is_causal") is False]
    cases = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            CASES[name].write(Path(folder), prefix="")  # the package takes no other names
            drafter = (MlxVlm if vlm else Zlab)(Path(folder), target_model())
            cases[name] = [run(drafter, CASES[name], at) for at in range(len(PROMPTS))]
    package = "mlx-vlm" if vlm else "dflash"
    made_by = {package: "0.1.0" if not vlm else version(package), "mlx": version("mlx")}
    written = {"made_by": made_by, "conventions": CONVENTIONS, "cases": cases}
    file = DATA / ("mlx_vlm_dflash2.json" if vlm else "zlab_dflash.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written, separators=(",", ":")) + "\n")
    print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
