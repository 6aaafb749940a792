"""Write ``prompts-copy.jsonl``: prompts whose answer repeats text that the prompt holds.

Each takes a held-out text of ``prompts-dev.jsonl`` (code or prose, in order, the first 40), shows it
in a fence, and begins its second printing. Nothing is chosen by how well a drafter does on it.
"""
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
AGAIN = {"code": "The edited file:", "prose": "The same passage:"}

rows = [json.loads(line) for line in (HERE / "prompts-dev.jsonl").read_text().splitlines()]
with open(HERE / "prompts-copy.jsonl", "w", encoding="utf-8") as out:
    for row in [row for row in rows if row["kind"] in AGAIN][:40]:
        text, lines = row["text"], row["text"].split("\n")
        head = "\n".join(lines[:2]) if len(lines) > 3 else text[: len(text) // 5]
        prompt = f"```\n{text}\n```\n\n{AGAIN[row['kind']]}\n\n```\n{head}"
        record = {"id": row["id"].replace("dev", "copy"), "kind": row["kind"], "source": row["source"], "text": prompt}
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
