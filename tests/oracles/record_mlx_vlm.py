"""Records what mlx-vlm's ``qwen3_5_mtp`` and ``glm_moe_dsa_mtp`` draft, as specdec-mtp's oracle.

Run it where mlx-vlm is installed; specdec is not needed there::

    python3.11 -m venv vlm
    vlm/bin/pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 mlx-vlm==0.7.10 attrs
    vlm/bin/python tests/oracles/record_mlx_vlm.py

It writes ``mlx_vlm_qwen3_5.json`` and ``mlx_vlm_glm.json`` into ``plugins/specdec-mtp/tests/data``.
Everything is computed in float32: target and head are cast after loading. ``CONVENTIONS`` below is
stored with the figures and says what each of them is. pytest does not collect this file.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mtp_synthetic import split_release, write_glm, write_qwen3_5  # noqa: E402

DEMO = ROOT / "plugins/specdec-demo/src/specdec_demo"
DATA = ROOT / "plugins/specdec-mtp/tests/data"
DEPTH = 4
ACCEPTED = 1
TOKENS = 33  # the first token and those of the free run
KEPT = 16  # logits kept of a large vocabulary
CONVENTIONS = {
    "prompt": "ids; 'first' is the target's greedy token after them",
    "hidden": "the head is fed the target's hidden states AFTER its final norm",
    "pairs": "head position p: embedding of token p + 1, hidden of position p; rope position p",
    "prefill": "the head reads every pair of the prompt; the last one has 'first' as its token",
    "chain": "the head's output after its own last norm (mtp.norm or shared_head.norm) gives the "
    "logits, and is the next step's hidden",
    "drafts": f"{DEPTH} greedy drafts that follow 'first'; 'logits' has one entry a draft",
    "window": "'first' and the drafts, as the target verified them; 'greedy' is its own choice",
    "accepted": "drafts taken as accepted, whatever the target chose; 'pending' follows the last",
    "next.kept": "drafts that follow 'pending' as mlx-vlm itself goes on: the head's entry of an "
    "accepted draft stays, though its hidden was the head's own",
    "next.reread": "the same after every drafted entry was trimmed, and mlx-vlm's own "
    "accept_verified_tokens read the accepted drafts with the target's hidden states",
    "free_run": "mlx-vlm's own greedy loop (drafted entries kept): tokens, drafts accepted a round",
    "logits": f"'all', or the {KEPT} largest by id and value, with mean and largest magnitude",
}


def prompts_of_the_demo() -> list[list[int]]:
    """Starts of the first prompts of different kinds, of several lengths."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer
    encoder = tokenizer.from_file(str(DEMO / "models/demo-qwen3_5/tokenizer.json"))
    lines = (DEMO / "prompts-dev.jsonl").read_text().splitlines()
    kinds: dict[str, str] = {}
    for line in lines:
        prompt = json.loads(line)
        kinds.setdefault(prompt["kind"], prompt["text"])
    texts = [*kinds.values(), *(json.loads(line)["text"] for line in lines[1:4])][:4]
    lengths = (24, 40, 57, 71)
    return [
        list(encoder.encode(text).ids[:length]) for text, length in zip(texts, lengths, strict=True)
    ]


def prompts_of_a_synthetic_one(vocabulary: int) -> list[list[int]]:
    """Ids that go round the vocabulary with different steps."""
    return [
        [(step * place + start) % vocabulary for place in range(length)]
        for step, start, length in ((7, 3, 1), (11, 5, 2), (13, 1, 9), (29, 2, 30))
    ]


def greedy_ids(logits: mx.array) -> list[int]:
    """The largest of each position of [1, n, V]."""
    found: list[int] = np.array(mx.argmax(logits[0], axis=-1)).tolist()
    return found


def summary(logits: mx.array) -> dict[str, Any]:
    """One position's logits as numbers of JSON."""
    values = np.array(logits.astype(mx.float32)).reshape(-1)
    if values.size <= 128:
        return {"all": [short(value) for value in values]}
    best = np.argsort(-values, kind="stable")[:KEPT]
    return {
        "ids": best.tolist(),
        "values": [short(value) for value in values[best]],
        "mean": short(values.mean()),
        "largest": short(np.abs(values).max()),
    }


def short(value: Any) -> float:
    """Seven digits: a float32 has no more that mean something here."""
    return float(f"{float(value):.7g}")


