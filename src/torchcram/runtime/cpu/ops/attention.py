"""Self-attention without a mask: of all tokens of a sequence to all tokens of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.ops.common import register, require_floats


def _attention(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float) -> Tensor:
    _require_same_shape(query, key, value, heads)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    batch, tokens, features = query.shape
    y = torch.empty_like(query)
    computed = y.numel() == 0 or kernels().torchcram_attention(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), batch, tokens, heads),
        *(features // heads, scale, y.data_ptr(), torch.get_num_threads()),
    )
    if computed:
        return y
    # The kernel takes heads of a multiple of 16 features and no scale below 1e-30.
    q, k, v = _split_heads(query, key, value, heads)
    return _join_heads(functional.scaled_dot_product_attention(q, k, v, scale=scale))


def _fake_attention(
    query: Tensor, _key: Tensor, _value: Tensor, _heads: int, _scale: float
) -> Tensor:
    return query.new_empty(query.shape)


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float) -> Tensor:
    _require_same_shape(query, key, value, heads)
    q, k, v = _split_heads(query, key, value, heads)
    weights = functional.softmax(q @ k.transpose(2, 3) * scale, dim=3)
    return _join_heads(weights @ v)


def _split_heads(query: Tensor, key: Tensor, value: Tensor, heads: int) -> list[Tensor]:
    size = heads, query.shape[2] // heads
    return [each.unflatten(2, size).transpose(1, 2) for each in (query, key, value)]


def _join_heads(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def _require_same_shape(query: Tensor, key: Tensor, value: Tensor, heads: int) -> None:
    for each in (query, key, value):
        require_floats(each)
    shapes = [tuple(each.shape) for each in (query, key, value)]
    if shapes != shapes[:1] * 3 or query.dim() != 3 or heads < 1 or query.shape[2] % heads:
        raise ValueError(
            "query, key and value must have the same shape (sequences, tokens, features), with "
            f"features divisible by the heads, got shapes {shapes} for {heads} heads"
        )


register(
    "attention(Tensor query, Tensor key, Tensor value, int heads, float scale) -> Tensor",
    _attention,
    fake=_fake_attention,
    dense=_dense_attention,
)
