"""CrAM+ in Lightning's automatic optimization, with compressed accuracy at every validation.

python examples/lightning_digits.py [EPOCHS]    # scikit-learn's digits; seconds on one core
"""

import sys

import lightning as L  # noqa: N812
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torchcram import CrAM
from torchcram.integrations.lightning import CompressedPass, CompressedValidation

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
TARGETS = ["global:0.8", "global:0.9", "nm:2:4"]


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()]
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(256, 10))

    def training_step(self, batch):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        optimizer = CrAM(self, base, TARGETS, rho=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


L.seed_everything(0)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().div(16)
train = TensorDataset(images[:1440], labels[:1440])
test = TensorDataset(images[1440:], labels[1440:])  # which other people wrote
trainer = L.Trainer(
    max_epochs=EPOCHS,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[CompressedPass(), CompressedValidation(TARGETS)],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Digits(), DataLoader(train, 48, shuffle=True), DataLoader(test, 357))
for name in ["accuracy", *(f"accuracy/{target}" for target in TARGETS)]:
    print(f"{name}: {trainer.callback_metrics[name]:.1%}")
