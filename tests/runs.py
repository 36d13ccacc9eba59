"""Small trainings that the tests of experiments share."""

import hashlib
import io
from contextlib import contextmanager

import torch

from torchcram.experiments.data.images import ImageDataset, Images, load_data
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import train

CPU = torch.device("cpu")


def recipe(*overrides, method="cram-plus-multi", epochs=3):
    """A recipe for digits with all its epochs falling along the cosine."""
    name = f"digits/convnet-digits/{method}"
    return load_recipe(name, [f"train.epochs={epochs}", "optimizer.lr=0.05", *overrides])


def digits(train=320, test=100):
    """Some of the digits."""
    data = load_data(recipe().data, None)
    parts = [
        Images(part.images[:count], part.labels[:count])
        for part, count in ((data.train, train), (data.test, test))
    ]
    return ImageDataset("digits", *parts, data.classes)


class Stop(BaseException):
    """Ends a training where it is."""


def stop_after(steps):
    """Takes so many steps, whatever the epoch, and then stops."""
    taken = 0

    class Stopping(EagerStep):
        def run(self):
            nonlocal taken
            if taken == steps:
                raise Stop
            taken += 1
            super().run()

    return Stopping


@contextmanager
def one_thread():
    """More are slower with a net this small, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(folder, given, data, **options):
    """Trains on the CPU with seed 0 unless told otherwise."""
    with one_thread():
        return train(given, folder, data=data, **{"seed": 0, "device": CPU, **options})


def weights(folder):
    """The file with the final weights, to be compared bit for bit."""
    return (folder / "model.safetensors").read_bytes()


def reseal(path, change):
    """Changes the content of a checkpoint and makes its digest right again."""
    content = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    change(content)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest().encode()
    path.write_bytes(b"torchcram-checkpoint 1 " + digest + b"\n" + buffer.getvalue())
