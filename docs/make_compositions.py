"""Write docs/compositions.md: the features that tests combine, and the combinations that raise errors.

    python docs/make_compositions.py
    python docs/make_compositions.py --tests   # print every combination with its tests instead

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
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.composition import FEATURES, OUT_OF_REACH  # noqa: E402

HEAD = """<!-- Written by docs/make_compositions.py from the decorators of the tests; do not edit. -->
# Feature combinations

Each line names a feature and the features that are tested together with it, on 2, 4 or 8 gloo processes. The tests
compare losses, gradients and weights with torch's `fully_shard` under the same plan, or with a single process if torch
raises an error. The features of the table at the end raise an error together, at least in the form that it describes.
"""

REST = f"""A pair that is in neither has no test of its own. Random programs combine it, unless it has one of these
features: {", ".join(OUT_OF_REACH)}. Then it may work, but nobody has tried it."""


@dataclass(frozen=True)
class Combination:
    """The content of one decorator of a test; ``by`` is empty if the combination works."""

    features: frozenset[str]
    path: str
    test: str
    by: str = ""
    reason: str = ""

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


def partners(found: list[Combination]) -> Iterator[str]:
    """Yield the lines of the list: each feature, what it means, and what it is tested with."""
    works = pairs([one for one in found if not one.by])
    for row, meaning in FEATURES.items():
        others = [other for other in FEATURES if other != row and frozenset([row, other]) in works]
        yield f"* **{row}**: {meaning}. With {', '.join(others)}."


def text() -> str:
    """Return the whole document."""
    found = everything()
    lines = [HEAD, fill(REST, 120)]
    lines += ["\n## Tested together\n"]
    lines += partners(found)
    lines += ["\n## Refused\n", "| together | by | why |", "|---|---|---|"]
    who = {"torch": "torch only", "fsdp2": "fsdp2", "both": "torch and fsdp2"}
    rows = [f"| {named(one.features)} | {who[one.by]} | {one.reason} |" for one in found if one.by]
    return "\n".join([*lines, *dict.fromkeys(rows)]) + "\n"


def listed() -> str:
    """Return every combination with its tests, one a line."""
    tests: dict[tuple[frozenset[str], str], list[str]] = defaultdict(list)
    for one in everything():
        tests[one.features, one.by].append(f"{one.path}::{one.test}")
    return "\n".join(
        f"{named(features)}{f' (refused by {by})' if by else ''}: {', '.join(dict.fromkeys(names))}"
        for (features, by), names in tests.items()
    )


def main() -> int:
    """Write the file, or print the combinations with their tests."""
    if "--tests" in sys.argv[1:]:
        print(listed())
    else:
        (ROOT / "docs" / "compositions.md").write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
