"""The kernels in threads, in forked processes, with torch's number of threads."""

import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_weight
from torch.nn import functional

from torchcram.kernels.cpu import library
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.packing import Geometry

pytestmark = needs_kernels


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["of torch", "of our own"])
def threads_of(request, two_threads):  # noqa: ARG001
    """Threads of the OpenMP runtime of torch, or those that take its place where there is none."""
    if request.param == "of our own":
        library.kernels().torchcram_use_openmp(None)
    yield
    library.kernels().torchcram_use_openmp(library._openmp_of_torch())


@pytest.mark.usefixtures("threads_of")
def test_more_threads_change_no_bit():
    layer, x = SparseLinear(sparse_weight(500, 300), None), torch.randn(500, 300)
    for tokens in (1, 64, 130, 500):
        found = layer(x[:tokens])
        torch.set_num_threads(1)
        assert torch.equal(layer(x[:tokens]), found)
        torch.set_num_threads(2)


def _feed_forward(width, middle):
    first = SparseLinear(sparse_weight(middle, width), torch.randn(middle))
    return SparseFeedForward(
        first, SparseLinear(sparse_weight(width, middle), None), activation="gelu"
    )


def _convolution(*, by_images):
    weight = sparse_weight(8, 36).view(8, 4, 3, 3)
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    return SparseConv2d(weight, torch.randn(8), geometry, by_images=by_images, relu=True)


def hammer(seconds, callers):
    """Calls layers from many threads at once; returns the number of calls."""
    inputs = [torch.randn(tokens, 90) for tokens in (1, 70, 200)]
    images = [torch.randn(count, 4, 9, 9) for count in (1, 5, 33)]
    work = [(SparseLinear(sparse_weight(n, 90), torch.randn(n)), inputs) for n in (7, 64, 450)]
    work.append((_feed_forward(90, 200), inputs))
    work += [(_convolution(by_images=one), images) for one in (False, True)]
    if library.has_int8():
        work.append((SparseLinearInt8(sparse_weight(64, 90), None), inputs))
    expected = [[layer(x) for x in given] for layer, given in work]
    end, count, lock = time.monotonic() + seconds, 0, threading.Lock()

    def call(number):
        nonlocal count
        done = 0
        while time.monotonic() < end:
            i, j = (number + done) % len(work), done // len(work) % 3
            layer, given = work[i]
            assert torch.equal(layer(given[j]), expected[i][j])
            done += 1
        with lock:
            count += done

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(call, range(callers)))
    return count


@pytest.mark.usefixtures("threads_of")
def test_many_callers_at_once():
    assert hammer(0.5, 6) > 6


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_many_callers_for_ten_minutes():
    assert hammer(600, 8) > 1000


def _in_child(layer, x, queue):
    queue.put(layer(x).numpy())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_after_a_fork():
    layer, x = SparseLinear(sparse_weight(300, 200), None), torch.randn(256, 200)
    expected = functional.linear(x.double(), layer.weight.double())
    assert relative_error(layer(x), expected) < 1e-6  # the threads of the parent exist by now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(layer, x, queue))
    child.start()
    found = queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    assert torch.equal(torch.from_numpy(found), layer(x))


FIRST = """
import os, signal, torch
from torchcram.runtime.cpu.modules import SparseLinear
torch.set_num_threads(2)
torch.relu(torch.randn(4_000_000)).sum()  # the threads of the parent exist by now
weight = torch.randn(100, 100) * (torch.rand(100, 100) < 0.2)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(int(SparseLinear(weight, None)(torch.randn(256, 100)).shape != (256, 100)))
print(os.waitpid(child, 0)[1])
"""


def test_a_child_may_be_the_first_to_load_them():
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout == "0\n", ran.stderr
