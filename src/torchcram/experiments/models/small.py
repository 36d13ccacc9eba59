"""Networks for small images: a plain convnet, ResNets and VGG."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """3x3 convolutions with batch norm, the second of stride 2; average pooling; Linear."""

    def __init__(self, widths: Sequence[int], *, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for number, outputs in enumerate(widths):
            stride = 2 if number == 1 else 1
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)
        _initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to class scores."""
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """relu(x + BN(conv(relu(BN(conv(x)))))); x is subsampled and zero-padded as needed."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.widen = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, inputs, h, w) to (n, outputs, h/stride, w/stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.skip(x) + self.bn2(self.conv2(y)))

    def skip(self, x: Tensor) -> Tensor:
        """Returns x in the shape of the output."""
        x = x[:, :, :: self.stride, :: self.stride]
        if self.widen:
            x = nn.functional.pad(x, (0, 0, 0, 0, self.widen // 2, self.widen - self.widen // 2))
        return x


class ResNet(nn.Module):
    """ResNet for small images: three stages of basic blocks, each twice as wide as the last."""

    def __init__(self, blocks: int, width: int, *, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages, inputs = [], width
        for stage in range(3):
            outputs = width << stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)
        _initialise_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to class scores."""
        x = torch.relu(self.bn1(self.conv1(x)))
        logits: Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return logits


def resnet20(classes: int = 10) -> ResNet:
    """Returns ResNet20 for 32x32 images, with 0.27 M weights."""
    return ResNet(3, 16, classes=classes)


def _initialise_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)


VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class ProjectionBlock(BasicBlock):
    """A `BasicBlock` that adds BN(1x1 conv(x)) instead of x if the shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def skip(self, x: Tensor) -> Tensor:
        """Returns x in the shape of the output."""
        y: Tensor = self.shortcut(x)
        return y


class ResNet18(nn.Module):
    """ResNet18 for 32x32 images: two blocks of each width from 64 to 512; 11.2 M weights."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.blocks = nn.Sequential()
        inputs = 64
        for outputs in (64, 128, 256, 512):
            self.blocks.append(ProjectionBlock(inputs, outputs, 1 if outputs == 64 else 2))
            self.blocks.append(ProjectionBlock(outputs, outputs, 1))
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)
        _initialise_by_fan_out_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to class scores."""
        x = torch.relu(self.bn1(self.conv1(x)))
        logits: Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return logits


class VGG(nn.Module):
    """Groups of 3x3 convolutions with batch norm, each followed by pooling; one Linear layer."""

    def __init__(self, groups: tuple[tuple[int, ...], ...] = VGG16, *, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential()
        inputs = 3
        for widths in groups:
            for outputs in widths:
                self.features.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
                self.features.append(nn.BatchNorm2d(outputs))
                self.features.append(nn.ReLU())
                inputs = outputs
            self.features.append(nn.MaxPool2d(2))
        self.fc = nn.Linear(inputs, classes)
        _initialise_by_fan_out_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to class scores."""
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits


def _initialise_by_fan_out_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
