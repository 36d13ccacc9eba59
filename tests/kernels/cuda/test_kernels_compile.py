"""The CUDA kernels compile for a GPU that is not there; interpreting them does not show that."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchcram.kernels.cuda import int8
from torchcram.kernels.cuda.combine import _add_scaled_kernel, _combine_kernel
from torchcram.kernels.cuda.select import REGISTERS, _select_kernel
from torchcram.kernels.cuda.chunks import CHUNK, WARPS
from torchcram.kernels.cuda.zero import _zero_kernel

OTHER = {"mask": "*i1", "chunk_count": "i32", "tensor_count": "i32", "segment_count": "i32"}
OTHER |= {"count": "i32", "outputs": "i32", "inputs": "i32", "values": "*i8", "scale": "*fp32"}
OTHER |= {"bad": "*fp32"}
EXACT = (_add_scaled_kernel, _combine_kernel)  # round as torch does, and keep subnormal numbers


def compile_(kernel, constants, **options):
    types = {**dict.fromkeys(kernel.arg_names, "*i64"), **OTHER}
    if "values" in kernel.arg_names:
        types |= dict.fromkeys(("x", "y", "bias"), f"*{constants.pop('DTYPE')}")
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    values = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    options = {"num_warps": WARPS, **options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ptx" in made.asm
    if kernel in EXACT:
        assert ".ftz" not in made.asm["ptx"] and "fma" not in made.asm["ptx"]
    print(kernel.__name__, constants, "ok")


for key, sign in ((tl.int32, 2**31 - 1), (tl.int16, 2**15 - 1)):
    common = {"KEY": key, "ALIGNED": True, "SIZE": CHUNK}
    for stride, depth, zero in ((1, 3, True), (1, 0, False), (8, 7, False), (8, 7, True)):
        shape = {"STRIDE": stride, "PARTS": (2048 << depth) // 1024, "DEPTH": depth}
        compile_(
            _select_kernel,
            {**common, **shape, "SIGN": sign, "ZERO": zero},
            maxnreg=REGISTERS,
            launch_cooperative_grid=True,
        )
    compile_(_zero_kernel, common)
for dtype in (tl.float32, tl.bfloat16, tl.float16):
    compile_(_combine_kernel, {"DTYPE": dtype, "ALIGNED": True, "SIZE": CHUNK})
compile_(_add_scaled_kernel, {"ALIGNED": True, "SIZE": CHUNK}, enable_fp_fusion=False)
for dtype, bias in (("bf16", True), ("fp16", False)):
    common = {"DTYPE": dtype, "HAS_BIAS": bias}
    one = {"WIDE": int8.ONE, "DEEP": int8.LONG}
    compile_(int8._one_row_kernel, {**common, **one}, num_warps=4)
    for wide in int8.COLUMNS:
        tile = {"ROWS": int8.ROWS, "WIDE": wide, "DEEP": int8.DEEP}
        compile_(int8._rows_kernel, {**common, **tile}, num_warps=4, num_stages=4)
"""


def test_kernels_compile_for_compute_capability_9():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.count("ok") == 20
