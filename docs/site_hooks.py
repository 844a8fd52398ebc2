"""Links to files outside of the documentation become their text: the site is built from the documentation alone."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:tests|fsdp2|examples|benchmarks)/[^)]*)\)")


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Replace such links; mkdocs calls this for each page."""
    return OUTSIDE.sub(_text_of, markdown)


def _text_of(link: re.Match[str]) -> str:
    """Return the text of ``link``, as code if it is a path."""
    text = link[1]
    return text if "`" in text or " " in text else f"`{text}`"
