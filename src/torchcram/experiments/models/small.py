"""Networks for small images: a plain convnet, ResNets, VGG and a vision transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


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


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on tokens (n, t, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens to tokens."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (n, t, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, heads, t, d)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        y: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y


class VisionTransformer(nn.Module):
    """Vision transformer for small square images, pre-norm, with the mean of its tokens as output.

    Args:
        size: Height and width of the images.
        patch: Height and width of a patch, which becomes a token.
        width: Size of a token.
        depth: Number of blocks.
        heads: Number of attention heads.
        channels: Number of channels of the images.
        classes: Number of scores.
    """

    def __init__(
        self,
        size: int = 32,
        patch: int = 4,
        width: int = 192,
        *,
        depth: int = 6,
        heads: int = 3,
        channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.pos_embed = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to class scores."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
        logits: Tensor = self.fc(self.norm(self.blocks(tokens)).mean(1))
        return logits
