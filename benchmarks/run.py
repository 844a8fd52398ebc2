"""One table with every benchmark's figures, in less than ten minutes on two cores.

Runs memory, host, step and optimizer one after the other, each in its own process, so that none of them meets what
another left behind. `--write` writes one report that holds them all; `--json` prints the rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from _common import Row, arguments, finish

BENCHMARKS = ("memory", "host", "step", "optimizer")


def rows_of(name: str, ours: str) -> list[Row]:
    """What one benchmark measured; a line on stderr says how long it took."""
    start = time.perf_counter()
    script = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run([sys.executable, str(script), "--json", "--ours", ours], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"run: {name} failed; its error is above")
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return [Row(**row) for row in json.loads(done.stdout)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="run only these")
    options = parser.parse_args()
    rows = [row for name in options.only for row in rows_of(name, options.ours)]
    finish("all", rows, __doc__ or "", options)
    missed = sum(row.reached is False for row in rows)
    print(f"{sum(row.reached is True for row in rows)} figures reached, {missed} missed", file=sys.stderr)


if __name__ == "__main__":
    main()
