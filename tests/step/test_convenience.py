"""Convenience: what people do with a model besides training it."""

from __future__ import annotations

import copy
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp2.tools.check.strict import LiveBytes, settled
from tests.support.cases import CASES, Setup, build, shard
from tests.support.counting import Collectives
from tests.support.parity import Run, beside_one_process, mesh_1d, shard_each, sharded, stack
from tests.support.report import Absent, agrees, check, full_grads, report, same, thrifty
from tests.support.shapes import loss_of


@report("model.unshard(recurse=True) and model.reshard(recurse=True)", 1, 2, 4)
def test_unshard_everything(rank, world, fsdp):
    """To look at a model, to initialise it or to run a method of its inside, all of its units are gathered with one
    call and freed with another."""
    build = lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    module, alone = beside_one_process(build, lambda module: (module[0][0], module[0]), fsdp)
    try:
        module.unshard(recurse=True)
    except TypeError as error:
        raise Absent from error
    for name, parameter in module.named_parameters():
        check(not isinstance(parameter, DTensor), f"{name} is still a shard")
        same(parameter.detach(), alone.get_parameter(name).detach(), name)
    module.reshard(recurse=True)
    check(all(isinstance(p, DTensor) for p in module.parameters()), "something is not resharded")
    module[0].unshard(recurse=False)
    check(isinstance(module[0][0].weight, DTensor), "recurse=False gathers units below")
    check(not isinstance(module[0][1].weight, DTensor), "recurse=False does not gather the unit itself")


@report("copy.deepcopy of a sharded model", 1, 2, 4)
def test_deepcopy(rank, world, fsdp):
    """A teacher, a reference policy or a snapshot is a deep copy of the model. It must be sharded alike, train alike
    and share nothing."""
    for case in (CASES["nested"], CASES["transformer"], CASES["uneven"]):
        module = shard(build(case), case, fsdp, mesh_1d(), Setup())
        inputs = case.inputs(0)
        loss_of(module(*inputs)).backward()
        twin = copy.deepcopy(module)
        check(not {*module.modules()} & {*twin.modules()}, "it shares modules")
        before = {n: p.to_local().clone() for n, p in module.state_dict().items()}
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        check(all(torch.equal(p.to_local(), before[n]) for n, p in module.state_dict().items()), "it shares weights")
        twin.load_state_dict(module.state_dict())
        for one in (module, twin):
            one.zero_grad()
            loss_of(one(*inputs)).backward()
        for (name, got), expected in zip(full_grads(twin).items(), full_grads(module).values(), strict=True):
            same(got, expected, f"gradient of {name} of the copy")


@report("AveragedModel of a sharded model", 1, 2, 4)
def test_averaged_model(rank, world, fsdp):
    """``torch.optim.swa_utils`` makes the average of a model by a deep copy that is updated after every step and
    evaluated now and then."""

    def program(run: Run) -> None:
        averaged = AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for step in range(4):
            run.backward(step)
            run.update()
            averaged.update_parameters(run.module)
            with torch.no_grad():
                output = averaged(torch.ones(2, 8))
            run.seen[f"output of the average {step}"] = output

    agrees(fsdp, program=program)


@report("An exponential moving average by hand", 1, 2, 4)
def test_moving_average(rank, world, fsdp):
    """A dictionary of averaged shards, updated by lerp, loaded for evaluation and taken out again."""

    def program(run: Run) -> None:
        average = {name: value.detach().clone() for name, value in run.module.state_dict().items()}
        for step in range(4):
            run.backward(step)
            run.update()
            for name, value in run.module.state_dict().items():
                average[name].lerp_(value.detach(), 0.2)
            own = {name: value.detach().clone() for name, value in run.module.state_dict().items()}
            run.module.load_state_dict(average)
            with torch.no_grad():
                run.seen[f"output of the average {step}"] = run.module(torch.ones(2, 8))
            run.module.load_state_dict(own)

    agrees(fsdp, program=program)


