"""A head that drafts over listed ids drafts those alone, and the text stays the target's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx_lm
import numpy as np
import pytest
from mtp_demo import demo, drafted, draws, greedy, head, prompts, seeded
from mtp_files import demo_folder, split_release
from scripted import drain, request

from specdec import VerifyGroup, load_drafter
from specdec.errors import ArtifactError, OptionError, SpecdecError
from specdec_mtp.select import HeadChooser
from specdec_mtp.vocabulary import FILE, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from specdec import LoadedDrafter
    from specdec.drafting.choose import Choice

V = 8192


def common() -> tuple[int, ...]:
    """What the target writes behind the first two prompts, and every eighth id."""
    held = {*greedy(prompts()[0]), *greedy(prompts()[1])[::2], *range(5, V, 8)}
    return tuple(sorted(held))


def vocabulary(loaded: LoadedDrafter) -> Any:
    """The ids that a drafter says it drafts over."""
    grouped: Any = loaded.provider.grouped
    return grouped.draft_vocabulary(loaded.target)


def drafts(loaded: LoadedDrafter, prompt: tuple[int, ...], **options: Any) -> set[int]:
    """Every token that the head proposes while a text is generated."""
    seen: set[int] = set()
    choose = HeadChooser.__call__

    def recorded(chooser: HeadChooser, hidden: mx.array, steps: Sequence[int]) -> Choice:
        choice = choose(chooser, hidden, steps)
        ids: Any = choice.ids.tolist()
        seen.update(ids)
        return choice

    with mock.patch.object(HeadChooser, "__call__", recorded):
        group = VerifyGroup(loaded.target, loaded.provider, drafter="mtp")
        group.admit([request(prompt, max_tokens=16, num_draft_tokens=3, **options)])
        drain(group)
        group.close()
    assert len(seen) > 8
    return seen


@pytest.mark.parametrize("seed", [None, 3])
def test_drafts_are_listed_ids_and_the_text_is_the_same(seed: int | None) -> None:
    loaded = head(draft_vocab=common())
    for prompt in prompts()[:2]:
        if seed is None:
            found = drafted(prompt, loaded, 3)
            assert found.tokens == greedy(prompt)
        else:
            found = drafted(prompt, loaded, 3, seed=seed, **draws())
            assert found.tokens == seeded(prompt, seed)
        assert found.stats.accepted > 2
    options: dict[str, Any] = {} if seed is None else {"temp": 0.8, "seed": seed}
    seen = drafts(loaded, prompts()[1], **options)
    assert seen <= set(common())
    assert not drafts(head(), prompts()[1], **options) <= set(common()), "what the whole head does"


def test_ids_that_are_never_right_cost_acceptance_and_no_token() -> None:
    prompt = prompts()[2]
    listed = [token for token in range(2000, 2100) if token not in greedy(prompt)]
    found = drafted(prompt, head(draft_vocab=tuple(listed)), 3, max_tokens=12)
    assert found.tokens == greedy(prompt)[:12]
    assert (found.stats.accepted, found.stats.target_forwards) == (0, 12)
    assert found.stats.drafted > 20


def test_rejection_sampling_over_listed_ids_runs_without_a_complaint() -> None:
    # Its distribution is checked for listed drafts in tests/test_draft_policy.py.
    found = drafted(
        prompts()[1], head(draft_vocab=common()), 3, seed=3, acceptance="rejection", **draws()
    )
    assert found.stats.accepted > 2
    assert found.stats.reason is None


# Where the list is found.


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """The demo's files under a folder that may be written to."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in demo_folder().iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def write(folder: Path, ids: Any) -> Path:
    (folder / FILE).write_text(json.dumps({"ids": ids}))
    return folder / FILE


def test_a_file_beside_the_target_is_used_and_false_leaves_it_out(target_folder: Path) -> None:
    write(target_folder, list(common()))
    model, tokenizer = mlx_lm.load(str(target_folder))
    for option, expected in ((None, common()), (False, None), ([7, 3], (3, 7))):
        options: dict[str, Any] = {} if option is None else {"draft_vocab": option}
        with load_drafter("mtp", model, tokenizer, probe=False, **options) as loaded:
            assert vocabulary(loaded) == expected


