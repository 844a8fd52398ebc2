"""Functions of FSDP1's class on modules that fsdp2 manages: the error names what to call instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

import fsdp2
from tests.support import api
from tests.support.fake import fake_mesh

pytestmark = api.fsdp2_only


@pytest.fixture
def model() -> Any:
    """A model whose layers are units, and attributes of its own with names that FSDP1's wrappers use."""
    with fake_mesh(2) as mesh:
        made: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        made[0]._handle = "its own"
        for layer in made:
            fsdp2.fully_shard(layer, mesh=mesh)
        yield fsdp2.fully_shard(made, mesh=mesh)


CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "set_state_dict_type": (lambda m, o: FSDP.set_state_dict_type(m, StateDictType.FULL_STATE_DICT), "the same"),
    "state_dict_type": (lambda m, o: FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT).__enter__(), "the same"),
    "get_state_dict_type": (lambda m, o: FSDP.get_state_dict_type(m), "fsdp2.get_state_dict_type"),
    "summon_full_params": (lambda m, o: FSDP.summon_full_params(m).__enter__(), "fsdp2.summon_full_params"),
    "optim_state_dict": (lambda m, o: FSDP.optim_state_dict(m, o), "fsdp2.optim_state_dict"),
    "optim_state_dict_to_load": (lambda m, o: FSDP.optim_state_dict_to_load(m, o, {}), "fsdp2.optim_state_dict_to"),
    "full_optim_state_dict": (lambda m, o: FSDP.full_optim_state_dict(m, o), "FULL_STATE_DICT"),
    "sharded_optim_state_dict": (lambda m, o: FSDP.sharded_optim_state_dict(m, o), "SHARDED_STATE_DICT"),
    "shard_full_optim_state_dict": (lambda m, o: FSDP.shard_full_optim_state_dict({}, m, optim=o), "to_load(model, "),
    "scatter_full_optim_state_dict": (lambda m, o: FSDP.scatter_full_optim_state_dict({}, m, optim=o), "to_load("),
    "flatten_sharded_optim_state_dict": (lambda m, o: FSDP.flatten_sharded_optim_state_dict({}, m, o), "to_load("),
    "no_sync": (lambda m, o: FSDP.no_sync(m).__enter__(), "fsdp2.no_sync(model)"),
    "clip_grad_norm_": (lambda m, o: FSDP.clip_grad_norm_(m, 1.0), "model.clip_grad_norm_(max_norm)"),
    "register_comm_hook": (lambda m, o: FSDP.register_comm_hook(m, None, print), "set_all_reduce_hook"),
    "apply": (lambda m, o: FSDP.apply(m, print), "model.apply(function)"),
    "module": (lambda m, o: FSDP.module.fget(m), "the module itself"),
    "forward": (lambda m, o: FSDP.forward(m, torch.ones(1, 4)), "the module itself"),
    "named_parameters": (lambda m, o: [*FSDP.named_parameters(m)], "model.named_parameters()"),
    "named_buffers": (lambda m, o: [*FSDP.named_buffers(m)], "model.named_buffers()"),
    "check_is_root": (lambda m, o: FSDP.check_is_root(m), "fsdp2.fsdp_modules(model, root_only=True)"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_error_names_ours(model, name):
    """Some raised an IndexError or an AttributeError of torch's, which said nothing about fsdp2."""
    call, remedy = CALLS[name]
    with pytest.raises(ValueError, match=rf"FullyShardedDataParallel\.{name} is for FSDP1's wrappers") as raised:
        call(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert remedy in str(raised.value).split("; use ")[1]


def test_who_asks_for_wrappers_is_told_that_there_are_none(model):
    """Libraries tell FSDP1 from FSDP2 by ``fsdp_modules``, torch's state dicts too: the answer stays, and a warning
    names ours."""
    with pytest.warns(UserWarning, match=r"fsdp2\.fsdp_modules\(model\) finds its units"):
        assert FSDP.fsdp_modules(model) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(get_model_state_dict(model)) == 4


def test_others_see_no_new_attribute(model):
    """The attributes that FSDP1 reads exist for FSDP1 alone, and a model's own of these names are its own."""
    for name in ("_is_root", "_handle", "_fsdp_wrapped_module", "check_is_root", "training_state"):
        assert not hasattr(model, name) and getattr(model, name, None) is None
    with pytest.raises(AttributeError, match="'FSDPSequential' object has no attribute '_is_root'"):
        print(model._is_root)
    assert model[0]._handle == "its own"
    model.training_state = 3
    assert model.training_state == 3
