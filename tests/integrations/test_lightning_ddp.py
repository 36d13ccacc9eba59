"""Two processes that Lightning starts train as one does on the whole batches."""

import pytest
import torch
from nets import mlp
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset, TensorDataset

from torchcram import CrAM

L = pytest.importorskip("lightning")

from torchcram.integrations.lightning import CompressedPass, CompressedValidation  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp()
        self.found = torch.nn.Parameter(torch.zeros(2), requires_grad=False)  # comes back

    def loader(self):
        """The share of this process: of two, every other sample, also in each half of a batch."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 8, generator=generator)
        data = TensorDataset(inputs, torch.randint(4, (64,), generator=generator))
        count = self.trainer.world_size
        return DataLoader(Subset(data, range(self.trainer.global_rank, 64, count)), 8 // count)

    train_dataloader = val_dataloader = loader

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_fit_end(self):
        metrics = self.trainer.callback_metrics
        self.found.copy_(torch.stack([metrics["loss"], metrics["loss/nm:2:4"]]))

    def configure_optimizers(self):
        base = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return CrAM(self, base, ["global:0.5", "nm:2:4"], rho=0.05)


def fitted(**options):
    module = Net()
    L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        accumulate_grad_batches=3,  # the last step of an epoch has two
        gradient_clip_val=0.1,
        callbacks=[CompressedPass(1.0, 0.5), CompressedValidation(["nm:2:4"])],
        **options,
    ).fit(module)
    return module


def test_two_processes_train_and_validate_as_one():
    one = fitted(devices=1)
    two = fitted(devices=2, strategy="ddp_spawn")
    for (name, ours), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m, name=name: f"{name}: {m}")
    assert one.found[0] != one.found[1]
