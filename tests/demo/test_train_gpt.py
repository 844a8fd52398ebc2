"""The example as a person runs it: real processes, real files, and every kind of bad input."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpt import checkpoint
from gpt.data import HELD_OUT, load_text, training_batch
from gpt.options import Settings, parse
from gpt.processes import Place, UserError
from gpt.record import Progress
from tests.support import ROOT

EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
LIMIT = 300  # seconds until a hanging run is killed; the longest takes about ten on two idle cores
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 6, "steps": 10, "sample": 8, "eval-every": 5}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


@dataclass
class Ended:
    """What one process left behind."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def text() -> Iterator[Path]:
    """A file of 20,000 bytes of words."""
    words = [line.split()[0] for line in (EXAMPLES / "gpt" / "train.py").read_text().splitlines() if line.split()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        path.write_text(" ".join(random.Random(0).choices(words, k=8000))[:20_000])
        yield path


@pytest.fixture(scope="module")
def whole(text: Path) -> Iterator[Path]:
    """The folder of a run of ten steps on two processes under torchrun, with a checkpoint in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        ended = torchrun(2, *TINY, "--text", text, "--out", out, "--save-every", 5)
        assert ended.status == 0, ended.stderr
        yield out


@pytest.mark.slow
def test_a_run_shows_samples_a_table_and_a_picture(whole: Path, text: Path) -> None:
    assert checkpoint.find(whole).name == "step-000010"
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    progress = checkpoint.verify(checkpoint.find(whole))
    (run,) = progress.runs
    assert run.ranks == 2 and len(run.losses) == 10
    assert [step for step, _ in run.held_out] == [0, 5, 10]
    assert run.held_out[-1][1] < run.held_out[0][1]
    assert run.parameters / 2 <= run.parameters_per_rank < 0.52 * run.parameters
    assert 0 < run.peak_bytes < run.peak_bytes_unsharded
    assert progress.text == str(text.resolve())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(whole: Path, tmp_path: Path, ranks: int) -> None:
    """Step 5 was saved by two processes; steps 6 to 10 on another number repeat those of the run that went on."""
    before = snapshot(whole)
    ended = torchrun(ranks, "--resume", whole / "checkpoints" / "step-000005", "--out", tmp_path / "on", "--no-report")
    assert ended.status == 0, ended.stderr
    original = checkpoint.verify(whole / "checkpoints" / "step-000010")
    first, second = checkpoint.verify(checkpoint.find(tmp_path / "on")).runs
    assert second.first_step == 5 and second.ranks == ranks
    assert second.held_out[0] == pytest.approx(first.held_out[-1], abs=1e-6), "the loss continues"
    assert first.losses + second.losses == pytest.approx(original.runs[0].losses, abs=5e-3)
    assert second.held_out[-1] == pytest.approx(original.runs[0].held_out[-1], abs=5e-3)
    assert snapshot(whole) == before
    assert f"when saved by 2 processes, {second.held_out[0][1]:.4f} now on {ranks}" in ended.stdout


@pytest.mark.slow
def test_the_demo_trains_and_resumes_by_itself(tmp_path: Path, text: Path) -> None:
    ended = run([EXAMPLES / "demo.py", *TINY, "--steps", 4, "--sample", 0, "--device", "cpu", "--text", text], tmp_path)
    assert ended.status == 0, ended.stderr
    (out,) = (tmp_path / "runs").iterdir()
    runs = checkpoint.verify(checkpoint.find(out)).runs
    assert len({run.ranks for run in runs}) == 2 and runs[-1].last_step == 4
    assert runs[1].held_out[0][1] == pytest.approx(runs[0].held_out[-1][1], abs=1e-6)
    for words in (
        "peak memory of a step",
        "without sharding",
        "held-out loss, first",
        "loss.png",
        "recorded",
        "step.html",
    ):
        assert words in ended.stdout


@pytest.mark.slow
def test_a_save_that_is_killed_harms_no_other_checkpoint(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    command = [SCRIPT, *TINY, "--steps", 1000, "--save-every", 1, "--text", text, "--out", out]
    with started(command, tmp_path) as process:
        until = time.monotonic() + LIMIT
        while not (len(checkpoint.saved_steps(out)) >= 2 and list((out / "checkpoints").glob(".partial-*"))):
            assert process.poll() is None and time.monotonic() < until, "no second save came"
            time.sleep(0.001)
        kill(process)
    steps = checkpoint.saved_steps(out)
    for step in steps:
        assert checkpoint.verify(out / "checkpoints" / f"step-{step:06d}").step == step
    options = ["--resume", out, "--out", out, "--stop-at", max(steps) + 1, "--no-report"]
    assert [rank.status for rank in directly(1, *options)] == [0]
    assert max(checkpoint.saved_steps(out)) == max(steps) + 1


# --- bad input, as every rank sees it -------------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_input_under_torchrun_is_said_once(tmp_path: Path) -> None:
    ended = torchrun(2, *TINY, "--text", tmp_path / "none.txt", "--out", tmp_path / "out")
    assert ended.status != 0
    assert len(re.findall("^train_gpt.py: error: cannot read the text .*none.txt", ended.stderr, re.MULTILINE)) == 1
    assert 'train_gpt.py", line' not in ended.stderr, "a traceback of the script"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_bad_input_without_torchrun_is_all_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    ended = run([SCRIPT, *TINY, "--text", "empty.txt", "--out", "out"], tmp_path)
    assert_one_line(ended.stderr, "the text empty.txt is empty")
    assert ended.status == 2 and ended.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_every_rank(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shard = tmp_path / "run" / "checkpoints" / "step-000010" / "__1_0.distcp"
    flip_a_byte(shard)
    before = snapshot(tmp_path)
    refused_everywhere(2, "damaged checkpoint .*__1_0.distcp have changed", "--resume", tmp_path / "run", "--steps", 20)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_run_is_never_overwritten(whole: Path) -> None:
    before = snapshot(whole)
    refused_everywhere(2, "already holds a run", *TINY, "--out", whole)
    assert snapshot(whole) == before


@pytest.mark.slow
def test_more_ranks_than_the_batch_can_serve(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused_everywhere(2, "a batch of 3 .* over 2 processes; start 1, 3 of", *TINY, "--batch", 3, "--out", out)
    assert not out.exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    refused_everywhere(2, "cannot write to the output folder", *TINY, "--out", tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "keep me"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to serve them")
def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    refused_everywhere(2, "this machine has no GPU", *TINY, "--device", "cuda", "--out", tmp_path / "out")


# --- bad input, each kind of it: the same checks, called without starting processes ---------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-thing", "unrecognized arguments: --no-such-thing"),
        ("--steps 0", "--steps: 0 is less than 1"),
        ("--steps many", "--steps: invalid .* value: 'many'"),
        ("--ranks 0", "--ranks: 0 is less than 1"),
        ("--learning-rate nan", "nan is not between 0 and 1"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
    ],
)
def test_command_lines_that_make_no_sense(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(arguments.split())


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="--width 30 cannot be split into 4 heads"):
        parse(["--width", "30", "--heads", "4"]).settings(None).check(ranks=1)
    with pytest.raises(UserError, match="the checkpoint's model has width 256; it cannot be resumed with --width 128"):
        parse(["--width", "128"]).settings(saved=Settings())
    assert parse(["--steps", "9"]).settings(saved=Settings(width=64)) == Settings(width=64, steps=9)


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    short, garbage = tmp_path / "short.txt", tmp_path / "garbage.bin"
    short.write_bytes(b"x" * (HELD_OUT * 33 - 1))
    garbage.write_bytes(random.Random(0).randbytes(HELD_OUT * 33))
    with pytest.raises(UserError, match=r"short.txt has only 329 bytes; windows of 32 bytes need a text of 330 bytes"):
        load_text(short, context=32)
    with pytest.raises(UserError, match="cannot read the text .*: Is a directory"):
        load_text(tmp_path, context=32)
    text = load_text(garbage, context=32)  # any bytes will do, and the shortest text can be trained on
    inputs, targets = training_batch(text, 0, 6, 32, 0, Place(1, 2, torch.device("cpu")))
    assert inputs.shape == targets.shape == (3, 32) and len(text.held_out) == 33


def test_the_global_batch_is_the_same_on_any_number_of_ranks(text: Path) -> None:
    loaded = load_text(text, 32)

    def rows(ranks: int) -> torch.Tensor:
        places = [Place(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
        return torch.cat([training_batch(loaded, 7, 12, 32, 0, place)[0] for place in places])

    assert all(torch.equal(rows(1), rows(ranks)) for ranks in (2, 3, 4, 6, 12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes, not"),
        (lambda folder: flip_a_byte(folder / "__0_0.distcp"), "the contents of __0_0.distcp have changed"),
        (lambda folder: (folder / "checkpoint.json").unlink(), "checkpoint.json cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text('{"files": {'), "checkpoint.json cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("[]"), "checkpoint.json cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_bytes(b"\xff\x00"), "checkpoint.json cannot be read"),
    ],
)
def test_damage_to_a_checkpoint_is_found(whole: Path, tmp_path: Path, damage, message: str) -> None:
    folder = tmp_path / "step-000010"
    shutil.copytree(whole / "checkpoints" / "step-000010", folder)
    assert isinstance(checkpoint.verify(folder), Progress)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(f"damaged checkpoint {folder}: {message}")):
        checkpoint.verify(folder)


def test_checkpoints_that_are_not_there(tmp_path: Path) -> None:
    wrong = {tmp_path / "none": "is not there", tmp_path: "no checkpoint in", SCRIPT: "not a folder"}
    for path, message in wrong.items():
        with pytest.raises(UserError, match=message):
            checkpoint.find(path)
    for name in ("step-000005", "step-000010", ".partial-step-000020"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint.find(tmp_path).name == "step-000010", "what a killed save left is not a checkpoint"
    checkpoint.prepare(tmp_path, resumed_at=10)
    with pytest.raises(UserError, match="already holds a checkpoint of step 10, later than 5"):
        checkpoint.prepare(tmp_path, resumed_at=5)


# --- running the script ---------------------------------------------------------------------------------------------


def torchrun(ranks: int, *arguments: object) -> Ended:
    """The end of the script under the torchrun command, over loopback."""
    engine = f"--nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1".split()
    return run(["-m", "torch.distributed.run", *engine, SCRIPT, *arguments], ROOT)


def directly(ranks: int, *arguments: object) -> list[Ended]:
    """The end of each rank, started with the environment that torchrun gives it: so each has an exit status to see."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent serves it as well
    served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = []
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                extra = served | {k: str(v) for k, v in place.items()}
                processes.append(start([SCRIPT, *arguments], Path(elsewhere), extra))
            return [finish(process) for process in processes]
        finally:
            for process in processes:
                kill(process)


def refused_everywhere(ranks: int, message: str, *arguments: object) -> None:
    """Rank 0 says `message` in one line, the others say nothing, and every one exits with status 2."""
    first, *others = directly(ranks, *arguments)
    assert_one_line(first.stderr, message)
    assert [rank.status for rank in (first, *others)] == [2] * ranks
    assert all(rank.stderr == "" for rank in others)


def assert_one_line(stderr: str, message: str) -> None:
    assert re.fullmatch(rf"train_gpt.py: error: [^\n]*{message}[^\n]*\n", stderr), stderr


def run(command: list[object], folder: Path) -> Ended:
    with started(command, folder) as process:
        return finish(process)


@contextmanager
def started(command: list[object], folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(command, folder, {})
    try:
        yield process
    finally:
        kill(process)


def start(command: list[object], folder: Path, extra: dict[str, str]) -> subprocess.Popen[str]:
    """Python with `command`, in a process group of its own, with everything on loopback and one thread a rank."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "PYTHONPATH": paths, **extra}
    words = [sys.executable, *map(str, command)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill(process)
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {LIMIT} s\n{stdout}\n{stderr}")
    return Ended(process.returncode, stdout, stderr)


def kill(process: subprocess.Popen[str]) -> None:
    """End the process and its ranks without warning; torchrun gives every rank a process group of its own."""
    if process.poll() is not None:
        return
    for leader in [*children(process.pid), process.pid]:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [pid for pid, ppid in pairs if ppid == parent]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def snapshot(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
