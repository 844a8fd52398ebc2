"""Write docs/compositions.md: the features that tests combine, and the combinations that raise errors.

    python docs/make_compositions.py

Everything comes from the source of the tests: decorators of tests/support/composition.py list the features of a test.
tests/docs/test_compositions.py fails if the file differs from the output of this script.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.composition import FEATURES  # noqa: E402

HEAD = """# Feature combinations

A dot marks a combination with at least one test on 2, 4 or 8 gloo processes. The test compares losses, gradients and
weights with torch's `fully_shard` under the same plan, or with a single process if torch raises an error. A cross marks
a combination for which fsdp2 raises an error in some form; the last table lists these forms and the reasons. An empty
cell is a combination without a test.

`python docs/make_compositions.py` writes this page from the decorators of the tests; do not edit it.
"""


@dataclass(frozen=True)
class Combination:
    """The content of one decorator of a test; ``by`` is empty if the combination works."""

    features: frozenset[str]
    path: str
    test: str
    by: str = ""
    reason: str = ""

    @property
    def link(self) -> str:
        """A link to the test from the docs folder."""
        return f"[{self.test}](../{self.path})"

    @property
    def order(self) -> tuple[int, list[int], str, str]:
        """A key that sorts by the number of features, then in the order of FEATURES."""
        names = list(FEATURES)
        return len(self.features), sorted(names.index(f) for f in self.features), self.path, self.test


def combinations_of(path: Path) -> Iterator[Combination]:
    """Yield the combinations in the decorators of one file."""
    for node in ast.walk(ast.parse(path.read_text())):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Name):
                continue
            if decorator.func.id not in ("composes", "refuses"):
                continue
            features = frozenset(ast.literal_eval(argument) for argument in decorator.args)
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords if keyword.arg}
            yield Combination(features, path.relative_to(ROOT).as_posix(), node.name, **options)


def everything() -> list[Combination]:
    """Return the combinations of all tests."""
    found = [one for path in sorted((ROOT / "tests").rglob("test_*.py")) for one in combinations_of(path)]
    return sorted(set(found), key=lambda one: one.order)


def pairs(found: list[Combination]) -> set[frozenset[str]]:
    """Return all pairs of features that appear together, and each single feature."""
    together = {frozenset(pair) for one in found for pair in combinations(one.features, 2)}
    return together | {frozenset([feature]) for one in found for feature in one.features}


def named(features: frozenset[str]) -> str:
    """Return the features as text, in the order of FEATURES."""
    return " + ".join(feature for feature in FEATURES if feature in features)


def matrix(found: list[Combination]) -> Iterator[str]:
    """Yield the lines of the table of pairs."""
    works = pairs([one for one in found if not one.by])
    refused = {one.features for one in found if one.by in ("fsdp2", "both")}
    names = list(FEATURES)
    yield "| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |"
    yield "|---|" + "---|" * len(names)
    for i, row in enumerate(names):
        cells = []
        for column in names[: i + 1]:
            pair = frozenset([row, column])
            cells.append(" ".join(["●"] * (pair in works) + ["✕"] * (pair in refused)))
        yield f"| **{i + 1} {row}** | " + " | ".join(cells + [""] * (len(names) - i - 1)) + " |"


def text() -> str:
    """Return the whole document."""
    found = everything()
    lines = [HEAD, "## Pairs\n", *matrix(found), "\n## Names of features\n", "| feature | meaning |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in FEATURES.items()]
    lines += ["\n## Combinations\n", "| together | tests |", "|---|---|"]
    tests: dict[frozenset[str], list[str]] = defaultdict(list)
    for one in found:
        if not one.by:
            tests[one.features].append(one.link)
    lines += [f"| {named(features)} | {', '.join(dict.fromkeys(links))} |" for features, links in tests.items()]
    lines += ["\n## Refused\n", "| together | by | why | test |", "|---|---|---|---|"]
    for one in found:
        if one.by:
            who = {"torch": "torch only", "fsdp2": "fsdp2", "both": "torch and fsdp2"}[one.by]
            lines.append(f"| {named(one.features)} | {who} | {one.reason} | {one.link} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file."""
    (ROOT / "docs" / "compositions.md").write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
