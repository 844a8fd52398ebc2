"""Lightning's Trainer with its ModelParallelStrategy, whose ``configure_model`` calls ``fully_shard`` of torch.

Run by ``test_clients.py`` under ``torch.distributed.run``; ``--fsdp2`` installs fsdp2 first. Prints the losses.
"""

from __future__ import annotations

import json
import sys

import torch

if "--fsdp2" in sys.argv:
    import fsdp2

    fsdp2.install()

import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

STEPS = 4


class Regression(lightning.LightningModule):
    """Two layers and a head, sharded over the data-parallel mesh of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.seen: list[float] = []

    def configure_model(self) -> None:
        """Shard once."""
        if not isinstance(self.head, FSDPModule):
            for unit in (self.layers[0], self.layers[2], self.head, self):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch; its mean over the ranks is noted."""
        loss = self.head(torch.tanh(self.layers(batch[0]))).square().mean()
        both = loss.detach().clone()
        torch.distributed.all_reduce(both)
        self.seen.append(both.item() / 2)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam on the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train and print one line of JSON on the first process."""
    rows = torch.randn(STEPS * 4, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    module = Regression()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, loader)
    kinds = sorted(
        f"{type(unit).__mro__[1].__module__}.{type(unit).__name__}"
        for unit in module.modules()
        if isinstance(unit, FSDPModule)
    )
    if trainer.is_global_zero:
        print("\n" + json.dumps({"units": kinds, "losses": module.seen}), flush=True)


if __name__ == "__main__":
    main()