def bytes_alive(device: str = "cpu") -> int:
    """Return the bytes of all tensors that Python can find."""
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and not isinstance(one, DTensor) and one.device.type == device:
            storages[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
    return sum(storages.values())


@report("del model", 1, 2, 4)
def test_deleting_frees(rank, world, fsdp):
    """A notebook builds one model after the other. A deleted one must be gone with its shards, its full parameters and
    its gradients after a collection."""
    seen = []
    for _ in range(3):
        gc.collect()
        gc.collect()
        seen.append(bytes_alive())
        module = sharded(lambda: stack(64), fsdp, reshard_after_forward=False)
        with torch.no_grad():
            module(torch.randn(2, 64))
        output = module(torch.randn(2, 64))
        output.sum().backward()
        torch.optim.AdamW(module.parameters()).step()
        del module, output
    gc.collect()
    gc.collect()
    seen.append(bytes_alive())
    thrifty(seen[-1] - seen[1] < 1024, f"{(seen[-1] - seen[1]) // 2} bytes more after each model")


@report('model.to("cpu") frees what is gathered; model.to("meta") frees everything', 1, 2, 4)
def test_sleep(rank, world, fsdp):
    """Between phases of reinforcement learning a model sleeps: it is moved away, and its memory serves another. Moving
    must take along full parameters that are kept, and leave no buffer behind."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    with LiveBytes() as live:
        shard_each(module, fsdp, mesh=mesh_1d(), reshard_after_forward=False)
        shards = live.now
        with torch.no_grad():
            module(torch.randn(2, 64))
        module.to("cpu")
        gc.collect()
        held = settled(lambda: live.now, at_most=shards)
        thrifty(held < 1.1 * shards, f"{held} bytes are held after .to('cpu') instead of {shards}")
        values = {name: value.to_local().clone() for name, value in module.state_dict().items()}
        module.to("meta")
        gc.collect()
        copies = sum(value.nbytes for value in values.values())
        held = settled(lambda: live.now, at_most=copies) - copies
        thrifty(held < 0.1 * shards, f"{held} bytes are held after .to('meta')")
        module.to_empty(device="cpu")
        for name, value in module.state_dict().items():
            value.to_local().copy_(values[name])
        values.clear()
        output = module(torch.ones(2, 64))
        check(output.isfinite().all(), "the model does not wake up")


@report("copy.deepcopy of a state dict", 1, 2, 4)
def test_copied_state_dict(rank, world, fsdp):
    """The best state so far is kept by ``copy.deepcopy(model.state_dict())``. It must not follow training, and it must
    be no larger than the shards."""
    module = sharded(stack, fsdp)
    best = copy.deepcopy(module.state_dict())
    before = {name: value.to_local().clone() for name, value in best.items()}
    module(torch.randn(2, 8)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    check(all(torch.equal(value.to_local(), before[name]) for name, value in best.items()), "it follows training")
    held = {
        value.to_local().untyped_storage()._cdata: value.to_local().untyped_storage().nbytes()
        for value in best.values()
    }
    own = sum(value.to_local().nbytes for value in best.values())
    thrifty(sum(held.values()) <= own + 64 * len(best), f"the copy holds {sum(held.values())} bytes for {own}")
    module.load_state_dict(best)
    for name, value in module.state_dict().items():
        check(torch.equal(value.to_local(), before[name]), f"{name} is not restored")


@report("The optimizer's state dict is deep-copied and loaded", 1, 2)
def test_copied_optimizer_state(rank, world, fsdp):
    """A training loop rolls model and optimizer back to the last good step."""

    def program(run: Run) -> None:
        run.backward(0)
        run.update()
        kept = copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict()))
        for step in range(1, 3):
            run.backward(step)
            run.update()
        run.module.load_state_dict(kept[0])
        run.optimizer.load_state_dict(kept[1])
        for step in range(1, 3):
            run.backward(step)
            run.update()

    agrees(fsdp, program=program)


class Generator(nn.Module):
    """A model with the loop that every library calls ``generate``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(8, 8), stack(), nn.Linear(8, 8)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)).cumsum(1))

    @torch.no_grad()
    def generate(self, tokens, count: int):
        """Return ``tokens`` continued greedily."""
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def generate(fsdp, reshard, *, kept: bool = False) -> tuple[int, int]:
    """Generate, train, generate; return the gathers of the last generation and the number of units."""
    parts = lambda module: (module.embed, *module.layers, module.head)
    module, alone = beside_one_process(Generator, parts, fsdp, reshard_after_forward=reshard)
    units = [*parts(module), module]
    optimizers = [torch.optim.SGD(one.parameters(), lr=5.0) for one in (module, alone)]
    prompt = torch.arange(6).view(2, 3)
    gathers = 0
    for _ in range(3):
        with Collectives() as seen:
            for unit in units if kept else ():
                unit.unshard()
            got = module.generate(prompt, 8)
            for unit in units if kept else ():
                unit.reshard()
        gathers = seen.gathers
        check(torch.equal(got, alone.generate(prompt, 8)), "other tokens than a single process generates")
        for one, optimizer in zip((module, alone), optimizers, strict=True):
            F.cross_entropy(one(prompt).flatten(0, 1), prompt.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return gathers, len(units) - 1


@report("A generation loop with sharded parameters", 1, 2, 4)
def test_generation_sharded(rank, world, fsdp):
    """Online reinforcement learning alternates generation and training; every token is a forward."""
    generate(fsdp, True)


@report("A generation loop with parameters kept by unshard()", 1, 2, 4)
def test_generation_kept(rank, world, fsdp):
    """After ``unshard()`` of every unit a loop of many tokens gathers once. After a step of the optimizer, the next one
    must not go on with the old weights."""
    gathers, units = generate(fsdp, True, kept=True)
    thrifty(gathers <= units + 1, f"{gathers} gathers for 8 tokens of {units} units")


@report("Many small units", 1, 2, 4)
def test_many_small_units(rank, world, fsdp):
    """A rule that shards every module makes a unit of each norm and gate. Hundreds of tiny ones must work, some
    without parameters, some smaller than the number of ranks; a few dozen here."""
    many = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(12)))

    def prepare(module, fsdp):
        for unit in reversed(list(module.modules())):
            fsdp.fully_shard(unit, mesh=mesh_1d())

    agrees(fsdp, prepare, many, tolerance=1e-4)
