"""``specdec new-drafter`` writes a package that installs, passes the kit and drafts, at once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from specdec import scaffold
from specdec.cli import main, new_drafter
from specdec.errors import OptionError
from specdec.testing import CHECKS, PluginContract

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "specdec-echo"
AGAIN = "rm -r docs/examples/specdec-echo && specdec new-drafter echo --directory docs/examples"
LEFTOVERS = {"__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


def texts(folder: Path) -> dict[str, str]:
    """Every file of a package but what tools leave behind."""
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    return {
        path.as_posix(): (folder / path).read_text(encoding="utf-8")
        for path in paths
        if (folder / path).is_file() and not LEFTOVERS & set(path.parts)
    }


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a refused command says."""
    status = main(["new-drafter", *argv])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("specdec: ")
    return err


def test_the_example_is_what_the_template_gives() -> None:
    assert texts(EXAMPLE) == scaffold.render("echo"), (
        f"edit core/src/specdec/scaffold/template, then: {AGAIN}"
    )
    assert scaffold.__doc__ is not None
    assert AGAIN in scaffold.__doc__


def test_a_package_is_written_and_the_next_steps_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-drafter", "two-words", "--directory", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "specdec-two-words"
    assert texts(folder) == scaffold.render("two-words")
    assert list(tmp_path.iterdir()) == [folder]
    assert str(folder) in out
    assert 'pip install -e ".[test]"' in out
    assert "python -m pytest" in out
    assert "src/specdec_two_words/history.py" in out
    assert err == ""


def test_it_is_written_here_if_nothing_else_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-drafter", "here"]) == 0
    assert (tmp_path / "specdec-here" / "pyproject.toml").is_file()


def test_the_name_is_everywhere_and_nothing_is_left_of_the_template() -> None:
    files = scaffold.render("two-words")
    assert "src/specdec_two_words/py.typed" in files
    assert not [path for path in files if "tmpl" in path or "package/" in path]
    everything = "\n".join([*files, *files.values()])
    assert "$" not in everything
    assert "echo" not in everything.lower()
    assert "class TwoWordsRows:" in everything
    for path, text in files.items():
        assert path == "src/specdec_two_words/py.typed" or text.endswith("\n")
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_no_class_of_a_package_hides_one_that_it_imports() -> None:
    """Whatever the name: ``new-drafter draft`` defines ``DraftRows`` and ``DraftProvider``."""
    for path, text in scaffold.render("q").items():
        imported = re.findall(r"from specdec\.[\w.]+ import (\([^)]*\)|.*)", text)
        for word in re.findall(r"\w+", " ".join(imported)):
            assert not word.endswith(("Groups", "Provider", "Rows")), f"{path} imports {word}"


def test_the_package_asks_for_this_core() -> None:
    assert 'dependencies = ["specdec-core>=0.1,<0.2"]' in scaffold.render("q")["pyproject.toml"]
    assert metadata.version("specdec-core").split(".")[:2] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "lower-case letters"),
        ("Echo", "lower-case letters"),
        ("2gram", "a letter first"),
        ("my_first", "hyphens"),
        ("my-", "hyphens"),
        ("a--b", "hyphens"),
        ("a/b", "hyphens"),
        ("..", "hyphens"),
        ("a\nb", "hyphens"),
        ("é", "lower-case letters"),
        ("a" * 41, "40 characters"),
        ("core", "specdec itself"),
        ("none", "no drafter"),
        ("class", "my-class"),
        ("ngram", "pip uninstall specdec-ngram"),
        ("demo", "pip uninstall specdec-demo"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, name, "--directory", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_kind_of_a_broken_plugin_is_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "specdec-ngram")
    with pytest.raises(OptionError, match="taken by specdec-ngram"):
        new_drafter.check_free("ngram")


def test_a_folder_that_holds_something_is_never_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "specdec-mine"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    assert "is not empty" in refused(capsys, "mine", "--directory", str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["specdec-mine", "notes"]
    assert (folder / "notes").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "specdec-mine").mkdir()
    assert main(["new-drafter", "mine", "--directory", str(tmp_path)]) == 0
    assert texts(tmp_path / "specdec-mine") == scaffold.render("mine")


