"""What tests of single files have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.support.fake import fake_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks on one dimension, whose collectives move nothing."""
    with fake_mesh(4, names=("dp",)) as mesh:
        yield mesh
