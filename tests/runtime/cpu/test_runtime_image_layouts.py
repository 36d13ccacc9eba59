"""Which convolutions of a graph run on panels of images: times of layers and of copies count."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import sparse_model
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from torchcram.runtime import prepare, report
from torchcram.runtime.cpu import image_layouts, replace_layers
from torchcram.runtime.cpu.image_layouts import choose_by_images

pytestmark = needs_kernels

VALUES = 16 * 4 * 6 * 6  # of a batch between two layers


class Residual(nn.Module):
    """Five convolutions; the last two have an addition between them, and a pooling comes first."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.pool, self.last = nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.pool(torch.relu(self.stem(x)))
        x = x + self.two(torch.relu(self.one(x)))
        return self.last(x)


def graph():
    traced = fx.symbolic_trace(Residual().eval())
    ShapeProp(traced).propagate(torch.randn(16, 4, 6, 6))
    return traced


@pytest.fixture
def copies(monkeypatch):
    """A copy of a batch takes a millisecond."""
    monkeypatch.setattr(replace_layers, "time_in_turns", lambda _: {"copy": 1.0})
    assert image_layouts._copy_ms_of_value(graph()) == 1 / VALUES


def times(**by_images):
    """Times of layers that take 10 ms in the other layout."""
    return {
        name: {"dense": 12.0, "sparse": 10.0, "by_images": ms} for name, ms in by_images.items()
    }


ALL = {"stem", "one", "two", "last"}


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(
    ("by_images", "chosen"),
    [
        ({"stem": 10.5, "one": 5, "two": 5, "last": 5}, {"one", "two", "last"}),  # two copies more
        ({"stem": 7, "one": 5, "two": 5, "last": 5}, ALL),
        ({"stem": 20, "one": 9.2, "two": 9.2, "last": 9.2}, set()),  # 0.8 ms less, two copies more
        ({"stem": 20, "one": 8.9, "two": 8.9, "last": 9.2}, {"one", "two"}),
        ({"stem": 20, "one": 9.2, "two": 9.2, "last": 5}, {"last"}),
    ],
)
def test_a_layer_follows_its_neighbours_if_copies_cost_more_than_it_gains(by_images, chosen):
    assert choose_by_images(graph(), times(**by_images)) == chosen


def test_nothing_is_timed_where_no_layer_can_run_on_panels_of_images(monkeypatch):
    monkeypatch.setattr(replace_layers, "time_in_turns", None)
    assert choose_by_images(graph(), {"stem": {"dense": 1.0}, "one": {}}) == set()


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("between", "chosen"), [(10.9, {"0", "1", "2"}), (13.1, {"0", "2"})])
def test_a_slower_layer_between_two_saves_two_copies(between, chosen):
    chain = fx.symbolic_trace(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))))
    ShapeProp(chain).propagate(torch.randn(16, 4, 6, 6))
    ways = {"0": 7, "1": between, "2": 7}
    given = {name: {"dense": 10.0, "by_images": ms} for name, ms in ways.items()}
    assert choose_by_images(chain, given) == chosen


@pytest.mark.parametrize(("copy", "panels"), [(2.0, True), (0.0, False)])
def test_a_layer_that_follows_its_neighbours_says_so(monkeypatch, copy, panels):
    calls = iter([9.9, 5.0])  # panels of images, in the first and in the second layer

    def race(work):
        if "copy" in work:
            return {"copy": copy}
        if "by_images" not in work:
            return {way: -i for i, way in enumerate(work)}
        return dict.fromkeys(work, 9.5) | {"by_images": next(calls)}

    monkeypatch.setattr(replace_layers, "time_in_turns", race)
    model = sparse_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)))
    first, second = report(prepare(model, torch.randn(16, 3, 9, 9)))
    assert second.sparse
    assert first.sparse == panels == ("no images are copied" in first.reason)
