"""What messages call a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType, fully_shard

import fsdp2
from fsdp2._naming import class_name
from tests.unit.meshes import gloo_mesh


def test_a_module_is_called_by_the_class_that_its_author_wrote():
    """Errors spoke of an FSDPSequential, which no source had."""
    with gloo_mesh():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for shard in (fsdp2.fully_shard, fully_shard):
            layer, whole = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
            for module in (layer, whole):
                shard(module, mesh=mesh)
            assert (class_name(layer), class_name(whole), class_name(whole[0])) == ("Linear", "Sequential", "Linear")
    assert (class_name(nn.Linear(2, 2)), class_name(3)) == ("Linear", "int")


TAKE_A_MODULE: dict[str, Callable[[Any], object]] = {
    "cpu_offload_by_budget": lambda one: fsdp2.cpu_offload_by_budget(one, 8),
    "fsdp_modules": fsdp2.fsdp_modules,
    "get_state_dict_type": fsdp2.get_state_dict_type,
    "iter_full_params": lambda one: list(fsdp2.iter_full_params(one)),
    "no_sync": lambda one: fsdp2.no_sync(one).__enter__(),
    "padding_report": fsdp2.padding_report,
    "plan_units": fsdp2.plan_units,
    "record_steps": lambda one: fsdp2.record_steps(one).__enter__(),
    "set_state_dict_type": lambda one: fsdp2.set_state_dict_type(one, StateDictType.FULL_STATE_DICT),
    "summon_full_params": lambda one: fsdp2.summon_full_params(one).__enter__(),
    "use_weights": lambda one: fsdp2.use_weights(one).__enter__(),
}


@pytest.mark.parametrize("function", TAKE_A_MODULE)
def test_what_is_no_module(function):
    """A parameter in the place of its module, ``use_weights(head.weight)``, or a list of modules: "object has no
    attribute 'modules'", or the text of all its values."""
    for given, name in ((nn.Parameter(nn.Linear(2, 2).weight), "Parameter"), ([nn.Linear(2, 2)], "list")):
        with pytest.raises(TypeError, match=rf"^{function}: expected an nn\.Module, got {name}$"):
            TAKE_A_MODULE[function](given)
