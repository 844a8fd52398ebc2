"""``python -m fsdp2 check`` on GPUs: all that it checks, the order of its streams included.

Ranks that share a GPU run the quick part: the large models would go over the loopback interface, for minutes.
"""

from __future__ import annotations

import pytest

from tests.gpu.devices import environment, places, visible
from tests.support import api
from tests.tools.check.launching import check

pytestmark = api.fsdp2_only
ON_GPUS = [one for one in places(1, 2, 4) if one[1:] != ("cpu",)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "device"), ON_GPUS)
def test_nothing_is_wrong(world, device, tmp_path):
    """The verdict of every check, on GPUs that ranks may share."""
    quick = ("--quick",) if len(visible()) < world else ()
    done = check(tmp_path, world, "--device", device, *quick, each=environment)
    assert done.statuses == [0] * world, done.output
    assert done.verdicts["streams"] == "right" and (quick or done.report["hardware"])
