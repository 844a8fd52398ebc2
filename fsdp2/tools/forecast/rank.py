"""One rank of a simulated job: code runs unchanged, without memory and without other ranks.

Errors of code that cannot run there are replaced by errors with the remedy.
"""

from __future__ import annotations

import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pickle import PicklingError

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import _trace
from fsdp2._torch.forecast import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    UnsupportedOperatorException,
    fake_tensors,
)
from fsdp2.sharding.platform import simulated, using
from fsdp2.tools.forecast.clock import Clock

__all__ = ["built_model", "check_mesh", "explained", "line_of", "simulated_rank", "users_traceback"]

_VALUES = (
    "a forecast runs without values, but build or step reads some ({what}); leave out code that reads tensors "
    "(loss.item(), float(loss), formatting a loss, tensor.numpy(), and what loads or saves: torch.save, dcp.save, "
    "save_safetensors, load_safetensors)"
)
_SHAPES = (
    "a forecast runs without values, but the shape of a result depends on some ({what}); use a variant with fixed "
    "shapes (torch.where in place of a mask as an index; for a mixture of experts in transformers "
    'experts_implementation="grouped_mm" with parameters in bfloat16, or "batched_mm"), or a fixed number of elements'
)
_LOADER = (
    "a forecast runs without values, but iterating over a DataLoader draws random numbers and reads them ({what}); "
    "make the batch in step instead, with the shapes of a real one (torch.randint, torch.empty)"
)
_DEVICE = (
    "a forecast needs no device, but the code uses one ({what}); make tensors and meshes on mesh.device_type, and "
    "leave .cuda() and torch.cuda out"
)
_KERNEL = (
    "an operator has no fake kernel, so the shape of its result is not known ({what}); register one with "
    "torch.library.register_fake"
)
_DTYPE = (
    "torch describes this operator for bfloat16 only, and its inputs have another dtype ({what}); compute in bfloat16 "
    "(mp_policy with param_dtype=torch.bfloat16, or a model in bfloat16), or use another implementation (for a mixture "
    'of experts in transformers experts_implementation="batched_mm")'
)
_MESH = (
    "the code makes a mesh that does not fit the {ranks} simulated ranks ({what}); use the mesh that is passed to "
    "build, or change the forecast's"
)
_GROUP = "build and step run inside a simulated job ({what}); leave init_process_group out of them"

# Error texts of torch and of libraries about tensors without values, and the remedies.
_REMEDIES = (
    (
        _VALUES,
        (
            ".numpy() is not supported",
            "could not determine the shape of object type",
            "access data pointer",
            "FakeTensor.__format__",
            "Can't pickle",
            "is not pickleable",
            "Not available for 'meta' device type",
            'of a tensor on device "meta"',
        ),
    ),
    (
        _DEVICE,
        (
            "CUDA enabled",
            "support for cuda",
            "_cuda_",
            "this process cannot use",
            "No CUDA GPUs",
            "NVIDIA driver",
            "found at least two devices",
        ),
    ),
    (_KERNEL, ("There was no fake impl registered",)),
    (_DTYPE, ("Expected inputs of BF16 type", "Expected mat_a to be BFloat16", "Float16 grouped_mm requires")),
    (_MESH, ("Mesh should not be bigger", "must divide the world size")),
    (_GROUP, ("initialize the default process group twice",)),
)
_FIRST_SENTENCE = re.compile(r"\n|(?<!e\.g)[.!] (?=[A-Z])")
_READS = "_local_scalar_dense"  # the operator behind item()


