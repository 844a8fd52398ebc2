"""All-gather extensions from gather to gather, on a mesh of one rank, which really gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard, summon_full_params
from fsdp2.engine.agreement import Answer, CanJoin, NoAgreement
from fsdp2.engine.collective import Collective
from fsdp2.engine.extension import GroupExtensions
from fsdp2.engine.observer import Unobserved
from tests.support.fake import fake_mesh


class InParts:
    """The extension of a tensor that travels as some tensors, each with as many rows."""

    def __init__(self, local: Any, parts: int) -> None:
        self.local, self.parts = local, parts
        self.releases, self.sent = False, 0
        local.fsdp_pre_all_gather = self.send
        local.fsdp_post_all_gather = self.receive
        local.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: self.releases

    def send(self, mesh: object) -> tuple[tuple[Tensor, ...], None]:
        """Cut the tensor."""
        self.sent = self.parts
        return self.local.detach().chunk(self.parts), None

    def receive(self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Join what was gathered in memory of its own."""
        whole = torch.cat(outputs).to(dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


@pytest.fixture
def module() -> Iterator[Any]:
    """A layer on one rank."""
    with fake_mesh(1, names=("dp",)) as mesh:
        yield fully_shard(nn.Linear(4, 12, bias=False), mesh=mesh)


def assert_gathered(module: Any, value: float) -> None:
    """Fill the shard and assert that it is gathered, and freed after."""
    module.weight.to_local().detach().fill_(value)
    module.unshard()
    full = module.weight
    assert type(full) is nn.Parameter and bool((full == value).all())
    module.reshard()
    assert full.untyped_storage().size() == 0


def test_what_is_sent_may_change_in_number(module: Any) -> None:
    """As many tensors are taken out of a gather as were sent in it."""
    extension = InParts(module.weight._local_tensor, 1)
    for parts in (1, 2, 3, 1):
        extension.parts = parts
        assert_gathered(module, parts + 0.5)
        assert extension.sent == parts


@pytest.mark.parametrize("releases", [False, True])
def test_what_was_gathered_is_released_where_it_is_not_needed(module: Any, releases: bool) -> None:
    """Its memory is there again in the next gather."""
    InParts(module.weight._local_tensor, 2).releases = releases
    for value in (1.0, 2.0):
        assert_gathered(module, value)
        module.unshard()
        (extension,) = module._get_fsdp_state().groups[0].store.extensions._extensions
        assert [tensor.untyped_storage().size() for tensor in extension.outputs] == [0 if releases else 96] * 2
        module.reshard()


class Postponing(NoAgreement):
    """Leaves every prefetch until it is needed, as if other ranks came to it later."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def next(self, step: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        self.asked.append(step.kind)
        return Answer.LATER if optional else Answer.LAUNCH


def test_a_prefetch_that_is_left_for_later() -> None:
    """The tensors were encoded before other ranks were asked: what they send stayed allocated until the gather that was
    needed, and that encoded them once more."""
    with fake_mesh(2, names=("dp",)) as mesh, torch.no_grad():
        model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        model.set_reduce_scatter_unused_params(True)
        extensions = [InParts(layer.weight._local_tensor, 2) for layer in model]
        model(torch.ones(1, 4))  # sizes and order are known from now on
        root = model._get_fsdp_state().root
        root.observer, others = Unobserved(), Postponing()
        root.observer.agreement = others
        begun: list[list[int]] = []
        for extension in extensions:
            extension.sent = 0
        for layer in model:
            layer.register_forward_hook(lambda *_: begun.append([extension.sent for extension in extensions]))
        model(torch.ones(1, 4))
    assert others.asked.count("gather") > 3  # some were asked for twice
    assert begun == [[2, 0, 0], [2, 2, 0], [2, 2, 2]]  # a unit that comes later has encoded nothing


def test_a_number_is_gathered_too(module: Any) -> None:
    """A scale, which is a scalar on each rank, arrives as one number for each rank."""
    local, seen = module.weight._local_tensor, list[Any]()

    def receive(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        seen.append(outputs[1].clone())
        return None if out is not None else (outputs[0] * outputs[1], ())

    local.fsdp_pre_all_gather = lambda mesh: ((local.detach(), torch.tensor(2.0)), None)
    local.fsdp_post_all_gather = receive
    for _ in range(2):
        module.unshard()
        module.reshard()
    assert all(torch.equal(scale, torch.tensor([2.0])) for scale in seen) and len(seen) == 2


def test_what_is_written_to_all_of_it_is_gathered_anew(module: Any) -> None:
    """A full parameter in memory is what the extension has made, so it is not written to but freed."""
    InParts(module.weight._local_tensor, 2)
    module.unshard()
    with torch.no_grad():
        with summon_full_params(module):
            module.weight.fill_(3)
        assert bool((module(torch.ones(2, 4)) == 12).all())


def test_lanes_wait_before_an_extension_decodes_and_before_it_releases() -> None:
    """What is sent is filled on the gather's lane, which takes the memory again that compute has decoded from."""
    order: list[object] = []

    class Recording:
        releases = True

        def __getattr__(self, name: str) -> Any:
            return lambda *unused: (order.append(name), [])[1]

    class Lane:
        def after(self, before: object = None) -> Any:
            order.append(("the gather's lane waits for", before))
            return nullcontext(SimpleNamespace(event="filled"))

    extensions, compute = GroupExtensions([Recording()]), SimpleNamespace()
    compute.wait = lambda event: order.append(("compute waits until", event))
    extensions.encode(2, Lane())
    order.clear()
    extensions.decode([], Lane(), compute)
    filling, releasing = (("the gather's lane waits for", before) for before in (None, compute))
    assert order == [filling, "fill", ("compute waits until", "filled"), "decode", releasing, "release"]
