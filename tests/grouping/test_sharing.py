"""Sharing and structure: who owns a parameter, and what happens when the tree of modules is not what it was."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from tests.grouping.models import Shifted
from tests.support.counting import Collectives
from tests.support.models import Three
from tests.support.parity import Run, assert_gradients, beside_one_process, mesh_1d, mesh_2d, shard_each, stack
from tests.support.pool import on_ranks
from tests.support.report import agrees, check, refused, report


class Language(nn.Module):
    """A tiny language model: embedding, body, head and an auxiliary head, tied as asked."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(heads))
        for head in self.heads:
            head.weight = self.embed.weight

    def forward(self, x):
        hidden = torch.tanh(self.body(self.embed(x.argsort(dim=-1))))
        for head in self.heads:
            hidden = head(torch.tanh(hidden))
        return hidden.mean(1)


def check_tied(run: Run, units: int) -> None:
    """One parameter under all its names, in the state dict too, and one reduction for each unit of its own."""
    names = ["embed.weight", *(f"heads.{i}.weight" for i in range(len(run.module.heads)))]
    shown = {id(run.module.get_parameter(name)) for name in names}
    check(len(shown) == 1, "the tie is lost")
    state = run.module.state_dict()
    check(all(name in state for name in names), "a name is missing in the state dict")
    check(len({state[name].to_local().data_ptr() for name in names}) == 1, "the state dict holds several weights")
    with Collectives() as seen:
        run.module(run.inputs(9)).sum().backward()
    check(seen.reductions == units, f"{seen.reductions} reductions of gradients instead of {units}")


@on_ranks(2)
def test_a_tie_is_replaced_in_one_place(rank, world):
    """``functional_call`` without ``tie_weights`` gave the head another weight than the embedding, which the gathered
    one overwrote without a word."""
    module = Language()
    each_part(module, fsdp2)
    state = {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}
    state["heads.0.weight"] = state["heads.0.weight"] * 0
    tokens = torch.rand(2, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"embed\.weight: .* is tied, .*; expected the same"):
        torch.func.functional_call(module, state, (tokens,), tie_weights=False)
    with torch.no_grad():
        module(tokens)


def each_part(module: nn.Module, fsdp) -> None:
    """Embedding, body and heads are units."""
    for unit in (module.embed, module.body, *module.heads, module):
        fsdp.fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=True)


@report("Embedding and head share their weight, each a unit of its own", 1, 2, 4)
def test_tied_units(rank, world, fsdp):
    """Every second language model ties its head to its embedding, and examples shard every layer: the same parameter
    then belongs to two units. It must be trained as one."""
    check_tied(agrees(fsdp, each_part, Language), 2 if world > 1 else 0)


@report("The embedding is a unit, the head that shares its weight is left to the root", 1, 2, 4)
def test_tied_unit_and_root(rank, world, fsdp):
    """A user shards the large embedding by itself and calls fully_shard on the model for the rest, which contains the
    head: the tie crosses from a unit into the root."""

    def prepare(module, fsdp):
        for unit in (module.embed, module):
            fsdp.fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=True)

    check_tied(agrees(fsdp, prepare, Language), 2 if world > 1 else 0)


@report("A weight tied three ways across units", 1, 2, 4)
def test_tied_three_ways(rank, world, fsdp):
    """Multi-token prediction uses the embedding's weight in several heads. Whoever runs first gathers it, and its
    gradient, finished by the last of them, is reduced once."""
    check_tied(agrees(fsdp, each_part, lambda: Language(heads=2)), 2 if world > 1 else 0)


def untied(state: dict[str, torch.Tensor]) -> Language:
    """Return a model on the CPU that ``load_state_dict(assign=True)`` has given its weights."""
    with torch.device("meta"):
        module = Language()
    module.load_state_dict(state, assign=True)
    assert module.heads[0].weight is not module.embed.weight
    return module


def all_in_root(module: nn.Module, fsdp) -> None:
    """The whole is the only unit."""
    fsdp.fully_shard(module, mesh=mesh_1d())