@contextmanager
def simulated_rank(
    mesh: Mapping[str, int], clock: Clock, *, backend: str = "nccl", rank: int = 0
) -> Iterator[DeviceMesh]:
    """Simulate one ``rank`` of a mesh of those dimensions, whose devices have the clock's streams.

    Tensors made in the block have no memory, and collectives send nothing. With the backend "gloo" there are no
    streams, as on a CPU.

    Raises:
        RuntimeError: This process already has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a forecast makes a simulated process group, but this process already has a process group; run the "
            "forecast in a process of its own, or after destroy_process_group()"
        )
    shows_errors = sys.excepthook  # torch replaces it by one that puts "[rank0]: " before each line, and leaves it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh.values()))
    sys.excepthook = shows_errors
    try:
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        # Devices are CPUs here, so memory of the host is on another device, which has none: it does not count.
        with using(simulated(backend, clock if backend != "gloo" else None, host="meta")):
            with fake_tensors(), clock:
                yield made
    finally:
        dist.destroy_process_group()


@contextmanager
def explained(ranks: int) -> Iterator[None]:
    """Replace errors in the block that are caused by the simulation: name the line and the remedy."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        remedy = _VALUES if _READS in str(error.func) else _SHAPES
        if _passed_loader(error):
            remedy = _LOADER
        raise RuntimeError(remedy.format(what=_at(str(error.func), error))) from error
    except UnsupportedOperatorException as error:
        raise RuntimeError(_KERNEL.format(what=_at(str(error.func), error))) from error
    except (AssertionError, AttributeError, PicklingError, RuntimeError, TypeError, ValueError) as error:
        text = str(error)
        for remedy, known in _REMEDIES:
            if any(part in text for part in known):
                what = _at(_FIRST_SENTENCE.split(text, 1)[0].rstrip(".!"), error)
                raise RuntimeError(remedy.format(what=what, ranks=ranks)) from error
        raise


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of ``error``, and that of a library below it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    own = [frame for frame in frames if not _is_below(frame.filename, *_SITE)]
    lines = [_line(frame) for frame in own[-1:]]
    if frames and frames[-1:] != own[-1:]:
        lines.append(_line(frames[-1]))
    return ", which calls ".join(lines)


def users_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` from the user's first line on; "" if no line of the user is in it."""
    found = error.__traceback__
    while found is not None and _is_machinery(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return "" if found is None else "".join(traceback.format_exception(type(error), error, found))


def _at(what: str, error: BaseException) -> str:
    line = line_of(error)
    return f"{what}, in {line}" if line else what


def _line(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename.removeprefix(os.getcwd() + os.sep)}, line {frame.lineno}{code}"


def _passed_loader(error: BaseException) -> bool:
    """Return True if ``error`` came through torch's DataLoader or its samplers."""
    folder = os.path.join(_TORCH, "utils", "data")
    return any(_is_below(frame.filename, folder) for frame in traceback.extract_tb(error.__traceback__))


def _is_machinery(path: str) -> bool:
    """Return True if ``path`` is a file of torch, of fsdp2 or of Python itself."""
    if path.startswith("<") or _is_below(path, _TORCH, _FSDP2):
        return True
    return _is_below(path, _PYTHON) and not _is_below(path, *_SITE)


def _is_below(path: str, *folders: str) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


_TORCH, _FSDP2 = os.path.dirname(torch.__file__), os.path.dirname(_trace.__file__)
_PYTHON = sysconfig.get_paths()["stdlib"]
_SITE = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))


def check_mesh(mesh: Mapping[str, int], rank: int) -> None:
    """Raise ValueError if ``mesh`` is not a mesh, or ``rank`` is not one of its ranks."""
    sizes = mesh.items() if isinstance(mesh, Mapping) else [(None, 0)]
    if not sizes or not all(isinstance(name, str) and type(size) is int and size >= 1 for name, size in sizes):
        raise ValueError(f"forecast: mesh={mesh!r}; expected names and sizes of at least 1, as in {{'shard': 16}}")
    ranks = math.prod(mesh.values())
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ValueError(
            f"forecast: rank {rank!r} of a mesh of {ranks} ranks; expected a number of at least 0 that "
            "is less than the number of ranks"
        )


def built_model(built: object) -> tuple[nn.Module, object]:
    """Return the model and the optimizer (or None) in the result of ``build``.

    Raises:
        TypeError: ``build`` returned something else.
    """
    model, optimizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"forecast: build returned {type(built).__name__}; expected a module, or (module, optimizer)")
    return model, optimizer
