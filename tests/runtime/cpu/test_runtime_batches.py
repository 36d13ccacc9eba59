"""Large batches: parts of them one after the other, or side by side in threads of their own."""

import copy
import multiprocessing
import threading

import pytest
import torch
from native_library import needs_kernels
from torch import nn

from torchcram import compress
from torchcram.kernels.cpu import library
from torchcram.kernels.cpu.library import has_openmp, set_openmp_threads
from torchcram.runtime import prepare, report
from torchcram.runtime.cpu import batches, image_ways, replace_layers
from torchcram.runtime.cpu.batches import BatchSplitter

pytestmark = pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP")


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Recorder(nn.Module):
    """Doubles its inputs and notes how it was called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        thread = threading.current_thread().name.split("_")[0]
        self.calls.append(
            (len(x), thread, torch.get_num_threads(), torch.is_inference_mode_enabled())
        )
        return 2 * x


@pytest.mark.parametrize("images", [1, 16, 17, 31, 32, 33, 63, 64, 79, 100])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_outputs_are_in_the_order_of_the_images(images, side_by_side):
    model = Recorder()
    x = torch.randn(images, 3)
    with torch.inference_mode():
        assert torch.equal(BatchSplitter(model, 16, side_by_side=side_by_side)(x), 2 * x)
    assert sum(count for count, *_ in model.calls) == images
    beside = images // 32 * 32 if side_by_side else 0
    alone = [call for call in model.calls if call[1] == "torchcram"]
    assert alone == [(16, "torchcram", 1, True)] * (beside // 16)
    assert all(call[2:] == (2, True) for call in model.calls if call not in alone)


def test_the_threads_of_others_stay_as_they_were():
    BatchSplitter(Recorder(), 16, side_by_side=True)(torch.randn(64, 3))
    numbers = [torch.get_num_threads()]
    other = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert numbers == [2, 2]


def test_one_thread_has_no_one_beside_it():
    torch.set_num_threads(1)
    model = Recorder()
    BatchSplitter(model, 16, side_by_side=True)(torch.randn(64, 3))
    assert {thread for _, thread, *_ in model.calls} == {"MainThread"}


def test_gradients_of_the_inputs_are_not_lost():
    x = torch.randn(64, 3, requires_grad=True)
    BatchSplitter(Recorder(), 16, side_by_side=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((64, 3), 2.0))


def test_an_error_of_a_part_is_raised():
    class Refuses(nn.Module):
        def forward(self, x):
            if x[0, 0] == 32:
                raise ValueError("not these images")
            return x

    x = torch.arange(64.0)[:, None]
    splitter = BatchSplitter(Refuses(), 16, side_by_side=True)
    with pytest.raises(ValueError, match="not these images"):
        splitter(x)
    assert torch.equal(splitter(x + 1), x + 1)


def test_a_copy_works():
    splitter = BatchSplitter(nn.Linear(3, 2), 16, side_by_side=True)
    x = torch.randn(64, 3)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(splitter)(x), splitter(x))


def test_without_the_openmp_of_torch_parts_come_one_after_the_other(monkeypatch):
    monkeypatch.setattr(batches, "has_openmp", lambda: False)
    model = Recorder()
    BatchSplitter(model, 16, side_by_side=True)(torch.randn(64, 3))
    assert {thread for _, thread, *_ in model.calls} == {"MainThread"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_process_has_threads_of_its_own():
    splitter, x = BatchSplitter(Recorder(), 16, side_by_side=True), torch.randn(64, 3)
    splitter(x)
    child = multiprocessing.get_context("fork").Process(target=splitter, args=(x,))
    child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    assert code == 0


@pytest.fixture
def beside_wins(monkeypatch):
    """Running images side by side wins its races; sparse kernels win none."""

    def times(work):
        return {name: 0.0 if name in ("side by side", "sparse") else 1.0 for name in work}

    monkeypatch.setattr(replace_layers, "time_in_turns", times)


@needs_kernels
@pytest.mark.usefixtures("beside_wins")
@pytest.mark.parametrize("images", [32, 45])
def test_a_dense_model_may_run_side_by_side(images):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    x = torch.randn(images, 3, 4, 4)
    fast = prepare(model, x)
    assert isinstance(fast, BatchSplitter)
    assert fast.side_by_side
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-6)


def test_images_that_are_too_few_for_all_threads_run_at_once():
    model = Recorder()
    splitter = BatchSplitter(model, 64, side_by_side=True)
    for images in (0, 1, 31):
        assert len(splitter(torch.randn(images, 3))) == images
    splitter(torch.randn(45, 3))
    assert [count for count, *_ in model.calls] == [0, 1, 31, 16, 16, 13]


def test_without_openmp_the_threads_cannot_be_set(monkeypatch):
    monkeypatch.setattr(library, "_omp_set_num_threads", lambda: None)
    assert not has_openmp()
    with pytest.raises(RuntimeError, match="not loaded an OpenMP runtime"):
        set_openmp_threads(1)


class Centred(nn.Module):
    """Subtracts the mean over the images from the outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x).mean((2, 3))
        return y - y.mean(0)


