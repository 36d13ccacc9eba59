"""`prepare_generation`: a language model that generates fast on the CPU.

`generate` of Transformers stays as it is. It calls the model with the whole prompt first, which
runs as before or in the kernels of `prepare`, and then with one token at a time, for which all
layers run in a single call of the kernels (`torchcram.runtime.cpu.decoder`).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import kernels
from torchcram.messages import list_names, warn_caller
from torchcram.runtime.cpu.decoder_check import find_difference
from torchcram.runtime.cpu.prepare import prepare
from torchcram.runtime.cpu.prompt_layers import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    fuse_prompt_layers_,
    linear_layers,
)
from torchcram.runtime.cpu.replace_layers import Choice
from torchcram.runtime.cpu.reports import report, with_report
from torchcram.runtime.cpu.row_matrix import (
    INT4,
    RoundedLinear,
    cache_dtype,
    has_four_bits,
    require_dtype,
)
from torchcram.runtime.marking import mark_prepared_


def prepare_generation(
    model: nn.Module, dtype: torch.dtype = torch.float32, prompt: Tensor | None = None
) -> nn.Module:
    """Returns a copy of a causal language model that generates fast on the CPU.

    Single tokens run through all layers in one call of the kernels, for up to four sequences at a
    time, and so does the head. Zeros are skipped: a weight that is not zero is read once per
    token, and every weight has a bit that says whether it is zero. Everything else runs as before,
    so that `generate` works unchanged: several sequences with padding, more than four sequences,
    and prompts, unless an example of one is given.

    Args:
        model: Causal model of Transformers of the Llama family, such as Llama, Mistral without a
            window, Qwen2 and SmolLM2, with compressed weights or without; it stays unchanged.
        dtype: Type that weights are kept in for single tokens: torch.float32; torch.bfloat16;
            torch.int8 with a scale for every output, as `int8` targets have it; or torch.int4,
            which keeps the weights of `int4` targets as they are, with a scale for every 64 or 32
            inputs, and the head in int8. Other layers of the decoder are kept in int8, too, with a
            warning. With int8 and int4, activations are rounded to 8 bits, with a scale for every
            64 of them. With every type but float32, keys and values of earlier tokens are kept in
            bfloat16.
        prompt: Example of a prompt, token numbers of the shape (sequences, tokens). Layers get
            the sparse kernels of `prepare` for prompts if that is faster with one of this size,
            and `report` tells what was done with each. It takes some seconds to measure. Norms and
            the products of gated layers get kernels, too.

    Raises:
        ValueError: If the model is of another kind; the message says what is missing. With
            torch.int4, also if no layer of the decoder has weights of at most 4 bits.
        RuntimeError: If the kernels have not been built.
    """
    require_dtype(dtype)
    _require_supported(model)
    if dtype == INT4:
        _require_four_bits(model)
    return with_single_tokens(_copy_for_prompts(model, prompt), model, dtype)


def prepare_prompts(
    model: nn.Module, prompt: Tensor | None, *, share_weights: bool = False
) -> nn.Module:
    """Returns a copy of a causal language model whose prompts run in the kernels if one is given.

    Args:
        model: Model that `prepare_generation` takes; it stays unchanged.
        prompt: Example of a prompt, as `prepare_generation` takes it; None for none.
        share_weights: Whether the copy has the dense weights of `model` itself, which saves memory;
            they must not change afterwards.

    Raises:
        ValueError: If the model is of another kind; the message says what is missing.
        RuntimeError: If the kernels have not been built.
    """
    _require_supported(model)
    return _copy_for_prompts(model, prompt, share_weights=share_weights)


def _copy_for_prompts(
    model: nn.Module, prompt: Tensor | None, *, share_weights: bool = False
) -> nn.Module:
    fast = _frozen_copy(model, share_weights=share_weights)
    if prompt is None:
        return fast  # type: ignore[no-any-return]
    choices = _prepare_prompts_(fast, prompt)
    if share_weights:
        _share_weights_(fast, model)
    return with_report(fast, choices)


def with_single_tokens(prepared: nn.Module, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a model whose single tokens run in the kernels; its prompts run as in `prepared`.

    Args:
        prepared: Model that `prepare_prompts` returned. It stays unchanged and may be given again,
            for another type.
        model: Model that it was prepared from.
        dtype: Type that weights are kept in for single tokens, as `prepare_generation` takes it.

    Raises:
        ValueError: If the type is another, or is torch.int4 and no layer of the decoder has weights
            of 4 bits.
    """
    from torchcram.runtime.cpu.decoder import FewTokens, GeneratingDecoder

    fast, source = copy.copy(prepared), cast("Any", model)
    fast._modules = dict(prepared._modules)
    if dtype == INT4:
        _require_four_bits(model)
    fast.model = GeneratingDecoder(prepared.model, source.model, dtype)
    if dtype == INT4:
        names = [f"model.{name}" for name, _ in linear_layers(source.model)]
        packed = zip(names, fast.model.packed, strict=True)
        if others := [name for name, layer in packed if layer.dtype != dtype]:
            warn_caller(
                f"{len(others)} of {len(names)} layers of the decoder have weights of more than 4 "
                f"bits and are kept in torch.int8: {list_names(others)}"
            )
    fast.lm_head = FewTokens(cast("nn.Linear", prepared.lm_head), dtype)
    mark_prepared_(fast, model)
    return fast


