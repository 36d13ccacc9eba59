"""Attention as one operator against float64, and where encoders use it."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model
from torch.nn import functional

from torchcram.runtime import ops_attention  # noqa: F401  registers the operator
from torchcram.runtime.encoders import SelfAttention
from torchcram.runtime.prepare import prepare

pytestmark = needs_kernels


def expected(query, key, value, heads, scale):
    parts = (x.double().unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(*parts, scale=scale).transpose(1, 2).flatten(2)


def attention(parts, heads, scale):
    return torch.ops.torchcram.attention(*parts, heads, scale)


@pytest.mark.parametrize("tokens", [*range(1, 20), 31, 47, 63, 64, 65, 130])
@pytest.mark.usefixtures("each_level")
def test_every_remainder_of_tokens(tokens):
    parts = [2 * torch.randn(2, tokens, 64) for _ in range(3)]
    found = attention(parts, 2, 32**-0.5)
    assert relative_error(found, expected(*parts, 2, 32**-0.5)) < 2e-6


@pytest.mark.parametrize("features", [16, 32, 48, 64, 80, 96, 128])
@pytest.mark.usefixtures("each_level")
def test_every_size_of_a_head(features):
    parts = [torch.randn(1, 70, 3 * features) for _ in range(3)]
    assert relative_error(attention(parts, 3, 0.1), expected(*parts, 3, 0.1)) < 2e-6


@pytest.mark.usefixtures("each_level")
def test_large_scores_leave_one_key():
    query, key = torch.zeros(1, 40, 16), torch.zeros(1, 40, 16)
    query[..., 0] = 1
    key[0, 7, 0], key[0, 9, 0] = 1e4, -1e4
    value = torch.randn(1, 40, 16)
    assert torch.equal(attention((query, key, value), 1, 1.0), value[:, 7:8].expand(1, 40, 16))


def test_one_sequence_is_shared_by_threads():
    parts = [torch.randn(1, 37, 16) for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = attention(parts, 1, 0.25)
    finally:
        torch.set_num_threads(before)
    assert relative_error(found, expected(*parts, 1, 0.25)) < 2e-6


def test_heads_of_other_sizes_and_strides_work_too():
    parts = [torch.randn(2, 9, 30), torch.randn(2, 30, 9).transpose(1, 2), torch.randn(2, 9, 30)]
    assert relative_error(attention(parts, 3, 0.3), expected(*parts, 3, 0.3)) < 2e-6
    assert attention([torch.randn(0, 9, 32)] * 3, 2, 1.0).shape == (0, 9, 32)


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match=r"\(2, 4, 32\).* not all of one shape"):
        attention((x, x[:, :4], x), 2, 1.0)
    with pytest.raises(ValueError, match="for 5 heads"):
        attention((x, x, x), 5, 1.0)
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        attention((x, x, x.double()), 2, 1.0)


def test_torch_knows_its_shape():
    x = torch.randn(2, 5, 32)
    torch.library.opcheck(torch.ops.torchcram.attention.default, (x, x, x, 2, 0.2))


@pytest.mark.usefixtures("sparse_wins")
def test_bert_uses_it_unless_there_is_a_mask():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
    )
    model = sparse_model(transformers.BertModel(config).eval())
    tokens = torch.randint(0, 50, (2, 9))
    fast = prepare(model, {"input_ids": tokens})
    layers = [m for m in fast.modules() if isinstance(m, SelfAttention)]
    assert len(layers) == 2
    calls = []
    for layer in layers:
        layer.original.register_forward_hook(lambda *_: calls.append(1))
    mask = torch.ones(2, 9).long()
    with torch.no_grad():
        whole = fast(tokens).last_hidden_state
        assert not calls
        assert relative_error(whole, model(tokens).last_hidden_state) < 1e-5
        mask[:, 5:] = 0
        part = fast(tokens, attention_mask=mask).last_hidden_state
        assert len(calls) == 2
        assert relative_error(part, model(tokens, attention_mask=mask).last_hidden_state) < 1e-5
