"""Random programs on random models: what a training script may do in any order, against a single process and torch's.

``run`` executes a program sharded and alone and compares all losses, gradients, norms, weights and buffers as whole
tensors. What only concerns sharding does nothing in the single process.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.models import Case, rows
from tests.support.parity import assert_close_together, forward_alone, full, fulls, mesh_1d, mesh_of, rows_of
from tests.support.shapes import loss_of
from tests.support.trees import POLICIES, WIDTH, Plan, plans, trees, units

LIMIT_PENDING = 3


@dataclass(frozen=True)
class Fuzz:
    """A plan, and steps: the name of a method of ``Execution`` and its arguments."""

    plan: Plan
    steps: tuple[tuple[Any, ...], ...]


def programs(*, ordinary: bool = False) -> st.SearchStrategy[Fuzz]:
    """Return a strategy for programs of up to a dozen steps, or for those that torch's fully_shard does right."""
    number, truth = st.integers(0, 5), st.booleans()
    steps = [
        *(st.tuples(st.just("train"), number) for _ in range(2)),
        *(st.tuples(st.just("forward"), number) for _ in range(2)),
        *(st.tuples(st.just("backward"), number, truth) for _ in range(2)),
        st.tuples(st.just("evaluate"), st.just("no_grad")),
        st.tuples(st.just("sync"), truth),
        st.tuples(st.just("after_forward"), truth),
        st.tuples(st.just("after_backward"), truth),
        st.tuples(st.just("unshard"), number, st.just(False)),
        st.tuples(st.just("reshard"), number),
        st.tuples(st.just("freeze"), number, truth),
        st.tuples(st.just("state_dict")),
        st.tuples(st.just("reload")),
        st.tuples(st.just("update"), st.just(True)),
    ]
    ours_alone = [
        st.tuples(st.just("evaluate"), st.just("inference")),
        st.tuples(st.just("sync_unit"), number, truth),
        st.tuples(st.just("all_reduce"), truth),
        st.tuples(st.just("unshard"), number, st.just(True)),
        st.tuples(st.just("skip"), number, truth),
        st.tuples(st.just("lone"), number, number),
        st.tuples(st.just("input_gradient"), number),
        st.tuples(st.just("penalty"), number),
        st.tuples(st.just("twin"), number),
        st.tuples(st.just("stumble"), st.integers(0, 20), number),
        st.tuples(st.just("sleep")),
        st.tuples(st.just("reset")),
        st.tuples(st.just("update"), st.just(False)),
    ]
    step = st.one_of(*steps, *([] if ordinary else ours_alone))
    return st.builds(Fuzz, plan=plans(ordinary=ordinary), steps=st.lists(step, min_size=1, max_size=12).map(tuple))


