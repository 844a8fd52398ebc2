"""Running one program on one case three ways with the same seed and data: one process on the whole batch, torch's
fully_shard, ours.

The single process never shards anything; under a mixed precision policy it casts a copy of the parameters for each
forward and leaves the cast-back to autograd. ``assert_parity`` is what most tests call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tests.support import api
from tests.support.cases import CASES
from tests.support.models import ROWS, Case
from tests.support.remembered import remembered
from tests.support.shapes import loss_of
from tests.support.trace import Tolerance, Trace, assert_traces_agree

SEED = 7
STEPS = 3
"""The first pass records, the second follows what was recorded, the third reuses what the second left behind."""
DIRECT = {"direct_param_bytes": 0, "direct_group_bytes": 0, "chunk_bytes": 1}
"""Transfer sizes with which every parameter is gathered in place and every gradient leaves as soon as it is there."""
TRANSFERS: dict[str, dict[str, int]] = {"packed": {}, "direct": DIRECT}


@dataclass(frozen=True)
class Setup:
    """What ``fully_shard`` is told, in picklable form.

    ``placement`` is "last" or "first" (dimension) or None for the default. ``transfer`` is a key of ``TRANSFERS``.
    The policy's output_dtype is the root's, and the units' as well if ``units_cast_outputs``.
    """

    reshard_after_forward: bool | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    placement: str | None = None
    transfer: str = "packed"
    units_cast_outputs: bool = False

    def arguments(self, root: bool) -> dict[str, Any]:
        """Return the keyword arguments of ``fully_shard``, the mesh excepted."""
        policy = self.policy if root or self.units_cast_outputs else replace(self.policy, output_dtype=None)
        placements = {"last": lambda p: Shard(max(p.ndim - 1, 0)), "first": lambda p: Shard(0), None: None}
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": policy,
            "shard_placement_fn": placements[self.placement],
        }

    @property
    def low_precision(self) -> bool:
        """Whether anything is computed or sent in fewer bits than fp32."""
        return self.policy.param_dtype is not None or self.policy.reduce_dtype is not None


def cpu_mesh(world: int) -> DeviceMesh:
    """Return the 1D mesh over the default process group."""
    return init_device_mesh("cpu", (world,))


def build(case: Case) -> nn.Module:
    """Return the case's model, equal on every call."""
    torch.manual_seed(SEED)
    return case.build()


def shard(module: nn.Module, case: Case, implementation: ModuleType, mesh: DeviceMesh, setup: Setup) -> Any:
    """Shard the units and then the root in place and return the root."""
    for unit in [*case.units(module), module]:
        implementation.fully_shard(unit, mesh=mesh, **setup.arguments(root=unit is module))
    if implementation is api.ours and api.name == "fsdp2":
        module.set_transfer_sizes(**TRANSFERS[setup.transfer])
    return module


def build_sharded(name: str, world: int, setup: Setup | None = None) -> Any:
    """Return the named case's model, sharded by ours."""
    return shard(build(CASES[name]), CASES[name], api.ours, cpu_mesh(world), setup or Setup())


def rows_of(inputs: tuple[Any, ...], rank: int, world: int) -> tuple[Any, ...]:
    """Return this rank's rows of a whole batch, as leaves."""
    count = ROWS // world

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach()[rank * count : (rank + 1) * count].requires_grad_(value.requires_grad)

    return pytree.tree_map(part, inputs)


