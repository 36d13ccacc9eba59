"""Trains a sharded net by Lightning in two processes, which Lightning starts; writes its weights.

python lightning_fsdp_program.py FILE
"""

import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from torchcram import CrAM
from torchcram.integrations.lightning import CompressedPass

EPOCHS, BATCH = 2, 32


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(96, 8, generator=generator)
    return images, torch.randint(4, (96,), generator=generator)


def optimizer_for(net):
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return CrAM(net, base, ["global:0.5", "uniform:0.7", "int4"], rho=0.05)


class Sharded(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def train_dataloader(self):
        share = range(self.trainer.global_rank, 96, 2)  # of this process: every other sample
        return DataLoader(Subset(TensorDataset(*data()), share), BATCH // 4)

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return optimizer_for(self.net)


def main():
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CompressedPass()],
    )
    module = Sharded()
    trainer.fit(module)
    weights = {name: p.full_tensor() for name, p in module.net.named_parameters()}
    if trainer.global_rank == 0:
        torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    main()
