"""Random programs (``programs.py``) on random models, against a single process and torch's.

``run`` executes a program sharded and alone and compares all losses, gradients, norms, weights and buffers as whole
tensors. The single process computes the part of each rank in turn, so it rounds what the ranks round; what only
concerns sharding does nothing there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import StateDictType
from torch.optim.swa_utils import AveragedModel

import fsdp2
from fsdp2.sharding.platform import simulated, using
from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.models import Case, rows
from tests.support.parity import assert_close_together, device, forward_alone, full, fulls, low, rows_of
from tests.support.programs import OPTIMIZERS, WHOLE, Fuzz
from tests.support.shapes import first_tensor, loss_of
from tests.support.stores import meeting_in
from tests.support.streams import Device
from tests.support.trees import DIVIDE, POLICIES, WIDTH, Tree, expert_of, trees, units

LIMIT_PENDING = 3
EXACT = 1e-4
"""How far a run may be off. The longest programs make a hundredth of that of a last bit of float32.

Trees that run twice inside each other apply their layers again and again, which amplifies rounding: three were off by
2.7 times as much in float32, and by 1.5e-15 in float64. So it is doubled for each such tree from the second on.
"""
ROUNDED = 2.0**-8
"""How much a rounding to bfloat16 changes at most.

Weights of two runs that have stepped may round to other numbers, and a sum of more than two, as of the gradients of a
tensor that units inside each other are given, depends on its order. Such runs may be off by that for each part of the
model, forth and back: a part rounds more often, but up and down.
"""
SLOW_SECONDS = 0.3
"""How late a slow rank is: the others look several times what it does."""


@dataclass
class Execution:
    """A program on one of the two runs; ``fsdp`` is None in the single process, which stands for this rank as well."""

    program: Fuzz
    fsdp: Any
    rank: int = 0
    world: int = 1
    seen: list[dict[str, Tensor | None]] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = self.program.plan
        self.model: Any = self.plan.build(self.world).to(device())
        self.case = Case(self.plan.build, rows(WIDTH, grad=self.plan.input_needs_grad))
        across = self.plan.across(self.world)
        self.count = self.world // across  # of ranks with rows of their own
        self.parts = range(self.count) if self.fsdp is None else [self.rank // across]
        if self.fsdp is not None:
            self.keep_own_expert(self.model)
        early = self.program.early and across == 1  # parallelize_module replaces parameters unseen by the optimizer
        if early:
            self.optimizer = self.make_optimizer()
        if self.fsdp is not None:
            self.plan.shard(self.model, self.fsdp)
            if self.is_ours:
                self.model.set_transfer_sizes(**TRANSFERS[self.plan.transfer])
        if not early:
            self.optimizer = self.make_optimizer()
        self.sender = fsdp2.WeightSender(self.model, delta=True) if self.is_ours else None
        self.engine = fsdp2.WeightReceiver()
        scheduled = self.program.optimizer == "scheduled"
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5) if scheduled else None
        scaler = fsdp2.ShardedGradScaler if self.is_ours else torch.amp.GradScaler
        self.scaler = scaler(device(), init_scale=8.0, growth_interval=2, enabled=self.program.scaled)
        self.divide(self.model)
        for tree in (self.model.tree, *trees(self.model)):
            tree.alone = self.fsdp is None
            # A function, which a deep copy of the model takes as it is.
            tree.after_backward = (lambda part: self.look(part)) if self.is_ours else None
        self.late: list[str] = []  # units that backward was through with, and that were still in memory
        self.frees = True  # backward frees each unit when it has the gradients of its inputs
        self.pending: list[Tensor] = []
        self.held: set[str] = set()
        self.unreduced = False
        self.stepped = self.penalised = False
        self.interrupted = False  # the latest forward, which only the next one finds out

    # ---- what everything is made of ----

    @property
    def is_ours(self) -> bool:
        """Whether fsdp2 shards the model."""
        return self.fsdp is api.ours and api.name == "fsdp2"

    @property
    def units(self) -> list[Any]:
        """The sharded modules, root first; none in a single process."""
        return [m for m in self.model.modules() if self.fsdp is not None and isinstance(m, self.fsdp.FSDPModule)]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the model as it is now."""
        make = OPTIMIZERS.get(self.program.optimizer, OPTIMIZERS["scheduled"])
        optimizer = make(self.model.parameters())
        if self.is_ours and self.program.whole:
            optimizer = fsdp2.use_full_params(optimizer, **WHOLE[self.program.whole])
        return fsdp2.offload_optimizer_state(optimizer) if self.is_ours and self.program.host else optimizer

    def keep_own_expert(self, model: Any) -> None:
        """Drop the experts that other ranks have."""
        if self.plan.experts:
            name = expert_of(self.rank, self.world)
            model.experts = nn.ModuleDict({name: model.experts[name]})

    def divide(self, model: nn.Module) -> None:
        """Let a single process divide its gradients by as much more than for their mean as the plan says."""
        if self.fsdp is None and self.plan.divide:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    required, parameter.requires_grad = parameter.requires_grad, True
                    parameter.register_hook(lambda grad: grad / DIVIDE)
                    parameter.requires_grad = required

    def inputs(self, batch: int, part: int) -> tuple[Any, ...]:
        """Return the rows of one rank."""
        rows = rows_of(self.case.inputs(batch), part, self.count)
        return tuple(value.detach().to(device()).requires_grad_(value.requires_grad) for value in rows)

    def output(self, module: Any, inputs: tuple[Any, ...], part: int) -> Any:
        """Return what a module returns on one rank, cast as the policy says."""
        self.interrupted = False
        if self.plan.experts:
            self.model.expert = expert_of(part, self.world)
        if self.fsdp is not None:
            return module(*inputs)
        return forward_alone(module, self.case, inputs, POLICIES[self.plan.policy])

    def mean(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the mean over the ranks that this process computes."""
        return torch.stack(list(parts)).mean()

    def see(self, values: dict[str, Tensor | None]) -> None:
        """Note values as whole tensors. Of experts, those that this rank has."""
        own = f"experts.{expert_of(self.rank, self.world)}."
        self.seen.append({name: value for name, value in values.items() if "experts." not in name or own in name})
        plan = self.plan
        # Of a layer that runs twice: gradients that accumulate unreduced are added in the reduce dtype.
        in_order = plan.is_simple and not plan.caches
        in_order = in_order and not any(node.children or node.kind == "twice" for node in plan.all_nodes())
        # After a penalty, gradients are sums over two paths, in an order that autograd chooses.
        # A single process divides by the number of ranks before its gradients are rounded, the ranks after theirs.
        exact_mean = self.world & (self.world - 1) == 0
        few_bits = plan.policy == "low" and (
            self.stepped or self.penalised or not in_order or not exact_mean or plan.across(self.world) > 1
        )
        layers = 2 + sum(1 + node.twice for node in plan.all_nodes())  # with the expert and the root's own
        self.allowed.append(2 * layers * ROUNDED if few_bits else EXACT * max(1.0, plan.repeats / 2))

    def note(self, name: str, value: Tensor, *, mean: bool = True) -> None:
        """Note a value, its mean over ranks if it is one of this rank's rows."""
        value = value.detach().double().clone()
        if mean and self.fsdp is not None:
            dist.all_reduce(value)
            value /= self.world
        self.see({name: value})

    def loss(self, batch: int) -> Tensor:
        """Return a loss and note it."""
        loss = self.mean(loss_of(self.output(self.model, self.inputs(batch, part), part)) for part in self.parts)
        self.note("loss", loss)
        return loss

    def look(self, part: Tree) -> None:
        """Backward has the gradient of what went into ``part``: a unit is freed by then."""
        if self.frees and self.plan.is_simple and isinstance(part, self.fsdp.FSDPModule):
            if any(not hasattr(p, "placements") for p in part.parameters()):
                self.late.append(part.node.kind)

    def back(self, loss: Tensor, retain: bool = False) -> None:
        """Go back from a loss."""
        self.scaler.scale(loss).backward(retain_graph=retain)
        self.unreduced |= bool(self.held)

    # ---- steps ----

    def forward(self, batch: int) -> None:
        """Compute a loss and keep it for a later backward."""
        if len(self.pending) < LIMIT_PENDING:
            self.pending.append(self.loss(batch))

    def backward(self, index: int, retain: bool) -> None:
        """Go back from one of the kept losses, which may be used again if ``retain``."""
        if self.pending:
            index %= len(self.pending)
            # torch allows one backward through what a selective checkpoint has recomputed, or a graph of AOTAutograd.
            once = self.plan.backend == "aot_eager" or any(
                node.recompute == "selective" for node in self.plan.all_nodes()
            )
            retain = retain and not once
            loss = self.pending[index] if retain else self.pending.pop(index)
            self.back(loss, retain)

    def train(self, batch: int) -> None:
        """Forward and backward at once."""
        self.back(self.loss(batch))

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
        self.frees = value
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

    def freeze(self, index: int, value: bool, tidy: bool) -> None:
        """Freeze a part of the tree, or train it, from the next iteration on if ``tidy``, else from the next forward.

        Gradients that it has by then are not lost.
        """
        if tidy:
            self.update(True)
        self.pending.clear()
        parts = trees(self.model)
        parts[index % len(parts)].requires_grad_(value)

    def skip(self, index: int, value: bool) -> None:
        """Leave a part of the tree out from now on, or not; what is recomputed would be another forward."""
        self.pending.clear()
        parts = trees(self.model)
        if any(tree.node.recompute for tree in parts):
            self.pending.clear()  # a checkpoint must recompute what its forward computed; the single process has none
        parts[index % len(parts)].skipped = value

    def lone(self, index: int, batch: int) -> None:
        """Run and go back through one unit by itself."""
        parts = [unit for unit, _ in units(self.model.tree) if not isinstance(unit, list)]
        if parts:
            module = parts[index % len(parts)]
            loss = self.mean(loss_of(self.output(module, self.inputs(batch, part), part)) for part in self.parts)
            self.note("loss of a part", loss)
            if loss.requires_grad:
                self.back(loss)

    def input_gradient(self, batch: int) -> None:
        """Ask for the gradient of the input alone."""
        if any(tree.node.recompute == "reentrant" for tree in trees(self.model)):
            return

        def size(part: int) -> Tensor:
            inputs = [value.detach().requires_grad_() for value in self.inputs(batch, part)]
            output = self.output(self.model, tuple(inputs), part)
            (gradient,) = torch.autograd.grad(output.double().square().sum(), inputs)
            return gradient.square().sum(1).mean()

        self.note("gradient of the input", self.mean(map(size, self.parts)))

    def penalty(self, batch: int) -> None:
        """Train on the size of the input's gradient.

        Not where torch's graphs refuse that, nor of layers that are cut over ranks, whose gradients are then wrong also
        without fully_shard (``test_torch_differentiates_what_is_cut_over_ranks_twice``).
        """
        recomputed = any(tree.node.recompute for tree in trees(self.model))
        if recomputed or self.plan.across(self.world) > 1 or self.plan.backend == "aot_eager":
            return

        def penalised(part: int) -> Tensor:
            inputs = [value.detach().requires_grad_() for value in self.inputs(batch, part)]
            output = self.output(self.model, tuple(inputs), part).square().sum(1)
            (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            wide = torch.promote_types(output.dtype, torch.float32)
            return (output.to(wide) + gradient.to(wide).square().sum(1)).mean()

        self.penalised = True
        frees, self.frees = self.frees, False  # a backward that is differentiated keeps what it saved
        loss = self.mean(map(penalised, self.parts))
        self.note("penalised loss", loss)
        self.back(loss)
        self.frees = frees

    def two_losses(self, one: int, other: int) -> None:
        """Go back from two forwards at once."""
        self.penalised = True  # autograd chooses in which order it adds their gradients
        self.back(self.loss(one) + self.loss(other))

    def use(self, index: int, inside: bool) -> None:
        """Train on the size of weights outside of forward, and go back while they are full or later.

        Not of layers that are cut over ranks, none of which has the size of the whole.
        """
        parts = [self.model.tree, *trees(self.model)]
        part = parts[index % len(parts)]
        if self.plan.across(self.world) > 1 or not any(p.requires_grad for p in floats(part)):
            return
        with fsdp2.use_weights(part) if self.units else contextlib.nullcontext():
            weights = [low(weight, POLICIES[self.plan.policy].param_dtype) for weight in floats(part)]
            loss = torch.stack([weight.double().square().mean() for weight in weights]).sum()
            self.note("size of weights", loss)
            if inside:
                self.back(loss)
        if not inside:
            self.back(loss)

    def write(self, what: str, batch: int) -> None:
        """Write to full weights, which stays or is lost, or to full gradients."""
        self.update(True)
        if what == "gradients":
            self.sync(True)
            self.train(batch)
        how = {"writeback": what != "nothing", "with_grads": what == "gradients"}
        with fsdp2.summon_full_params(self.model, **how) if self.units else contextlib.nullcontext(), torch.no_grad():
            for weight in floats(self.model):
                if what == "gradients" and weight.grad is not None:
                    weight.grad.mul_(0.5)
                elif what == "weights" or (what == "nothing" and self.units):
                    weight.mul_(0.5)

    def substitute(self, index: int) -> None:
        """Forward with another tensor in the place of a parameter, which no policy casts and no graph expects."""
        named = {name: p for name, p in self.model.tree.named_parameters() if p.is_floating_point()}
        tied = any(node.ties for node in self.plan.all_nodes())
        if self.plan.policy != "plain" or self.plan.compiled or tied or not named:
            return
        self.update(True)
        for unit in self.units:
            unit.reshard()
        name = sorted(named)[index % len(named)]
        others = {f"tree.{name}": named[name].detach() * 0.5}

        def call(*inputs: Any) -> Any:
            return torch.func.functional_call(self.model, others, inputs)

        with torch.no_grad():
            outputs = [self.output(call, self.inputs(7, part), part) for part in self.parts]
        self.note("loss with another tensor", self.mean(map(loss_of, outputs)))

    def halve(self, batch: int) -> None:
        """Train with hooks of parameters that halve their gradients."""
        self.reset()
        self.sync(True)
        handles = [p.register_hook(lambda grad: grad / 2) for p in floats(self.model) if p.requires_grad]
        self.train(batch)
        for handle in handles:
            handle.remove()

    def finalize(self, batch: int, twice: bool, async_op: bool) -> None:
        """Reduce the gradients of one or two backwards by hand."""
        self.update(True)
        frees, self.frees = self.frees, False
        for root in self.units[:1]:
            root.set_manual_backward_finalization(True)
        if twice:
            self.sync(False)
            self.train(batch + 1)
        self.sync(True)
        self.train(batch)
        for root in self.units[:1]:
            handle = root.finalize_backward(async_op=async_op)
            if async_op:
                handle.wait()
            root.set_manual_backward_finalization(False)
        self.frees, self.unreduced = frees, False

    def uneven(self, batch: int) -> None:
        """Train on micro-batches whose number differs between ranks; only the last one communicates.

        Not where backward comes to a grouped call twice, for a member that is recomputed in a backward of its own: what
        leaves first is what is there, and on some ranks that includes gradients of earlier micro-batches.
        """
        if any(tree.node.recompute == "reentrant" for tree in trees(self.model)):
            return
        self.update(True)
        self.recover()  # a backward would gather ahead for losses that were kept, after as many backwards as it is
        self.sync(True)
        kept = self.units if self.plan.mesh != "copies" or self.plan.experts else []
        for root in self.units[:1]:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
        self.frees = False
        for unit in kept:
            unit.unshard()
        total = torch.zeros((), dtype=torch.float64, device=device())
        counts = {part: 1 + (batch + part) % 3 for part in self.parts}
        for part, count in counts.items():
            for micro in range(count):
                for root in self.units[:1]:
                    root.set_requires_gradient_sync(micro + 1 == count)
                loss = loss_of(self.output(self.model, self.inputs(batch + micro, part), part)) / len(counts)
                total += loss.detach()
                self.back(loss)
        self.note("loss of micro-batches", total)
        self.after_forward(True)
        self.after_backward(True)
        for unit in self.units:
            unit.reshard()

    def prefetch(self, index: int, other: int, backward: bool) -> None:
        """Let one unit gather another one ahead, which may not come next, or ever."""
        if self.units:
            unit, ahead = (self.units[i % len(self.units)] for i in (index, other))
            choose = unit.set_modules_to_backward_prefetch if backward else unit.set_modules_to_forward_prefetch
            choose([] if unit is ahead else [ahead])

    def configure(self, setter: str, value: Any) -> None:
        """Call one of the setters that change no result."""
        for root in self.units[:1]:
            getattr(root, setter)(value)

    def resize(self, direct: int, chunk: int) -> None:
        """Send tensors otherwise from now on, for which shards move."""
        self.reset()
        for root in self.units[:1]:
            root.set_transfer_sizes(
                direct_param_bytes=direct, direct_group_bytes=direct, chunk_bytes=chunk, exchange_bytes=chunk
            )

    def rebuild(self, how: str) -> None:
        """Go on with a new optimizer that loads the state of the one so far, and perhaps steps on other tensors then.

        Not where a schedule has the one so far.
        """
        if self.schedule is not None:
            return
        self.update(True)
        state = self.optimizer.state_dict()
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)
        if not self.is_ours or self.program.whole or self.program.host:
            return
        if how == "host":
            fsdp2.offload_optimizer_state(self.optimizer)
        elif how == "local":
            fsdp2.use_local_shards(self.optimizer)
        elif how == "whole":
            fsdp2.use_full_params(self.optimizer)

    def cast(self) -> None:
        """Cast the model to another dtype and back."""
        self.reset()
        self.model.double()
        self.model.float()

    def twin(self, batch: int) -> None:
        """Train a deep copy for a step and drop it."""
        self.update(True)
        self.sync(True)
        twin, original = copy.deepcopy(self.model), self.model
        self.divide(twin)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
        self.model = twin
        self.train(batch)
        self.record()
        optimizer.step()
        self.loss(batch)
        self.model = original

    def average(self, batch: int) -> None:
        """Average the weights of two steps, and evaluate with them."""
        self.update(True)
        self.sync(True)
        average, original = AveragedModel(self.model), self.model
        average.update_parameters(self.model)
        self.train(batch)
        self.update(True)
        average.update_parameters(self.model)
        self.model = average.module
        self.evaluate("no_grad")
        for unit in self.units:
            unit.reshard()
        self.see(fulls({f"average of {name}": value for name, value in self.model.named_parameters()}))
        self.model = original

    def state_dict(self) -> None:
        """Take a state dict and look at it."""
        state = {name: value.detach() for name, value in self.model.state_dict().items()}
        self.see(fulls(state))

    def send(self) -> None:
        """Send what changed to an engine, and look at all that the engine has then, on the rank where it is."""
        values = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        if self.sender is not None:
            self.sender.send(self.engine.apply)
            values = {name: value.clone() for name, value in self.engine.tensors.items()}
        self.see({f"sent {name}": value for name, value in sorted(values.items())} if self.rank == 0 else {})

    def look_at(self, how: str) -> None:
        """Look at parameters or gradients in a way that changes nothing."""
        if self.fsdp is None:
            return
        if how == "deepcopy":
            copy.deepcopy(self.model)
        elif how == "summon":
            if not self.interrupted:  # else it takes the forward for one that is under way, and says what to do
                with fsdp2.summon_full_params(self.model):
                    pass
        elif how == "iterate":
            for _ in fsdp2.iter_full_params(self.model):
                pass
        elif how == "use":
            with torch.no_grad(), fsdp2.use_weights(self.model):
                pass
        elif how == "move":
            self.move_in_place()
        else:
            self.units[0].get_pending_gradients()

    def synchronize(self) -> None:
        """Reduce what backwards have left unreduced, after a forward that nothing has interrupted."""
        if not self.interrupted:
            for root in self.units[:1]:
                root.synchronize_gradients()
            self.unreduced = False

    def leaf(self, index: int) -> nn.Module:
        """Return one of the innermost modules of the tree."""
        leaves = [module for module in self.model.tree.modules() if not list(module.children())]
        return leaves[index % len(leaves)]

    @contextlib.contextmanager
    def hooked(self, handle: Any) -> Iterator[None]:
        """Have a module's hook inside the block. Dynamo does not look for new ones, so it compiles again."""
        forget = torch._dynamo.reset if self.plan.compiled else lambda: None
        forget()
        yield
        handle.remove()
        forget()

    def stumble(self, index: int, batch: int, interrupt: bool, reset: bool) -> None:
        """Catch an error or an interrupt from the middle of a forward, and go on, perhaps after a reset."""
        trouble = KeyboardInterrupt if interrupt else KeyError
        if reset:
            self.update(True)

        def stop(*unused: object) -> None:
            raise trouble

        with self.hooked(self.leaf(index).register_forward_pre_hook(stop)):
            for part in self.parts:
                with contextlib.suppress(trouble):
                    self.output(self.model, self.inputs(batch, part), part)
        self.interrupted = interrupt and not reset
        if reset:
            self.reset()

    def break_off(self, index: int, batch: int, interrupt: bool, reset: bool) -> None:
        """Catch an error or an interrupt from the middle of a backward, whose gradients are dropped.

        Without a reset the next forward has to ask for one. Not in graphs, where a hook of a gradient is no Python.
        """
        if self.plan.compiled:
            return
        self.update(True)
        trouble = KeyboardInterrupt if interrupt else KeyError

        def stop(grad: Tensor) -> None:
            raise trouble

        def watch(module: nn.Module, args: object, output: Any) -> None:
            if first_tensor(output).requires_grad:
                first_tensor(output).register_hook(stop)

        ended = False
        with self.hooked(self.leaf(index).register_forward_hook(watch)), contextlib.suppress(trouble):
            self.train(batch)
            ended = True
        self.note("backward ended", torch.tensor(float(ended)))
        if ended:
            return
        self.unreduced = False
        asked = True
        if self.units and not reset:
            try:
                self.output(self.model, self.inputs(batch, self.parts[0]), self.parts[0])
                asked = False
            except RuntimeError as error:
                asked = "reset_iter_state" in str(error)
        self.note("a reset is asked for", torch.tensor(float(asked)))
        self.recover()
        self.optimizer.zero_grad()

    def slow(self, index: int, batch: int) -> None:
        """Train with one rank that comes late to the middle of a forward."""

        def wait(*unused: object) -> None:
            if self.fsdp is not None and self.rank == index % self.world:
                time.sleep(SLOW_SECONDS)

        with self.hooked(self.leaf(index).register_forward_pre_hook(wait)):
            self.train(batch)

    def reload(self, how: str) -> None:
        """Load values made of the present ones, after which earlier losses are not to be used.

        Only as shards where each rank has experts of its own.
        """
        self.update(True)
        state = {n: v * 0.9 if v.is_floating_point() else v.clone() for n, v in self.model.state_dict().items()}
        if not self.units or self.plan.experts or how == "shards":
            self.model.load_state_dict(state)
        elif how == "rank 0":
            whole = fulls(state)
            first = self.rank < self.plan.across(self.world)  # of the ranks that a layer is not cut over
            fsdp2.broadcast_from_rank0(self.model, whole if first else None)
        else:
            self.model.load_state_dict(state)
            path = folder_of_all()
            fsdp2.save_safetensors(self.model, path, max_shard_bytes=500)
            self.model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
            fsdp2.load_safetensors(self.model, path)

    def restore(self, how: str) -> None:
        """Save model and optimizer, train for a step, perhaps while that is written, and load what was saved.

        An optimizer that has not stepped yet has no state, and torch makes one that counts a step. Its broadcast from
        one rank needs contiguous tensors, and names that are the same on all ranks. It is not strict, because it would
        refuse that a parameter which had no gradient so far has no state.
        """
        scattered = any(node.kind in ("conv", "strided") for node in self.plan.all_nodes())
        whole = how == "whole" and not scattered and not self.plan.experts
        self.sync(True)
        self.train(6)
        self.update(True)
        if self.fsdp is None:
            state = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
        elif whole:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            state = copy.deepcopy(get_state_dict(self.model, self.optimizer, options=options))
        else:
            options = StateDictOptions(strict=False)
            state = get_state_dict(self.model, self.optimizer, options=options)
            path = folder_of_all()
            if how == "beside training":
                beside = dist.new_group()
                saving = dcp.async_save(dict(zip("mo", state)), checkpoint_id=path, process_group=beside)
            else:
                dcp.save(dict(zip("mo", state)), checkpoint_id=path)
        self.train(8)
        self.update(True)
        if self.fsdp is not None and how == "beside training":
            saving.result()
            dist.destroy_process_group(beside)
        if self.fsdp is None:
            self.model.load_state_dict(state[0])
            self.optimizer.load_state_dict(state[1])
            return
        if not whole:
            state = get_state_dict(self.model, self.optimizer, options=options)
            dcp.load(dict(zip("mo", state)), checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )

    def restore_fsdp1(self, kind: str) -> None:
        """Take the state dicts of model and optimizer in one of FSDP1's types, train for a step, and load them."""
        if self.plan.experts:
            return
        in_type = (
            contextlib.nullcontext
            if self.fsdp is None
            else functools.partial(fsdp2.state_dict_type, self.model, StateDictType[kind])
        )
        self.sync(True)
        self.train(6)
        self.update(True)
        with in_type():
            weights = copy.deepcopy(self.model.state_dict())
            state = copy.deepcopy(
                self.optimizer.state_dict() if self.fsdp is None else fsdp2.optim_state_dict(self.model, self.optimizer)
            )
        self.train(8)
        self.update(True)
        with in_type():
            self.model.load_state_dict(weights)
            if self.fsdp is not None:
                state = fsdp2.optim_state_dict_to_load(self.model, self.optimizer, state)
            self.optimizer.load_state_dict(state)

    def move(self, mesh: str, placement: str, tensor_parallel: bool) -> None:
        """Save the model, and load it where it is sharded otherwise."""
        values = self.model.state_dict()
        if self.fsdp is not None:
            path = folder_of_all()
            dcp.save(values, checkpoint_id=path)
            plan = replace(self.plan, mesh=mesh, placement=placement, tensor_parallel=tensor_parallel, compiled="")
            model = plan.build(self.world).to(device())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            self.keep_own_expert(model)
            plan.shard(model, self.fsdp)
            values = model.state_dict()
            dcp.load(values, checkpoint_id=path)
        self.see(fulls({f"moved {name}": value.detach() for name, value in values.items()}))

    def sleep(self) -> None:
        """Move the model to where it is."""
        self.update(True)
        self.move_in_place()

    def move_in_place(self) -> None:
        """Move the model to where it is, if that is one place: shards may be on the host, and buffers on the device."""
        if not self.plan.offload or device() == "cpu":
            self.model.to(device())

    def reset(self) -> None:
        """Recover without need."""
        self.update(True)
        self.recover()

    def recover(self) -> None:
        """Drop what an iteration left behind."""
        for unit in self.units[:1]:
            try:
                unit.reset_iter_state()
            except RuntimeError as error:  # its root is not in the model
                assert "must be called on the root" in str(error)

    def record(self) -> None:
        """Note all gradients as whole tensors."""
        for unit in self.units:
            unit.reshard()
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in self.model.named_parameters()}
        self.see(fulls(gradients))
        assert not self.late, f"units stayed in memory longer than backward needed them: {self.late}"

    def update(self, tidy: bool) -> None:
        """Step, after one more backward if some gradients were not reduced; ``tidy`` notes them first."""
        if self.unreduced:
            self.sync(True)
            self.train(5)
            self.unreduced = False
        self.pending.clear()
        # The model may show full parameters, and an optimizer that was built early have no shards before a forward.
        parameters = [*self.model.parameters(), *(p for group in self.optimizer.param_groups for p in group["params"])]
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if tidy:
            if has_gradients:
                self.scaler.unscale_(self.optimizer)
            self.record()
            clip = self.fsdp.clip_grad_norm_ if self.is_ours else torch.nn.utils.clip_grad_norm_
            norm = clip(self.optimizer.param_groups[0]["params"], 5.0)
            self.note("norm", full(norm), mean=False)
        if has_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.stepped = True
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
        self.see(fulls({f"weight {name}": value for name, value in self.model.named_parameters()}))
        self.see({f"buffer {name}": value.clone() for name, value in self.model.named_buffers()})
        return self.seen


