"""The CPU kernels as operators of torch, which torch.compile and torch.export can handle.

They are registered in `torch.ops.torchcram` when this package is imported. The modules in
`torchcram.runtime.cpu.modules`, `fuse` and `prompt_layers` beside it call them.

    linear.py       sparse_linear             a Linear layer
                    sparse_feed_forward       two Linear layers with an activation between them
    linear_int8.py  sparse_linear_int8        a Linear layer in 8 bits
                    sparse_feed_forward_int8  two of them with an activation between them
    conv2d.py       sparse_conv2d             a convolution
    convolution_chain.py
                    convolution_chain         convolutions, some rows of each in turn
    image_layout.py lay_out_images            images as the innermost dimension in memory, and back
    max_pool.py     max_pool2d                max pooling of contiguous images
    attention.py    attention                 self-attention without a mask
    rows.py         rms_norm                  RMSNorm of every row
                    silu_and_mul              silu(gate) * up, between gated Linear layers

An operator has a schema and three implementations, which `register` in `common.py` takes: the
kernel, a fake implementation for tensors without data, and a dense one. The kernels have no
derivatives. If one is needed, for `backward`, in forward mode or in a transform of `torch.func`,
the dense implementation unpacks the weight and computes with torch.

`attention.py` is the shortest example. A new file is imported below.
"""

from torchcram.runtime.cpu.ops import (
    attention,
    conv2d,
    convolution_chain,
    image_layout,
    linear,
    linear_int8,
    max_pool,
    rows,
)

__all__ = [
    "attention",
    "conv2d",
    "convolution_chain",
    "image_layout",
    "linear",
    "linear_int8",
    "max_pool",
    "rows",
]
