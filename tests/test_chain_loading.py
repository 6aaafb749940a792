"""Loading a chain: its members by name, each with its own options, all of them or none."""

from __future__ import annotations

import types
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import frozen
from drafters.recurrent import RecurrentProvider
from scripted import RIGHT, Script, ScriptedProvider, ScriptedRows, text_of, tiny_tokenizer
from tiny_models import tiny_model

from specdec import BatchGenerator, load_drafter, stream_generate
from specdec.bench import compare, options_for
from specdec.drafters import check_drafter
from specdec.errors import ArtifactError, OptionError, SpecdecError, UnknownKindError
from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, Registry, hookimpl, scan
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.core as mx

PROMPT = (5, 9, 40, 3, 22, 17)


class Rows(ScriptedRows):
    """Scripted rows that read what others chose."""

    def consume(self, tokens: mx.array, context: Any, lengths: Any, /) -> None:
        chunks: Any = tokens.tolist()
        for row, chunk, count in zip(self.rows, chunks, lengths, strict=True):
            row.tokens.extend(chunk[:count])


class Kinds:
    """Fake kinds; remembers what each was asked for, and hands out new drafters."""

    def __init__(self) -> None:
        self.requests: list[LoadRequest] = []
        self.made: list[ScriptedProvider] = []

    def load(self, request: LoadRequest) -> LoadedDraft:
        self.requests.append(request)
        text = text_of(PROMPT)
        made = ScriptedProvider(Script.always([text], [RIGHT] * 3), rows=Rows)
        self.made.append(made)
        return LoadedDraft(made, request.num_draft_tokens or 2 + len(self.made))

    def ngram(self, request: LoadRequest) -> LoadedDraft:
        self.requests.append(request)
        return LoadedDraft(NgramProvider(), 2)

    def deaf(self, request: LoadRequest) -> LoadedDraft:
        return LoadedDraft(RecurrentProvider.tiny(hidden_size=64), 2)

    def broken(self, request: LoadRequest) -> LoadedDraft:
        raise ArtifactError("it is damaged")

    def all(self) -> list[DraftKind]:
        def detect(artifact: Any) -> bool:
            return bool(artifact.has("one.json"))

        return [
            DraftKind(name="ngram", load=self.ngram, artifact=False),
            DraftKind(name="one", load=self.load, detect=detect, bundled_at="one"),
            DraftKind(name="two", load=self.load, artifact=False),
            DraftKind(name="deaf", load=self.deaf, artifact=False),
            DraftKind(name="broken", load=self.broken, artifact=False),
        ]


@frozen
class Distribution:
    name: str = "specdec-fake"
    version: str = "1.0"


@frozen
class Entry:
    kinds: Kinds
    name: str = "fake"
    dist: Distribution = Distribution()

    def load(self) -> object:
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = 1
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: list(self.kinds.all()))
        return module


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    made = Kinds()
    with mock.patch.object(metadata, "entry_points", return_value=[Entry(made)]):
        registry = Registry(scan(strict=True))
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: registry)
    return made


def load(drafter: Any, **options: Any) -> Any:
    return load_drafter(drafter, tiny_model("qwen3"), tiny_tokenizer(), **options)


@pytest.mark.parametrize("drafter", ["one,two", "one, two", ["one", "two"], ("one", "two")])
def test_members_are_loaded_in_order_and_the_chain_is_as_wide_as_the_widest(
    kinds: Kinds, drafter: Any
) -> None:
    with load(drafter) as loaded:
        assert (loaded.kind, loaded.num_draft_tokens, loaded.max_draft_tokens) == ("one,two", 4, 4)
        assert loaded.width(9) == 4
        assert loaded.width(2) == 2
    assert [request.kind for request in kinds.requests] == ["one", "two"]
    assert [made.closed for made in kinds.made] == [1, 1]


def test_a_number_of_drafts_goes_to_every_member_and_an_option_to_its_own(kinds: Kinds) -> None:
    options = {"one.size": 4, "two.size": 5, "one.more": "x"}
    load("one,two", num_draft_tokens=6, **options).close()
    assert [request.num_draft_tokens for request in kinds.requests] == [6, 6]
    assert [dict(request.options) for request in kinds.requests] == [
        {"size": 4, "more": "x"},
        {"size": 5},
    ]


