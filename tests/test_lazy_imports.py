"""Listing and choosing work on a host without MLX: nothing on that path imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "core" / "src"

BLOCKED = ("mlx", "mlx.core", "mlx.nn", "mlx_lm", "transformers", "tokenizers", "numpy")

PREAMBLE = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
"""

# A real distribution on the path, so that the entry points are read as they are in earnest.
PLUGIN = """
from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, hookimpl

specdec_api = 1

def load(request: LoadRequest) -> LoadedDraft:
    import mlx.core
    raise NotImplementedError

def detect(artifact):
    return (artifact.config or {}).get("model_type") == "lazy"

@hookimpl
def specdec_draft_kinds():
    return [DraftKind(name="lazy", load=load, detect=detect)]
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "lazy_drafter.py").write_text(PLUGIN)
    info = tmp_path / "lazy_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specdec.providers]\nlazy = lazy_drafter\n")
    (tmp_path / "config.json").write_text('{"model_type": "lazy"}')
    return tmp_path


def run(code: str, site: Path) -> str:
    """What ``code`` prints in an interpreter that has no MLX."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + code, str(site)],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")},
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(site)]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["specdec", "specdec.errors", "specdec.contract", "specdec.plugins", "specdec.cli"]
)
def test_the_light_packages_import_without_mlx(module: str, site: Path) -> None:
    run(f"import {module}", site)


def test_scanning_and_choosing_need_no_mlx(site: Path) -> None:
    code = """
import specdec
from specdec.plugins import Registry, scan

report = scan(strict=True)
registry = Registry(report)
print(registry.select(sys.argv[1]).name, [a.answer for a in registry.detect(sys.argv[1])
                                          if a.kind.name == "lazy"])
"""
    assert run(code, site) == "lazy ['yes']\n"


def test_the_listing_commands_need_no_mlx(site: Path) -> None:
    code = """
import argparse
from specdec.cli.listing import run_detect, run_plugins

assert run_plugins(argparse.Namespace(json=False, strict=True, verbose=False)) == 0
assert run_detect(argparse.Namespace(path=sys.argv[1], json=False)) == 0
"""
    out = run(code, site)
    assert "lazy-drafter" in out
    assert "choice: lazy, by lazy-drafter 1.0" in out


def test_a_plugin_that_imports_mlx_too_early_shows_up_as_broken(site: Path) -> None:
    (site / "lazy_drafter.py").write_text("import mlx.core\n" + PLUGIN)
    code = """
from specdec.plugins import scan

print([(b.origin.name, b.stage) for b in scan().broken])
"""
    assert run(code, site) == "[('lazy', 'import')]\n"
