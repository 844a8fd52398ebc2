"""Only some parameters of a unit live on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, cpu_offload_by_budget
from tests.grouping.models import Block, Net
from tests.support import api
from tests.support.fake import fake_mesh
from tests.support.inside import options_by_name
from tests.support.parity import assert_parity, mesh_1d, mesh_2d
from tests.support.pool import on_ranks


class Three(nn.Module):
    """Parameters of 400, 400, 200 and 40 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.first, self.second = (nn.Parameter(torch.zeros(n)) for n in (10, 100, 100))
        self.middle = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))


class Tied(nn.Module):
    """An embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, []),
        (399, []),
        (400, ["first"]),
        (999, ["first", "second"]),
        (1000, ["first", "second", "middle"]),
        (1 << 60, ["first", "second", "middle", "small"]),
    ],
)
def test_the_largest_come_first(budget, expected):
    """Up to the budget, by name where two are equal; a larger budget only adds some. torch's chooses the same."""
    for model in (Three(), Three().to("meta")):
        chosen = cpu_offload_by_budget(model, budget)
        assert list(chosen) == expected
        assert all(policy == CPUOffloadPolicy() for policy in chosen.values())
        if theirs := getattr(api.theirs, "cpu_offload_by_budget", None):
            assert chosen == theirs(model, budget)
    assert not any(policy.pin_memory for policy in cpu_offload_by_budget(Three(), budget, pin_memory=False).values())


@pytest.mark.parametrize("budget", [-1, True, 1.5, None])
def test_budgets_that_are_no_number_of_bytes(budget):
    with pytest.raises(ValueError, match=f"number of bytes >= 0, got {budget!r}"):
        cpu_offload_by_budget(Three(), budget)


def homes(module: nn.Module) -> dict[str, bool]:
    """Return whether each parameter lives on the CPU whatever the device."""
    found = options_by_name(module).items()
    return {name: isinstance(options.offload_policy, CPUOffloadPolicy) for name, options in found}


@on_ranks(2, 4)
@pytest.mark.parametrize("how", ["policy", "by hand"])
def test_a_budget_of_parameters_on_the_cpu(rank, world, how):
    """Units hold some parameters on the CPU and others not; training is the same, and so are checkpoints."""
    plain = Net()
    chosen = cpu_offload_by_budget(plain, 1000, pin_memory=False)
    assert list(chosen) == ["blocks.0.down.weight", "blocks.0.up.weight"]
    mesh = mesh_2d() if world == 4 else mesh_1d()

    def prepare(module, fsdp):
        if how == "policy":
            fsdp.fully_shard(module, mesh=mesh, policy={Block}, offload_policy=chosen)
            return
        for name, block in module.blocks.named_children():
            prefix = f"blocks.{name}."
            own = {name.removeprefix(prefix): policy for name, policy in chosen.items() if name.startswith(prefix)}
            fsdp.fully_shard(block, mesh=mesh, offload_policy=own)
        fsdp.fully_shard(module, mesh=mesh, offload_policy=chosen)

    run = assert_parity(prepare, build=Net, against=("alone",))
    assert homes(run.module) == {name: name in chosen for name, _ in plain.named_parameters()}
    values = run.module.state_dict()
    assert list(values) == list(plain.state_dict())
    run.module.load_state_dict(values)


@pytest.mark.parametrize("policy", [None, {nn.Linear}, {nn.Embedding}])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "hea*weight"])
def test_any_name_of_a_tied_parameter(name, policy):
    """A unit knows it by one name, that of whichever module comes first. A policy for another one was ignored,
    silently: the largest parameter of a budget stayed on the device, and a head in float32 computed in bfloat16."""
    low, high = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy()
    with fake_mesh(2) as mesh:
        module = Tied()
        assert list(cpu_offload_by_budget(module, 64 * 8 * 4)) == ["embed.weight"]
        fsdp2.fully_shard(
            module,
            mesh=mesh,
            policy=policy,
            offload_policy={name: CPUOffloadPolicy(pin_memory=False)},
            mp_policy={name: high, "": low},
        )
        assert homes(module) == {"embed.weight": True, "head.bias": False}
        for unit in fsdp2.fsdp_modules(module):
            unit.unshard()
        assert module.head.weight is module.embed.weight and module.head.weight.dtype == torch.float32
        assert module.head.bias.dtype == torch.bfloat16


def test_names_with_brackets():
    """In a pattern they stand for one of several characters, so the name in full fitted nothing: a budget was refused,
    and ``mp_policy`` had no effect on the parameter."""
    module = nn.ParameterDict({"[a]": torch.zeros(100), "b": torch.zeros(10)})
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    budget = cpu_offload_by_budget(module, 400, pin_memory=False)
    with fake_mesh(2) as mesh:
        fsdp2.fully_shard(module, mesh=mesh, offload_policy=budget, mp_policy={"[a]": low})
        assert homes(module) == {"[a]": True, "b": False}
        module.unshard()
        assert (module["[a]"].dtype, module["b"].dtype) == (torch.bfloat16, torch.float32)


def test_a_pattern_for_dtypes_that_fits_nothing():
    """A letter too many left the norms in bfloat16, silently. It is no error: a model's blocks may be of several kinds,
    which share one mapping."""
    low, high = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy()
    with fake_mesh(2) as mesh:
        with pytest.warns(UserWarning, match=r"mp_policy: '\*biases' matches no parameter; .* it has no effect"):
            fsdp2.fully_shard(Net(), mesh=mesh, policy="auto", mp_policy={"*biases": high, "": low})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fsdp2.fully_shard(Net(), mesh=mesh, policy="auto", mp_policy={"head.*": high, "": low})


@on_ranks(2)
def test_patterns_and_mistakes(rank, world):
    """A pattern stands for several names, "" for all others. A name that matches nothing would leave a parameter on the
    device, as the names of a whole model do in a call for one block, so it is refused.
    """
    module = fsdp2.fully_shard(
        Net(), mesh=mesh_1d(), offload_policy={"*.bias": OffloadPolicy(), "": CPUOffloadPolicy()}
    )
    assert homes(module) == {name: not name.endswith(".bias") for name, _ in module.named_parameters()}
    names = cpu_offload_by_budget(Net(), 1 << 20)
    with pytest.raises(ValueError, match=r"'blocks\.0\.down\.weight' matches no parameter; expected names in Block"):
        fsdp2.fully_shard(Net().blocks[0], mesh=mesh_1d(), offload_policy=dict(sorted(names.items())[1:]))
    for wrong in ({"head.weight": True}, {0: OffloadPolicy()}, lambda name: None, CPUOffloadPolicy):
        with pytest.raises(TypeError, match="offload_policy must be an OffloadPolicy, a mapping"):
            fsdp2.fully_shard(Net(), mesh=mesh_1d(), offload_policy=wrong)
    with pytest.raises(ValueError, match="per-param offload_policy"):
        module.set_all_reduce_hook(lambda sums: None)
