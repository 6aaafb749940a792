"""Who says how many drafts a round has: a request, who loaded the drafter, or what pays."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest
from tiny_models import tiny_model

from specdec import LoadedDrafter, load_drafter
from specdec.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

# What is said in the environment.


@pytest.mark.parametrize(("said", "seconds"), [(None, 1.5), ("0", 0.0), ("2.5", 2.5), ("1e1", 10)])
def test_the_environment_says_how_long_to_measure(
    said: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECDEC_MEASURING_SECONDS", raising=False)
    if said is not None:
        monkeypatch.setenv("SPECDEC_MEASURING_SECONDS", said)
    assert load_drafter("ngram", tiny_model("qwen3")).measuring_seconds == seconds


@pytest.mark.parametrize("said", ["", "a while", "-1", "nan", "inf", "1,5"])
def test_what_is_no_time_to_measure_is_refused_in_one_line(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_MEASURING_SECONDS", said)
    with pytest.raises(OptionError) as raised:
        load_drafter("ngram", tiny_model("qwen3"))
    message = str(raised.value)
    assert "\n" not in message
    assert "SPECDEC_MEASURING_SECONDS" in message
    assert repr(said) in message


# Who decides on a number of drafts.


def loaded(*, given: int | None, limit: int | None, usual: int = 4) -> LoadedDrafter:
    drafter = load_drafter("ngram", tiny_model("qwen3"))
    drafter.num_draft_tokens = usual if given is None else given
    drafter.adaptive, drafter.max_draft_tokens = given is None, limit
    return drafter


def test_numbers_of_drafts_and_who_chooses_them() -> None:
    """All that may be said when a drafter is loaded, of a request, and by the drafter's limit."""
    for given_, limit, asked, adaptive in itertools.product(
        (None, 2, 6, 30), (None, 3, 40), (None, 0, 1, 5, 20), (None, True, False)
    ):
        number, chosen = loaded(given=given_, limit=limit).drafts(asked, adaptive)
        said = given_ if asked is None else asked
        wanted = adaptive if adaptive is not None else said is None
        assert chosen is (wanted and asked != 0)
        usual = 15 if chosen else 4
        most = usual if said is None else said
        ends = [most, *([15] if chosen else []), *([] if limit is None else [limit])]
        assert number == min(ends), (given_, limit, asked, adaptive)


def test_a_measurement_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drafter = loaded(given=None, limit=3)
    drafter.measuring_seconds = 0.05
    shares: list[float] = []
    drafter.progress = shares.append
    begin = time.perf_counter()
    drafter.costs.prepare(1)
    assert time.perf_counter() - begin < 5
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert drafter.costs.padded(1, 2) >= 2
    assert list(tmp_path.rglob("*.json")) != []
