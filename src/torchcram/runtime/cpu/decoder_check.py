"""Whether the kernels compute what a decoder of Transformers computes.

Many models have layers with the names of Llama's and compute something else: without rotations in
some layers, with further norms, or with factors. Each layer is therefore run on a few hidden states
and compared with what the kernels compute, written in torch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from torchcram.messages import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

CLOSE = 1e-4  # relative difference that rounding may cause
_TOKENS = 3


@torch.no_grad()
def find_difference(model: Any) -> str | None:  # noqa: ANN401
    """Returns where a decoder computes something else than the kernels; None if it does not.

    Args:
        model: Causal model of Transformers whose layers have the weights of Llama's; it stays
            unchanged. Weights of a layer are compared in float32, one layer at a time.
    """
    try:
        if not _feeds_embeddings(model.model):
            return "it does not give embeddings to its layers as they are"
        for number, apart in enumerate(_differences(model)):
            if not apart <= CLOSE:  # NaN is none either
                return (
                    f"layer {number}: it does not compute what a layer of Llama computes, the "
                    f"outputs differ by {apart:.2g} of the largest"
                )
    except Exception as error:  # noqa: BLE001  the code of a model may raise anything
        return f"its layers cannot be called as those of Llama: {reason_of(error)}"
    return None


def _feeds_embeddings(decoder: Any) -> bool:  # noqa: ANN401
    """Returns whether the first layer gets the embeddings of tokens without any change."""
    shell = copy.copy(decoder)
    shell._modules = {**decoder._modules, "layers": nn.ModuleList(), "norm": nn.Identity()}
    weight = decoder.embed_tokens.weight
    tokens = torch.arange(min(_TOKENS, len(weight)), device=weight.device).unsqueeze(0)
    given = shell(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.equal(given, decoder.embed_tokens(tokens))


def _differences(model: Any) -> Iterator[float]:  # noqa: ANN401
    """Yields for every layer how far its outputs are from the expected ones, relatively."""
    decoder, config = model.model, model.config
    weight = decoder.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    shape = (1, _TOKENS, weight.shape[1])
    x = torch.randn(shape, generator=generator).to(weight.device)
    last = max(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS) - 1
    positions = torch.tensor([[*range(_TOKENS - 1), last]], device=x.device)
    # scaled rotations may depend on the positions that were seen, so those of a copy are used
    rotation = copy.deepcopy(decoder.rotary_emb)(x, position_ids=positions)
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=x.device).triu(1)
    mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -1e9)
    scale, eps = float(decoder.layers[0].self_attn.scaling), float(decoder.norm.variance_epsilon)
    for layer in decoder.layers:
        memo = {id(p): nn.Parameter(p.float(), requires_grad=False) for p in layer.parameters()}
        alone = copy.deepcopy(layer, memo).float().eval()  # float32 weights are not copied
        y = alone(
            x,
            attention_mask=mask[None, None],
            position_ids=positions,
            past_key_values=None,
            use_cache=False,
            position_embeddings=rotation,
        )
        y = y[0] if isinstance(y, tuple) else y
        expected = _llama_layer(alone, x, rotation, mask, config.num_attention_heads, scale, eps)
        changed = (expected - x).abs().max().clamp(min=1e-3)  # a layer may add nothing to x
        yield float((y - expected).abs().max() / changed)


def _llama_layer(
    layer: Any,  # noqa: ANN401
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor,
    heads: int,
    scale: float,
    eps: float,
) -> Tensor:
    """Returns what the kernels compute for a layer.

    Args:
        layer: Layer with the weights of Llama's, in float32.
        x: Hidden states, (1, tokens, hidden).
        rotation: Cosines and sines of the positions, (1, tokens, features) each.
        mask: Values that are added to attention scores, (tokens, tokens).
        heads: Number of attention heads.
        scale: Factor of attention scores.
        eps: Term in the root mean square of all norms.
    """
    attention, feed_forward = layer.self_attn, layer.mlp
    features = len(attention.q_proj.weight) // heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def linear(part: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return F.linear(x, part.weight, part.bias)

    def split(part: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        y = linear(part, x)
        return y.view(*y.shape[:2], -1, features).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:  # (1, heads, tokens, features)
        first, second = x.chunk(2, dim=-1)
        cosine, sine = (part.float().unsqueeze(1) for part in rotation)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    h = norm(x, layer.input_layernorm.weight)
    q, k = rotate(split(attention.q_proj, h)), rotate(split(attention.k_proj, h))
    v = split(attention.v_proj, h)
    k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
    weighted = (q @ k.transpose(-1, -2) * scale + mask).softmax(-1) @ v
    x = x + linear(attention.o_proj, weighted.transpose(1, 2).flatten(2))
    h = norm(x, layer.post_attention_layernorm.weight)
    gate, up = linear(feed_forward.gate_proj, h), linear(feed_forward.up_proj, h)
    return x + linear(feed_forward.down_proj, F.silu(gate) * up)