def told(prepare, module: nn.Module, fsdp) -> list[str]:
    """Return what ``prepare`` warns of while it shards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(module, fsdp)
    return [str(one.message) for one in caught]


@report("A tied model is loaded with assign=True, which unties it", 1, 2, promise="warns, names both parameters")
def test_two_parameters_in_one_memory(rank, world, fsdp):
    """A user builds a tied model on the meta device, and ``load_state_dict(assign=True)`` makes a parameter for each
    name of the file, in one memory. A step on one is a step on the other, until each has a shard of its own."""
    for prepare in (each_part, all_in_root):
        texts = told(prepare, untied(Language().state_dict()), fsdp)
        check(len(texts) == 1 and "embed.weight and heads.0.weight: got" in texts[0], "trains them apart")


@on_ranks(1, 2)
def test_parameters_in_one_memory_that_nobody_is_warned_of(rank, world):
    """The remedies, tying and copying, end the warning; a unit above one that was warned of is silent, and so is what
    cannot change: frozen weights, and rows of one matrix that do not overlap."""
    state = Language(heads=2).state_dict()
    with torch.device("meta"):
        module = Language(heads=2)
    module.load_state_dict(state, assign=True)
    texts = told(all_in_root, module, fsdp2)
    assert len(texts) == 1 and "embed.weight and heads.0.weight (and 1 more)" in texts[0]
    assert not told(all_in_root, nn.Sequential(module, nn.Linear(8, 8)), fsdp2)

    module = untied(Language().state_dict())
    module.heads[0].weight = module.embed.weight
    assert not told(each_part, module, fsdp2)
    module = untied(Language().state_dict())
    module.heads[0].weight = nn.Parameter(module.heads[0].weight.detach().clone())
    assert not told(each_part, module, fsdp2)
    assert not told(each_part, untied(Language().state_dict()).requires_grad_(False), fsdp2)

    rows, module = torch.randn(16, 8), Three()
    for part, piece in zip((module.first, module.middle), rows.chunk(2)):
        part.weight = nn.Parameter(piece)
    assert not told(all_in_root, module, fsdp2)


class Adapter(nn.Module):
    """A linear layer with a low-rank update, as LoRA libraries put it in the place of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, 8) / 3)
        self.up = nn.Parameter(torch.randn(8, 2) / 3)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def add_and_train(add) -> None:
    """Return the program: train, add parameters with one seed on every rank, train on with a new optimizer."""

    def program(run: Run) -> None:
        run.backward(0)
        run.update()
        torch.manual_seed(5)
        add(run.module)
        run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)
        for step in range(1, 4):
            run.backward(step)
            run.update()

    return program


@report("LoRA adapters are put into a model that is sharded already")
def test_adapters_added_later(rank, world, fsdp):
    """A user shards and loads the base model first and then lets the LoRA library replace linear layers by adapters
    around them. The new parameters belong to no unit; their gradients must be averaged over ranks all the same."""

    def adapt(module):
        for name in ("0", "1"):
            setattr(module, name, Adapter(getattr(module, name)))

    run = agrees(fsdp, None, program=add_and_train(adapt))
    names = [name for name, parameter in run.module.named_parameters() if not isinstance(parameter, DTensor)]
    check(not names, f"{', '.join(names)} is not sharded")


@report("A layer is appended to a sharded model")
def test_modules_added_later(rank, world, fsdp):
    """A new classification head is appended to a sharded trunk for fine-tuning."""
    agrees(fsdp, None, program=add_and_train(lambda module: module.append(nn.Linear(8, 8))))


@report("A parameter is added to a sharded unit")
def test_parameters_added_later(rank, world, fsdp):
    """Prompt tuning registers a new parameter on a module that fully_shard manages."""
    build = lambda: nn.Sequential(Shifted(8, 8), nn.Linear(8, 8))
    add = lambda module: module[0].register_parameter("shift", nn.Parameter(torch.randn(8)))
    agrees(fsdp, None, build, add_and_train(add))


