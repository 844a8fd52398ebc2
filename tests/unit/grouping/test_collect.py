"""What one call manages: modules, parameters with every place that shows them, and buffers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate

from fsdp2 import fully_shard
from fsdp2._torch.modules import REGISTRY_KEY, RegistryItem
from fsdp2.grouping.collect import Found, Managed, collect, move_to


class Block(nn.Module):
    """Two linear layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(1))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)


def names(managed: Managed) -> list[str]:
    """Return the names of the parameters in order."""
    return [found.name for found in managed.params]


def test_everything_below_the_root_is_managed_children_first() -> None:
    model = Model()
    managed = collect((model,), set())
    block = ["up.weight", "up.bias", "down.weight", "scale"]
    expected = [f"blocks.{i}.{name}" for i in range(2) for name in block] + ["head.weight", "head.bias"]
    assert names(managed) == expected
    assert set(managed.modules) == set(model.modules()) and managed.modules[-1] is model
    assert len(managed.modules) == len(set(managed.modules))
    assert [id(b) for b in managed.buffers] == [id(b) for b in model.buffers()]
    parameters = dict(model.named_parameters())
    for found in managed.params:
        (site,) = found.sites
        assert found.param is parameters[found.name] is site.module._parameters[site.name]


def test_a_module_of_its_own_names_its_parameters_without_a_prefix() -> None:
    assert names(collect((nn.Linear(2, 2),), set())) == ["weight", "bias"]


def test_what_is_ignored_or_absent_is_not_managed() -> None:
    model = Block()
    managed = collect((model,), {model.up.weight, model.scale})
    assert names(managed) == ["up.bias", "down.weight"]
    assert model.down.bias is None


def test_a_tied_parameter_is_found_once_with_every_place() -> None:
    model = Model()
    model.blocks[1].down.weight = model.blocks[0].down.weight
    model.again = model.blocks[0]
    managed = collect((model,), set())
    (found,) = [found for found in managed.params if found.name == "blocks.0.down.weight"]
    places = [(id(site.module), site.name) for site in found.sites]
    assert places == [(id(model.blocks[i].down), "weight") for i in range(2)]
    assert "blocks.1.down.weight" not in names(managed)


def test_a_tied_buffer_is_found_once() -> None:
    model = Model()
    model.blocks[1].count = model.blocks[0].count
    assert len(collect((model,), set()).buffers) == 1


def test_what_another_call_manages_is_left_to_it(mesh: DeviceMesh) -> None:
    model = Model()
    fully_shard(model.blocks[0], mesh=mesh)
    managed = collect((model,), set())
    assert not set(managed.modules) & set(model.blocks[0].modules())
    assert set(managed.modules) == set(model.modules()) - set(model.blocks[0].modules())
    assert not any(name.startswith("blocks.0") for name in names(managed))
    assert len(managed.buffers) == 1


def test_a_tie_into_a_module_of_another_call_is_shown_there_too(mesh: DeviceMesh) -> None:
    model = Model()
    shared = model.head.weight = nn.Parameter(torch.ones(2, 4))
    model.blocks[0].down.weight = shared
    fully_shard(model.blocks[0], mesh=mesh, ignored_params={shared})
    (found,) = [found for found in collect((model,), set()).params if found.param is shared]
    assert [site.module for site in found.sites] == [model.head, model.blocks[0].down]


def test_several_roots_are_one_unit() -> None:
    model = Model()
    managed = collect((model.blocks[0], model.head), set())
    assert names(managed) == ["up.weight", "up.bias", "down.weight", "scale", "weight", "bias"]
    assert {model.blocks[0], model.head} <= set(managed.modules)


def test_a_module_below_two_roots_is_managed_once() -> None:
    shared = nn.Linear(2, 2)
    roots = (nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared))
    managed = collect(roots, set())
    assert managed.modules.count(shared) == 1 and len(managed.params) == 2
    assert [len(found.sites) for found in managed.params] == [1, 1]


def test_what_replicate_manages_is_left_to_it() -> None:
    model = Model()
    model.blocks[0].__dict__[REGISTRY_KEY] = {"replicate": RegistryItem()}
    managed = collect((model,), set())
    assert not any(name.startswith("blocks.0") for name in names(managed))
    assert model.blocks[0] not in managed.modules


def test_a_module_that_torch_manages_is_refused(mesh: DeviceMesh) -> None:
    model = Model()
    torch_fully_shard(model.blocks[1], mesh=mesh)
    with pytest.raises(ValueError, match=r"Block below Model is managed by\s+torch.distributed.fsdp.fully_shard"):
        collect((model,), set())


# ---- moving ----


def test_what_is_in_place_or_has_no_data_yet_is_not_moved() -> None:
    here, meta = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(2, device="meta"))
    place = here.data_ptr()
    move_to(torch.device("cpu"), [Found(here, "here", []), Found(meta, "meta", [])], [torch.zeros(1)])
    assert here.data_ptr() == place and meta.is_meta


def test_a_dtensor_on_another_kind_of_device_is_refused_by_name(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Replicate(),), run_check=False))
    with pytest.raises(ValueError, match=r"layers.0.weight: Requires DTensor to have mesh of the same type .* cuda"):
        move_to(torch.device("cuda"), [Found(param, "layers.0.weight", [])], [])
