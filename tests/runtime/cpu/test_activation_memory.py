"""Memory of large activations: a block belongs to one tensor at a time, and comes back."""

import copy
import gc
import io
import multiprocessing
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels

from torchcram import runtime
from torchcram.kernels.cpu import library
from torchcram.runtime.cpu import activation_memory
from torchcram.runtime.cpu.activation_memory import BlockPool, empty_activations

pytestmark = needs_kernels

LARGE = (16, 16, 32, 32)  # 1 MB


@pytest.fixture
def pool(monkeypatch):
    pool = BlockPool()
    monkeypatch.setattr(activation_memory, "_pool", pool)
    return pool


def test_memory_is_used_again(pool):
    y = empty_activations(LARGE)
    address = y.data_ptr()
    assert pool.idle_bytes() == 0
    other = y.permute(2, 3, 1, 0)[1:]
    del y
    assert pool.idle_bytes() == 0  # a view still needs it
    assert other.numel()
    del other
    assert pool.idle_bytes() == 2**20
    assert empty_activations(LARGE).data_ptr() == address
    runtime.empty_cache()
    assert pool.idle_bytes() == 0


def test_small_tensors_are_left_to_torch(pool):
    empty_activations((1, 2, 3))
    empty_activations((0, 2**20))
    assert pool.idle_bytes() == 0


SIZES = st.sampled_from([100, 150, 199, 200, 201, 399, 400, 1000])


@given(st.lists(st.tuples(SIZES, st.integers(0, 8)), max_size=40), st.integers(0, 8000))
def test_no_two_tensors_share_memory(calls, most_idle):
    pool, live = BlockPool(most_idle), {}
    for number, (count, freed) in enumerate(calls):
        live.pop(freed, None)
        y = pool.empty(count)
        assert y.shape == (count,)
        assert y.dtype == torch.float32
        live[number % 9] = y.fill_(number), number
        assert pool.idle_bytes() <= most_idle
    y = None
    for tensor, number in live.values():
        assert bool((tensor == number).all())
    tensor = None
    live.clear()
    pool.idle_bytes()  # collects what came back
    assert not pool._owners


def test_a_block_may_be_larger_than_a_tensor_but_not_by_much():
    pool = BlockPool()
    addresses = {count: pool.empty(count).data_ptr() for count in (1000, 4000, 700)}
    assert pool.idle_bytes() == 4 * 5000  # the vector of 700 took the block of 1000
    assert addresses[700] == addresses[1000]
    assert pool.empty(1500).data_ptr() not in addresses.values()
    smallest = pool.empty(1200)
    assert len(pool.empty(1200)) == 1200
    assert smallest.data_ptr() != addresses[4000]


def test_the_blocks_that_were_idle_longest_are_freed():
    pool = BlockPool(most_idle=4 * 250)
    first, second, third = (pool.empty(100) for _ in range(3))
    kept = [second.data_ptr(), third.data_ptr()]
    del first
    del second
    del third
    assert pool.idle_bytes() == 4 * 200
    again = [pool.empty(100) for _ in range(2)]
    assert [y.data_ptr() for y in again] == kept[::-1]  # the one that was used last first


def test_a_freed_tensor_does_not_exceed_the_limit():
    pool = BlockPool(most_idle=4 * 150)
    tensors = [pool.empty(100) for _ in range(9)]
    tensors.clear()
    assert sum(map(len, [*pool._idle, *pool._returned])) == 100


def test_a_tensor_may_outlive_the_pool(monkeypatch):
    allocate, blocks = activation_memory._allocate, []

    def noted(count):
        block = allocate(count)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(activation_memory, "_allocate", noted)
    pool = BlockPool()
    y = pool.empty(100)
    del pool
    gc.collect()
    (block,) = blocks
    assert block() is not None
    del y
    gc.collect()
    assert block() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_child_forked_while_a_thread_takes_a_block(pool):
    with pool._lock:
        child = multiprocessing.get_context("fork").Process(target=empty_activations, args=(LARGE,))
        child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    assert code == 0


def test_idle_blocks_make_room_when_memory_runs_out(monkeypatch):
    pool, allocate = BlockPool(), activation_memory._allocate
    pool.empty(100)
    assert pool.idle_bytes() == 400

    def limited(count):
        if pool.idle_bytes():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(count)

    monkeypatch.setattr(activation_memory, "_allocate", limited)
    assert len(pool.empty(1000)) == 1000
    assert pool.idle_bytes() == 4000


def test_threads_get_blocks_of_their_own(pool):
    found = []

    def work(number):
        for _ in range(50):
            y = empty_activations(LARGE).fill_(number)
            found.append(bool((y == number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200
    assert pool.idle_bytes() <= 8 * 2**20  # each holds two at a time


def test_tensors_that_are_freed_by_the_garbage_collector(pool):
    cycle = [empty_activations(LARGE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.idle_bytes() == 2**20


def test_they_are_tensors_like_others(pool):
    y = empty_activations(LARGE).normal_()
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), y)
    assert torch.equal(copy.deepcopy(y), y)
    assert torch.equal(y.clone().share_memory_(), y)
    assert y.share_memory_().is_shared()
    assert pool.idle_bytes() == 2**20  # its values have moved
    with torch.inference_mode():
        assert empty_activations(LARGE).is_inference()


@pytest.mark.parametrize("count", [2**20, 2**20 - 1, 12])
def test_large_blocks_ask_for_huge_pages(monkeypatch, count):
    asked = []
    monkeypatch.setattr(
        library.kernels(), "torchcram_use_huge_pages", lambda *region: asked.append(region)
    )
    y = BlockPool().empty(count)
    assert asked == ([(y.data_ptr(), 4 * count)] if count >= 2**20 else [])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_memory_on_huge_pages_is_memory():
    y = torch.zeros(2**20 + 3)
    for floats in (y[1:], y[:1000], y[:0]):  # whole pages, none, nothing
        size = 4 * floats.numel()
        asked = library.kernels().torchcram_use_huge_pages(floats.data_ptr(), size)
        assert asked in ((0, 1) if size > 8192 else (0,))  # a kernel may have no huge pages
        floats.fill_(1.0)
    assert int(y.sum()) == 2**20 + 2 + 1