def test_a_folder_is_a_member_and_may_be_named_by_its_kind(kinds: Kinds, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.json").touch()
    folder = tmp_path / "a"
    load(["two", folder], **{"one.size": 1}).close()
    load(f"two,{folder}", **{f"{folder}.size": 2}).close()
    assert [request.path for request in kinds.requests] == [None, folder] * 2
    assert [dict(request.options) for request in kinds.requests[1::2]] == [{"size": 1}, {"size": 2}]


def test_a_path_with_a_comma_that_exists_is_one_drafter(kinds: Kinds, tmp_path: Path) -> None:
    folder = tmp_path / "one,two"
    folder.mkdir()
    (folder / "one.json").touch()
    for given in (folder, str(folder)):
        with load(given) as loaded:
            assert loaded.kind == "one"
        assert kinds.requests[-1].path == folder


MISTAKES = [
    ("one,", "drafter 'one,' has an empty name"),
    (",", "has an empty name"),
    (["one", 5], "drafter 5 is no name; give a kind or a folder"),
    (7, "drafter 7 is no name"),
    ("one,,two", "has an empty name"),
    (["one"], "drafter 'one' is a chain of 1; give two or more"),
    ([], "drafter is an empty list; give a kind or a folder, or none at all"),
    ((), "drafter is an empty tuple"),
    ("one,one", "drafter 'one,one' has one drafter twice"),
    ("one,auto", "drafter 'one,auto': auto cannot stand in a chain"),
    ("none,two", "drafter 'none,two': none cannot stand in a chain"),
    ("", "drafter '' is empty; give a kind or a folder"),
    (" ", "drafter ' ' is empty"),
]


@pytest.mark.parametrize(("drafter", "message"), MISTAKES)
def test_what_is_no_chain_is_refused_before_anything_is_loaded(
    kinds: Kinds, drafter: Any, message: str
) -> None:
    for look in (check_drafter, load):
        with pytest.raises(OptionError, match=message) as caught:
            look(drafter)
        assert "\n" not in str(caught.value)
    assert kinds.requests == []


@pytest.mark.parametrize("option", ["size", "one.", ".size"])
def test_an_option_that_names_no_member_is_refused_with_the_names(
    kinds: Kinds, option: str
) -> None:
    for look in (
        lambda: check_drafter("one,two", options=[option]),
        lambda: load("one,two", **{option: 1}),
    ):
        with pytest.raises(OptionError, match=rf"option {option} does not .* one of one\., two\."):
            look()
    assert kinds.requests == []


def test_the_same_folder_under_two_names_is_one_drafter_twice(kinds: Kinds, tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (tmp_path / "", f"{tmp_path}/../{tmp_path.name}", tmp_path / "link"):
        for look in (check_drafter, load):  # before a model is there, too
            with pytest.raises(OptionError, match="one drafter twice"):
                look([str(tmp_path), other])
    assert kinds.requests == []


def test_options_of_two_folders_of_one_kind_go_by_their_names(kinds: Kinds, tmp_path: Path) -> None:
    folders = [tmp_path / "v1.5", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "one.json").touch()
    first, second = map(str, folders)
    for look in (
        lambda: check_drafter(folders, options=["one.size"]),
        lambda: load(folders, **{"one.size": 1}),
    ):
        with pytest.raises(OptionError, match=rf"begin it with one of {first}\., {second}\."):
            look()
    load(folders, **{f"{first}.size": 1, f"{second}.size": 2}).close()
    assert [dict(request.options) for request in kinds.requests] == [{"size": 1}, {"size": 2}]


def test_an_option_under_two_names_of_one_drafter_is_refused(kinds: Kinds, tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    with pytest.raises(OptionError, match=r"option one\.size is given under two names"):
        load(["two", tmp_path], **{f"{tmp_path}.size": 1, "one.size": 1})
    assert kinds.requests == []


def test_a_chain_longer_than_any_file_name_is_a_chain(kinds: Kinds) -> None:
    with pytest.raises(OptionError, match="one drafter twice"):
        check_drafter(",".join(["one"] * 2_000))


@pytest.mark.parametrize("given", ["two", 5, ("model", "tokenizer"), {}])
def test_a_draft_model_that_is_none_is_named_as_what_it_is(kinds: Kinds, given: Any) -> None:
    with pytest.raises(OptionError, match=f"draft_model is a {type(given).__name__}; give what"):
        stream_generate(tiny_model("qwen3"), tiny_tokenizer(), [1, 2], draft_model=given)


def test_a_loaded_model_is_no_drafter_and_the_line_is_short(kinds: Kinds) -> None:
    for drafter in (tiny_model("qwen3"), ["one", tiny_model("qwen3")]):
        with pytest.raises(OptionError, match=r"is no name; .* a model is a draft_model") as caught:
            load(drafter)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 150


def test_kind_is_of_one_folder(kinds: Kinds) -> None:
    with pytest.raises(OptionError, match="kind='one' is of one folder"):
        load(["one", "two"], kind="one")


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        ("broken", ArtifactError, "it is damaged"),
        ("deaf", OptionError, r"drafter deaf cannot stand in a chain: .*\(consume\)"),
    ],
)
def test_a_member_that_does_not_load_or_follow_closes_the_others(
    kinds: Kinds, last: str, error: type[SpecdecError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(f"one,two,{last}")
    assert [made.closed for made in kinds.made] == [1, 1]
    assert all(made.left_open == [] for made in kinds.made)


def test_a_member_that_is_not_installed_is_named_before_the_model_is_bound(kinds: Kinds) -> None:
    with pytest.raises(UnknownKindError, match=r"'dflash'.*pip install specdec-dflash"):
        check_drafter("one,dflash")
    with pytest.raises(UnknownKindError, match="'nope'"):
        load_drafter("nope,one", object())


def test_generators_take_chains_by_name_and_close_them(kinds: Kinds) -> None:
    text, model, tokenizer = text_of(PROMPT), tiny_model("qwen3"), tiny_tokenizer()
    found = list(
        stream_generate(model, tokenizer, list(PROMPT), max_tokens=12, drafter="ngram,two")
    )
    assert tuple(each.token for each in found) == text.output[:12]
    stats = found[-1].stats
    assert stats is not None
    assert (stats.drafter, stats.draft_errors) == ("ngram,two", 0)
    assert stats.accepted > 0
    with BatchGenerator(model, tokenizer=tokenizer, drafter="ngram,two", max_tokens=12) as batch:
        batch.insert([list(PROMPT)])
        written = []
        while responses := batch.next_generated():
            written += [each.token for each in responses]
    assert tuple(written) == text.output[:12]
    assert all(made.closed for made in kinds.made)
    assert len(kinds.made) == 2


def test_an_option_of_no_member_names_the_members(kinds: Kinds, tmp_path: Path) -> None:
    said = r"option three\.size: three is no member of the chain; its members are one, two$"
    for look in (
        lambda: check_drafter("one,two", options=["three.size"]),
        lambda: load("one,two", **{"three.size": 1}),
    ):
        with pytest.raises(OptionError, match=said):
            look()
    assert kinds.requests == []


def test_members_of_one_kind_are_called_as_they_were_given(kinds: Kinds, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "one.json").touch()
    first, second = map(str, folders)
    with load(["two", *folders]) as loaded:
        assert loaded.kind == f"two,{first},{second}"
    with load(["two", first]) as loaded:
        assert loaded.kind == "two,one"


def test_a_chain_is_timed_as_wide_as_it_is_asked_and_options_go_where_they_belong(
    kinds: Kinds,
) -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    found = compare(
        model,
        tokenizer,
        ["a b"],
        drafters=["ngram", "ngram,two"],
        widths=(1, 6),
        options={"size": 3, "two.size": 4, "ngram.size": 5},
        max_tokens=2,
    )
    runs = [(each.name, each.width) for each in found[1:]]
    assert runs == [("ngram", 1), ("ngram", 6), ("ngram,two", 1), ("ngram,two", 6)]
    asked = [(r.kind, r.num_draft_tokens, dict(r.options)) for r in kinds.requests]
    assert asked == [
        ("ngram", None, {"size": 3}),
        ("ngram", 6, {"size": 5}),
        ("two", 6, {"size": 4}),
    ]


def test_no_option_of_a_comparison_is_passed_over() -> None:
    both, single, chained = {"a": 1, "ngram.a": 2}, {"a": 1}, {"ngram.a": 2}
    assert options_for("ngram", ["ngram", "two"], both) == both
    assert options_for("ngram,two", ["ngram,two"], both) == both
    assert options_for("ngram", ["ngram,two", "ngram"], both) == single
    assert options_for("ngram,two", ["ngram,two", "ngram"], both) == chained