def test_a_file_beside_the_head_goes_before_one_beside_the_target(
    target_folder: Path, tmp_path: Path
) -> None:
    own = split_release(tmp_path / "head")
    write(target_folder, [1, 2, 3])
    model, tokenizer = mlx_lm.load(str(target_folder))

    def ids(path: Any, **options: Any) -> Any:
        with load_drafter(path, model, tokenizer, probe=False, **options) as loaded:
            return vocabulary(loaded)

    assert ids(own) == (1, 2, 3)
    write(own, [9, 4])
    assert ids(own) == (4, 9)
    assert ids("mtp") == (1, 2, 3)
    shutil.copytree(own, target_folder / "mtp")
    assert ids("mtp") == (4, 9), "a companion folder is beside the head"
    named = write(tmp_path, [8])
    assert ids(own, draft_vocab=named) == ids(own, draft_vocab=str(named)) == (8,)


# What is refused.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, V], f"draft_vocab has {V}; this target's ids are 0 to {V - 1}"),
        ([-1], f"draft_vocab has -1; this target's ids are 0 to {V - 1}"),
        ([3, True], "draft_vocab has True; this target's ids"),
        ([3, 2.0], "draft_vocab has 2.0; this target's ids"),
        (["3"], "draft_vocab has '3'; this target's ids"),
        ([[3]], "draft_vocab has [3]; this target's ids"),
        ([10**60], f"draft_vocab has {10**60}; this target's ids"),
        ([], "draft_vocab is empty; list some ids"),
        ([4, 5, 4], "draft_vocab has 4 twice; list each id once"),
        (17, "draft_vocab is 17; give a list of ids"),
        (True, "draft_vocab is True; give a list of ids"),
        ({"ids": [1]}, "draft_vocab is {'ids': [1]}; give a list of ids"),
        ("/nowhere/at/all.json", "/nowhere/at/all.json cannot be read"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_option_that_lists_no_ids_is_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        load_drafter("mtp", *demo(), draft_vocab=given, probe=False)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe{", "cannot be read"),
        (b'{"ids": [1,', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1, 2]", 'has no list "ids"'),
        (b'{"ids": 5}', 'has no list "ids"'),
        (b'{"ids": []}', "is empty"),
        (b'{"ids": [5, 5]}', "has 5 twice"),
        (b'{"ids": [8192]}', "has 8192; this target's ids are 0 to 8191"),
        (b'{"ids": [1.0]}', "has 1.0; this target's ids"),
        (b'{"ids": [null]}', "has None; this target's ids"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_file_that_lists_no_ids_is_refused_in_one_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / FILE
    file.write_bytes(content)
    askings: list[tuple[type[SpecdecError], Callable[[], Any]]] = [
        (ArtifactError, lambda: read_vocabulary(None, [None, tmp_path], V)),
        (OptionError, lambda: read_vocabulary(file, [], V)),
        (OptionError, lambda: read_vocabulary(str(file), [], V)),
    ]
    for error, ask in askings:
        with pytest.raises(error) as caught:
            ask()
        assert str(caught.value).startswith(f"{file} {message}")
        assert "\n" not in str(caught.value)


def test_a_broken_file_beside_the_target_fails_the_load_and_false_goes_around_it(
    target_folder: Path,
) -> None:
    (target_folder / FILE).write_text("{")
    model, tokenizer = mlx_lm.load(str(target_folder))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_drafter("mtp", model, tokenizer, probe=False)
    load_drafter("mtp", model, tokenizer, draft_vocab=False, probe=False).close()


def test_numbers_of_numpy_and_tuples_are_ids_too() -> None:
    assert read_vocabulary((np.int64(9), np.uint8(4)), [], 10) == (4, 9)
    assert read_vocabulary(None, [], 10) is None
    assert read_vocabulary(None, [None, Path("/nowhere")], 10) is None
    assert read_vocabulary(False, [], 10) is None