@needs_kernels
@pytest.mark.usefixtures("beside_wins")
def test_a_model_that_mixes_its_images_is_not_split():
    model, x = Centred().eval(), torch.randn(64, 3, 4, 4)
    fast = prepare(model, x)
    assert not isinstance(fast, BatchSplitter)
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-6)


@pytest.fixture
def single_images_win(monkeypatch):
    """Running images one by one wins its races, and so do sparse kernels; all images are large.

    Returns the names of the participants of each race and the number of threads.
    """
    races = []

    def times(work):
        races.append((list(work), torch.get_num_threads()))
        return {name: 0.1 if name in ("image by image", "sparse") else 1.0 for name in work}

    monkeypatch.setattr(replace_layers, "time_in_turns", times)
    monkeypatch.setattr(image_ways, "_CACHE_BYTES", 0)
    return races


@needs_kernels
@pytest.mark.parametrize("images", [2, 3, 16, 33])
def test_large_images_may_run_one_by_one(images, single_images_win):
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    model = compress(nn.Sequential(*layers).eval(), "uniform:0.5")
    x = torch.randn(images, 3, 4, 4)
    fast = prepare(model, x)
    assert isinstance(fast, BatchSplitter)
    assert (fast.images, fast.thread_images, fast.side_by_side) == (1, 1, True)
    assert {choice.name for choice in report(fast)} == {"model.0", "model.3"}
    layers_threads = [threads for names, threads in single_images_win if "dense" in names]
    assert layers_threads[:2] == [1, 1]  # for single images
    assert set(layers_threads[2:]) == {2}  # for the batch
    assert torch.get_num_threads() == 2
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-6)
        assert torch.allclose(fast(x[:1]), model(x[:1]), atol=1e-6)


@needs_kernels
@pytest.mark.usefixtures("single_images_win")
def test_one_large_image_is_no_batch():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    assert not isinstance(prepare(model, torch.randn(1, 3, 4, 4)), BatchSplitter)


@needs_kernels
@pytest.mark.usefixtures("single_images_win")
def test_a_model_that_mixes_large_images_is_not_split():
    model, x = compress(Centred().eval(), "uniform:0.5"), torch.randn(4, 3, 4, 4)
    fast = prepare(model, x)
    assert not isinstance(fast, BatchSplitter)
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-6)
    assert torch.get_num_threads() == 2


def test_a_thread_takes_as_many_images_as_it_is_told():
    model = Recorder()
    BatchSplitter(model, 1, side_by_side=True, thread_images=1)(torch.randn(5, 3))
    beside = [call for call in model.calls if call[1] == "torchcram"]
    assert [(count, threads) for count, _, threads, _ in beside] == [(1, 1)] * 4
    assert [call[:3] for call in model.calls if call not in beside] == [(1, "MainThread", 2)]
