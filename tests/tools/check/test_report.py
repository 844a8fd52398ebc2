"""What people read: verdicts in words, the rank that hangs, problems that are known, constants of a machine."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace

import pytest

from fsdp2.tools.check.cases import CASES
from fsdp2.tools.check.environment import known_problems
from fsdp2.tools.check.forecasted import fitted_link, hardware_of
from fsdp2.tools.check.place import Comparison, Outcome, worst
from fsdp2.tools.check.report import Figure, Report, figures_of, row_of
from fsdp2.tools.check.stacks import Stuck, describe, hanging, innermost
from fsdp2.tools.check.tasks import TASKS
from fsdp2.tools.check.trial import Skip


def comparison(difference: float, **options: object) -> Comparison:
    """Return a comparison with torch's own that allows a thousandth."""
    same = difference == 0
    return Comparison("torch's own", "weight a", difference, 1e-3, **{"exact": False, "same_bits": same, **options})


def test_a_row_is_the_worst_of_its_ranks():
    """The largest difference is shown, and the ranks that found it are named."""
    right = Outcome("right", comparisons=[comparison(0.0)])
    wrong = Outcome("wrong", "weight a differs from torch's own", [comparison(2e-3)])
    row = row_of("plain", "float32", [right, wrong, wrong])
    assert row.verdict == "wrong" and row.text == "ranks 1, 2: weight a differs from torch's own"
    report = Report("python -m fsdp2 check", rows=[row])
    assert report.status == 1 and report.summary == "Something is wrong: 1 wrong."
    assert "2.0e-03 EXCEEDS 1.0e-03" in report.text() and "| plain | WRONG |" in report.markdown()


def test_verdicts_in_words():
    """Same bits, a difference beside what it may be, a difference where none may be, and a gradient that is lost."""
    for one, words in (
        (comparison(0.0), "same bits"),
        (comparison(5e-4), "5.0e-04 of 1.0e-03"),
        (comparison(5e-4, exact=True), "5.0e-04, expected the same bits"),
        (comparison(math.inf), "missing EXCEEDS 1.0e-03"),
    ):
        report = Report("", rows=[row_of("plain", "float32", [Outcome("right", comparisons=[one])])])
        assert words in report.text() and words in report.markdown()
        json.loads(report.json())
        assert "Infinity" not in report.json()


def test_the_first_failure_is_told_first():
    """Ranks 0 and 2 raised because rank 1 had."""
    came = Outcome("failed", "RuntimeError: rank 1 ended", figures={"traceback": "elsewhere", "first": 1})
    first = Outcome("failed", "ValueError: no", figures={"traceback": "here", "first": 1})
    row = row_of("plain", "", [came, first, came])
    assert row.text == "rank 1: ValueError: no\nranks 0, 2: RuntimeError: rank 1 ended" and row.details == "here"


def test_nothing_ran():
    """A rank whose host is gone has no outcome."""
    assert row_of("plain", "", [None, None]).verdict == "not run" and worst([]) == "not run"
    assert Report("", interrupted=True).status == 1 and "interrupted" in Report("", interrupted=True).text()


def test_figures():
    """Memory is that of the rank with the most; more than torch's is marked, and is no failure."""
    ranks = [Outcome("seen", figures={"peak memory allocated": {"fsdp2": n << 20, "torch": 2 << 20}}) for n in (2, 3)]
    forecast = [Outcome("seen", figures={"peak memory allocated": {"forecast": 3 << 20}}), None]
    (figure,) = figures_of([ranks, forecast])
    assert figure == Figure("peak memory allocated", "MiB", 3.0, 2.0, 3.0)
    assert figure.verdict == "more: look" and Report("", figures=[figure]).status == 0
    assert Figure("step", "ms", 1.0, 2.0).verdict == "less" and Figure("step", "ms", 1.0).verdict == ""
    head = next(line for line in Report("", figures=[figure]).text().splitlines() if line.startswith("is it good"))
    assert head.split()[-2:] == ["forecast", "verdict"]  # the verdicts stood below nothing


def test_rows_begin_alike():
    """One of them had a capital. Names keep theirs."""
    assert {about.split()[0] for about in (task.about for task in TASKS.values()) if about[0].isupper()} == {
        "Muon",
        "AdamW",
    }


def dump(*threads: str) -> str:
    """Return what faulthandler writes."""
    lines = []
    for thread in threads:
        lines.append("Thread 0x1 (most recent call first):")
        for frame in thread.split():
            file, line, function = frame.split(":")
            lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join(lines)


MAIN = "/a/fsdp2/tools/check/worker.py:66:work"
FOLLOWS = "/a/fsdp2/tools/check/worker.py:102:follow"
WAITS = dump(FOLLOWS, f"/a/fsdp2/comm/host_work.py:9:wait /a/fsdp2/comm/reduce.py:1:wait {MAIN}")
STANDS = dump(FOLLOWS, f"/home/me/data.py:7:read {MAIN}")
IN_HOOK = dump(
    FOLLOWS, "/home/me/hook.py:3:hook /a/fsdp2/engine/unit.py:1:f", f"/x/torch/autograd/graph.py:1:run {MAIN}"
)


