"""Handwritten digits and a small net, to see a method learn and prune."""

import functools

import torch
from problems import loss_on
from torch import nn

from torchcram.experiments.data.images.digits import split_digits


@functools.cache
def images():
    """Returns training images, their labels, test images and their labels."""
    train, labels, test, test_labels = split_digits()
    return train.flatten(1).float() / 8 - 1, labels, test.flatten(1).float() / 8 - 1, test_labels


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def digit_batches(count, size=64):
    """Returns random batches of training images."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = images()[:2]
    picks = torch.randint(len(inputs), (count, size), generator=generator)
    return [(inputs[pick], labels[pick]) for pick in picks]


def whole_loss(model):
    """Returns the loss on all training images."""
    with torch.no_grad():
        return loss_on(model, images()[:2]).item()


def accuracy(model):
    """Returns the share of test images that a model recognises."""
    with torch.no_grad():
        _, _, inputs, labels = images()
        return (model(inputs).argmax(1) == labels).float().mean().item()


def pruned(masks):
    """Returns the share of weights that masks prune."""
    kept = sum(int(mask.sum()) for mask in masks.values())
    return 1 - kept / sum(mask.numel() for mask in masks.values())
