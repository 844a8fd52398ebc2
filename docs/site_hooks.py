"""Links to files outside of the documentation become their names: the site is built from the documentation alone."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:tests|fsdp2|examples|benchmarks)/[^)]*)\)")


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Replace such links; mkdocs calls this for each page."""
    return OUTSIDE.sub(lambda link: f"`{link[1]}`" if "`" not in link[1] else link[1], markdown)
