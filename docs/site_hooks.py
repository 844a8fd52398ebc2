"""Changes to pages on the site: its name has the version; links to files outside of it become text; versions of a
snippet get their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:tests|fsdp2|examples|benchmarks)/[^)]*)\)")
SNIPPET = re.compile(r"^## |^<!-- (\w+) -->\n```python$|^```python$", re.M)


PRINTS = re.compile(r"^<!-- prints(?:: measured)? -->\n```\n", re.M)
WHOLE_FILE = re.compile(r'^--8<-- "([^"]+\.md)"$', re.M)


def on_config(config: Any, **unused: Any) -> Any:
    """Show the version beside the name, on every page; mkdocs calls this once."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    config["site_name"] = f"{config['site_name']} {found[1]}"
    return config


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Return the page as the site shows it; mkdocs calls this for each page."""
    markdown = PRINTS.sub('```text title="prints"\n', markdown)
    markdown = WHOLE_FILE.sub(lambda found: (ROOT / found[1]).read_text(), markdown)
    if page.file.src_uri == "migration.md":
        markdown = _named(markdown)
    return OUTSIDE.sub(_text_of, markdown)


def _text_of(link: re.Match[str]) -> str:
    """Return the text of ``link``, as code if it is a path."""
    text = link[1]
    return text if "`" in text or " " in text else f"`{text}`"


def _named(markdown: str) -> str:
    """Give each snippet of a section a title: one marked fsdp2 its mark, the others FSDP1 and FSDP2 in this order."""
    names: list[str] = []

    def name(found: re.Match[str]) -> str:
        if found[0] == "## ":
            names[:] = ["FSDP1", "FSDP2"]
        elif found[1] == "fsdp2":
            return '```python title="fsdp2"'
        elif not found[1]:
            return f'```python title="{names.pop(0)}"'
        return found[0]

    return SNIPPET.sub(name, markdown)
