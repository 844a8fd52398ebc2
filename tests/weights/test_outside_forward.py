"""Weights outside forward: what the loss, or anybody else, computes with a sharded parameter."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations

import fsdp2
from fsdp2 import hints
from tests.support import api
from tests.support.parity import Run, mesh_1d
from tests.support.pool import on_ranks
from tests.support.processes import ended
from tests.support.report import Unhelpful, agrees, check, offered, refused, report

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Headed(nn.Module):
    """A trunk whose head is left to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 12, bias=False)

    def forward(self, x):
        return torch.tanh(self.trunk(x))


def each(module: nn.Module, fsdp, **options) -> None:
    """Trunk, head and the rest are units."""
    for unit in (module.trunk, module.head, module):
        fsdp.fully_shard(unit, mesh=mesh_1d(), **options)


UNCAUGHT = """
import {implementation} as fsdp, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 12)
    def forward(self, x):
        return self.trunk(x)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, model = dist.device_mesh.init_device_mesh("cpu", (1,)), Model()
for unit in (model.trunk, model.head, model):
    fsdp.fully_shard(unit, mesh=mesh)
hidden = model(torch.randn(2, 8))
F.linear(hidden, model.head.weight)
"""


class Reading(Headed):
    """Its forward computes what the loss needs with the head's weight, as fused losses do."""

    def forward(self, x):
        return F.linear(torch.tanh(self.trunk(x)), self.head.weight)


@report("F.linear(x, self.head.weight) in a forward", promise="error that names the parameter, its unit and the remedy")
def test_sharded_weight_in_a_forward(rank, world, fsdp):
    """Fused losses take the head's weight instead of calling the head. It is a shard at that moment; the error should
    say so rather than that a tensor and a DTensor were mixed."""
    module = Reading()
    each(module, fsdp)
    with refused("head.weight", "unit 'head'", "use_weights", otherwise="silently wrong: computes with one shard"):
        module(torch.randn(2, 8))


