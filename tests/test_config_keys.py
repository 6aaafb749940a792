"""A config is read key by key: right values come back, anything else is named with its level."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from specdec.errors import ArtifactError
from specdec.plugins.config_keys import Keys, shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEVEL: dict[str, Any] = {
    "n": 3, "x": 0.5, "on": False, "list": [1, 2], "words": ["a", "b"], "word": "a",
    "none": None, "in": {"n": 7, "deep": {"n": 9}},
}  # fmt: skip


def test_values_come_back_as_they_are_and_the_first_level_that_has_one_wins() -> None:
    keys = Keys("it", {"n": 4, "x": None}, LEVEL)
    assert (keys.count("n"), keys.number("x"), keys.flag("on", True)) == (4, 0.5, False)
    assert (keys.counts("list"), keys.words("words", "ab")) == ((1, 2), ("a", "b"))
    assert (keys.one_of("word", "ab"), keys.one_of("none", "ab", "b")) == ("a", "b")
    assert (keys.count("none", 5), keys.get("none"), keys.has("none")) == (5, None, False)
    assert keys.within({"n": 1}).count("n") == 1
    assert keys.within({}).count("n") == 4
    assert not keys.alone({}).has("n")
    assert (keys.level("in"), keys.level("none")) == (LEVEL["in"], {})
    assert keys.under("in").under("deep").count("n") == 9
    assert not keys.under("in").has("x"), "nothing is behind a level"
    keys.must_be("word", "b", "a")
    keys.must_be("none", 1)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda k: k.count("x"), "it: x is 0.5; it must be a whole number of 1 or more"),
        (lambda k: k.count("n", most=2), "it: n is 3; it must be a whole number of 2 at most"),
        (lambda k: k.count("on"), "it: on is False; it must be a whole number of 1 or more"),
        (lambda k: k.number("x", above=1), "it: x is 0.5; it must be a number above 1"),
        (lambda k: k.flag("n", True), "it: n is 3; it must be true or false"),
        (lambda k: k.words("words", "ac"), "it: words is ['a', 'b']; it must be a list of a and c"),
        (lambda k: k.one_of("word", "bc"), "it: word is 'a'; it must be b or c"),
        (lambda k: k.must_be("on", 0), "it: on is False; it must be 0, or absent"),
        (lambda k: k.level("n"), "it: n is 3; it must be a mapping"),
        (lambda k: k.under("n"), "it: n is 3; it must be a mapping"),
        (lambda k: k.under("none"), "it has no none; give a complete release"),
        (lambda k: k.under("in").under("deep").count("m"), "it has no in.deep.m; give a complete"),
        (lambda k: k.under("in").flag("n", True), "it: in.n is 7; it must be true or false"),
        (lambda k: k.under("in").within({}).flag("n", True), "it: in.n is 7"),
    ],
)
def test_what_is_wrong_is_named(ask: Callable[[Keys], object], said: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        ask(Keys("it", LEVEL))
    assert str(caught.value).startswith(said)


def test_any_value_is_shown_on_one_line() -> None:
    assert shown("a\nb") == repr("a\nb")
    assert shown(10**5000) == "a int of too many digits"


def test_drafters_are_recognised_without_mlx(tmp_path: Path) -> None:
    code = """
import sys
for name in ("mlx", "mlx.core", "mlx_lm", "transformers", "numpy"):
    sys.modules[name] = None
from specdec.plugins import Artifact, default_registry
from pathlib import Path
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(default_registry().select(Artifact(folder)).name)
"""
    for name, config in {
        "a": {"model_type": "gemma4_unified_assistant"},
        "b": {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1]}},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["assistant", "dflash"], "")
