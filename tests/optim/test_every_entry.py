"""Every entry point x every kind of parameter x every way to build an optimizer: as in one process, or refused by name.

Who accepts more than torch does (scalars, optimizers from before sharding, plain parameters beside sharded ones) has to
finish the job wherever an optimizer is used. No pair is forgotten: a new entry point is one function in ``ENTRIES``, a
new kind of parameter one class in ``KINDS``, and a new way to step is one of ``WAYS``.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from tests.optim.stepping import host_apart, local, on_host
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import full, mesh_1d
from tests.support.pool import on_ranks
from tests.support.sampling import ALL_VARIABLE

pytestmark = api.fsdp2_only
WIDTH = 4
COUNTERS = ("step",)


class Base(nn.Module):
    """A linear layer and what a kind adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def added(self, y: Tensor) -> Tensor:
        """Compute with what the kind adds."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.added(torch.tanh(self.linear(x)))


class Scalar(Base):
    """A parameter without dimensions (CLIP's ``logit_scale``)."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.tensor(0.7))

    def added(self, y: Tensor) -> Tensor:
        return y * self.extra


class Tied(Base):
    """A second layer with the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.extra.weight = self.linear.weight

    def added(self, y: Tensor) -> Tensor:
        return self.extra(y)


class Frozen(Scalar):
    """A parameter that no optimizer changes, but which it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(WIDTH), requires_grad=False)


class Empty(Scalar):
    """A parameter of one row: one of two ranks has nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(1, WIDTH))


class Plain(Scalar):
    """An ignored parameter, plain on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(WIDTH))


class Local(Plain):
    """A DTensor that fsdp2 does not manage."""

    def added(self, y: Tensor) -> Tensor:
        return y * full_with_gradient(self.extra)


KINDS = {kind.__name__.lower(): kind for kind in (Scalar, Tied, Frozen, Empty, Plain, Local)}


def full_with_gradient(param: Tensor) -> Tensor:
    """Return the whole of ``param`` as autograd sees it."""
    return param.full_tensor() if isinstance(param, DTensor) else param


class Pair(NamedTuple):
    """A model and its optimizer."""

    model: Any
    optimizer: Any


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two moments and a counter."""
    return torch.optim.AdamW(params, lr=0.05)


def train(pair: Pair, *steps: int) -> None:
    """Take steps on the same rows on every rank, so that gradients are those of one process."""
    for step in steps:
        dtype = pair.model.linear.weight.dtype
        rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        pair.model(rows).square().mean().backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.model.zero_grad()  # of what the optimizer does not hold


def shard(model: Any) -> None:
    """Shard all but what the kind leaves out."""
    ignored = {model.extra} if type(model) in (Plain, Local) else set()
    fsdp2.fully_shard(model, mesh=mesh_1d(), ignored_params=ignored)


def build(kind: str, way: str, seed: int = 3, params: Callable[[Any], Any] = lambda m: m.parameters()) -> Pair:
    """Return a model of a kind and an optimizer of ``params(model)``, built in a ``way``; "alone" is one process."""
    torch.manual_seed(seed)
    model: Any = KINDS[kind]()
    if kind == "local" and way != "alone":
        model.extra = nn.Parameter(distribute_tensor(model.extra.detach(), mesh_1d(), [Shard(0)]))
    optimizer = adamw(params(model)) if way in ("alone", "before", *STEPPED_BEFORE) else None
    if way in ("alone", *STEPPED_BEFORE):
        pair = Pair(model, optimizer)
        if STEPPED:
            train(pair, 90)
    if way != "alone":
        shard(model)
    if optimizer is None:
        optimizer = adamw(params(model))
    if way == "use_local_shards":
        fsdp2.use_local_shards(optimizer)
    if way == "use_full_params":
        fsdp2.use_full_params(optimizer)
    if way == "offload_optimizer_state":
        fsdp2.offload_optimizer_state(fsdp2.use_local_shards(optimizer), bucket_mb=64 / 2**20)
    return Pair(model, optimizer)


STEPPED_BEFORE = ("stepped before", "just stepped before")
WAYS = ("before", *STEPPED_BEFORE, "after", "use_local_shards", "use_full_params", "offload_optimizer_state")
"""When an optimizer is built, and how it steps. One that has just stepped does not step on shards before its use."""
STEPPED = False


# ---- entry points: each takes the way, the kind and a trained pair, and returns the pair to go on with ----


def step(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    return pair


def zero_grad(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """Gradients of nothing, and none, change nothing that they do not change in one process."""
    for to_none in (False, True):
        for one in (pair, alone):
            one.model(torch.ones(1, WIDTH)).sum().backward()
            one.optimizer.zero_grad(set_to_none=to_none)
            if one is pair:
                for param in one.model.parameters():
                    assert param.grad is None or (not to_none and not full(param.grad).any())
            one.optimizer.step()
    return pair


def add_param_group(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """An optimizer of a part gets the rest when it has stepped."""
    part = lambda model: model.linear.parameters()
    made = build(kind, way, params=part)
    other = build(kind, "alone", params=part)
    for one in (made, other):
        train(one, 0)
        held = {id(param) for param in one.model.linear.parameters()}
        rest = [param for param in one.model.parameters() if id(param) not in held]
        one.optimizer.add_param_group({"params": rest, "lr": 0.02})
        train(one, 1)
    alone.model.load_state_dict(other.model.state_dict())
    alone.optimizer.__setstate__(build_like(alone.model, other.optimizer))
    return made


def build_like(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the groups and state of ``optimizer``, of the parameters of ``model`` in place of its own."""
    own = list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
    params = list(model.linear.parameters())
    params += [param for param in model.parameters() if all(param is not known for known in params)]
    new = dict(zip(own, params, strict=True))
    groups = [{**group, "params": [new[param] for param in group["params"]]} for group in optimizer.param_groups]
    return {"param_groups": groups, "state": {new[param]: entry for param, entry in optimizer.state.items()}}


