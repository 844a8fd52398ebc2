"""docs/settings.md names every setting that its readers come with: accelerate's plugin's, and FSDP1's arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re

from torch.distributed.fsdp import FullyShardedDataParallel

from tests.docs.test_pages import DOCS
from tests.support import api
from tests.support.packages import needs

pytestmark = api.fsdp2_only

TEXT = (DOCS / "settings.md").read_text()
NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", TEXT))))
ELSEWHERE = {"fsdp_version", "sharding_strategy", "state_dict_config", "optim_state_dict_config"}
"""The version is ``version`` in files, the strategy is FSDP1's; the others follow from settings that are listed."""


def test_arguments_of_fsdp1():
    """A new argument of torch's class, or one that the page forgets."""
    assert set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self", "module"} <= NAMES


@needs("accelerate")
def test_settings_of_accelerate():
    """Each field of the plugin is named, also one that a new version brings."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert fields - ELSEWHERE <= NAMES, fields - ELSEWHERE - NAMES
