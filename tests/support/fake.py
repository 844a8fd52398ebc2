"""A process group of any size inside this process: collectives are recorded by whoever looks, and move nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(*sizes: int, names: Sequence[str] = (), rank: int = 0) -> Iterator[DeviceMesh]:
    """Yield a mesh over a fake default process group as ``rank`` sees it; the group ends with the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names) or None)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # DTensor finds meshes like this one there, whose process groups are gone