@report("A unit runs before the model that contains it")
def test_submodule_first(rank, world, fsdp):
    """An encoder is warmed up, or its output shape is found out, by calling it alone before the first call of the
    whole model."""

    def program(run: Run) -> None:
        run.module[0](run.inputs(0)).square().mean().backward()
        run.update()
        for step in range(3):
            run.backward(step)
            run.update()

    agrees(fsdp, program=program)


@report("The root is sharded after its units were trained")
def test_root_chosen_late(rank, world, fsdp):
    """Pretrained parts, sharded and trained as models of their own, become parts of a larger model that is sharded
    afterwards."""

    def prepare(module, fsdp):
        for unit in module:
            fsdp.fully_shard(unit, mesh=mesh_1d())

    def program(run: Run) -> None:
        for step in range(4):
            if step == 2:
                run.configure(lambda module, fsdp: fsdp.fully_shard(module, mesh=mesh_1d()))
            run.backward(step)
            run.update()

    agrees(fsdp, prepare, program=program)


class Callable(nn.ModuleList):
    """A container that has a forward."""

    def forward(self, x):
        return self[0](x)


@report("fully_shard(model.layers), a ModuleList or ModuleDict", 1, 2, promise="refused, with what to do instead")
def test_containers(rank, world, fsdp):
    """A container has no forward to hook. The error must say what to do, and leave the container as it was. One that
    defines a forward is a module like any other."""
    for container in (nn.ModuleList(stack()), nn.ModuleDict({"a": nn.Linear(8, 8)})):
        before = dict(container.named_parameters())
        with refused("containers that do not implement forward", "Call fully_shard on each module"):
            fsdp.fully_shard(container, mesh=mesh_1d())
        check(type(container) in (nn.ModuleList, nn.ModuleDict), "the container's class was changed")
        check(all(p is before[n] for n, p in container.named_parameters()), "the container was changed")
    fsdp.fully_shard(Callable(stack()), mesh=mesh_1d())(torch.ones(1, 8))


def toggle(run: Run) -> None:
    """Freeze and unfreeze layers between iterations, with an evaluation in between."""
    for step, trainable in enumerate([(0, 1, 2), (2,), (1, 2), (0, 1, 2), (0,)]):
        with torch.no_grad():
            run.module(run.inputs(50 + step))
        for index, layer in enumerate(run.module):
            layer.requires_grad_(index in trainable)
        run.backward(step)
        run.record()
        run.module.zero_grad()


@report("Layers are frozen and unfrozen midway, parameters kept after forward")
def test_requires_grad_changes(rank, world, fsdp):
    """Gradual unfreezing and adversarial training flip ``requires_grad`` all the time, also right after an evaluation,
    when full parameters may be what the module shows. No change may be lost."""
    agrees(fsdp, lambda m, f: shard_each(m, f, mesh=mesh_1d(), reshard_after_forward=False), program=toggle)


class TwoDtypes(nn.Module):
    """A float32 layer beside a frozen float64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)

    def forward(self, x):
        return self.one(torch.tanh(self.two(x.double()).float()))


@report("Frozen parameters of another dtype become trainable midway", 1, 2, 4)
def test_requires_grad_changes_of_another_dtype(rank, world, fsdp):
    """A frozen base in another dtype is unfrozen for the last phase of training, in one unit with the rest."""

    def program(run: Run) -> None:
        run.backward(0)
        run.record()
        run.module.zero_grad()
        run.module.two.requires_grad_(True)
        run.backward(1)
        run.record()

    agrees(fsdp, lambda module, fsdp: fsdp.fully_shard(module, mesh=mesh_1d()), TwoDtypes, program)


@report("module.weight = nn.Parameter(...) after sharding")
def test_replaced_parameters(rank, world, fsdp):
    """Initialisation code and weight surgery assign new parameters to a sharded module, whole ones and the same on
    every rank. They are the weights from then on."""

    def program(run: Run) -> None:
        for step in range(4):
            if step in (0, 2):
                torch.manual_seed(step)
                for module in run.module.modules():
                    if hasattr(module, "reshard"):
                        module.reshard()
                run.module[1].weight = nn.Parameter(torch.randn(8, 8) / 3)
                run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)
            run.backward(step)
            run.update()

    agrees(fsdp, program=program)


class TiedLater(nn.Module):
    """An embedding, and a head that shares its weight from when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).float().square().mean()


