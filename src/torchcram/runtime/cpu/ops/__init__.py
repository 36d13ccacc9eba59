"""The CPU kernels as operators of torch, which torch.compile and torch.export can handle.

They are registered as `torch.ops.torchcram`; the modules in `torchcram.runtime.cpu.modules` call
them.

    sparse_linear             a Linear layer
    sparse_feed_forward       two Linear layers with an activation between them
    sparse_linear_int8        a Linear layer in 8 bits
    sparse_feed_forward_int8  two Linear layers in 8 bits with an activation between them
    sparse_conv2d             a convolution
    attention                 self-attention without a mask

The kernels have no derivatives. If one is needed, for `backward`, in forward mode or in a transform
of `torch.func`, an operator unpacks the weight and computes with torch.
"""

from torchcram.runtime.cpu.ops import attention, conv2d, linear, linear_int8

__all__ = ["attention", "conv2d", "linear", "linear_int8"]