@report("F.linear(x, model.head.weight) in the loss", 2, promise="refused; the log names parameter, unit and remedy")
def test_sharded_weight_in_the_loss(rank, world, fsdp):
    """The same outside of any forward: torch raises in C++ before anybody else could say more. When the process ends
    with that error, its last line should say which weight it was and what to do."""
    if rank:
        return
    command = [sys.executable, "-c", UNCAUGHT.format(implementation=fsdp.__name__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    check(done.returncode != 0, "silently wrong: computes with one rank's shard")
    lines = done.stderr.strip().splitlines()
    if not all(word in lines[-1] for word in ("head.weight", "unit 'head'", "use_weights")):
        raise Unhelpful(next(line.partition("]: ")[2] for line in lines if "RuntimeError: " in line))


GENERATING = """
import fsdp2, torch, torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 12)
    def generate(self, x):
        return self.head(self.embed(x))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, model = dist.device_mesh.init_device_mesh("cpu", (1,)), Model()
for unit in (model.head, model):
    fsdp2.fully_shard(unit, mesh=mesh)
model.generate(torch.ones(2, dtype=torch.long))
"""


@api.fsdp2_only
def test_an_error_of_the_first_call_is_explained():
    """The log named the weight only once some forward had begun, since the first one registered the explanation. Where
    ``generate`` was the first call and no unit ran before the error, torch's raw error was all there was."""
    status, written = ended(GENERATING)
    last = written.strip().splitlines()[-1]
    assert status != 0 and "use_weights" in last, written
    assert "embed.weight (unit Model)" in last and "head" not in last
    # The method is what has to be registered; the remedy named use_weights alone.
    assert (
        "call fsdp2.register_fsdp_forward_method(module, 'generate') after fully_shard, where module is the Model"
        in last
    )


EQUAL_NAMES = """
import fsdp2, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])
for unit in (*model, model):
    fsdp2.fully_shard(unit, mesh=mesh)
torch.ones(2, 8) @ model[1][0].weight
"""


@api.fsdp2_only
def test_a_name_of_several_units_is_listed_once(tmp_path):
    """Before the first forward no name counts from the root: the hint listed ``0.weight`` of every block, each alike,
    with a class that the user had never written."""
    program = tmp_path / "program.py"  # the hint reads its source
    program.write_text(EQUAL_NAMES)
    status, written = ended(f"import runpy; runpy.run_path({str(program)!r})")
    last = written.strip().splitlines()[-1]
    assert status != 0 and last.count("0.weight (unit Sequential)") == 1 and "FSDP" not in last, written


IN_A_NOTEBOOK = """
import sys, types

class Events:
    def register(self, name, function):
        assert name == "post_run_cell"
        self.after = function

events = Events()
shell = types.SimpleNamespace(events=events)
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
import torch, fsdp2, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
model = fsdp2.fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
error = None
try:
    torch.ones(2, 8) @ model.weight
except RuntimeError as raised:
    error = raised
events.after(types.SimpleNamespace(error_in_exec=error))
events.after(types.SimpleNamespace(error_in_exec=None))
"""


@api.fsdp2_only
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the explanation is in the error itself")
def test_an_error_in_a_cell_of_a_notebook_is_explained():
    """A notebook's process does not end with the error, so nothing explained it there."""
    done = subprocess.run([sys.executable, "-c", IN_A_NOTEBOOK], capture_output=True, text=True, timeout=300)
    written = done.stdout + done.stderr
    assert done.returncode == 0, written
    assert written.count("weight (unit Linear): got a shard") == 1 and "use_weights" in written, written


@api.fsdp2_only
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python does not tell of exceptions when they are raised")
@on_ranks(2)
def test_an_error_that_the_caller_catches_is_explained(rank, world):
    """Whoever catches the error reads which weight it was, of which unit, and what to do; once, and others nothing."""
    module = Speaking()
    for unit in (module.trunk, module.head, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    hidden = module.trunk(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"head\.weight \(unit 'head'\): got a shard.*use_weights\(") as caught:
        F.linear(hidden, module.head.weight)
    assert str(caught.value).count("got a shard") == 1
    step = torch.optim.Rprop(module.parameters(), foreach=False)
    module(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="^(?s:.*)Rprop: its step got shards") as caught:
        step.step()
    assert "got a shard" not in str(caught.value)
    with pytest.raises(RuntimeError, match="^mine$"):
        raise RuntimeError("mine")


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize(
    "norm",
    [parametrizations.spectral_norm, nn.utils.spectral_norm, parametrizations.orthogonal],
    ids=["spectral", "old spectral", "orthogonal"],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_buffers_that_stay_in_another_dtype(rank, world, norm):
    """Mixed precision casts no buffers, and spectral_norm computes with its own and the weight: "addmv input tensors
    must have the same dtype". The error names them, and what it advises works."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    norm(model[0])
    fsdp2.fully_shard(model, mesh=mesh_1d(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    names = "base" if norm is parametrizations.orthogonal else r"\w*_u, \w*_v"
    expected = rf"possibly the buffers {names} of .*got torch.float32, expected torch.bfloat16.*buffer\.data = "
    with pytest.raises(RuntimeError, match=expected):
        model(torch.ones(2, 4))
    for buffer in model.buffers():
        buffer.data = buffer.to(torch.bfloat16)
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Frozen(nn.Module):
    """A BatchNorm as detection models have it: statistics and weights are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled input, in the wider dtype."""
        return x * self.scale


class Detector(nn.Module):
    """Convolutions around a frozen BatchNorm, and a head that itself computes with two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), Frozen(), nn.Conv2d(4, 4, 1))
        self.head = Head(4, 4)

    def forward(self, x: torch.Tensor, *, head: bool = False) -> torch.Tensor:
        """Return what the body computes, or the head."""
        return self.head(x) if head else self.body(x)


class Head(nn.Linear):
    """A layer that computes with an input of another dtype, which comes from no buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise torch's error about two dtypes."""
        return super().forward(x.double())


@api.fsdp2_only
@on_ranks(1, 2)
def test_buffers_that_give_a_convolution_another_dtype(rank, world):
    """A convolution behind a frozen BatchNorm says "Input type (float) and bias type (c10::BFloat16) should be the
    same", which no hint explained. Buffers that are not in the failing unit are not named: its inputs are cast."""
    model = Detector()
    for module in (model.head, model):
        fsdp2.fully_shard(module, mesh=mesh_1d(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    images = torch.ones(1, 3, 2, 2)
    with pytest.raises(RuntimeError, match=r"possibly the buffers 1\.scale of Sequential .*got torch\.float32"):
        model(images)
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        model(torch.ones(2, 4), head=True)
    assert "buffers" not in str(caught.value)
    for buffer in model.buffers():
        buffer.data = buffer.to(torch.bfloat16)
    assert model(images).dtype is torch.bfloat16


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, one piece of the rows after the other."""
    pieces = zip(hidden.split(1), targets.split(1), strict=True)
    logits = ((F.linear(h, weight.to(h.dtype)).float(), t) for h, t in pieces)
    return sum(F.cross_entropy(logit, t, reduction="sum") for logit, t in logits) / len(hidden)


def fused_loss(run: Run) -> None:
    """Train with a loss that uses the head's weight by itself."""
    for step in range(3):
        x = run.inputs(step)
        hidden = run.module(x)
        if run.fsdp is None:
            loss = chunked_cross_entropy(hidden, run.module.head.weight, x.argmax(-1))
        else:
            with offered(run.fsdp, "use_weights")(run.module.head):
                weight = run.module.head.weight
                check(weight.dtype == hidden.dtype, f"the weight is {weight.dtype}")
                loss = chunked_cross_entropy(hidden, weight, x.argmax(-1))
        loss.backward()
        run.update()


@report("A fused cross-entropy with the head's weight", 1, 2, 4)
def test_fused_cross_entropy(rank, world, fsdp):
    """The usual way to save the memory of logits: hidden states and the head's weight go into one kernel or a loop over
    rows. Gradients must reach head and trunk as if the head had been called."""
    agrees(fsdp, each, Headed, fused_loss)


@report("A fused cross-entropy with the head's weight, in mixed precision")
def test_fused_cross_entropy_in_mixed_precision(rank, world, fsdp):
    """The weight comes in the dtype of computation, its gradient in the parameter's own."""
    prepare = lambda module, fsdp: each(module, fsdp, mp_policy=BF16)
    run = agrees(fsdp, prepare, Headed, fused_loss, tolerance=0.05)
    check(run.module.head.weight.dtype == torch.float32, "the weight is not kept in float32")


@report("A weight is regularised or measured outside forward")
def test_penalty_on_a_weight(rank, world, fsdp):
    """An orthogonality penalty on the whole matrix is added to the loss."""

    def program(run: Run) -> None:
        for step in range(3):
            loss = run.module(run.inputs(step)).square().mean()
            if run.fsdp is None:
                weight = run.module.trunk.weight
                penalty = (weight @ weight.t() - torch.eye(8)).square().sum()
            else:
                with offered(run.fsdp, "use_weights")(run.module.trunk):
                    weight = run.module.trunk.weight
                    penalty = (weight @ weight.t() - torch.eye(8)).square().sum()
            (loss + 0.01 * penalty).backward()
            run.update()

    agrees(fsdp, each, Headed, program)


class Scorer(nn.Linear):
    """A layer with a second method that computes with its weights."""

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * self.weight.sum()


class Scaled(nn.Module):
    """A layer of a user's own, whose forward is the failing code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * self.scale
        except RuntimeError as error:  # Python 3.12 tells of it here, where the traceback has this frame alone
            hints.explain(error, hints._all_groups())
            raise


class Encoding(Headed):
    """Two methods beside forward, of which one calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def copied_to(weight, plain):
    weight.copy_(plain)


def copied_from(weight, plain):
    plain.copy_(weight)


def scaled(weight, plain):
    weight.data.mul_(plain)


def scaled_in_place(weight, plain):
    weight *= plain


def scaling_in_place(weight, plain):
    plain *= weight


def masked_gradient(weight, plain):
    weight.grad.mul_(plain)


def set_to_a_number(weight, plain):
    weight[0] = 0.0


def set_at_indices(weight, plain):
    weight[torch.tensor([0, 1])] = plain[:2]


def compared(weight, plain):
    return weight.add(plain).sum() == 0


WRITES = (copied_to, scaled, scaled_in_place, masked_gradient, set_to_a_number, set_at_indices)
READS = (copied_from, scaling_in_place, compared)


@api.fsdp2_only
@on_ranks(2)
def test_a_write_to_a_shard_is_told_from_one_of_a_shard(rank, world):
    """Outside of forward the error advised ``use_weights``, where a write to the parameter is lost. Where a shard is
    only read, as into the plain copy of a moving average, that is the right place."""
    module = Headed()
    each(module, fsdp2)
    module.head(module(torch.ones(2, 8))).sum().backward()
    for used in (*WRITES, *READS):
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            used(module.head.weight, torch.ones(module.head.weight.shape))
        hints.explain(caught.value, hints._all_groups())  # before Python 3.12 nobody has yet
        text = str(caught.value)
        assert "head.weight (unit 'head')" in text, (used, text)
        assert ("summon_full_params(module, with_grads=True)" in text) == (used in WRITES), (used, text)
        assert ("use_weights" in text) == (used in READS), (used, text)


@api.fsdp2_only
@on_ranks(2)
def test_an_operator_that_would_resize_a_shard(rank, world):
    """``torch.nn.init.eye_`` writes with ``out=``. From torch 2.14 on DTensor refuses that; before, its error was about
    a storage."""
    module = Headed()
    each(module, fsdp2)
    with pytest.raises(RuntimeError) as caught:
        nn.init.eye_(module.head.weight)
    hints.explain(caught.value, hints._all_groups())
    assert "(unit " in str(caught.value) and "with fsdp2.summon_full_params(module" in str(caught.value)


@api.fsdp2_only
@on_ranks(2)
def test_the_method_to_register_is_named(rank, world):
    """It is the outermost one of the unit, however deep below it a parameter was used; a method of the unit around, or
    a function, gathers nothing of a unit's. A SqueezeBERT calls ``layer.forward(x)``, for which the error said to call
    that module."""
    module = Encoding()
    for unit in (module.head, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    x = torch.ones(2, 8)
    for call, method in (
        (lambda: module.generate(x), "generate"),
        (lambda: module.encode(x), "encode"),
        (lambda: module.head.forward(x), "forward"),
        (lambda: x * module.scaled.scale, None),
        (lambda: F.linear(x, module.head.weight), None),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        hints.explain(caught.value, hints._all_groups())  # before Python 3.12 nobody has yet
        found = re.search(r"register_fsdp_forward_method\(module, '(\w+)'\)", str(caught.value))
        assert (found and found[1]) == method and "use_weights(module)" in str(caught.value), caught.value
    fsdp2.register_fsdp_forward_method(module.head, "forward")
    assert torch.equal(module.head.forward(x), module.head(x))


class Speaking(Headed):
    """A method computes with the weights of its own and of a unit that it does not call."""

    def speak(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.trunk(x)), self.head.weight)


@api.fsdp2_only
@on_ranks(2)
def test_an_error_of_a_registered_method_is_explained(rank, world):
    """Only what left a forward was explained: a registered method that read a shard raised torch's raw error."""
    module = Speaking()
    for unit in (module.trunk, module.head, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    fsdp2.register_fsdp_forward_method(module, "speak")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"head.weight \(unit 'head'\): got a shard, .*use_weights"):
            module.speak(torch.ones(2, 8))
        module.reset_iter_state()
    with fsdp2.use_weights(module.head):
        module.speak(torch.ones(2, 8)).sum().backward()
    assert module.head.weight.grad is not None


@api.fsdp2_only
@on_ranks(2)
def test_a_registered_method_of_a_copy(rank, world):
    """A deep copy took the registered method along, but the method called the original's: it gathered the weights of
    the copy and computed with those that the original had kept."""
    module = Scorer(4, 4)
    fsdp2.fully_shard(module, mesh=mesh_1d())
    fsdp2.register_fsdp_forward_method(module, "score")
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.fill_(2.0)
        module.unshard()  # the original's own weights are there as well
    assert copied.score(torch.ones(1, 4)).tolist() == [[10.0 * 32.0] * 4]
