"""The parts of the core import each other in one direction only, and MLX only where it works.

The sources are parsed, not imported, so that imports inside functions count too.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "specdec"

# What each part may import, besides itself. A new part needs a line here.
NUMERICS = {"state", "sampling", "drafting", "checkpoints"}
MAY_IMPORT = {
    "errors": set[str](),
    "contract": {"errors"},
    "plugins": {"errors", "contract"},
    "grammar": {"errors", "contract"},
    "cost": {"errors", "contract", "state", "verify"},
    **dict.fromkeys(NUMERICS | {"verify", "chain"}, {"errors", "contract"} | NUMERICS),
    "targets": {"errors", "contract", "plugins"} | NUMERICS,  # a checkpoint may declare a kind
}
LOWER = {*MAY_IMPORT}
FRONT = {"check", "generation", "requests", "batch", "bench", "models"}
FRONT |= {"drafters", "pairing", "chained", "automatic"}
MAY_IMPORT |= dict.fromkeys(FRONT, LOWER | FRONT)
MAY_IMPORT |= {"cli": LOWER | FRONT | {"specdec", "scaffold"}, "specdec": LOWER | FRONT}
MAY_IMPORT |= {"testing": {*MAY_IMPORT}, "scaffold": {"errors"}, "__main__": {"cli"}}

# verify and drafting are annotated with what they drive, drafting with what headers say, too; no
# import at run time.
MAY_NAME_IN_TYPES = {
    ("verify", "targets"),
    ("cost", "targets"),
    ("drafting", "targets"),
    ("drafting", "plugins"),
}

HEAVY = {"mlx", "mlx_lm", "transformers", "tokenizers", "safetensors", "numpy", "llguidance"}
LIGHT = {"specdec", "errors", "contract", "plugins", "cli", "models", "scaffold"}
MLX_AT_IMPORT = NUMERICS | FRONT | {"targets", "verify", "testing", "grammar", "chain", "cost"}
NEVER_MLX = {"errors", "contract", "plugins", "scaffold"}
PURE = {"verify/accept.py"}


@frozen
class Import:
    """One imported module, and when the import runs."""

    module: str
    line: int
    in_function: bool
    for_types: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def part(self) -> str:
        """The part of the core that is imported; ``specdec`` is the top-level package itself."""
        names = self.module.split(".")
        return names[1] if len(names) > 1 else "specdec"


def is_type_checking(node: ast.If) -> bool:
    name = node.test.attr if isinstance(node.test, ast.Attribute) else node.test
    return name == "TYPE_CHECKING" or (isinstance(name, ast.Name) and name.id == "TYPE_CHECKING")


def modules_of(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    if source == "specdec":  # `from specdec import errors` imports a part of it
        for alias in node.names:
            is_part = (CORE / alias.name).is_dir() or (CORE / f"{alias.name}.py").is_file()
            yield f"specdec.{alias.name}" if is_part else "specdec"
    else:
        yield source


def imports_of(path: Path, package: list[str]) -> list[Import]:
    found: list[Import] = []

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(
                Import(module, node.lineno, in_function, for_types)
                for module in modules_of(node, package)
            )
        if isinstance(node, ast.If) and is_type_checking(node):
            for statement in node.body:
                walk(statement, in_function, True)
            for statement in node.orelse:
                walk(statement, in_function, for_types)
            return
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, in_function or inside, for_types)

    walk(ast.parse(path.read_text(encoding="utf-8")), False, False)
    return found


def part_of(path: Path) -> str:
    first = path.relative_to(CORE).parts[0]
    return "specdec" if first == "__init__.py" else first.removesuffix(".py")


def core_imports() -> Iterator[tuple[Path, str, Import]]:
    for path in sorted(CORE.rglob("*.py")):
        package = ["specdec", *path.relative_to(CORE).parts[:-1]]
        for found in imports_of(path, package):
            yield path, part_of(path), found


def where(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line} imports {found.module}"


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {part_of(path) for path in CORE.rglob("*.py")}
    assert parts, "the sources of the core are missing"
    assert parts <= set(MAY_IMPORT), "give a new part its line in MAY_IMPORT"


def test_the_parts_import_in_one_direction() -> None:
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if found.root == "specdec"
        and found.part not in {part, *MAY_IMPORT[part]}
        and not (found.for_types and (part, found.part) in MAY_NAME_IN_TYPES)
    ]
    assert not wrong


def test_the_numeric_parts_do_not_import_each_other_in_a_circle() -> None:
    edges = {
        (part, found.part)
        for _, part, found in core_imports()
        if found.root == "specdec" and {part, found.part} <= NUMERICS and part != found.part
    }
    left = set(NUMERICS)
    while free := {part for part in left if not any((part, other) in edges for other in left)}:
        left -= free
    assert not left


def test_mlx_is_imported_at_module_level_only_where_it_computes() -> None:
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if found.root in HEAVY
        and not found.in_function
        and not found.for_types
        and (part not in MLX_AT_IMPORT or path.relative_to(CORE).as_posix() in PURE)
    ]
    assert not wrong


def test_the_light_parts_never_import_mlx_at_run_time() -> None:
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if found.root in HEAVY and part in NEVER_MLX and not found.for_types
    ]
    assert not wrong


def test_the_light_parts_reach_the_heavy_ones_only_inside_functions() -> None:
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if found.root == "specdec"
        and part in LIGHT
        and found.part not in LIGHT
        and not found.in_function
        and not found.for_types
    ]
    assert not wrong


def test_the_core_never_imports_a_plugin() -> None:
    wrong = [
        where(path, found) for path, _, found in core_imports() if found.root.startswith("specdec_")
    ]
    assert not wrong


def test_the_conformance_kit_alone_imports_what_it_is_installed_with() -> None:
    importers = {
        part
        for _, part, found in core_imports()
        if found.root in {"hypothesis", "pytest", "_pytest"}
    }
    assert importers == {"testing"}
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if found.root == "specdec" and found.part == "testing" and part != "testing"
    ]
    for source in sorted(ROOT.glob("plugins/*/src/specdec_*")):
        for path in sorted(source.rglob("*.py")):
            for found in imports_of(path, [source.name, *path.relative_to(source).parts[:-1]]):
                tests = found.root in {"hypothesis", "pytest"}
                if tests or found.module.startswith("specdec.testing"):
                    wrong.append(where(path, found))
    assert not wrong


def test_the_grammar_part_alone_imports_the_grammar_engine() -> None:
    importers = {part for _, part, found in core_imports() if found.root == "llguidance"}
    assert importers == {"grammar"}


def test_a_grammar_can_be_written_down_without_the_grammar_engine() -> None:
    wrong = [
        where(path, found)
        for path, part, found in core_imports()
        if part == "grammar"
        and path.name in {"__init__.py", "grammar.py"}
        and (found.root in HEAVY or found.module.startswith("specdec.grammar."))
        and found.module != "specdec.grammar.grammar"
        and not found.in_function
        and not found.for_types
    ]
    assert not wrong


def test_plugins_import_no_other_plugin() -> None:
    wrong = []
    for source in sorted(ROOT.glob("plugins/*/src/specdec_*")):
        for path in sorted(source.rglob("*.py")):
            for found in imports_of(path, [source.name, *path.relative_to(source).parts[:-1]]):
                if found.root.startswith("specdec_") and found.root != source.name:
                    wrong.append(where(path, found))
    assert not wrong


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import mlx.core as mx", ("mlx.core", False, False)),
        ("def f():\n    import mlx.core", ("mlx.core", True, False)),
        ("if TYPE_CHECKING:\n    import mlx.core", ("mlx.core", False, True)),
        ("if typing.TYPE_CHECKING:\n    import mlx.core", ("mlx.core", False, True)),
        ("if True:\n    import mlx.core", ("mlx.core", False, False)),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import mlx.core", ("mlx.core", False, False)),
        ("class C:\n    import mlx.core", ("mlx.core", False, False)),
        ("from ..errors import SpecdecError", ("specdec.errors", False, False)),
        ("from . import kinds", ("specdec.plugins", False, False)),
        ("from specdec import errors", ("specdec.errors", False, False)),
        ("from specdec import generate_something", ("specdec", False, False)),
    ],
)
def test_this_test_sees_imports_as_python_does(
    source: str, expected: tuple[str, bool, bool], tmp_path: Path
) -> None:
    path = tmp_path / "kinds.py"
    path.write_text(source)
    (found,) = imports_of(path, ["specdec", "plugins"])
    assert (found.module, found.in_function, found.for_types) == expected
