"""The forecast as an object, on the command line, and what it says of code that it cannot run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import forecast
from fsdp2.__main__ import main
from fsdp2._torch.tensors import local_tensor
from fsdp2.optim import runs
from fsdp2.tools.forecast.comparing import compare, comparison
from fsdp2.tools.forecast.cost import H100, Hardware, Link
from tests.support import api
from tests.support.parity import shard_each

pytestmark = api.fsdp2_only
WIDTH = 1 << 12
FORECAST = ["forecast", "tests.tools.forecast.test_run:build", "--mesh", "shard=8"]
"""The command, as far as most tests agree."""


def build(mesh: Any, layers: int = 4, over: bool = False) -> tuple[Any, Any]:
    """Return a model of layers that are units, 64 MiB each, and its optimizer; ``over``: without copies on replicas."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    shard_each(model, fsdp2, mesh=mesh, shard_over_replicas=over)
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any) -> None:
    """Train once."""
    model(torch.empty(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def build_offloaded(mesh: Any, **options: Any) -> tuple[Any, Any]:
    """Return the model, and its optimizer with its state on the host."""
    model, _ = build(mesh)
    return model, fsdp2.offload_optimizer_state(torch.optim.AdamW(model.parameters(), fused=True), **options)


def test_state_on_the_host():
    """Moments are no memory of the device, except for a budget; a step takes the time in which they are copied.

    Copies go in both directions at once, three buckets are on the device, and the kernels are hidden behind them.
    """
    hardware = replace(H100, host_bytes_per_second=1e9)
    moments = 2 * 4 * WIDTH * WIDTH * 4 // 8

    def built(mesh: Any) -> tuple[Any, Any]:
        model, _ = build(mesh)
        return model, fsdp2.use_local_shards(torch.optim.AdamW(model.parameters(), fused=True))

    def forecast_of(build: Any) -> Any:
        return forecast(build, step, mesh={"shard": 8}, hardware=hardware)

    plain = forecast_of(built)
    offloaded = forecast_of(partial(build_offloaded, bucket_mb=16))
    half = forecast_of(partial(build_offloaded, bucket_mb=16, device_budget_bytes=moments // 2))
    assert plain.bytes_by_kind["optimizer state"] == pytest.approx(moments, rel=0.001)
    assert offloaded.bytes_by_kind.get("optimizer state", 0) < 1024
    assert half.bytes_by_kind["optimizer state"] == pytest.approx(moments // 2, rel=0.001)
    assert plain.peak_bytes - offloaded.peak_bytes == pytest.approx(moments, rel=0.1)
    # The first bucket arrives while nothing leaves, and the last one leaves while nothing arrives.
    for one, buckets, copied in ((offloaded, 4, moments), (half, 2, moments // 2)):
        extra = one.step_seconds - plain.step_seconds
        assert extra == pytest.approx(copied / 1e9 * (1 + 1 / buckets), rel=0.05)


@pytest.mark.parametrize(("overlap", "keep"), [(False, False), (True, False), (False, True), (True, True)])
def test_steps_on_whole_matrices(overlap, keep):
    """Each of four ranks owns one of the matrices: its kernels are Muon's on it, and what it gets are the other ranks'
    pieces of its gradient and values, and their new values of the others. In backward the gradient comes already, and
    the values may be there since the step before."""

    def built(mesh: Any) -> tuple[Any, Any]:
        model, _ = build(mesh)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        return model, fsdp2.use_full_params(optimizer, overlap_backward=overlap, keep_full_params=keep)

    result = forecast(built, step, mesh={"shard": 8}, steps=3)
    layer, pieces = WIDTH * WIDTH * 4, 7 / 8
    sent = {(one.axis, one.kind): (one.launches, one.nbytes) for one in result.collectives}
    in_step = (2 - overlap - keep) * layer * pieces + 3 * layer / 8
    assert sent["shard", "all_to_all"] == (1 if overlap and keep else 2, in_step)
    assert sent.get(("owners in backward", "all_to_all")) == ((4, layer * pieces) if overlap else None)
    spans = [span for span in result.timeline.spans if span.lane == "exchange"]
    assert sum(span.nbytes for span in spans) == in_step + overlap * layer * pieces
    products = 5 * 3 * 2 * WIDTH**3 / H100.flops_per_second
    plain = forecast(build, step, mesh={"shard": 8})
    assert products <= result.compute_seconds - plain.compute_seconds <= 1.2 * products
    assert result.bytes_by_kind["optimizer state"] == pytest.approx(layer, rel=0.001)
    assert result.timeline.memory[-1].by_kind.get("other", 0) >= keep * layer


def test_figures():
    """Shards, optimizer state and what is gathered are as long as arithmetic says; nothing is made in memory.

    Each layer is gathered for forward and for backward, except the last: it stays gathered between the two.
    """
    result = forecast(build, step, mesh={"replicate": 2, "shard": 8})
    layer = WIDTH * WIDTH * 4
    assert result.bytes_by_kind["shards"] == pytest.approx(4 * layer / 8, rel=0.001)
    assert result.bytes_by_kind["optimizer state"] == pytest.approx(2 * 4 * layer / 8, rel=0.001)
    # The next one is gathered when this one has its gradients, in memory that reductions have given back.
    assert layer <= result.bytes_by_kind["gathered"] <= 1.1 * layer
    assert result.peak.running.startswith("backward of ")
    sent = {(one.axis, one.kind): (one.launches, one.nbytes) for one in result.collectives}
    assert sent == {
        ("replicate", "all_reduce"): (4, 4 * layer // 8),
        ("shard", "all_gather"): (7, 7 * layer),
        ("shard", "reduce_scatter"): (4, 4 * layer),
    }
    assert result.padding_bytes == 0
    assert result.exposed_seconds == pytest.approx(result.step_seconds - result.compute_seconds)
    assert sum(result.exposed_by_unit.values()) == pytest.approx(result.exposed_seconds, rel=0.1)


@pytest.mark.parametrize(
    "update",
    [lambda p, k: p.lerp_(p.grad, 0.1 / k), lambda p, k: p.addcmul_(p.grad, p, value=0.1 / k)],
    ids=["lerp", "addcmul"],
)
def test_a_factor_that_changes_costs_nothing(update):
    """A step whose learning rate changes takes as long, in as much memory, as one where it stays the same.

    DTensor runs an operator whose numbers are new on fake tensors as long as whole parameters, to learn the shape of
    its result. No device does that work.
    """

    def updates(factors: Any) -> Any:
        def train(model: Any, optimizer: Any) -> None:
            model(torch.empty(8, WIDTH)).sum().backward()
            with torch.no_grad():
                factor = next(factors)
                for parameter in model.parameters():
                    update(parameter, factor)
            optimizer.zero_grad()

        return train

    changing, same = (forecast(build, updates(factors), mesh={"shard": 8}) for factors in (count(1), repeat(1)))
    assert changing.step_seconds == same.step_seconds and changing.bytes_by_kind == same.bytes_by_kind


def accumulate(model: Any, optimizer: Any, batches: int = 8) -> None:
    """Train once with micro-batches, of which the last one sums gradients over replicas."""
    for number in range(batches):
        model.set_requires_all_reduce(number == batches - 1)
        model(torch.empty(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("batches", [1, 8])
def test_figures_over_replicas(batches):
    """Every rank keeps exactly a 16th of the parameters and of the optimizer state. Between the two replicas, a step
    gathers and reduces each rank's piece for the shard axis once. The rest is as with hybrid sharding.
    """
    result = forecast(
        partial(build, over=True), partial(accumulate, batches=batches), mesh={"replicate": 2, "shard": 8}, steps=2
    )
    layer = WIDTH * WIDTH * 4
    assert result.bytes_by_kind["shards"] == 4 * layer // 16
    assert result.bytes_by_kind["optimizer state"] == 2 * 4 * layer // 16 + 4 * 4  # a step counter for each parameter
    portions = 4 * layer // 8
    assert result.bytes_by_kind["gathered"] == layer + portions
    sent = {(one.axis, one.kind): (one.launches, one.nbytes) for one in result.collectives}
    assert sent == {
        ("replicate", "all_gather"): (4, 4 * layer // 8),
        ("replicate", "reduce_scatter"): (4, 4 * layer // 8),
        ("shard", "all_gather"): (7 * batches, 7 * batches * layer),
        ("shard", "reduce_scatter"): (4 * batches, 4 * batches * layer),
    }
    assert result.padding_bytes == 0


def test_over_replicas_beside_hybrid_and_full_sharding():
    """A comparison lists all three, and the mesh without replicas with its error. In memory the option is between the
    other two; it sends what hybrid sharding does and one gather of each rank's pieces more."""
    meshes = [{"shard": 16}, {"replicate": 2, "shard": 8}]
    cases = compare(build, accumulate, meshes, {"over": [False, True]}, steps=2)
    full, refused, hybrid, over = (case.forecast for case in cases)
    assert refused is None and "needs a mesh with a replicate and a shard dimension" in cases[1].error
    assert full.peak_bytes < over.peak_bytes < hybrid.peak_bytes
    layer = WIDTH * WIDTH * 4
    assert hybrid.sent_bytes == full.sent_bytes + 4 * layer // 8
    assert over.sent_bytes == hybrid.sent_bytes + 4 * layer // 8
    rows = comparison(cases).splitlines()
    assert [row.split("  ")[0] for row in rows[1:5]] == [
        "shard 16, over=False",
        "shard 16, over=True",
        "replicate 2 x shard 8, over=False",
        "replicate 2 x shard 8, over=True",
    ]


def test_command_line(capsys):
    """A table for people, or json; constants can be set."""
    command = [*FORECAST, "--set", "memory_bytes_per_second=1e12", "--link", "8=0.001,2e11"]
    main(command)
    table, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "building"  # it was "1 of 1: shard 8: building"
    for text in ("one rank of shard 8", "optimizer state", "shard all_gather", "8 ranks: 1 ms, 2e+11"):
        assert text in table
    assert "memory_bytes_per_second = 1e+12" in table
    main([*command, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"] == {"shard": 8} and values["peak"]["by_kind"]["shards"] > 0
    assert str(H100) not in table


def prints(model: Any, optimizer: Any) -> None:
    """Train once, and say so."""
    step(model, optimizer)
    print("trained")


def test_json_is_all_that_is_printed(capsys):
    """What a step printed came before the JSON, which no program could read then."""
    assert main([*FORECAST, "--step", "prints", "--steps", "1", "--json"]) == 0
    written, others = capsys.readouterr()
    assert json.loads(written)["mesh"] == {"shard": 8} and "trained" in others
    assert main([*FORECAST, "--step", "prints", "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("trained\none rank of shard 8")


def test_settings_side_by_side(capsys, tmp_path):
    """Meshes and arguments of build in one table; which fit, and the fastest of these."""
    command = [*FORECAST, "--mesh", "replicate=3,shard=2"]
    command += ["--compare", "layers=1,0,4", "--nodes-of", "4", "--steps", "2", "--save", str(tmp_path / "all.json")]
    assert main([*command, "--fit", "0.3GiB"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["shard 8, layers=1"].endswith("  fits")
    long = "replicate 3 x shard 2, layers=4"  # on a line of its own: a row has room for 100 columns
    assert rows[long] == long and lines[lines.index(long) + 1].endswith("large")
    assert rows["shard 8, layers=0"].endswith("ValueError: optimizer got an empty parameter list")
    told = lines[lines.index("replicate 3 x shard 2, layers=0:") + 1]
    assert re.search(r"empty parameter list, in tests/tools/forecast/test_run\.py, line \d+: return model, ", told)
    assert max(map(len, lines[: lines.index("replicate 3 x shard 2, layers=0:")])) <= 100
    assert "fastest that fits: shard 8, layers=1" in shown.out and "ranks_per_node = 4" in shown.out
    assert "1 of 6: shard 8, layers=1: step 2 of 2" in shown.err
    assert len({event["pid"] for event in json.loads((tmp_path / "all.json").read_text())["traceEvents"]}) == 4
    assert main([*command[:4], "--steps", "2", "--fit", "1MiB"]) == 1
    assert "none fits" in capsys.readouterr().out


def test_constants_of_a_machine(capsys, tmp_path):
    """They are saved in a file, read again, and single ones can still be replaced on the command line."""
    mine = replace(H100, name="mine", memory_bytes_per_second=7e11, links=(Link(2, 1e-4, 1e9), Link(8, 2e-4, 2e9)))
    mine.save(tmp_path / "mine.json")
    assert Hardware.load(tmp_path / "mine.json") == mine
    assert main([*FORECAST, "--hardware", str(tmp_path / "mine.json"), "--set", "flops_per_second=1e12"]) == 0
    text = capsys.readouterr().out
    assert "one rank of shard 8, mine" in text and "memory_bytes_per_second = 7e+11" in text
    assert "flops_per_second = 1e+12" in text and "2 ranks: 0.1 ms" in text and "1024 ranks" not in text
    (tmp_path / "part.json").write_text('{"ranks_per_node": 4}')
    assert Hardware.load(tmp_path / "part.json") == replace(H100, ranks_per_node=4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no", "not JSON"),
        ('{"speed": 1}', r"got \['speed'\]; expected an object with some of"),
        ("[]", "got list"),
        ('{"memory_bytes_per_second": "fast"}', "expected a number above 0"),
        ('{"memory_bytes_per_second": 0}', "bytes_per_second=0: expected a number above 0"),
        ('{"links": []}', "at least one link"),
        ('{"links": [{"ranks": 8}]}', "KeyError: 'seconds'"),
        (None, "argument --hardware: .*: No such file"),
    ],
)
def test_constants_that_are_wrong(capsys, tmp_path, text, problem):
    """The error names the file and says what was expected."""
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        main([*FORECAST, "--hardware", str(path)])
    error = capsys.readouterr().err
    assert re.search(problem, error) and str(path) in error


def test_gloo_works_beside_compute():
    """The host goes on after it started a collective, and waits where fsdp2 does."""
    result = forecast(build, step, mesh={"shard": 4}, backend="gloo")
    spans = [span for span in result.timeline.spans if span.ranks]
    assert {span.lane for span in spans} == {"gather", "reduce"}
    assert result.timeline.exposed_seconds < sum(span.seconds for span in spans)
    computes = [span for span in result.timeline.spans if span.lane == "compute"]
    assert any(one.begin < span.begin < one.end for one in spans for span in computes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["forecast", "tests.tools.forecast.test_run:build", "--mesh", "shard"], "expected NAME=SIZE"),
        (["forecast", "tests.tools.forecast.test_run:nothing", "--mesh", "shard=8"], "no function 'nothing'"),
        (["forecast", "no_such_module:build", "--mesh", "shard=8"], "no_such_module"),
        ([*FORECAST, "--set", "speed=1"], "flops_per_second"),
        ([*FORECAST, "--fit", "much"], "a size such as 80GiB"),
        ([*FORECAST, "--compare", "depth=1,2"], "no argument 'depth'"),
        ([*FORECAST, "--compare", "layers"], "expected NAME=A,B"),
        ([*FORECAST, "--compare", "layers=1", "layers=2"], "layers is given 2 times"),
        ([*FORECAST, "--compare", "over=true"], "expected True, False or None"),
        ([*FORECAST, "--compare", "layers=(1,2"], "a value as in Python"),
        ([*FORECAST, "--link", "8=1"], "expected RANKS=SECONDS"),
        ([*FORECAST, "--link", "4=0,0"], "numbers above 0"),
        ([*FORECAST, "--link", "4=1e-4,1e9", "--link", "4=1e-4,2e9"], "4 is given 2 times"),
        ([*FORECAST, "--nodes-of", "0"], "a whole number of at least 1"),
        ([*FORECAST, "--steps", "0"], "a whole number of at least 1"),
        ([*FORECAST, "--set", "ranks_per_node=0"], "a whole number above 0"),
        ([*FORECAST, "--set", "ranks_per_node=2.5"], "a whole number above 0"),
        ([*FORECAST, "--set", "flops_per_second=nan"], "a number above 0"),
        ([*FORECAST, "--set", "ranks_per_node=2", "--nodes-of", "4"], "ranks_per_node is given 2 times"),
        ([*FORECAST[:3], "shard=4,shard=2"], "names 'shard' twice"),
        ([*FORECAST, "--fit", "1.2.3GiB"], "a size such as 80GiB"),
        ([*FORECAST, "--fit", "80"], "'80' is 80 B; expected a size such as 80GiB"),
        ([*FORECAST, "--save", "step.bmp"], "step.bmp: expected a name that ends in .html,"),
        ([*FORECAST, "--save", "/proc/none/step.html"], "/proc/none"),
        ([*FORECAST, "--save", "/step.json/.."], "expected a name that ends in"),
        ([*FORECAST, "--step", "fails"], "too many positional arguments; a forecast calls it as (model, optimizer)"),
        (["forecast", "train.py:build", "--mesh", "shard=8"], "this is a file; expected a module"),
        (["forecast", "train", "--mesh", "shard=8"], "expected MODULE:FUNCTION, such as train:build"),
        (["forecast", "code:build", "--mesh", "shard=8"], "code.py) has no function 'build'"),
    ],
)
def test_command_lines_that_are_wrong(capsys, monkeypatch, arguments, text):
    """The error says what was expected, before anything runs. Some ended in a traceback, others meant something else:
    of a name that was given twice, the last value counted, and the word true was no Boolean."""
    monkeypatch.setattr("fsdp2.tools.forecast.comparing.forecast", None)  # nothing runs
    with pytest.raises(SystemExit):
        main(arguments)
    assert text in capsys.readouterr().err


def test_values_of_arguments(capsys):
    """Commas inside brackets and quotes belong to a value; an option may be given several times."""

    def noted(mesh: Any, **arguments: Any) -> Any:
        seen.append((arguments["kind"], arguments["layers"]))
        return build(mesh, 1)

    seen: list[Any] = []
    given = sys.modules[__name__]
    given.noted = noted
    command = ["forecast", f"{__name__}:noted", "--mesh", "shard=8", "--steps", "1", "--json"]
    assert main([*command, "--compare", "kind='a,b',auto,None", "--compare", "layers=(1,2),[3]"]) == 0
    assert seen == [(kind, layers) for kind in ("a,b", "auto", None) for layers in ((1, 2), [3])]
    cases = json.loads(capsys.readouterr().out)
    assert cases[1]["arguments"] == {"kind": "'a,b'", "layers": "[3]"} and cases[1]["step_seconds"] > 0


def fails(mesh: Any) -> Any:
    """Build no model."""
    raise KeyError(f"weights of {mesh.size()} ranks")


def test_errors_of_the_program(capsys, monkeypatch):
    """An exception in build or step is shown with type, file and line, whatever its type. It was "error: boom"."""
    assert main(["forecast", f"{__name__}:fails", "--mesh", "shard=8"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):" in said and '/test_run.py", line' in said and "in fails" in said
    assert "fsdp2/tools" not in said  # the traceback begins with the user's own line
    assert "error: KeyError: 'weights of 8 ranks', in tests/tools/forecast/test_run.py, line" in said
    assert main(["forecast", f"{__name__}:fails", "--mesh", "shard=8", "--mesh", "shard=4"]) == 2
    assert "KeyError: 'weights of 4 ranks', in tests/tools/forecast/test_run.py" in capsys.readouterr().out


def test_a_folder_is_made_for_pictures(tmp_path):
    """What a run has cost is not lost for a folder that is missing at its end."""
    result = forecast(build, step, mesh={"shard": 2}, steps=1)
    result.save(tmp_path / "new" / "folder" / "step.json")
    assert (tmp_path / "new" / "folder" / "step.json").exists()
    with pytest.raises(IsADirectoryError, match=r"this is a folder; expected the name of a file"):
        (tmp_path / "step.html").mkdir()
        result.save(tmp_path / "step.html")


def saves_a_checkpoint(model: Any, optimizer: Any, folder: Any) -> None:
    """Save with torch."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def saves_at_once(model: Any, optimizer: Any, folder: Any) -> None:
    """Save with torch's stager, which asks for addresses."""
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)


def saves_weights(model: Any, optimizer: Any, folder: Any) -> None:
    """Save the full weights."""
    fsdp2.save_safetensors(model, folder)


def saves_a_tensor(model: Any, optimizer: Any, folder: Any) -> None:
    """Save with safetensors."""
    save_file({"zeros": torch.zeros(3)}, folder / "zeros.safetensors")


def lists_storage(model: Any, optimizer: Any, folder: Any) -> None:
    """Read a storage."""
    torch.zeros(3).untyped_storage().tolist()


@pytest.mark.parametrize("code", [saves_a_checkpoint, saves_at_once, saves_weights, saves_a_tensor, lists_storage])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_nothing_is_saved(tmp_path, code):
    """Whoever asks for an address or a value is refused by name. C code wrote from address 0: the process ended, and a
    temporary folder stayed."""
    with pytest.raises(RuntimeError, match=r"leave out .*save_safetensors.*") as raised:
        forecast(build, partial(code, folder=tmp_path), mesh={"shard": 8})
    assert re.search(r"in tests/tools/forecast/test_run\.py, line \d+: ", str(raised.value))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or "partial" in path.name]


def test_fake_tensors_have_addresses():
    """What compares addresses found all fake tensors in one place: norms of neighbours were never joined."""

    def clips(model: Any, optimizer: Any) -> None:
        model(torch.empty(8, 8)).sum().backward()
        joined.append(len(runs.joined([local_tensor(parameter.grad) for parameter in model.parameters()])))

    def small(mesh: Any) -> Any:
        return fsdp2.fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), mesh=mesh)

    joined: list[int] = []
    forecast(small, clips, mesh={"shard": 2}, steps=1)
    assert joined == [1]


def test_a_script_that_trains_where_it_is_imported(capsys, tmp_path, monkeypatch):
    """README's ``train.py`` has no ``build``, and trains where it is imported. The error was torch's, about RANK."""
    (tmp_path / "trains.py").write_text("import fsdp2, torch\nfsdp2.fully_shard(torch.nn.Linear(2, 2))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("RANK", raising=False)
    assert main(["forecast", "trains:build", "--mesh", "shard=8"]) == 2
    said = capsys.readouterr().err
    assert 'trains.py", line 2, in <module>' in said and "in trains.py, line 2: " in said
    assert "importing trains raised ValueError: fully_shard: no mesh was passed" in said and "torchrun" in said
    assert "__main__" in said


@torch.library.custom_op("fsdp2_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator that does not say what its result looks like."""
    return x * 2


class Numbers(torch.utils.data.Dataset):
    """A few samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH)


def iterates(x: Tensor) -> None:
    """Make a loader and take batches from it."""
    for batch in torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True):
        x + batch


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (lambda x: x.sum().item(), "without values.*local_scalar"),
        (lambda x: f"{x.sum():.2f}", "without values.*__format__.*formatting a loss"),
        (lambda x: x.nonzero(), "shape of a result depends on some.*nonzero.*fixed shapes"),
        (lambda x: x[x > 0], "shape of a result depends on some.*torch.where"),
        (lambda x: x.detach().numpy(), "without values.*numpy"),
        (iterates, "iterating over a DataLoader"),
        (lambda x: x.to("cuda"), "needs no device"),
        (lambda x: x.cuda(), r"needs no device.*leave \.cuda\(\) and torch.cuda out"),
        (lambda x: x + torch.randn(WIDTH, device="cuda"), "needs no device.*two devices.*mesh.device_type"),
        (lambda x: torch.cuda.set_device(0), "needs no device"),
        (twice, r"register_fake"),
        (
            lambda x: torch.nn.functional.grouped_mm(x, x.expand(2, 8, WIDTH).mT, offs=torch.tensor([4, 8]).int()),
            "for bfloat16 only.*batched_mm",
        ),
        (lambda x: init_device_mesh("cpu", (16,)), "does not fit the 8 simulated ranks"),
        (lambda x: torch.distributed.init_process_group("gloo"), "leave init_process_group out"),
    ],
)
def test_code_that_needs_more(code, text):
    """Values, devices and other ranks do not exist; the error says what to change, and in which line of the script."""

    def looks(model: Any, optimizer: Any) -> None:
        code(model(torch.empty(8, WIDTH)))

    if torch.backends.cuda.is_built() and "device" in text:
        pytest.skip("fake tensors can be on one")
    if "bfloat16" in text and not api.torch_since("2.13"):
        pytest.skip("this torch may have no torch.nn.functional.grouped_mm")
    with pytest.raises(RuntimeError, match=text) as raised:
        forecast(build, looks, mesh={"shard": 8})
    assert re.search(r"tests/tools/forecast/test_run\.py, line \d+: ", str(raised.value))


def test_weights_are_not_loaded(tmp_path):
    """``load_safetensors`` copies values, which there are none of; what to leave out is said. What torch and
    transformers load needs none."""
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "weights.safetensors")

    def loads(mesh: Any) -> Any:
        model = fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh)
        fsdp2.load_safetensors(model, tmp_path / "weights.safetensors")
        return model

    with pytest.raises(RuntimeError, match="leave out code that reads tensors .*load_safetensors"):
        forecast(loads, step, mesh={"shard": 8})

    torch.save(nn.Linear(8, 8).state_dict(), tmp_path / "weights.pt")

    def prints_and_loads(mesh: Any) -> Any:
        layer = nn.Linear(8, 8)
        layer.load_state_dict(torch.load(tmp_path / "weights.pt"))
        print(layer.weight)
        return build(mesh)

    assert forecast(prints_and_loads, step, mesh={"shard": 8}).peak_bytes > 0


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_of_the_step_itself_are_waited_for(backend):
    """A step that sums something over all ranks had the time in its table, and not by unit nor in red on the page,
    which said that compute waits for a twentieth of it."""

    def sums(model: Any, optimizer: Any) -> None:
        dist.all_reduce(torch.empty(1 << 28))
        step(model, optimizer)

    result = forecast(build, sums, mesh={"shard": 8}, backend=backend)
    assert sum(result.exposed_by_unit.values()) == pytest.approx(result.exposed_seconds)
    assert result.timeline.exposed_seconds == pytest.approx(result.exposed_seconds)
    assert result.exposed_seconds > H100.collective_seconds(1 << 30, range(8), "all_reduce")


def test_a_peak_at_the_beginning_of_a_step():
    """What a step frees first was said to be live "after backward", where it ends."""

    def builds(mesh: Any) -> Any:
        model, _ = build(mesh, layers=1)
        model.batch = torch.empty(1 << 30)
        return model

    def frees(model: Any, optimizer: Any) -> None:
        model.batch = None
        step(model, torch.optim.SGD(model.parameters()))

    peak = forecast(builds, frees, mesh={"shard": 8}, steps=1).peak
    assert peak.running == "before forward" and peak.by_kind["activations"] == 4 << 30


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mesh": {"shard": 0}}, ValueError, "sizes of at least 1"),
        ({"mesh": {}}, ValueError, "mesh={}; expected names and sizes of at least 1"),
        ({"mesh": 8}, ValueError, "mesh=8; expected names and sizes of at least 1"),
        ({"mesh": {"shard": True}}, ValueError, "sizes of at least 1"),
        ({"steps": 0}, ValueError, "steps=0.*expected at least one step"),
        ({"steps": 1.5}, ValueError, "steps=1.5.*expected at least one step"),
        ({"rank": 8}, ValueError, "rank 8 of a mesh of 8 ranks"),
        ({"rank": "0"}, ValueError, "rank '0' of a mesh of 8 ranks"),
        ({"backend": "mpi"}, ValueError, 'backend=\'mpi\'; expected "nccl", or "gloo"'),
        ({"hardware": "h100"}, TypeError, "hardware='h100'; expected a Hardware"),
        ({"build": nn.Linear(2, 2)}, TypeError, "build is a Linear; expected a function"),
        ({"step": None}, TypeError, "step is a NoneType; expected a function"),
        ({"build": lambda mesh: None}, TypeError, "build returned NoneType; expected a module"),
    ],
)
def test_arguments_that_are_wrong(change, error, text):
    """The error says what was expected."""
    with pytest.raises(error, match=text):
        forecast(**{"build": build, "step": step, "mesh": {"shard": 8}, **change})


def makes_own_mesh(mesh: Any) -> Any:
    """Shard on another mesh of the same ranks than the one that is given."""
    return build(init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "pieces")))


def casts(mesh: Any) -> Any:
    """Cast the module before it is sharded."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(torch.bfloat16)
    return fsdp2.fully_shard(model, mesh=mesh)


def materializes(mesh: Any) -> Any:
    """Make the module without memory, shard it and give its shards memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    fsdp2.fully_shard(model, mesh=mesh).to_empty(device="cpu")
    model[0].reset_parameters()
    return model


@pytest.mark.parametrize(
    ("how", "axes", "shards"),
    [
        (makes_own_mesh, {"copies", "pieces"}, 4 * WIDTH * WIDTH * 4 // 4),
        (casts, {"shard"}, WIDTH * WIDTH * 2 // 8),
        (materializes, {"shard"}, WIDTH * WIDTH * 4 // 8),
    ],
)
def test_ways_to_build(how, axes, shards):
    """What real programs do before they train, without values and without memory."""

    def trains(model: Any, optimizer: Any) -> None:
        dtype = next(model.parameters()).dtype
        model(torch.empty(8, WIDTH, dtype=dtype)).sum().backward()
        model.zero_grad()

    result = forecast(how, trains, mesh={"shard": 8})
    assert {one.axis for one in result.collectives} == axes
    assert result.bytes_by_kind["shards"] == shards


class Seeing(nn.Module):
    """Layers for text, and some for images, which not every step has."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.text = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        for layer in self.vision if image is not None else ():
            image = layer(image)
        x = x if image is None else x + image
        for layer in self.text:
            x = layer(x)
        return x


def sent_without_images(
    mesh: dict[str, int], backend: str, zeros: bool, run: Callable[..., None] = step
) -> dict[str, tuple[int, int]]:
    """Return launches and bytes of a step with text alone, or of what ``run`` does instead."""

    def builds(mesh: Any) -> Any:
        model = Seeing()
        for unit in (*model.vision, *model.text, model):
            fsdp2.fully_shard(unit, mesh=mesh)
        model.set_reduce_scatter_unused_params(zeros)
        return model, torch.optim.AdamW(model.parameters())

    result = forecast(builds, run, mesh=mesh, backend=backend)
    assert {one.kind for one in result.collectives} <= {"all_gather", "reduce_scatter", "all_to_all"}
    gathers = [one for one in result.collectives if one.kind == "all_gather"]
    others = [one for one in result.collectives if one.kind != "all_gather"]
    return {
        name: (sum(one.launches for one in found), sum(one.nbytes for one in found))
        for name, found in (("gathered", gathers), ("reduced", others))
    }


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_tower_that_the_step_does_not_use(backend):
    """A rank without images gathers the vision tower with the others, in both passes, and reduces zeros for it.

    Without the setting nobody may skip it, and the forecast is of a job in which no rank uses it. A forecast used to
    leave the gathers out, so that a step without images looked cheaper than it is. Without the
    setting the last layer stays gathered from forward to backward; a unit that ranks may skip does not.
    """
    layer = WIDTH * WIDTH * 4
    skipped = sent_without_images({"shard": 8}, backend, zeros=False)
    assert skipped["gathered"] == (5, 5 * layer) and skipped["reduced"][1] == 3 * layer
    taking_part = sent_without_images({"shard": 8}, backend, zeros=True)
    assert taking_part["gathered"] == (10, 10 * layer) and taking_part["reduced"][1] == 5 * layer


def test_a_tower_that_an_evaluation_does_not_use():
    """A rank without images gathers the tower in an evaluation too; the forecast left it out there."""

    def evaluates(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            model(torch.empty(8, WIDTH))

    layer = WIDTH * WIDTH * 4
    for zeros, layers in ((False, 3), (True, 5)):
        assert sent_without_images({"shard": 8}, "gloo", zeros, evaluates)["gathered"] == (layers, layers * layer)


def test_padding_comes_with_a_remedy():
    """256 experts over 4096 ranks were padded to 4096 rows, sixteen times what is needed, and only bytes were shown.

    Here they are 4 over 64.
    """

    def builds(mesh: Any, width: int = 4096, **options: Any) -> Any:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in model.layers:
            layer.up = nn.Parameter(torch.empty(4, width, 8))
            layer.tiny = nn.Parameter(torch.empty(3, 5))
        model.forward = lambda x: sum((layer.up.sum() * x for layer in model.layers), x)
        return fsdp2.fully_shard(model, mesh=mesh, **options)

    def trains(model: Any, optimizer: Any) -> None:
        model(torch.ones(1)).sum().backward()

    result = forecast(builds, trains, mesh={"shard": 64})
    (text,) = result.padded
    assert text.startswith("layers.*.up: 15.0 MiB; dimension 0, 4 over 64 ranks, is padded to 64, 16 times as much; ")
    assert text.endswith('shard_placement_fn="auto" shards dimension 1 instead (0.0% padding)') and text in str(result)
    last = forecast(partial(builds, shard_placement_fn=lambda param: Shard(param.ndim - 1)), trains, mesh={"shard": 64})
    assert last.padded[0].startswith("layers.*.up: 7.0 MiB; dimension 2, 8 over 64 ranks, is padded to 64, 8 times")
    better = forecast(partial(builds, shard_placement_fn="auto"), trains, mesh={"shard": 64})
    assert better.padding_bytes < result.padding_bytes / 100 and not any("up" in text for text in better.padded)
    text = forecast(partial(builds, width=16), trains, mesh={"shard": 64}).padded[0]
    assert "no dimension divides better: shard it over fewer ranks, with another mesh" in text
    over = forecast(partial(builds, shard_over_replicas=True), trains, mesh={"replicate": 8, "shard": 8})
    assert "dimension 0, 4 over 64 ranks, is padded to 64, 16 times as much" in over.padded[0]
    assert over.padding_bytes == result.padding_bytes


@pytest.mark.parametrize("how", ["one unit", "grouped", "tied"])
def test_padding_counts_once(how):
    """That of a unit of two modules, and of a parameter in two units, was counted twice."""

    def builds(mesh: Any) -> Any:
        model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(2)))
        if how == "grouped":
            fsdp2.fully_shard([*model], mesh=mesh)
        elif how == "tied":
            model[1].weight = model[0].weight
            shard_each(model, fsdp2, mesh=mesh)
        return model if how == "tied" else fsdp2.fully_shard(model, mesh=mesh)

    result = forecast(builds, lambda model, optimizer: model(torch.ones(1, 5)).sum().backward(), mesh={"shard": 4})
    assert result.padding_bytes == (8 - 5) * 5 * 4 * (1 if how == "tied" else 2)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_what_others_send_is_no_gradient(backend):
    """Tokens that the program's own collectives send to experts were counted as gradients."""

    def sends(model: Any, optimizer: Any) -> None:
        tokens = torch.empty(1024, WIDTH)
        received = torch.empty_like(tokens)
        torch.distributed.all_to_all_single(received, tokens)
        torch.distributed.all_reduce(received)
        model(received[:8]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    result = forecast(lambda mesh: build(mesh, layers=1), sends, mesh={"shard": 8}, backend=backend)
    assert result.bytes_by_kind["activations"] >= 2 * 1024 * WIDTH * 4
    assert result.bytes_by_kind.get("gradients", 0) < 3 * WIDTH * WIDTH * 4
    at_end = result.timeline.memory[-1].by_kind
    assert at_end.get("gradients", 0) == 0
    after_backward = max(point.by_kind.get("gradients", 0) for point in result.timeline.memory)
    assert after_backward >= WIDTH * WIDTH * 4 // 8