def _require_four_bits(model: Any) -> None:  # noqa: ANN401
    """Raises an error if no layer of a decoder has weights of 4 bits."""
    if not any(has_four_bits(layer.weight) for _, layer in linear_layers(model.model)):
        raise ValueError(
            "no layer of the decoder has symmetric weights of 4 bits, with one scale per output or "
            "per group of inputs whose size is a multiple of 32: compress the model to int4:g64, "
            "say, or use torch.int8"
        )


def _prepare_prompts_(model: Any, prompt: Tensor) -> list[Choice]:  # noqa: ANN401
    """Gives the layers of a decoder the kernels for prompts, in place; returns what was done."""
    if prompt.dim() != 2 or prompt.is_floating_point() or prompt.numel() == 0:
        raise ValueError(
            "prompt must hold token numbers of the shape (sequences, tokens), got shape "
            f"{tuple(prompt.shape)} of {prompt.dtype}"
        )
    with torch.inference_mode(False):
        example = {"input_ids": prompt.clone(), "use_cache": False}
        fast: Any = prepare(model.model, example, fuse=False)
    fast.embed_tokens = model.model.embed_tokens  # the head may have the same weight
    fuse_prompt_layers_(fast)
    model.model = fast
    return [replace(choice, name=f"model.{choice.name}") for choice in report(fast)]