class Session:
    """One prompt with mlx-vlm's target and head, up to the round after a partial acceptance."""

    def __init__(self, model: Any, head: Any, prompt: list[int]) -> None:
        self.target, self.head = model.language_model, head
        self.seen: list[mx.array] = []
        self.cache = self.target.make_cache()
        ids = mx.array([prompt])
        out = self.target(ids, cache=self.cache, return_hidden=True, return_shared_kv=True)
        self.hidden = out.hidden_states[-1]
        self.first = greedy_ids(out.logits)[-1]
        self.prompt = ids
        head.reset(model)

    def sampler(self, logits: mx.array) -> mx.array:
        """Greedy, and it keeps what it was shown."""
        self.seen.append(logits)
        return mx.argmax(logits, axis=-1)

    def draft(self) -> tuple[list[int], list[mx.array]]:
        """The next chain's tokens and logits; mlx-vlm has computed the first of them already."""
        tokens = self.head.draft_block(0, self.hidden, None, DEPTH + 1, self.sampler)
        mx.eval(tokens, self.seen)
        logits, self.seen = self.seen, []
        return np.array(tokens[0]).tolist(), logits

    def run(self, *, keep: bool) -> dict[str, Any]:
        """Both rounds; with ``keep`` an accepted draft's entry stays as it was drafted."""
        head = self.head
        head.prefill_from_target_hidden(self.prompt, self.hidden, self.first, self.sampler)
        head.set_shared_kv({}, self.prompt.shape[1])
        drafts, logits = self.draft()
        window = [self.first, *drafts]
        out = self.target(mx.array([window]), cache=self.cache, return_hidden=True)
        greedy = greedy_ids(out.logits)
        pending = greedy[ACCEPTED]
        if not keep:
            for each in head._cache:
                each.trim(head._round_appended)
            if hasattr(head, "_next_position"):
                head._next_position -= head._round_appended
            head._round_appended = 0
        new = [*drafts[:ACCEPTED], pending]
        head.accept_verified_tokens(
            out.hidden_states[-1], mx.array([drafts]), ACCEPTED, new, self.sampler
        )
        again, later = self.draft()
        return {
            "prompt": self.prompt[0].tolist(),
            "first": self.first,
            "drafts": drafts,
            "logits": [summary(each) for each in logits],
            "window": window,
            "greedy": greedy,
            "accepted": ACCEPTED,
            "pending": pending,
            "next": {"drafts": again, "logits": [summary(each) for each in later]},
        }


def free_run(model: Any, head: Any, prompt: list[int]) -> dict[str, Any]:
    """mlx-vlm's loop, untouched."""
    rounds = importlib.import_module("mlx_vlm.speculative.mtp")._mtp_rounds
    cache = model.language_model.make_cache()
    ids = mx.array([prompt])
    out = model.language_model(ids, cache=cache, return_hidden=True, return_shared_kv=True)
    first = greedy_ids(out.logits)[-1]
    tokens = rounds(
        model,
        head,
        cache,
        out.hidden_states[-1],
        out.shared_kv_states,
        prompt_tokens=ids,
        first_bonus=first,
        max_tokens=TOKENS,
        sampler=lambda logits: mx.argmax(logits, axis=-1),
        draft_block_size=DEPTH + 1,
        greedy_sampling=True,
    )
    text = [first, *(int(token) for token, _ in tokens)]
    return {"tokens": text, "accepted": [int(count) for count in head.accept_lens]}


def record(name: str, full: Path, head_from: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """One checkpoint's prompts; mlx-vlm takes a head out of a full release of GLM itself."""
    model = importlib.import_module("mlx_vlm.utils").load_model(full)
    load_drafter = importlib.import_module("mlx_vlm.speculative.drafters").load_drafter
    head, _ = load_drafter(str(head_from))
    for module in (model.language_model, head):
        module.set_dtype(mx.float32)
        module.eval()
    found = []
    for prompt in prompts:
        kept = Session(model, head, prompt).run(keep=True)
        reread = Session(model, head, prompt).run(keep=False)
        both = {"kept": kept.pop("next"), "reread": reread.pop("next")}
        assert kept == reread, "the first round is the same under both conventions"
        found.append({**kept, "next": both, "free_run": free_run(model, head, prompt)})
    return {"name": name, "prompts": found}


def write(name: str, cases: list[dict[str, Any]]) -> None:
    """One recording."""
    made_by = {package: version(package) for package in ("mlx", "mlx-lm", "mlx-vlm")}
    recording = {"made_by": made_by, "conventions": CONVENTIONS, "cases": cases}
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / name).write_text(json.dumps(recording) + "\n")


def main() -> None:
    """Writes both recordings."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        demo = DEMO / "models/demo-qwen3_5"
        split = split_release(demo, here / "demo")
        cases = [record("demo-qwen3_5", demo, split, prompts_of_the_demo())]
        synthetic: dict[str, dict[str, Any]] = {
            "dense": {"seed": 0},
            "experts": {"seed": 0, "experts": 4, "tie": False},
        }
        prompts = prompts_of_a_synthetic_one(96)
        for name, options in synthetic.items():
            full = write_qwen3_5(here / name, **options)
            split = split_release(full, here / f"{name}-mtp")
            cases.append({**record(name, full, split, prompts), "written_with": options})
        write("mlx_vlm_qwen3_5.json", cases)
        full = write_glm(here / "glm", "glm_moe_dsa")
        options = {"model_type": "glm_moe_dsa", "seed": 0}
        glm = {**record("glm_moe_dsa", full, full, prompts), "written_with": options}
        write("mlx_vlm_glm.json", [glm])


if __name__ == "__main__":
    main()
