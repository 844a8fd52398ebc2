"""The command as users start it: on several processes, on one, and with a rank that hangs, dies or raises."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2.__main__ import main
from fsdp2.tools.check.command import _report, _write
from fsdp2.tools.check.report import Report
from fsdp2.tools.check.supervisor import Supervisor
from fsdp2.tools.forecast.cost import H100, Hardware, Link
from tests.support import api
from tests.tools.check.launching import check, check_planted

pytestmark = api.fsdp2_only


def processes_in(folder: Path) -> list[str]:
    """Return the processes that still run in a folder, where the system tells.

    Python's own resource tracker ends by itself soon after the process that it belongs to, so they get some seconds.
    """
    deadline = time.monotonic() + 30
    while (found := _now_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _now_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if entry.readlink() == folder:
                found.append(entry.with_name("cmdline").read_text().replace("\0", " "))
    return found


def test_a_rank_that_hangs_is_named(tmp_path):
    """Rank 1 waits for nothing in the second step of a check. The report names it and its line, says where the others
    wait, is there within the time that the ranks are given, and no process is left."""
    done = check_planted(tmp_path, 2, "--only", "plain", "--patience", "8", defects="plain=hang")
    assert done.statuses == [1, 0]
    row = done.row("plain")
    assert row["verdict"] == "hangs"
    line = r"tools/check/planted.py:\d+ \(wait_for_nothing\)"
    assert re.search(rf"rank 1, fsdp2: forward of step 2, at {line} hangs", row["text"])
    assert re.search(r"waiting: rank 0, fsdp2: \w+ of step 2, at \S*(fsdp2|distributed)/", row["text"])
    assert "plain: hangs" in done.output and "### plain: hangs" in done.markdown
    assert "wait_for_nothing" in done.markdown or "host_work" in done.markdown  # the stack
    assert not processes_in(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fsdp2-check.json",
        "fsdp2-check.md",
        "output-0",
        "output-1",
    ]


def test_the_command_of_the_report_can_be_run():
    """Names of checks lost their quotes, so that they were two names, which no check has."""
    job: Any = SimpleNamespace(device="cpu", gpus_here=0, ranks_here=1)
    report = _report(["--only", "tensor parallel"], {}, job, [], interrupted=False)
    assert report.command == "python -m fsdp2 check --only 'tensor parallel'"


def test_the_version_of_torch_is_known_without_a_worker(monkeypatch):
    """Where the first check died, the report took 2.13 for granted, and did not note that this torch was not tested."""
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    job: Any = SimpleNamespace(device="cpu", gpus_here=0, ranks_here=1)
    report = _report([], {}, job, [], interrupted=False)
    assert report.problems[0].startswith("torch 2.9.1: fsdp2 was tested with torch 2.11 to")


@pytest.mark.slow
def test_one_process(tmp_path):
    """Without a launcher; every figure is in the JSON file, and the Markdown begins with the verdict."""
    done = check(tmp_path, 1, "--only", "plain", "hybrid", "--against", "none")
    assert done.statuses == [0]
    assert done.verdicts == {"plain": "right", "hybrid": "skipped"}
    assert done.report["here"]["ranks"] == "1 on 1 host" and done.report["here"]["backend"] == "gloo"
    assert done.markdown.startswith("# fsdp2 check\n\n**Nothing is wrong: 1 right, 1 skipped.**")
    assert "[2/3] plain: right" in done.output and "hybrid: skipped\n    needs an even number of ranks" in done.output


@pytest.mark.slow
def test_what_fails_leaves_the_rest(tmp_path):
    """One check crashes a rank, one raises on a rank, one hangs a rank: each is reported by its row, and the checks
    behind it still run, on new processes."""
    names = ("plain", "mixed precision", "kept after forward", "hybrid", "recomputation")
    defects = "plain=hang,kept after forward=crash,hybrid=raise"
    done = check_planted(tmp_path, 4, "--only", *names, "--patience", "20", defects=defects)
    assert done.statuses == [1, 0, 0, 0]
    verdicts = ("hangs", "right", "died", "failed", "right")
    assert done.verdicts == dict(zip(names, verdicts, strict=True))
    assert re.search(r"rank 3, fsdp2: forward of step 2, at \S+ \(wait_for_nothing\) hangs", done.row("plain")["text"])
    assert "rank 3: its process was ended by SIGSEGV" in done.row("kept after forward")["text"]
    assert done.row("hybrid")["text"].startswith("rank 3: RuntimeError: trouble on purpose")
    assert "trouble on purpose" in done.row("hybrid")["details"]
    assert not processes_in(tmp_path)


@pytest.mark.slow
def test_everything(tmp_path):
    """All checks and measurements on two processes: nothing is wrong, and a step takes the memory that is forecast."""
    saved = tmp_path / "machine.json"
    done = check(tmp_path, 2, "--save-hardware", str(saved), "--json", "fsdp2-check.json")
    assert done.statuses == [0, 0], done.output
    assert set(done.verdicts.values()) == {"right"}
    figures = {figure["name"]: figure for figure in done.report["good"]}
    peak = figures["peak memory allocated"]
    assert peak["ours"] == pytest.approx(peak["forecast"], rel=0.05)
    assert figures["Python calls for a unit"]["ratio"] < 1
    assert {"step", "exposed communication", "host time for a unit"} <= figures.keys()
    machine = Hardware.load(saved)
    assert machine.name == "measured" and machine.ranks_per_node == 2 and [link.ranks for link in machine.links] == [2]
    assert done.report["hardware"]["flops_per_second"] == pytest.approx(machine.flops_per_second)


def test_saved_constants_are_those_of_a_forecast(tmp_path, capsys):
    """They come from the process that measured as JSON; the file that is written loads as the same machine."""
    report, path = Report("check"), tmp_path / "machine.json"
    machine = replace(H100, name="measured", links=(Link(2, 1e-4, 2e9),))
    report.hardware = json.loads(json.dumps(asdict(machine)))
    _write(report, SimpleNamespace(json=tmp_path / "check.json", save_hardware=path))
    assert Hardware.load(path) == machine
    assert "forecast --hardware" in capsys.readouterr().err
    _write(Report("check"), SimpleNamespace(json=tmp_path / "check.json", save_hardware=tmp_path / "other.json"))
    assert "did not write" in capsys.readouterr().err and not (tmp_path / "other.json").exists()


def test_rates_alone(tmp_path):
    """What is measured is said, and constants that one process cannot measure are not shown as if they were. The
    report said "Nothing was checked" and listed the collectives of 1024 ranks."""
    done = check(tmp_path, 1, "--only", "rates", "--save-hardware", "new/machine.json")
    assert done.statuses == [0]
    assert "No result was compared with another. Measured: rates." in done.output
    measured, _, others = done.output.partition("not measured here, so those of an H100:")
    assert "flops_per_second" in measured and "ranks_per_node" in measured and "collective of" not in measured
    assert "network_bytes_per_second" in others and "a collective of 1024 ranks" in others
    assert done.report["not measured"] == ["links", "network_bytes_per_second", "host_bytes_per_second"]
    assert Hardware.load(tmp_path / "new" / "machine.json").flops_per_second > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json", "check.md"], "check.md: expected a name that ends in .json"),
        (["--json", "/proc/none/check.json"], "/proc/none"),
        (["--save-hardware", "machine.txt"], "machine.txt: expected a name that ends in .json"),
        (["--save-hardware", "machine.json", "--quick"], "those of the check 'rates', which is not among those chosen"),
        (["--save-hardware", "machine.json", "--only", "plain"], "those of the check 'rates'"),
        (["--save-hardware", "new/../check.json", "--json", "check.json"], "--json writes this file; expected another"),
        (["--json", "a_folder.json"], "a_folder.md: this is a folder"),
        (["--quick", "--only", "plain"], "expected one of them"),
        (["--only", "plain", "--only", "plane"], "'plane': expected one or more of"),
        (["--patience", "0"], "a number of seconds above 0"),
        (["--patience", "nan"], "a number of seconds above 0"),
    ],
)
def test_options_are_checked_before_anything_runs(capsys, monkeypatch, tmp_path, arguments, text):
    """A file that cannot be written was noticed when all checks had run, and a patience of 0 made every rank hang.

    The constants of the machine took the place of the report if both had one name.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_folder.md").mkdir()
    monkeypatch.setattr(Supervisor, "run", None)
    with pytest.raises(SystemExit) as left:
        main(["check", *arguments])
    assert left.value.code == 2 and text in capsys.readouterr().err


def test_help_and_unknown_names(capsys):
    """The help names every check; a name that is none is refused with those that are."""
    with pytest.raises(SystemExit) as left:
        main(["check", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and "torchrun --nproc-per-node 8 -m fsdp2 check" in text and "tied parameters" in text
    with pytest.raises(SystemExit) as left:
        main(["check", "--only", "plane"])
    assert left.value.code == 2 and "'plane': expected one or more of" in capsys.readouterr().err