@dataclass
class Execution:
    """A program on one of the two runs; ``fsdp`` is None in the single process."""

    plan: Plan
    fsdp: Any
    rank: int = 0
    world: int = 1
    seen: list[dict[str, Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Any = self.plan.build()
        self.case = Case(self.plan.build, rows(WIDTH, grad=self.plan.input_needs_grad))
        if self.fsdp is not None:
            count = dist.get_world_size()
            outer = 2 if count % 2 == 0 else 1
            mesh = mesh_of(outer, count // outer, names=("replicate", "shard")) if self.plan.hybrid else mesh_1d()
            self.plan.shard(self.model, self.fsdp, mesh)
            if self.fsdp is api.ours and api.name == "fsdp2":
                self.model.set_transfer_sizes(**TRANSFERS[self.plan.transfer])
        for tree in trees(self.model):
            tree.alone = self.fsdp is None
        self.model.tree.alone = self.fsdp is None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.pending: list[Tensor] = []
        self.held: set[str] = set()
        self.unreduced = False

    # ---- what everything is made of ----

    @property
    def units(self) -> list[Any]:
        """The sharded modules, root first; none in a single process."""
        return [m for m in self.model.modules() if self.fsdp is not None and isinstance(m, self.fsdp.FSDPModule)]

    def inputs(self, batch: int) -> tuple[Any, ...]:
        """Return this rank's rows."""
        return rows_of(self.case.inputs(batch), self.rank, self.world)

    def output(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Return what a module returns, cast as the policy says."""
        if self.fsdp is not None:
            return module(*inputs)
        return forward_alone(module, self.case, inputs, POLICIES[self.plan.policy])

    def note(self, name: str, value: Tensor, *, mean: bool = True) -> None:
        """Note a value, its mean over ranks if it is one of this rank's rows."""
        value = value.detach().double().clone()
        if mean and self.fsdp is not None:
            dist.all_reduce(value)
            value /= self.world
        self.seen.append({name: value})

    def loss(self, batch: int) -> Tensor:
        """Return a loss and note it."""
        loss = loss_of(self.output(self.model, self.inputs(batch)))
        self.note("loss", loss)
        return loss

    # ---- steps ----

    def forward(self, batch: int) -> None:
        """Compute a loss and keep it for a later backward."""
        if len(self.pending) < LIMIT_PENDING:
            self.pending.append(self.loss(batch))

    def backward(self, index: int, retain: bool) -> None:
        """Go back from one of the kept losses, which may be used again if ``retain``."""
        if self.pending:
            index %= len(self.pending)
            loss = self.pending[index] if retain else self.pending.pop(index)
            loss.backward(retain_graph=retain)
            self.unreduced |= bool(self.held)

    def train(self, batch: int) -> None:
        """Forward and backward at once."""
        self.loss(batch).backward()
        self.unreduced |= bool(self.held)

    def evaluate(self, mode: str) -> None:
        """Forward without gradients."""
        self.model.eval()
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            self.loss(7)
        self.model.train()

    def hold(self, what: str, value: bool) -> None:
        """Note that gradients stay behind from now on, or not."""
        (self.held.discard if value else self.held.add)(what)

    def sync(self, value: bool) -> None:
        """Communicate gradients from now on, or not."""
        self.held.clear()
        self.hold("all", value)
        for root in self.units[:1]:
            root.set_requires_gradient_sync(value)

    def sync_unit(self, index: int, value: bool) -> None:
        """Communicate the gradients of one unit from now on, or not."""
        if "all" not in self.held:
            if not value:
                self.hold("some", value)
            for unit in self.units[index % max(len(self.units), 1) :][:1]:
                unit.set_requires_gradient_sync(value, recurse=False)

    def all_reduce(self, value: bool) -> None:
        """Reduce over the replicate axis from now on, or not."""
        self.hold("replicas", value)
        for root in self.units[:1]:
            root.set_requires_all_reduce(value)

    def after_forward(self, value: bool) -> None:
        """Reshard after forward from now on, or not."""
        for root in self.units[:1]:
            root.set_reshard_after_forward(value)

    def after_backward(self, value: bool) -> None:
        """Reshard after backward from now on, or not."""
        for root in self.units[:1]:
            root.set_reshard_after_backward(value)

    def unshard(self, index: int, async_op: bool) -> None:
        """Gather one unit by hand."""
        for unit in self.units[index % max(len(self.units), 1) :][:1]:
            unit.unshard(async_op=async_op)

    def reshard(self, index: int) -> None:
        """Free one unit by hand."""
        for unit in self.units[index % max(len(self.units), 1) :][:1]:
            unit.reshard()

    def freeze(self, index: int, value: bool) -> None:
        """Freeze a part of the tree, or train it, from the next iteration on."""
        self.update(True)
        parts = trees(self.model)
        parts[index % len(parts)].requires_grad_(value)

    def skip(self, index: int, value: bool) -> None:
        """Leave a part of the tree out from now on, or not."""
        parts = trees(self.model)
        if any(tree.node.recompute for tree in parts):
            self.pending.clear()  # a checkpoint must recompute what its forward computed; the single process has none
        parts[index % len(parts)].skipped = value

    def lone(self, index: int, batch: int) -> None:
        """Run and go back through one unit by itself."""
        parts = [unit for unit, _ in units(self.model.tree) if not isinstance(unit, list)]
        if parts:
            loss = loss_of(self.output(parts[index % len(parts)], self.inputs(batch)))
            self.note("loss of a part", loss)
            if loss.requires_grad:
                loss.backward()
                self.unreduced |= bool(self.held)

    def input_gradient(self, batch: int) -> None:
        """Ask for the gradient of the input alone."""
        if any(tree.node.recompute == "reentrant" for tree in trees(self.model)):
            return
        inputs = [value.detach().requires_grad_() for value in self.inputs(batch)]
        (gradient,) = torch.autograd.grad(self.output(self.model, tuple(inputs)).double().square().sum(), inputs)
        self.note("gradient of the input", gradient.square().sum(1).mean())

    def penalty(self, batch: int) -> None:
        """Train on the size of the input's gradient."""
        if any(tree.node.recompute for tree in trees(self.model)):
            return
        inputs = [value.detach().requires_grad_() for value in self.inputs(batch)]
        output = self.output(self.model, tuple(inputs)).square().sum(1)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        loss = (output + gradient.to(output.dtype).square().sum(1)).mean()
        self.note("penalised loss", loss)
        loss.backward()
        self.unreduced |= bool(self.held)

    def twin(self, batch: int) -> None:
        """Train a deep copy for a step and drop it."""
        self.update(True)
        self.sync(True)
        twin, original = copy.deepcopy(self.model), self.model
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
        self.model = twin
        self.train(batch)
        self.record()
        optimizer.step()
        self.loss(batch)
        self.model = original

    def state_dict(self) -> None:
        """Take a state dict and look at it."""
        state = {name: value.detach() for name, value in self.model.state_dict().items()}
        self.seen.append(fulls(state))

    def stumble(self, index: int, batch: int) -> None:
        """Catch an error from the middle of a forward, and go on."""
        leaves = [module for module in self.model.modules() if not list(module.children())]

        def stop(*unused: object) -> None:
            raise KeyError(index)

        handle = leaves[index % len(leaves)].register_forward_pre_hook(stop)
        with contextlib.suppress(KeyError):
            self.output(self.model, self.inputs(batch))
        handle.remove()

    def reload(self) -> None:
        """Load values made of the present ones, after which earlier losses are not to be used."""
        self.update(True)
        state = {n: v * 0.9 if v.is_floating_point() else v.clone() for n, v in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def sleep(self) -> None:
        """Move the model to where it is."""
        self.update(True)
        self.model.to("cpu")

    def reset(self) -> None:
        """Recover without need."""
        self.update(True)
        for root in self.units[:1]:
            if root._get_fsdp_state().is_root is not False:
                root.reset_iter_state()

    def record(self) -> None:
        """Note all gradients as whole tensors."""
        for unit in self.units:
            unit.reshard()
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in self.model.named_parameters()}
        self.seen.append(fulls(gradients))

    def update(self, tidy: bool) -> None:
        """Step, after one more backward if some gradients were not reduced; ``tidy`` notes them first."""
        if self.unreduced:
            self.sync(True)
            self.train(5)
            self.unreduced = False
        self.pending.clear()
        if tidy:
            self.record()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.note("norm", full(norm), mean=False)  # type: ignore[arg-type]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def execute(self, steps: tuple[tuple[Any, ...], ...]) -> list[dict[str, Tensor | None]]:
        """Run the steps, a step of the optimizer and an evaluation, and return all that was seen."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        self.sync(True)
        self.train(9)
        self.update(True)
        self.evaluate("no_grad")
        for unit in self.units:
            unit.reshard()
        self.seen.append(fulls({f"weight {name}": value for name, value in self.model.named_parameters()}))
        self.seen.append({f"buffer {name}": value.clone() for name, value in self.model.named_buffers()})
        return self.seen


def run(rank: int, world: int, program: Fuzz, against_torch: bool = False) -> bool:
    """Execute a program and compare with a single process, and with torch's; False if not even one process can."""
    try:
        alone = Execution(program.plan, None).execute(program.steps)
    except RuntimeError:
        return False
    sharded = [api.ours, api.theirs] if against_torch else [api.ours]
    runs = [Execution(program.plan, fsdp, rank, world).execute(program.steps) for fsdp in sharded]
    for seen in runs:
        assert [list(values) for values in seen] == [list(values) for values in alone]
    for index, (expected, *others) in enumerate(zip(alone, *runs, strict=True)):
        for name, got in zip(("ours", "torch's"), others, strict=False):
            assert_close_together(got, expected, f"a single process's in record {index} of {name}", 1e-4)
    return True
