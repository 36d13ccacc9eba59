"""Decoders of Transformers whose single tokens run in the kernels; needs Transformers."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.prompt_layers import ATTENTION, FEED_FORWARD, NORMS, linear_layers
from torchcram.runtime.cpu.row_matrix import (
    MOST_VECTORS,
    RowLinear,
    RowMatrixStruct,
    cache_dtype,
)

_ROOM = 256  # tokens that the memory grows by, at least


class _LayerStruct(ctypes.Structure):
    """`DecoderLayer` in packed.h."""

    _fields_ = (
        *((name, RowMatrixStruct) for name in (*ATTENTION, *FEED_FORWARD)),
        ("norm_before", ctypes.c_void_p),
        ("norm_between", ctypes.c_void_p),
    )


class _DecoderStruct(ctypes.Structure):
    """`Decoder` in packed.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "layers",
                "hidden",
                "heads",
                "memory_heads",
                "features",
                "middle",
            )
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layer", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
    )


class _StepStruct(ctypes.Structure):
    """`DecoderStep` in packed.h."""

    _fields_ = (
        ("decoder", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("past", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("bfloats", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("memory", "cosine", "sine", "input", "output")),
    )


class FewTokens(nn.Module):
    """A Linear layer that runs in the kernels for a few tokens, and as before for more.

    Args:
        layer: Layer for more tokens.
        dtype: Type of the weights for a few tokens.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.rows = RowLinear(layer.weight, layer.bias, dtype)

    @property
    def weight(self) -> Tensor:
        """Weight of the layer."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        if x.numel() <= MOST_VECTORS * x.shape[-1] and x.dtype == torch.float32:
            y: Tensor = self.rows(x)
            return y
        whole: Tensor = self.layer(x)
        return whole


class GeneratingDecoder(nn.Module):
    """A decoder whose single tokens run in the kernels; other attributes are those of `dense`.

    Args:
        dense: Decoder of Transformers, which runs prompts and everything else.
        source: Decoder with the weights for single tokens; `dense` itself, or the one that it was
            prepared from.
        dtype: Type of the weights for single tokens, as `RowLinear` takes it.
    """

    dense: Any

    def __init__(self, dense: Any, source: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
        super().__init__()
        self.dense = dense
        config, attention = source.config, source.layers[0].self_attn
        self.sizes = {
            "layers": len(source.layers),
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "memory_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
            "features": len(attention.q_proj.weight) // config.num_attention_heads,
            "middle": config.intermediate_size,
        }
        self.cache_dtype = cache_dtype(dtype)
        self.packed = nn.ModuleList(
            RowLinear(layer.weight, layer.bias, dtype) for _, layer in linear_layers(source)
        )
        self.norms: list[Tensor] = []
        for layer in source.layers:
            self.norms += [getattr(layer, name).weight.detach().float() for name in NORMS]
        self.norms.append(source.norm.weight.detach().float())
        self.eps = float(source.norm.variance_epsilon)
        self.scale = float(attention.scaling)
        self._struct: tuple[_DecoderStruct, Any] | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("dense"), name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_struct": None}  # addresses are those of this process

    def __deepcopy__(self, memo: dict[int, Any]) -> GeneratingDecoder:
        new = self.__class__.__new__(self.__class__)
        nn.Module.__init__(new)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,  # noqa: ANN401  those of Transformers
    ) -> Any:  # noqa: ANN401
        """Runs the decoder as Transformers does; single tokens run in the kernels."""
        cache = past_key_values
        if (
            input_ids is not None
            and inputs_embeds is None
            and use_cache is not False
            and not any(options.get(name) for name in ("output_attentions", "output_hidden_states"))
            and _can_continue(cache, input_ids, attention_mask, position_ids)
        ):
            return self._next_token(input_ids, cache)
        return self.dense(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )

    @torch.inference_mode()
    def _next_token(self, input_ids: Tensor, cache: Any) -> BaseModelOutputWithPast:  # noqa: ANN401
        if not isinstance(cache, KernelCache):
            cache = KernelCache(cache, self.dense.config, self.sizes, self.cache_dtype)
        x = self.dense.embed_tokens(input_ids)[:, 0].float().contiguous()
        past = cache.get_seq_length()
        positions = torch.full((1, 1), past)
        cosine, sine = self.dense.rotary_emb(x[:1, None], position_ids=positions)
        memory = cache.room_for_a_token()
        cosine, sine = cosine.float().flatten(), sine.float().flatten()
        y = torch.empty_like(x)
        step = _StepStruct(
            ctypes.addressof(self._decoder()),
            len(x),
            past,
            memory.shape[-2],
            memory.dtype == torch.bfloat16,
            *(tensor.data_ptr() for tensor in (memory, cosine, sine, x, y)),
        )
        if kernels().torchcram_decoder_step(ctypes.byref(step), torch.get_num_threads()) != 1:
            raise RuntimeError("the layers do not fit the kernels")
        cache.length = past + 1
        return BaseModelOutputWithPast(last_hidden_state=y.unsqueeze(1), past_key_values=cache)

    def _decoder(self) -> _DecoderStruct:
        """Returns the description of the layers for the kernels."""
        if self._struct is None:
            count = len(ATTENTION) + len(FEED_FORWARD)
            layers = (_LayerStruct * self.sizes["layers"])()
            for number in range(self.sizes["layers"]):
                matrices = self.packed[number * count : (number + 1) * count]
                norms = self.norms[2 * number : 2 * number + 2]
                layers[number] = _LayerStruct(
                    *(matrix.struct() for matrix in matrices if isinstance(matrix, RowLinear)),
                    *(norm.data_ptr() for norm in norms),
                )
            decoder = _DecoderStruct(
                *self.sizes.values(),
                self.eps,
                self.scale,
                ctypes.addressof(layers),
                self.norms[-1].data_ptr(),
            )
            self._struct = (decoder, layers)  # the layers must live as long
        return self._struct[0]


def _can_continue(
    cache: Cache | None,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> bool:
    """Returns whether a call adds one token to each of a few sequences without padding."""
    if cache is None or type(cache) not in (DynamicCache, KernelCache):
        return False  # such as a cache of fixed size
    sequences, tokens = input_ids.shape
    if tokens != 1 or sequences > MOST_VECTORS or input_ids.device.type != "cpu":
        return False
    past = cache.get_seq_length()
    if past < 1:
        return False
    if attention_mask is not None and (
        attention_mask.dim() != 2 or attention_mask.shape[1] != past + 1 or not attention_mask.all()
    ):
        return False
    return position_ids is None or bool((position_ids == past).all())


class KernelCache(DynamicCache):  # type: ignore[misc]  # of a package without types
    """A cache of Transformers whose keys and values lie where the kernels read them.

    Whatever else Transformers does with a cache (beams, cropping, several tokens at once) happens
    in the form of `DynamicCache`; the next single token moves everything back.

    Args:
        cache: Cache with the tokens so far; it must not be used any more.
        config: Configuration of the model.
        sizes: Numbers of layers, heads and features.
        dtype: Type of the keys and values that the kernels read, torch.float32 or torch.bfloat16.

    Attributes:
        length: Number of tokens.
    """

    def __init__(
        self,
        cache: DynamicCache,
        config: Any,  # noqa: ANN401
        sizes: dict[str, int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config=config)
        self._config, self._sizes, self._memory_dtype = config, sizes, dtype
        self._memory: Tensor | None = None  # (layers, 2, sequences, heads, capacity, features)
        self._dtype = torch.float32  # of keys and values outside of the kernels
        self.length = 0
        self.layers = cache.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens."""
        return self.length if self._memory is not None else super().get_seq_length(layer_idx)

    def room_for_a_token(self) -> Tensor:
        """Returns the memory of the kernels, with all tokens and room for another."""
        length = self.get_seq_length()
        if self._memory is None:
            first = self.layers[0].keys
            self._dtype = first.dtype
            memory = self._allocate(len(first), length)
            for number, layer in enumerate(self.layers):
                memory[number, 0, ..., :length, :] = layer.keys
                memory[number, 1, ..., :length, :] = layer.values
            self.layers = DynamicCache(config=self._config).layers
            self._memory, self.length = memory, length
        elif length == self._memory.shape[-2]:
            memory = self._allocate(self._memory.shape[2], length)
            memory[..., :length, :] = self._memory
            self._memory = memory
        return self._memory

    def _allocate(self, sequences: int, length: int) -> Tensor:
        sizes = self._sizes
        capacity = length + max(_ROOM, length // 2)
        shape = (sizes["layers"], 2, sequences, sizes["memory_heads"], capacity, sizes["features"])
        return torch.empty(shape, dtype=self._memory_dtype)

    def _as_layers(self) -> None:
        """Moves all tokens to the layers of `DynamicCache`."""
        if self._memory is None:
            return
        memory, self._memory = self._memory[..., : self.length, :], None
        for number, (keys, values) in enumerate(memory):
            keys, values = (part.to(self._dtype, copy=True) for part in (keys, values))
            super().update(keys, values, number)

    def update(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Adds tokens; see `DynamicCache.update`."""
        self._as_layers()
        return super().update(*args, **options)

    def get_mask_sizes(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Returns the sizes of the mask; see `Cache.get_mask_sizes`."""
        self._as_layers()
        return super().get_mask_sizes(*args, **options)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders sequences; see `Cache.reorder_cache`."""
        if self._memory is not None:
            self._memory = self._memory.index_select(2, beam_idx)
        else:
            super().reorder_cache(beam_idx)

    def crop(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        """Drops tokens at the end; see `Cache.crop`."""
        self._as_layers()
        super().crop(*args, **options)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats sequences; see `Cache.batch_repeat_interleave`."""
        self._as_layers()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects sequences; see `Cache.batch_select_indices`."""
        self._as_layers()
        super().batch_select_indices(indices)