def low(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with every floating point tensor in it in ``dtype``."""
    if dtype is None:
        return value
    cast = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
    return pytree.tree_map(cast, value)


def forward_alone(module: nn.Module, case: Case, inputs: tuple[Any, ...], policy: MixedPrecisionPolicy) -> Any:
    """Return the output of an unsharded module under a mixed precision policy that holds for the whole model."""
    if policy.param_dtype is None and policy.output_dtype is None:
        return case.call(module, inputs)
    cast = {name: low(p, policy.param_dtype) for name, p in module.named_parameters(remove_duplicate=False)}
    if policy.cast_forward_inputs:
        inputs = low(inputs, policy.param_dtype)
    args, keywords = ((), case.keywords(inputs)) if case.keywords else (inputs, {})
    return low(functional_call(module, cast, args, keywords, tie_weights=False), policy.output_dtype)


class Run:
    """One of the three runs of a program: a model, its optimizer, this rank's rows, and what is seen on the way.

    SGD with momentum is linear in the gradients, so small errors stay small.
    """

    def __init__(self, case: Case, rank: int, world: int, setup: Setup, implementation: ModuleType | None) -> None:
        self.case, self.setup = case, setup
        self.sharded = implementation is not None
        self.rank, self.world = (rank, world) if self.sharded else (0, 1)
        self.module: Any = build(case)
        if implementation is not None:
            shard(self.module, case, implementation, cpu_mesh(world), setup)
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trainable or self.module.parameters(), lr=0.05, momentum=0.9)
        self.trace = Trace()

    def forward(self, step: int) -> Any:
        """Return the model's output for this rank's rows of a step's batch."""
        inputs = rows_of(self.case.inputs(step), self.rank, self.world)
        if self.sharded:
            return self.case.call(self.module, inputs)
        return forward_alone(self.module, self.case, inputs, self.setup.policy)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's batch and note it."""
        loss = loss_of(self.forward(step))
        self.trace.losses.append(loss.item())
        return loss

    def record(self) -> None:
        """Note the gradients, which the shards hold; a forward without a backward may have left full parameters."""
        for unit in self.units:
            unit.reshard()
        self.trace.record(self.module)

    def update(self) -> None:
        """Note the gradients, step, and drop them."""
        self.record()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def units(self) -> list[Any]:
        """The sharded modules, root first; none in a single process, so that loops over them do nothing there."""
        kinds = (api.ours.FSDPModule, api.theirs.FSDPModule)
        return [module for module in self.module.modules() if isinstance(module, kinds)] if self.sharded else []

    @property
    def root(self) -> list[Any]:
        """The sharded root alone."""
        return self.units[:1]


Program = Callable[[Run], None]


def train(run: Run) -> None:
    """Train as usual."""
    for step in range(STEPS):
        run.loss(step).backward()
        run.update()


def assert_parity(
    rank: int,
    world: int,
    case: str | Case,
    setup: Setup | None = None,
    program: Program = train,
    *,
    against_torch: bool = True,
    against_single: bool = True,
) -> None:
    """Run a program on a case, or the named one, with ours, once with each of ``TRANSFERS``, and assert that it shows
    what torch's fully_shard and a single process on the whole batch show.

    All runs end before the first comparison, so that a difference on one rank leaves no other rank waiting.
    """
    name, setup = case if isinstance(case, str) else case.build, setup or Setup()
    case = CASES[case] if isinstance(case, str) else case

    def trace(implementation: ModuleType | None, transfer: str = "packed") -> Trace:
        run = Run(case, rank, world, replace(setup, transfer=transfer), implementation)
        program(run)
        for unit in run.units:
            unit.reshard()
        return run.trace.finish(run.module, run.sharded)

    transfers = [transfer for transfer in TRANSFERS if transfer == "packed" or api.name == "fsdp2"]
    ours = {transfer: trace(api.ours, transfer) for transfer in transfers}
    theirs = trace(api.theirs) if against_torch and case.torch_takes_it else None
    alone = None
    if against_single and not case.rows_couple:
        alone = remembered((name, case, setup.policy, program), lambda: trace(None))
    assert theirs or alone, "there is nothing to compare with"
    tolerance = Tolerance.of(setup.low_precision or case.low_precision)
    for transfer, mine in ours.items():
        if alone is not None:
            whole = alone.cut_like(mine, rank, world)
            assert_traces_agree(mine, whole, alone, f"{transfer} against a single process", tolerance)
        if theirs is not None:
            assert_traces_agree(mine, theirs, alone or theirs, f"{transfer} against torch's fully_shard", tolerance)
