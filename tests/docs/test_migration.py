"""docs/migration.md: each snippet of ours runs, on one process and on two; the others are at least Python."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import pytest

from tests.support import ROOT, api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

PAGE = ROOT / "docs" / "migration.md"
BLOCK = re.compile(r"(?:^<!-- (?P<mark>.*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Snippet:
    """A block of code and what is executed ahead of it; theirs are not executed."""

    title: str
    ours: bool
    code: str
    before: tuple[str, ...]


def snippets() -> list[Snippet]:
    """Return the page's blocks in order."""
    text, before, found = PAGE.read_text(), (), []
    for match in BLOCK.finditer(text):
        mark, code = match["mark"] or "", match["code"]
        heading = text.rfind("\n## ", 0, match.start())
        title = text[heading + 4 : text.index("\n", heading + 1)] if heading >= 0 else "the start"
        if mark == "before":
            before = (*before, code)
            continue
        assert mark in ("", "fsdp2"), mark
        found.append(Snippet(title, mark == "fsdp2", code, before))
    return found


ALL = snippets()
OURS = [index for index, snippet in enumerate(ALL) if snippet.ours]


def test_page_is_read_as_it_is_written():
    """Every fence belongs to a block that was found; every section has code of ours."""
    text = PAGE.read_text()
    assert text.count("```python\n") == len(ALL) + len(re.findall("^<!-- before -->$", text, re.M))
    assert text.count("<!-- fsdp2 -->") == len(OURS)
    titles = {snippet.title for snippet in ALL}
    assert titles == {ALL[index].title for index in OURS} and len(titles) > 10
    for snippet in ALL:
        compile(snippet.code, snippet.title, "exec")
        if snippet.ours:
            assert "fsdp2" in snippet.code or "fully_shard" in snippet.code or "optimizer" in snippet.code


@on_ranks(1, 2)
@pytest.mark.parametrize("index", OURS, ids=lambda index: f"{index} {ALL[index].title}")
def test_snippet_runs(rank, world, index, tmp_path):
    """As written, on every rank, with files in a folder that all ranks share."""
    snippet = ALL[index]
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        names = {"__name__": "snippet"}
        for code in (*snippet.before, snippet.code):
            exec(compile(code, f"{PAGE.name}: {snippet.title}", "exec"), names)
    finally:
        os.chdir(before)
