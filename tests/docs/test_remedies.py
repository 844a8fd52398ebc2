"""Every remedy that an error names is tried, or is on the list of those that are not."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs import remedies_of_setups  # noqa: F401  # registers its cases
from tests.docs.remedies import CASES, UNTRIED
from tests.support import ROOT, api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

NAMES_A_REMEDY = re.compile(
    r"\b([Cc]all|[Pp]ass|[Uu]se|instead|[Ss]et|[Bb]uild|[Ss]hard|[Rr]emove|[Ll]oad|[Mm]ake|[Ll]eave|[Rr]egister|[Ww]rite"
    r"|[Pp]ut|[Tt]ake|[Kk]eep|[Rr]edistribute|[Mm]aterialize|[Rr]eplace|[Uu]ntie|[Aa]pply|[Ss]tart|pip) "
)


def remedies() -> dict[str, str]:
    """Return the texts of all errors that say what to do, each with the place that raises it."""
    found = {}
    for path in sorted((ROOT / "fsdp2").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                parts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
                text = "\n".join(part for part in parts if isinstance(part, str))
                if NAMES_A_REMEDY.search(text):
                    found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


@on_ranks(2)
@pytest.mark.parametrize("text", CASES)
def test_goes_on(rank, world, text):
    """The error is raised, with the remedy; done as written, it helps."""
    case = CASES[text](rank)
    call = next(case, None)
    if call is None:
        return  # not on this machine
    with pytest.raises(Exception) as raised:
        call()
    first = next(name for name, other in CASES.items() if other is CASES[text])
    assert first in str(raised.value), str(raised.value)
    for _ in case:
        raise AssertionError("a case yields once")


def test_every_remedy_is_known():
    """A new one is tried, or is listed as untried."""
    unknown = [
        f"{where}: {text}"
        for text, where in remedies().items()
        if not any(piece in text for piece in (*CASES, *UNTRIED))
    ]
    assert not unknown, "\n".join(unknown)


def test_what_is_listed_exists():
    """A text that has changed is found again; what is tried by now leaves the list of the untried."""
    texts = list(remedies())
    gone = [piece for piece in (*CASES, *UNTRIED) if not any(piece in text for text in texts)]
    assert not gone
    twice = [piece for piece in UNTRIED for text in texts if piece in text and any(case in text for case in CASES)]
    assert not twice