def test_where_a_rank_stands():
    """The thread that runs tasks counts; where it waits for autograd's thread, that one."""
    assert str(innermost(STANDS)) == "home/me/data.py:7 (read)"
    assert str(innermost(IN_HOOK)) == "home/me/hook.py:3 (hook)"
    assert innermost("") is None


def test_the_rank_that_hangs():
    """It is the one that does not wait for others; if all wait, the one that waits elsewhere; else nobody is blamed."""
    waits, stands = ([Stuck(rank, "step 2", text) for rank in range(3)] for text in (WAITS, STANDS))
    assert hanging([waits[0], stands[1], waits[2]]) == [stands[1]]
    looks = dump(FOLLOWS, f"/a/fsdp2/engine/root.py:5:groups /a/fsdp2/comm/host_work.py:9:wait {MAIN}")
    assert hanging([Stuck(0, "step 2", looks), stands[1]]) == [stands[1]]
    elsewhere = Stuck(1, "step 2", dump(f"/a/fsdp2/comm/gather.py:5:finish {MAIN}"))
    assert hanging([waits[0], elsewhere, waits[2]]) == [elsewhere]
    late = Stuck(1, "step 1", WAITS)
    assert hanging([waits[0], late, waits[2]]) == [late]
    assert hanging(waits) == [] and hanging(waits[:2]) == [] and hanging(stands[:1]) == stands[:1]
    text = describe([waits[0], stands[1], waits[2]], 45)
    assert text.startswith(
        "there was no progress for 45 s. rank 1, step 2, at home/me/data.py:7 (read) hangs. waiting: rank 0"
    )
    assert "all ranks wait for each other" in describe(waits, 45)


def test_a_report_fits_a_terminal():
    """Of 100 columns: the table of results had 158, and notes were one line each."""
    same, close = comparison(0.0), replace(comparison(5e-4), against="one process")
    outcome = Outcome("right", comparisons=[same, close, replace(close, against="the same, resumed")])
    about = "a long description of what a check does, which the help shows as well, and Markdown has room for"
    rows = [row_of(max(TASKS, key=len), about, [outcome]), row_of("hybrid", "", [Outcome("skipped", "no")])]
    report = Report("", {"backend": "gloo"}, rows=rows, problems=[about + about], measured="small units")
    report.ranks = [{"host": "a" * 60, "device": "cpu", "free memory": "1 of 2 GiB"}]
    report.figures = [Figure("step above one that is not sharded", "ms", 123456.0, 123456.0, 123456.0)]
    report.figures.append(Figure("peak memory allocated", "MiB", 3.0, 2.0, 3.0))
    text = report.text()
    assert max(map(len, text.splitlines())) <= 100
    assert "hybrid: skipped\n    no" in text and about not in text and about in report.markdown()
    assert "Peak memory on CPUs is about that of torch's own" in text
    report.here = {"backend": "nccl"}
    assert "on CPUs" not in report.text() and "on CPUs" not in report.markdown()


def test_known_problems():
    """Versions that were not tested, more ranks than GPUs, and no GPU at all."""
    (old,) = known_problems("2.9.1+cu126", cuda=True, gpus=8, ranks_here=8)[:1]
    assert old.startswith("torch 2.9.1+cu126: fsdp2 was tested with torch 2.11 to 2.15")
    assert "8 ranks run on this host, which has 2 GPUs" in known_problems("2.13.0", cuda=False, gpus=2, ranks_here=8)[0]
    assert "no GPU was found" in known_problems("2.13.0+cpu", cuda=False, gpus=0, ranks_here=2)[0]


def test_without_numpy_the_checkpoint_is_left_out_and_the_reason_said(monkeypatch):
    """pip installs torch without numpy, and the first check of a new user said that something was wrong."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install numpy" in known_problems("2.13.0", cuda=False, gpus=0, ranks_here=2)[-1]
    with pytest.raises(Skip, match="numpy, which is not installed"):
        CASES["checkpoint"](None)


def test_constants_of_a_machine():
    """Latency and bandwidth follow from the smallest and the largest gather; a network's ranks share it."""
    link = fitted_link(4, [(4_000, 1e-3 + 3e-6), (4_000_000, 1e-3 + 3e-3)])
    assert link.seconds == pytest.approx(1e-3) and link.bytes_per_second == pytest.approx(1e9)
    backwards = fitted_link(4, [(4_000, 2e-3), (4_000_000, 1e-3)])
    assert backwards.bytes_per_second > 0
    rates = {"flops_per_second": 1e12, "memory_bytes_per_second": 1e10, "gathers": [(4_000, 1e-3), (4_000_000, 2e-3)]}
    machine = hardware_of(4, 2, rates)
    assert machine.ranks_per_node == 2 and machine.name == "measured"
    assert machine.collective_seconds(4_000_000, [0, 1, 2, 3]) == pytest.approx(2e-3, rel=0.05)