def round_for_generation(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a model that computes prompts as `prepare_generation` computes single tokens.

    Weights, activations, keys and values are rounded as the kernels of this machine round them. The
    model is as slow as the given one, and is for measuring what the rounding costs: perplexity is
    measured on whole windows of text, which a prepared model runs with the weights as they are.

    Args:
        model: Model that `prepare_generation` takes; it stays unchanged, and its other weights are
            shared.
        dtype: Type that `prepare_generation` keeps weights in.

    Raises:
        ValueError: If the model is of another kind; the message says what is missing.
        RuntimeError: If the kernels have not been built.
    """
    _require_supported(model)
    if dtype == INT4:
        _require_four_bits(model)
    # the method of Transformers refuses models that were read from GGUF files
    rounded: Any = nn.Module.float(_frozen_copy(model, share_weights=True))
    layers = [(f"model.{name}", layer) for name, layer in linear_layers(rounded.model)]
    for name, layer in (*layers, ("lm_head", rounded.lm_head)):
        rounded.set_submodule(name, RoundedLinear(layer.weight, layer.bias, dtype))
    if cache_dtype(dtype) != torch.float32:
        for layer in rounded.model.layers:
            layer.self_attn.register_forward_pre_hook(_round_cached, with_kwargs=True)
    return rounded  # type: ignore[no-any-return]


class _RoundingCache:
    """Rounds keys and values to bfloat16 as the kernels do, in front of a cache if there is one."""

    def __init__(self, cache: Any) -> None:  # noqa: ANN401
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Adds rounded keys and values, and returns all; see `Cache.update` of Transformers."""
        keys, values = (part.to(torch.bfloat16).to(part.dtype) for part in (keys, values))
        if self.cache is None:
            return keys, values
        return self.cache.update(keys, values, *args, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "cache":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.cache, name)


def _round_cached(
    _attention: nn.Module,
    args: tuple[object, ...],
    options: dict[str, Any],
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Puts rounding in front of the cache of an attention layer; a hook of its forward pass."""
    cache = _RoundingCache(options.get("past_key_values"))
    return args, {**options, "past_key_values": cache}


def _require_supported(model: nn.Module) -> None:
    """Raises an error if there are no kernels, or none for the model, that says why."""
    kernels()
    reason = _obstacle(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot generate in the kernels: {reason}")


def _frozen_copy(model: nn.Module, *, share_weights: bool) -> Any:  # noqa: ANN401
    """Returns a copy in eval mode without gradients, with the same memory for weights or not."""
    memo = {}
    if share_weights:
        memo = {
            id(weight): nn.Parameter(weight.detach(), requires_grad=False)
            for weight in model.parameters()
        }
    return copy.deepcopy(model, memo).eval().requires_grad_(False)


def _share_weights_(fast: nn.Module, model: nn.Module) -> None:
    """Replaces the weights that two models have under the same names by those of the second."""
    shared = dict(model.named_parameters())
    for path, module in fast.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            other = shared.get(f"{path}.{name}".lstrip("."))
            if other is not None and torch.equal(other, weight):
                module.register_parameter(name, nn.Parameter(other.detach(), requires_grad=False))


def _obstacle(model: Any) -> str | None:  # noqa: ANN401
    """Returns why single tokens of a model cannot run in the kernels; None if they can."""
    decoder: Any = getattr(model, "model", None)
    config = getattr(model, "config", None)
    layers = getattr(decoder, "layers", None)
    if config is None or not isinstance(layers, nn.ModuleList) or not len(layers):
        return "it is not a causal model of Transformers with layers at model.layers"
    for owner, name in [(decoder, n) for n in ("embed_tokens", "norm", "rotary_emb")] + [
        (model, "lm_head")
    ]:
        if not hasattr(owner, name):
            return f"it has no {name}"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {getattr(config, 'hidden_act', None)}, not silu"
    if getattr(config, "sliding_window", None) is not None:
        return f"it attends to a window of {config.sliding_window} tokens"
    for number, layer in enumerate(layers):
        if (reason := _layer_obstacle(layer, config)) is not None:
            return f"layer {number}: {reason}"
    if not _is_rms_norm(decoder.norm):
        return f"norm is {type(decoder.norm).__name__}, not an RMSNorm"
    return _other_epsilon(decoder) or find_difference(model)


def _other_epsilon(decoder: Any) -> str | None:  # noqa: ANN401
    """Returns which norm of a decoder has another epsilon than the final one; None if none has."""
    eps = decoder.norm.variance_epsilon
    for number, layer in enumerate(decoder.layers):
        for name in NORMS:
            if (other := getattr(layer, name).variance_epsilon) != eps:
                return f"layer {number}: {name} adds {other:g} to the mean, the final norm {eps:g}"
    return None


def _layer_obstacle(layer: Any, config: Any) -> str | None:  # noqa: ANN401
    attention: Any = getattr(layer, "self_attn", None)
    feed_forward = getattr(layer, "mlp", None)
    for owner, names in ((attention, ATTENTION), (feed_forward, FEED_FORWARD)):
        for name in names:
            if not isinstance(getattr(getattr(owner, name, None), "weight", None), Tensor):
                return f"it has no {name}"
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            return f"it has {name}"
    norms = {name: child for name, child in layer.named_children() if "norm" in name}
    if norms.keys() != {*NORMS}:
        return f"its norms are {', '.join(sorted(norms))}"
    for name, norm in norms.items():
        if not _is_rms_norm(norm):
            return f"{name} is {type(norm).__name__}, not an RMSNorm"
    features = len(attention.q_proj.weight) // config.num_attention_heads
    return f"a head has {features} features, not a multiple of 16" if features % 16 else None


def _is_rms_norm(norm: nn.Module) -> bool:
    """Returns whether a norm divides by the root mean square and multiplies by its weight."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or eps is None:
        return False
    x = torch.linspace(-1, 2, weight.numel(), dtype=torch.float32, device=weight.device)
    expected = weight.detach().float() * x * torch.rsqrt(x.square().mean() + eps)
    with torch.no_grad():  # in float32, since bfloat16 may round by more than norms differ
        return bool(torch.allclose(copy.deepcopy(norm).float()(x), expected, atol=1e-2))
