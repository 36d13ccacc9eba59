"""Memory that runs out in the kernels and in packing: a MemoryError, and all is well afterwards."""

import subprocess
import sys

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import sparse_weight

from torchcram.kernels.cpu import library
from torchcram.runtime import build, prepare_generation
from torchcram.runtime.cpu.chain_plan import NO_RESIDUAL, ChainLayer
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import PAIRS, QUAD_ROWS, Geometry, pack_images, pack_linear
from torchcram.runtime.cpu.row_matrix import RowLinear

pytestmark = needs_kernels

PADDED = Geometry((3, 3), padding=(1, 1))


def forget():
    library.find.cache_clear()
    library.library.cache_clear()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A library whose allocations fail on demand: that of `make sanitize`, or one built here."""
    if hasattr(library.kernels(), "torchcram_fail_allocation"):
        return library.LIBRARY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_COMMON", [*build._COMMON, "-O0"])  # quick
        return build.build(tmp_path_factory.mktemp("faulty") / "kernels.so", faults=True)


@pytest.fixture
def fail(faulty, monkeypatch):
    """Makes the n-th allocation from now on fail; says whether the one before was reached."""
    monkeypatch.setattr(library, "LIBRARY", faulty)
    forget()
    yield lambda n: library.kernels().torchcram_fail_allocation(n) == 0
    library.kernels().torchcram_fail_allocation(0)
    monkeypatch.undo()
    forget()


@pytest.fixture(params=["of torch", "of our own", "none"])
def threads_of(request, fail):  # noqa: ARG001  the library is loaded by now
    """Threads of the OpenMP runtime of torch, those that take its place, or none."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "none" else 3)
    openmp = library._openmp_of_torch()
    library.kernels().torchcram_use_openmp(None if request.param == "of our own" else openmp)
    yield
    library.kernels().torchcram_use_openmp(openmp)
    torch.set_num_threads(before)


def fail_each(fail, call):
    """Lets the first allocation of a call fail, then the second, and so on.

    Returns:
        How many of them made a MemoryError of it, and how many could be done without.
    """
    expected, errors, unharmed = call(), 0, 0
    while True:
        fail(errors + unharmed + 1)
        try:
            found = call()
        except MemoryError:
            assert fail(0)
            errors += 1
            continue
        reached = fail(0)
        assert torch.equal(found, expected)
        if not reached:
            return errors, unharmed
        unharmed += 1


def linear():
    layer, x = SparseLinear(sparse_weight(500, 40), torch.randn(500)), torch.randn(200, 40)
    return lambda: layer(x)


def feed_forward():
    first, second = SparseLinear(sparse_weight(60, 40), None), SparseLinear(torch.eye(60), None)
    layer, x = SparseFeedForward(first, second, activation="relu"), torch.randn(200, 40)
    return lambda: layer(x)


def convolution(*, by_images):
    layer = SparseConv2d(sparse_weight(8, 4, 3, 3), None, PADDED, by_images=by_images)
    x = torch.randn(5, 4, 9, 9)
    return lambda: layer(x)


def chain():
    layers = [ChainLayer(0, NO_RESIDUAL, 4, True, PADDED), ChainLayer(1, 0, 4, True, PADDED)]
    modules = [SparseConv2d(sparse_weight(4, 4, 3, 3), None, PADDED, by_images=True) for _ in "ab"]
    numbers = [number for layer in layers for number in layer.numbers()]
    x, packed = images_innermost(torch.randn(16, 4, 9, 9)), [each.packed for each in modules]
    return lambda: torch.ops.torchcram.convolution_chain(x, packed, [None, None], numbers, 2)


def attention():
    x = torch.randn(2, 30, 32)
    return lambda: torch.ops.torchcram.attention(x, x, x, 2, 0.2)


def max_pool():
    x = torch.randn(2, 4, 9, 9)
    return lambda: torch.ops.torchcram.max_pool2d(x, [3, 3], [2, 2], [1, 1])


