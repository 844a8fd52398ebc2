"""Every Python block of the documentation runs as it is printed, and every page is in the navigation."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest

import fsdp2
from tests.support import ROOT, api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
ELSEWHERE = {"forecast.md", "full_parameters.md", "loading.md", "migration.md", "state_dicts.md"}
"""Pages whose blocks have tests of their own beside this file."""
DOCS = ROOT / "docs"


def blocks(path: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return BLOCK.findall(path.read_text())


def pages(ranks: int) -> list[str]:
    """Return the pages whose code runs on so many ranks."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        mark = re.search(r"<!-- ranks: (\d+) -->", path.read_text())
        if name not in ELSEWHERE and blocks(path) and (int(mark[1]) if mark else 2) == ranks:
            found.append(name)
    return found


def run(path: Path, folder: Path) -> None:
    """Run a page's blocks in order, in one namespace, in a folder that all ranks share."""
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "examples"))  # where pages say that they are run
    names = {"__name__": "page"}
    try:
        for block in blocks(path):
            exec(compile(block, path.name, "exec"), names)
    finally:
        os.chdir(before)
        sys.path.remove(str(ROOT / "examples"))
        names.clear()  # sharded classes are kept for the next call, and with them the globals of their methods


@on_ranks(2)
@pytest.mark.parametrize("page", pages(2))
def test_page_runs_on_two_ranks(rank, world, page, tmp_path):
    """As a reader who pastes all of it runs it."""
    run(DOCS / page, tmp_path)


@on_ranks(4)
@pytest.mark.parametrize("page", pages(4))
def test_page_runs_on_four_ranks(rank, world, page, tmp_path):
    """The same for meshes of two dimensions."""
    run(DOCS / page, tmp_path)


def test_forecasts_run(tmp_path, monkeypatch):
    """In a process that is part of no job, as they are made; of a model with fewer layers."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(DOCS / "forecast.md"):
        exec(compile(block.replace("layers=32", "layers=2"), "forecast.md", "exec"), names)
    assert "layers=32" in blocks(DOCS / "forecast.md")[0]
    assert "blocks.1" in (tmp_path / "step.html").read_text()


@on_ranks(2)
def test_readme_runs(rank, world, tmp_path):
    """The twenty lines of the README, ten steps of them, but for the end of the process group, which belongs to the
    tests."""
    text = "\n".join(blocks(ROOT / "README.md")).replace("destroy_process_group()", "")
    assert "range(50)" in text
    text = text.replace("range(50)", "range(10)")
    names = {"__name__": "page"}
    exec(compile(text, "README.md", "exec"), names)
    names.clear()


def test_every_page_is_in_the_navigation():
    """A page that nobody can find is not documentation."""
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1]))
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_reference_names_everything_public():
    """The page of the API has every public name, once."""
    text = (DOCS / "reference.md").read_text()
    named = re.findall(r"^::: fsdp2\.(?:fully_shard\.)?(\w+)$", text, re.M) + re.findall(r"^### `(\w+)`$", text, re.M)
    assert sorted(named) == sorted(fsdp2.__all__)


def test_links_lead_somewhere():
    """Relative links of pages and of the README lead to files that exist."""
    broken = []
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("http") and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert not broken


def test_blocks_parse():
    """Also those that are executed elsewhere."""
    for path in DOCS.rglob("*.md"):
        for block in blocks(path):
            ast.parse(block)