def state_dict(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """Another pair goes on with the state dicts, from a file; its optimizer is built in the next way."""
    file = io.BytesIO()
    torch.save((pair.model.state_dict(), pair.optimizer.state_dict()), file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    other = build(kind, WAYS[(WAYS.index(way) + 1) % len(WAYS)], seed=9)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    return other


def load_state_dict(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """What one process has saved is whole, and replaces what an optimizer has that has stepped."""
    other = build(kind, way, seed=9)
    train(other, *(() if way == "just stepped before" else (8,)))
    if kind == "local":  # torch's own load_state_dict does not load a whole tensor into a DTensor of the user
        with torch.no_grad():
            other.model.extra.copy_(distribute_tensor(alone.model.extra.detach(), mesh_1d(), [Shard(0)]))
    other.model.load_state_dict(
        {k: v for k, v in alone.model.state_dict().items() if kind != "local" or k != "extra"}, strict=kind != "local"
    )
    saved = copy.deepcopy(alone.optimizer.state_dict())
    if kind == "local":
        index = [id(param) for param in other.model.parameters()].index(id(other.model.extra))
        entry = saved["state"][index]
        entry.update({k: distribute_tensor(v, mesh_1d(), [Shard(0)]) for k, v in entry.items() if k not in COUNTERS})
    other.optimizer.load_state_dict(saved)
    return other


def checkpoint(options: StateDictOptions) -> Callable[[str, str, Pair, Pair], Pair]:
    """Return the entry point of torch's get_state_dict and set_state_dict with these options."""

    def entry(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
        model, optimizer = get_state_dict(pair.model, pair.optimizer, options=options)
        other = build(kind, way, seed=9)
        if options.broadcast_from_rank0 and torch.distributed.get_rank():
            model, optimizer = {}, {}
        set_model_state_dict(other.model, model, options=options)  # set_state_dict skips a rank without values
        set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
        return other

    return entry


def deepcopy(order: str) -> Callable[[str, str, Pair, Pair], Pair]:
    """Return the entry point of copying the two together."""

    def entry(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
        if order == "model first":
            return Pair(*copy.deepcopy((pair.model, pair.optimizer)))
        return Pair(*copy.deepcopy((pair.optimizer, pair.model))[::-1])

    return entry


def pickled(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """A pickled optimizer holds copies of the parameters, as in one process; its state goes on with the model."""
    other = pickle.loads(pickle.dumps(pair.optimizer))
    for group, groups in zip(other.param_groups, pair.optimizer.param_groups, strict=True):
        for mine, theirs in zip(group["params"], groups["params"], strict=True):
            assert mine is not theirs and torch.equal(full(mine), full(theirs))
    pair.optimizer.load_state_dict(other.state_dict())
    return pair


def to(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """The optimizer still holds the parameters of a model that was cast. Its state is not cast, as in one process."""
    new, other = build(kind, way, seed=5), build(kind, "alone", seed=5)
    for one in (new, other):
        one.model.to(torch.float64)
        if STEPPED:
            with pytest.raises(RuntimeError, match="expected dtype"):
                train(one, 0)
        else:
            train(one, 0)
    if STEPPED:
        return pair
    alone.model.to(torch.float64)
    alone.model.load_state_dict(other.model.state_dict())
    alone.optimizer.load_state_dict(other.optimizer.state_dict())
    return new


def scaled_and_clipped(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """Gradients in the optimizer's groups are unscaled and clipped; one infinity lets all ranks skip a step."""
    for one, clip in ((pair, fsdp2.clip_grad_norm_), (alone, torch.nn.utils.clip_grad_norm_)):
        scaler = fsdp2.ShardedGradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 + step))
            scaler.scale(one.model(rows).square().mean()).backward()
            if step == 0:
                held = [param for group in one.optimizer.param_groups for param in group["params"]]
                scaler.unscale_(one.optimizer)
                assert clip(held, 0.01) > 0.01
            elif step == 1 and torch.distributed.get_rank() == 0:
                local(one.model.linear.weight.grad)[0, 0] = float("inf")
            scaler.step(one.optimizer)
            scaler.update()
            one.model.zero_grad()
        scales: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(scales, scaler.get_scale())  # a rank that differs lets no other wait
        assert scales == [512.0] * len(scales)
    return pair


ENTRIES: dict[str, Callable[[str, str, Pair, Pair], Pair]] = {
    "step": step,
    "zero_grad": zero_grad,
    "add_param_group": add_param_group,
    "state_dict": state_dict,
    "load_state_dict": load_state_dict,
    "get and set_state_dict": checkpoint(StateDictOptions()),
    "get and set_state_dict on the CPU": checkpoint(StateDictOptions(cpu_offload=True)),
    "full get and set_state_dict": checkpoint(StateDictOptions(full_state_dict=True)),
    "broadcast set_state_dict": checkpoint(StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
    "flat get and set_state_dict": checkpoint(StateDictOptions(flatten_optimizer_state_dict=True)),
    "deepcopy": deepcopy("model first"),
    "deepcopy, the optimizer first": deepcopy("optimizer first"),
    "pickle": pickled,
    "to": to,
    "scaled and clipped": scaled_and_clipped,
}


def rebuilt(kind: str, way: str, pair: Pair, alone: Pair) -> Pair:
    """Do what the error of a refused copy says: copy the model, build the optimizer anew, load its state dict."""
    model = copy.deepcopy(pair.model)
    optimizer = fsdp2.use_full_params(adamw(model.parameters()))
    optimizer.load_state_dict(pair.optimizer.state_dict())
    return Pair(model, optimizer)


NO_COPY = r"cannot copy or pickle AdamW after use_full_params.*call use_full_params on it, then load_state_dict"
REFUSED: dict[tuple[str, str], tuple[str, Callable[[str, str, Pair, Pair], Pair]]] = {
    ("deepcopy", "use_full_params"): (NO_COPY, rebuilt),
    ("deepcopy, the optimizer first", "use_full_params"): (NO_COPY, rebuilt),
    ("pickle", "use_full_params"): (NO_COPY, rebuilt),
}
"""What is refused, by entry point and way: what the error says, and its remedy, after which all is right."""


def walk(entry: str, kind: str, way: str) -> None:
    """Train, use the entry point, train on, and compare everything with one process."""
    pair, alone = build(kind, way), build(kind, "alone")
    for one in (pair, alone):
        train(one, *(() if way == "just stepped before" else (0, 1)))
    use = ENTRIES[entry]
    if (entry, way) in REFUSED:
        text, remedy = REFUSED[entry, way]
        with pytest.raises(TypeError, match=text):
            use(kind, way, pair, alone)
        use = remedy
    pair = use(kind, way, pair, alone)
    for one in (pair, alone):
        train(one, 2)
    for (name, param), plain in zip(pair.model.named_parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(full(param), plain.detach(), rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert param.requires_grad == plain.requires_grad
        assert isinstance(param, DTensor) == (kind != "plain" or name != "extra")
    saved, expected = pair.optimizer.state_dict(), alone.optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    held = [param for group in pair.optimizer.param_groups for param in group["params"]]
    assert saved["state"].keys() == expected["state"].keys()
    for index, state in saved["state"].items():
        assert state.keys() == expected["state"][index].keys()
        for key, value in state.items():
            torch.testing.assert_close(full(value), full(expected["state"][index][key]), rtol=2e-5, atol=1e-6)
            sharded = isinstance(held[index], DTensor) and key not in COUNTERS
            assert isinstance(value, DTensor) == sharded, f"{key} of parameter {index} is a {type(value).__name__}"
    if way == "offload_optimizer_state" and entry != "state_dict":  # that one goes on in another way
        values = [local(value) for state in saved["state"].values() for value in state.values()]
        assert on_host(pair.optimizer) >= sum(value.nbytes for value in values if value.numel() > 1) > 0


@composes("state on the host", "GradScaler", "clipping", "Adam")
@on_ranks(2, limit=300)
@pytest.mark.parametrize("way", WAYS)
def test_table(rank, world, way):
    """Every cell of one way to build an optimizer; all cells that fail are named.

    In a usual run every entry point meets every kind in some way, and in each way two of them.
    """
    global STEPPED
    STEPPED = way in STEPPED_BEFORE
    failed = []
    for row, entry in enumerate(ENTRIES):
        for column, kind in enumerate(KINDS):
            if not os.environ.get(ALL_VARIABLE) and (column - row - WAYS.index(way)) % 3:
                continue
            try:
                with host_apart():
                    walk(entry, kind, way)
            except Exception:
                failed.append(f"{entry} x {kind} x {way}:\n{traceback.format_exc()}")
    assert not failed, f"{len(failed)} cells:\n" + "\n".join(failed)