def test_a_file_or_a_link_in_the_way_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "specdec-one").write_text("a file")
    (tmp_path / "specdec-two").symlink_to(tmp_path / "nowhere")
    for name in ("one", "two"):
        assert "is no folder" in refused(capsys, name, "--directory", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["specdec-one", "specdec-two"]


@pytest.mark.parametrize("place", ["nowhere", "a-file"])
def test_a_place_that_is_no_folder_is_refused(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    said = refused(capsys, "mine", "--directory", str(tmp_path / place))
    assert "there is no folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_half_written_is_removed(
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = Path.write_text
    written: list[Path] = []

    def full(path: Path, *args: Any, **options: Any) -> int:
        if len(written) == 3:
            raise error
        written.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    status = main(["new-drafter", "mine", "--directory", str(tmp_path)])
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_the_command_itself_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["new-drafter"])
    assert capsys.readouterr().err.count("\n") == 1


def test_it_works_without_mlx(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'mlx_lm', 'transformers', 'tokenizers', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from specdec.cli import main\n"
        "sys.exit(main(['new-drafter', 'mine', '--directory', sys.argv[1]]))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert texts(tmp_path / "specdec-mine") == scaffold.render("mine")


# The whole way of a stranger: written, installed, tested, used.

KIT_TESTS = len(CHECKS) + 1 + sum(name.startswith("test_") for name in vars(PluginContract))
OPTIONAL = sum(check.needs not in (None, "consume") for check in CHECKS.values())


class Installed:
    """A package that pip has installed into a folder of its own."""

    def __init__(self, package: Path, site: Path) -> None:
        self.package = package
        self.site = site
        self.run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, package)

    def run(self, *words: str | Path) -> str:
        """What Python prints, beside the package, with the package on its path."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.package,
            env={**environment, "PYTHONPATH": str(self.site), "SPECDEC_PROFILE": "quick"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module", params=["my-first", "echo"])
def stranger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Installed]:
    """A package as the command writes it, and the one in the documentation."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip to install a package with")
    name = request.param
    folder = tmp_path_factory.mktemp("stranger")
    if name == "echo":
        # A copy: building and testing leave things behind.
        for path, text in texts(EXAMPLE).items():
            (folder / "specdec-echo" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "specdec-echo" / path).write_text(text, encoding="utf-8")
    else:
        assert main(["new-drafter", name, "--directory", str(folder)]) == 0
    return name, Installed(folder / f"specdec-{name}", folder / "site")


@pytest.mark.slow
def test_it_passes_the_kit_in_full(stranger: tuple[str, Installed]) -> None:
    _, installed = stranger
    out = installed.run("-m", "pytest", "-q", "-W", "error", "--hypothesis-seed=0")
    found = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", out.splitlines()[-1])}
    # Only what is about verbs that the example does not offer may be skipped.
    assert found == {"passed": KIT_TESTS - OPTIONAL, "skipped": OPTIONAL}


@pytest.mark.slow
def test_it_is_listed_without_a_fault(stranger: tuple[str, Installed]) -> None:
    name, installed = stranger
    report = json.loads(installed.run("-m", "specdec", "plugins", "--strict", "--json"))
    (kind,) = [kind for kind in report["kinds"] if kind["kind"] == name]
    assert kind["plugin"] == f"specdec-{name}"
    assert kind["status"] == "ok"
    assert kind["summary"]
    assert not [fault for fault in report["broken"] if fault["plugin"] == f"specdec-{name}"]


@pytest.mark.slow
def test_it_drafts(stranger: tuple[str, Installed]) -> None:
    name, installed = stranger
    words = ("-m", "specdec", "generate", "--model", "demo", "--drafter", name, "--json")
    prompt = ("--prompt", "one two three one two three one two", "--max-tokens", "8")
    found = json.loads(installed.run(*words, *prompt, "--option", "memory=64"))
    assert (found["drafter"], found["reason"]) == (name, None)
    assert found["drafted"] > 0
    assert len(found["tokens"]) <= 8


def test_the_wheel_of_the_core_holds_the_template() -> None:
    """Hatch packs what is below ``src/specdec``, unless git ignores it."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    template = ROOT / "core" / "src" / "specdec" / "scaffold" / "template"
    paths = [str(path) for path in template.rglob("*") if path.is_file()]
    ignored = subprocess.run(
        [git, "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ignored.stdout, len(paths)) == ("", len(scaffold.render("q")))