@on_ranks(2)
def test_a_weight_that_is_tied_after_sharding_in_low_precision(rank, world):
    """transformers ties the head to the embedding when both are sharded. It stays one parameter here, whose gradient is
    added up in bfloat16 as in one process. torch takes them for two and sums each over ranks, so the parts are added in
    the dtype of the reduction: no more than the rounding of that sum apart."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module, alone = beside_one_process(TiedLater, lambda module: (module.embed,), mp_policy=policy)
    alone.head.weight.data.copy_(alone.embed.weight.data)
    module.head.weight = module.embed.weight
    batches = [torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(index)) for index in range(world)]
    module(batches[rank]).backward()
    once, apart = torch.zeros(24, 16), torch.zeros(24, 16)
    for tokens in batches:
        parts = [weight.detach().bfloat16().requires_grad_() for weight in (alone.embed.weight, alone.head.weight)]
        for tied in (True, False):
            embed, head = (parts[0], parts[0]) if tied else parts
            found = torch.autograd.grad(
                F.linear(F.embedding(tokens, embed), head).float().square().mean(), list({embed: None, head: None})
            )
            (once if tied else apart).add_(sum(part.float() for part in found), alpha=1 / world)
    got = module.embed.weight.grad.full_tensor()
    assert torch.equal(got, once)
    assert 0 < (got - apart).abs().max() <= 2**-8 * apart.abs().max() * world


def by_name(module: nn.Module, policy: fsdp2.MixedPrecisionPolicy, weight: fsdp2.MixedPrecisionPolicy) -> None:
    """Shard embedding and head as units whose weight has a policy of its own, and the rest with ``policy``."""
    for unit in (module.embed, module.heads[0], module.body, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), mp_policy={"": policy, "weight": weight})


@on_ranks(2)
def test_tied_units_with_a_policy_by_name(rank, world):
    """A table of token weights is kept in float32 under both of its names, in units that compute in bfloat16. The tie
    was refused: each call compared its policy for the unit with the weight's own. A call that asks for another dtype
    for the weight is still refused."""
    low, high = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16), fsdp2.MixedPrecisionPolicy()
    tokens = torch.rand(2, 8)
    torch.manual_seed(0)
    module, alone = Language(), Language()
    module.load_state_dict(alone.state_dict())
    by_name(module, fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False), high)
    by_name(alone, high, high)
    module.embed.unshard()
    assert module.embed.weight is module.heads[0].weight and module.embed.weight.dtype == torch.float32
    module.embed.reshard()
    hidden = [one.heads[0](torch.tanh(one.embed(tokens.argsort(dim=-1)))) for one in (module, alone)]
    assert torch.equal(*hidden)
    other = Language()
    fsdp2.fully_shard(other.embed, mesh=mesh_1d(), mp_policy={"": low, "weight": high})
    with pytest.raises(ValueError, match="got mp_policy.param_dtype=torch.bfloat16, expected None"):
        fsdp2.fully_shard(other.heads[0], mesh=mesh_1d(), mp_policy=low)
    same = fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32)  # another policy, but the same dtype as without one
    fsdp2.fully_shard(other.heads[0], mesh=mesh_1d(), mp_policy=same)
    assert other.heads[0].weight is other.embed.weight


class Norms(nn.Module):
    """Two batch norms, whose weights may be tied later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_batch_norms_that_are_tied_after_sharding(rank, world):
    """They compute in the dtype of their statistics, whatever the policy says, also when these are cast after the tie.
    The tie was refused, and if it had not been, the tied weight would have kept the old dtype."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    module, alone = beside_one_process(Norms, lambda module: (), mp_policy=policy)
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(module(batch), alone(batch))
    for one in (module, alone):
        one.second.weight = one.first.weight
    torch.testing.assert_close(module(batch), alone(batch))
    for one in (module, alone):
        one.double()
    torch.testing.assert_close(module(batch.double()), alone(batch.double()))


@on_ranks(2, 4)
def test_a_tie_between_micro_batches(rank, world):
    """Sums that waited for their all-reduce were lost, of all parameters of the unit in which two were tied."""
    model, alone = beside_one_process(Three, lambda module: (), mesh=mesh_2d())
    batches = torch.randn(2, world, 4, 8, generator=torch.Generator().manual_seed(1))
    for part, batch in enumerate(batches):
        if part:
            alone.middle.weight, model.middle.weight = alone.first.weight, model.first.weight
        model.set_requires_all_reduce(bool(part))
        model(batch[rank]).square().sum().backward()
        (alone(batch.flatten(0, 1)).square().sum() / world).backward()
    assert_gradients(model, alone)


@on_ranks(1)
def test_a_tie_between_forward_and_backward(rank, world):
    """What the forward saved is gone then. Backward failed in torch with "setStorage: ... out of bounds"."""
    model = fsdp2.fully_shard(Three(), reshard_after_forward=True)
    loss = model(torch.ones(2, 8)).sum()
    model.middle.weight = model.first.weight
    with torch.no_grad():
        model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="first.weight: replaced on its module between forward and backward"):
        loss.backward()
    model.reset_iter_state()


LOW = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REFUSED = r"weight of Linear is shared with .*weight of .*, .* got mp_policy.param_dtype=None, expected torch.bfloat16"


@on_ranks(1)
def test_a_tie_that_is_refused_before_anything_is_sharded(rank, world):
    """Units that the policy chose before the one with the tie were sharded already."""
    model = Language()
    with pytest.raises(ValueError, match=REFUSED):
        fsdp2.fully_shard(model, policy=lambda m: {"mp_policy": LOW} if m is model.embed else m is model.body)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(1)
def test_a_later_tie_that_is_refused(rank, world):
    """The weight that it replaced was not managed any more: put back, it met plain tensors."""
    model = Three()
    fsdp2.fully_shard(model.last, mp_policy=LOW)
    fsdp2.fully_shard(model)
    own = model.first.weight
    model.first.weight = model.last.weight
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            model(torch.ones(2, 8))
    model.first.weight = own
    model(torch.ones(2, 8)).sum().backward()
    assert own.grad is not None


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", ["before", "after"])
def test_a_tie_between_two_roots(rank, world, tied):
    """An encoder and a decoder that share a weight are models of their own, as two stages of a pipeline on one rank
    are. What a backward of one reduced was left on the lanes of the other: it was added to ``.grad`` one step late."""
    torch.manual_seed(0)
    models = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
    (first, second), (third, last) = models
    encoder, decoder = nn.Sequential(first, second), nn.Sequential(third, last)
    if tied == "before":
        last.weight = first.weight
    alone = copy.deepcopy(models)
    pairs = [(encoder, decoder), tuple(nn.Sequential(*layers) for layers in alone)]
    for root in (encoder, decoder):
        fsdp2.fully_shard(root, mesh=mesh_1d())
    x = torch.randn(2, 8)
    for step in range(3):
        if tied == "after" and step == 1:
            last.weight, alone[1][1].weight = first.weight, alone[0][0].weight
            with torch.no_grad():
                decoder(x)  # takes the tie in, before the encoder's forward
        for one, other in pairs:
            hidden = one(x)
            middle = hidden.detach().requires_grad_()
            other(middle).square().sum().backward()
            hidden.backward(middle.grad)
        assert_gradients(models, alone, step)
        models.zero_grad()
        alone.zero_grad()
