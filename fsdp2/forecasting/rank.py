"""One rank of a job that is not there: code inside runs as it is, without memory, without other ranks.

Code that cannot run there is told what it should do instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._torch.forecast import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    UnsupportedOperatorException,
    fake_tensors,
)
from fsdp2.comm.streams import simulated_streams
from fsdp2.forecasting.clock import Clock
from fsdp2.sharding.mesh import simulated_backend

__all__ = ["built_model", "check_mesh", "explained", "simulated_rank"]

_VALUES = (
    "a forecast runs without values, but build or step reads some ({what}); leave out code that reads tensors "
    "(loss.item(), printing, tensor.numpy(), loading weights)"
)
_DEVICE = "a forecast needs no device, but the code uses one ({what}); make tensors and meshes on mesh.device_type"
_KERNEL = (
    "an operator has no fake kernel, so the shape of its result is not known ({what}); register one with "
    "torch.library.register_fake"
)
_MESH = (
    "the code makes a mesh that does not fit the {ranks} simulated ranks ({what}); use the mesh that is passed to "
    "build, or change the forecast's"
)
_GROUP = "build and step run inside a simulated job ({what}); leave init_process_group out of them"

# What torch and libraries say when they meet tensors without values, and the remedy.
_REMEDIES = (
    (_VALUES, (".numpy() is not supported", "could not determine the shape of object type", "access data pointer")),
    (
        _DEVICE,
        ("CUDA enabled", "support for cuda", "_cuda_", "this process cannot use", "No CUDA GPUs", "NVIDIA driver"),
    ),
    (_KERNEL, ("There was no fake impl registered",)),
    (_MESH, ("Mesh should not be bigger", "must divide the world size")),
    (_GROUP, ("initialize the default process group twice",)),
)


@contextmanager
def simulated_rank(
    mesh: Mapping[str, int], clock: Clock, *, backend: str = "nccl", rank: int = 0
) -> Iterator[DeviceMesh]:
    """Be one ``rank`` of a mesh of those dimensions, whose devices have the clock's streams.

    Tensors made in the block have no memory, and collectives send nothing. With the backend "gloo" there are no
    streams, as on a CPU.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a forecast makes a simulated process group, but this process already has a process group; run the "
            "forecast in a process of its own, or after destroy_process_group()"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh.values()))
    try:
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        with simulated_backend(backend), simulated_streams(clock if backend != "gloo" else None):
            with fake_tensors(), clock:
                yield made
    finally:
        dist.destroy_process_group()


@contextmanager
def explained(ranks: int) -> Iterator[None]:
    """Raise errors of the block that come from what a forecast lacks with what to change."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(_VALUES.format(what=error.func)) from error
    except UnsupportedOperatorException as error:
        raise RuntimeError(_KERNEL.format(what=error.func)) from error
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        text = str(error)
        for remedy, known in _REMEDIES:
            if any(part in text for part in known):
                raise RuntimeError(remedy.format(what=text.splitlines()[0].rstrip(".!"), ranks=ranks)) from error
        raise


def check_mesh(mesh: Mapping[str, int], rank: int) -> int:
    """How many ranks ``mesh`` has.

    Raises:
        ValueError: it is no mesh, or ``rank`` is none of its ranks.
    """
    ranks = 1
    for name, size in mesh.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"forecast: mesh={dict(mesh)}; expected names and sizes of at least 1, as in {{'shard': 16}}"
            )
        ranks *= size
    if not mesh or not 0 <= rank < ranks:
        raise ValueError(
            f"forecast: rank {rank} of a mesh of {ranks if mesh else 0} ranks; expected 0 or more, and less than that"
        )
    return ranks


def built_model(built: object) -> tuple[nn.Module, object]:
    """The model and the optimizer, or None, that ``build`` returned.

    Raises:
        TypeError: it returned something else.
    """
    model, optimizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"forecast: build returned {type(built).__name__}; expected a module, or (module, optimizer)")
    return model, optimizer
