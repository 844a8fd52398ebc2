"""Settings: what is refused, what is remembered, what comes back, and who else may look."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

import fsdp2
from tests.fsdp1.state_dict.kinds import (
    FULL,
    KINDS,
    LOCAL,
    SHARDED,
    assert_equal,
    build,
    save,
    shard,
    trained,
    using,
    whole,
)
from tests.support import api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
DEFAULT = StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


@on_ranks(2)
def test_what_is_refused(rank, world):
    """Configurations of another type, and things that are no modules or types, by name."""
    module = shard(build())
    for kind, wrong in (
        (FULL, ShardedStateDictConfig()),
        (SHARDED, FullStateDictConfig()),
        (LOCAL, FullStateDictConfig()),
    ):
        with pytest.raises(TypeError, match="Expected state_dict_config of type"):
            fsdp2.set_state_dict_type(module, kind, wrong)
        with pytest.raises(TypeError, match="Expected state_dict_config of type"):
            with fsdp2.state_dict_type(module, kind, wrong):
                pass
    for kind, config in ((FULL, LocalOptimStateDictConfig()), (SHARDED, FullOptimStateDictConfig())):
        with pytest.raises(TypeError, match="Expected optim_state_dict_config of type"):
            fsdp2.set_state_dict_type(module, kind, None, config)
    with pytest.raises(TypeError, match=r"must be a StateDictType, got 'full'"):
        fsdp2.set_state_dict_type(module, "full")
    with pytest.raises(TypeError, match=r"expected an nn.Module, got None"):
        fsdp2.set_state_dict_type(None, FULL)
    with pytest.raises(TypeError, match=r"expected an nn.Module"):
        fsdp2.get_state_dict_type([module])
    assert fsdp2.get_state_dict_type(module) == DEFAULT
    assert isinstance(module.state_dict()["last.weight"], DTensor)


@on_ranks(2)
def test_what_is_remembered(rank, world):
    """``get`` tells what ``set`` said, ``set`` tells what was before, contexts nest and undo themselves."""
    module = shard(build())
    config, optim_config = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(offload_to_cpu=False)
    assert fsdp2.set_state_dict_type(module, FULL, config, optim_config) == DEFAULT
    full = StateDictSettings(FULL, config, optim_config)
    assert fsdp2.get_state_dict_type(module) == full
    assert fsdp2.get_state_dict_type(module.first) == full
    with fsdp2.state_dict_type(module, LOCAL):
        local = StateDictSettings(LOCAL, LocalStateDictConfig(), LocalOptimStateDictConfig())
        assert fsdp2.get_state_dict_type(module) == local
        with fsdp2.state_dict_type(module.first, SHARDED):
            assert fsdp2.get_state_dict_type(module.first) == DEFAULT
            with pytest.raises(AssertionError, match="All FSDP modules must have the same state dict settings"):
                fsdp2.get_state_dict_type(module)
        assert fsdp2.get_state_dict_type(module) == local
        fsdp2.set_state_dict_type(module, SHARDED)
    assert fsdp2.get_state_dict_type(module) == full
    with pytest.raises(KeyError), fsdp2.state_dict_type(module, SHARDED):
        raise KeyError("the user's own")
    assert len(module.state_dict()) == (0 if rank else len(build().state_dict()))
    assert fsdp2.set_state_dict_type(module, SHARDED) == full
    assert all(isinstance(module.state_dict()[name], DTensor) for name, _ in module.named_parameters())


@on_ranks(2)
def test_plain_modules(rank, world):
    """The same script runs on a model that is not sharded: names are cleaned, the rest is as it is."""
    module = build()
    assert fsdp2.get_state_dict_type(module) == DEFAULT
    for kind in KINDS:
        state = save(module, kind)
        assert_equal(state, {} if kind == "full_on_rank0" and rank else build().state_dict())
    parent = nn.Sequential(nn.Linear(2, 2), shard(build()))
    with using(parent, "full"):
        assert fsdp2.get_state_dict_type(parent).state_dict_type is FULL
        assert all(type(value) is torch.Tensor for value in parent.state_dict().values())
    assert not parent[0].__dict__["_state_dict_hooks"] and not parent.__dict__["_load_state_dict_pre_hooks"]


@on_ranks(2)
def test_copies_and_garbage(rank, world):
    """A copy of a module starts without a setting, and a setting keeps no module alive."""
    module, _ = trained()
    fsdp2.set_state_dict_type(module, FULL)
    twin = copy.deepcopy(module)
    assert fsdp2.get_state_dict_type(twin) == DEFAULT and fsdp2.get_state_dict_type(module).state_dict_type is FULL
    assert isinstance(twin.state_dict()["last.weight"], DTensor)
    assert_equal(save(twin, "full"), module.state_dict())
    gone = weakref.ref(module)
    del module, twin, _
    gc.collect()
    gc.collect()
    assert gone() is None


@on_ranks(2)
def test_parameters_added_later(rank, world):
    """Modules that come after the setting are part of what is saved."""
    module = shard(build())
    fsdp2.set_state_dict_type(module, FULL)
    module.middle.adapter = nn.Linear(6, 6)
    expected = {
        name: value.clone() for name, value in module.middle.adapter.state_dict(prefix="middle.adapter.").items()
    }
    module(torch.ones(4, 8))  # adopts them
    state = module.state_dict()
    assert isinstance(dict(module.named_parameters())["middle.adapter.weight"], nn.Parameter)
    assert_equal({name: state[name] for name in expected}, expected)


OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full_on_cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", OPTIONS)
def test_distributed_checkpointing_inside(rank, world, kind, how):
    """torch.distributed.checkpoint.state_dict follows its own options, whatever is set."""
    module, optimizer = trained()
    options = OPTIONS[how]
    outside = get_model_state_dict(module, options=options)
    with using(module, kind):
        inside = get_model_state_dict(module, options=options)
        both = get_state_dict(module, optimizer, options=options)[0]
        assert list(inside) == list(outside) == list(both)
        for name, value in outside.items():
            assert type(inside[name]) is type(value) is type(both[name]), name
        state = {name: value.clone() for name, value in whole(shard(build(seed=9))).items()}
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    assert_equal(whole(module), build(seed=9).state_dict())


@on_ranks(1)
@pytest.mark.parametrize("inside", [False, True])
def test_functions_of_fsdp1_that_would_do_nothing(rank, world, inside):
    """Its class finds none of its wrappers, so its settings had no effect without a word; each names what to call."""
    module = shard(build())
    outer = nn.Sequential(module) if inside else module
    optimizer = torch.optim.SGD(module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for call, instead in (
            (lambda: FSDP.state_dict_type(outer, FULL).__enter__(), "fsdp2.state_dict_type"),
            (lambda: FSDP.set_state_dict_type(outer, FULL), "fsdp2.set_state_dict_type"),
            (lambda: FSDP.summon_full_params(outer).__enter__(), "fsdp2.summon_full_params"),
            (lambda: FSDP.optim_state_dict(outer, optimizer), "fsdp2.optim_state_dict"),
            (lambda: FSDP.optim_state_dict_to_load(outer, optimizer, {}), "fsdp2.optim_state_dict_to_load"),
        ):
            with pytest.raises(ValueError, match=f"fsdp2.fully_shard manages.*{instead}"):
                call()
    assert FSDP.fsdp_modules(outer) == []  # what torch's checkpointing looks for
    assert all(isinstance(value, DTensor) for name, value in outer.state_dict().items() if "weight" in name)


@on_ranks(2)
def test_what_is_offloaded_is_copied(rank, world):
    """Shards on the CPU were handed out as they are: a dictionary that a thread saved had values of two steps."""
    module = shard(build())
    with fsdp2.state_dict_type(module, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        saved = module.state_dict()
    here = {name: value.to_local() for name, value in saved.items() if isinstance(value, DTensor)}
    before = {name: value.clone() for name, value in here.items()}
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1)
    assert_equal(here, before)