def floats(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that can have gradients."""
    return [parameter for parameter in module.parameters() if parameter.is_floating_point()]


def folder_of_all() -> str:
    """Return the path of a new folder, the same on every rank."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    return path[0]


def run(rank: int, world: int, program: Fuzz, against_torch: bool = False) -> bool:
    """Execute a program and compare with a single process, and with torch's; False if not even one process can."""
    alone = Execution(program, None, rank, world)
    try:
        alone.execute(program.steps)
    except RuntimeError:
        return False
    sharded = [api.ours, api.theirs] if against_torch else [api.ours]
    apart: Any = contextlib.nullcontext()
    if device() == "cpu":  # which has no memory apart from the host's; what is offloaded is on the host in any case
        pretended = program.host and not program.plan.offload
        apart = mock.patch("fsdp2.optim.host_state.has_host", return_value=pretended)
    with meeting_in(program.store), apart:
        runs = [Execution(program, fsdp, rank, world).execute(program.steps) for fsdp in sharded]
    for seen in runs:
        assert [list(values) for values in seen] == [list(values) for values in alone.seen]
    for index, (expected, allowed, *others) in enumerate(zip(alone.seen, alone.allowed, *runs, strict=True)):
        for name, got in zip(("ours", "torch's"), others, strict=False):
            assert_close_together(got, expected, f"a single process's in record {index} of {name}", allowed)
    return True


def run_on_streams(rank: int, world: int, program: Fuzz) -> bool:
    """Execute a program on a simulated device with streams, whose ranks communicate all the same, and compare.

    In each forward the device compares full parameters with shards, and finds nothing.
    """
    always = mock.patch("fsdp2.comm.late_checks._EVERY", 1)
    with Device(watches=False) as device, using(simulated("streams", device)), always:
        return run(rank, world, program)
