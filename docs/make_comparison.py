"""Write the comparison of fsdp2 with torch's fully_shard: run every report among the tests with both.

    python docs/make_comparison.py                  # all of them: some minutes
    python docs/make_comparison.py --only test_tied_units test_deepcopy

Each report runs in processes of its own, which are ended after some seconds, so that a crash or a hang is a row of the
table and not the end of this script. The tables are between two comments in docs/comparison.md.
tests/docs/test_comparison.py fails if a report has no row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

START, END = "<!-- comparison: start -->", "<!-- comparison: end -->"
FILES = ("docs/comparison.md",)
ROW = re.compile(r"^\| \[(?P<title>.*)\]\((?P<link>[^)]*)\) \| (?P<fsdp2>.*) \| (?P<torch>.*) \|$", re.MULTILINE)


def outcomes(implementation: str, names: Iterable[str]) -> dict[str, str]:
    """Run reports against one implementation and return a cell for each."""
    command = [sys.executable, "-m", "tests.support.comparison", *names]
    environment = {**os.environ, "FSDP2_TESTS_IMPLEMENTATION": implementation, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}
    found = {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, cell = json.loads(line)
            print(f"{implementation:6} {name}: {cell}", file=sys.stderr)
            found[name] = cell
    return found


def known_rows(text: str) -> dict[str, tuple[str, str]]:
    """Return the cells of the rows in ``text`` by title."""
    return {match["title"]: (match["fsdp2"], match["torch"]) for match in ROW.finditer(text)}


def tables(cells: dict[str, tuple[str, str]], version: str) -> str:
    """Return one table per heading with a row per report, without reports that have no cells."""
    from tests.support.report import all_reports

    lines = []
    for heading, reports in all_reports().items():
        shown = [one for one in reports if one.title in cells]
        if shown:
            lines += [f"### {heading}", "", f"| report | fsdp2 | torch {version} |", "|---|---|---|"]
        for one in shown:
            path = f"../{one.program.__module__.replace('.', '/')}.py"
            lines.append(f"| [{one.title}]({path}) | {cells[one.title][0]} | {cells[one.title][1]} |")
        lines += [""] if shown else []
    return "\n".join(lines)


def write(path: Path, table: str) -> None:
    """Replace the text between the two comments of a file, if it has them."""
    text = path.read_text()
    if START not in text or END not in text:
        return
    if path.parent == ROOT:
        table = table.replace("](../", "](")
    before, rest = text.split(START, 1)
    path.write_text(f"{before}{START}\n\n{table}\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    """Run the reports and write the files."""
    from tests.support.report import all_reports

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these reports; the other rows stay as they are")
    options = parser.parse_args()
    reports = [one for group in all_reports().values() for one in group]
    names = [one.name for one in reports if not options.only or one.name in options.only]
    ours, theirs = outcomes("fsdp2", names), outcomes("torch", names)
    cells = known_rows((ROOT / FILES[0]).read_text())
    for one in reports:
        if one.name in names:
            mine = one.promise if ours[one.name] == "works" else ours[one.name]
            cells[one.title] = (mine, theirs[one.name])
    import torch

    table = tables(cells, ".".join(torch.__version__.split(".")[:2]))
    for file in FILES:
        write(ROOT / file, table)


if __name__ == "__main__":
    main()