def linear_int8():
    layer, x = SparseLinearInt8(sparse_weight(500, 40), None), torch.randn(200, 40)
    return lambda: layer(x)


def feed_forward_int8():
    first, second = (
        SparseLinearInt8(sparse_weight(9, 40), None),
        SparseLinearInt8(torch.eye(9), None),
    )
    layer, x = SparseFeedForwardInt8(first, second, activation="relu"), torch.randn(200, 40)
    return lambda: layer(x)


def row_product(dtype):
    layer, x = RowLinear(sparse_weight(500, 40), None, dtype), torch.randn(4, 40)
    return lambda: layer(x)


def decoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = prepare_generation(transformers.LlamaForCausalLM(config))
    prompt = torch.arange(400).view(2, 200) % 61

    @torch.inference_mode()
    def call():
        cache = model(prompt, use_cache=True).past_key_values
        return model(prompt[:, :1], past_key_values=cache).logits

    return call


CALLS = {
    "linear": linear,
    "feed-forward": feed_forward,
    "pixels": lambda: convolution(by_images=False),
    "images": lambda: convolution(by_images=True),
    "chain": chain,
    "attention": attention,
    "max-pool": max_pool,
    "linear-int8": linear_int8,
    "feed-forward-int8": feed_forward_int8,
    "row-product": lambda: row_product(torch.float32),
    "row-product-int8": lambda: row_product(torch.int8),
    "decoder": decoder,
}


@pytest.mark.usefixtures("threads_of")
@pytest.mark.parametrize("name", CALLS)
def test_in_kernels(name, fail):
    if "int8" in name and not library.has_int8():
        pytest.skip("this machine has no kernels for 8 bits")
    errors, _ = fail_each(fail, CALLS[name]())
    assert errors >= (1 if "row" in name else 2)  # one thread lays out a few rows


@pytest.mark.parametrize("threads_of", ["of our own"], indirect=True)
@pytest.mark.usefixtures("threads_of")
def test_a_thread_that_cannot_be_started_is_done_without(fail):
    call = linear()
    expected = call()
    torch.set_num_threads(7)  # more than there are
    fail(1)
    assert torch.equal(call(), expected)
    assert fail(0)


@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
@pytest.mark.parametrize("by_images", [False, True])
def test_in_packing(layout, by_images, fail):
    torch.manual_seed(0)
    weight = sparse_weight(6, 4, 3, 3)
    if by_images:
        errors, _ = fail_each(fail, lambda: pack_images(weight, PADDED, layout=layout))
    else:
        errors, _ = fail_each(fail, lambda: pack_linear(weight, layout=layout))
    assert errors > 10


def test_the_error_names_what_failed(fail):
    call = linear()
    fail(1)
    with pytest.raises(MemoryError, match="torchcram_linear: not enough memory"):
        call()
    fail(1)
    with pytest.raises(MemoryError, match="torchcram_pack_linear: not enough memory"):
        SparseLinear(torch.eye(4), None)


def test_a_matrix_that_no_memory_holds():
    call = library.kernels().torchcram_pack_linear
    with pytest.raises(MemoryError):
        call(torch.ones(1).data_ptr(), 1, 1 << 62, PAIRS, 128, None, 0)


LIMITED = """
import resource, torch
from torchcram.runtime.cpu.modules import SparseLinear
from torchcram.kernels.cpu.library import kernels
torch.set_num_threads(2)
layer, x = SparseLinear(torch.eye(16), None), torch.randn(200, 16)
expected = layer(x)
weight = torch.ones(1, 1 << 24)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), used + (1 << 26)))
try:
    SparseLinear(weight, None)
except MemoryError as error:
    print(error)
print(torch.equal(layer(x), expected))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(
    library.LIBRARY != build.LIBRARY, reason="sanitizers take more memory than the limit"
)
def test_a_process_that_may_use_no_more_memory():
    command = [sys.executable, "-W", "ignore", "-c", LIMITED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "torchcram_pack_linear: not enough memory\nTrue\n", ran.stderr
