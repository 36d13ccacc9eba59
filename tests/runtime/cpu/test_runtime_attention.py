"""Attention as one operator against float64, and where encoders use it."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model
from torch.nn import functional

from torchcram.kernels.cpu import library
from torchcram.runtime.cpu.fuse import SelfAttention
from torchcram.runtime.cpu.prepare import prepare

pytestmark = needs_kernels


def expected(query, key, value, heads, scale):
    parts = (x.double().unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    query, key, value = parts
    weights = functional.softmax(query @ key.transpose(2, 3) * scale, dim=3)
    return (weights @ value).transpose(1, 2).flatten(2)


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


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 5, 13, 67])
@pytest.mark.usefixtures("each_level")
def test_sequences_and_heads_are_apart(batch, tokens):
    parts = [torch.randn(batch, tokens, 96) for _ in range(3)]
    whole = attention(parts, 3, 0.2)
    for one in range(batch):
        alone = [each[one : one + 1] for each in parts]
        assert relative_error(whole[one : one + 1], expected(*alone, 3, 0.2)) < 2e-6
        for head in range(0, 96, 32):
            single = [each[:, :, head : head + 32] for each in alone]
            assert relative_error(attention(single, 1, 0.2), expected(*single, 1, 0.2)) < 2e-6


@pytest.mark.usefixtures("each_level")
def test_inputs_of_any_strides():
    joined = torch.randn(2, 21, 3 * 32)
    query, key, value = joined.chunk(3, 2)
    key = torch.randn(2, 32, 21).transpose(1, 2)
    value = value[:1].expand(2, 21, 32)
    assert not any(each.is_contiguous() for each in (query, key, value))
    found = attention((query, key, value), 2, 0.25)
    assert relative_error(found, expected(query, key, value, 2, 0.25)) < 2e-6


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF])
@pytest.mark.parametrize("tokens", [1, 7, 16, 37, 70])
@pytest.mark.usefixtures("each_level")
def test_a_nan_goes_where_it_belongs(bits, tokens):
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for name in range(3):
        for place in {0, tokens // 2, tokens - 1}:
            parts = [torch.randn(2, tokens, 64) for _ in range(3)]
            parts[name][1, place, 3] = nan  # the first of two heads
            found = attention(parts, 2, 0.2).isnan()
            assert torch.equal(found, expected(*parts, 2, 0.2).isnan())
            assert found.any()
            if name == 0:  # a query: its own row alone
                assert int(found.sum()) == 32


def test_scales_of_either_sign():
    parts = [3 * torch.randn(1, 37, 32) for _ in range(3)]
    for scale in (-2.0, -0.2, 0.0, 1e-38, 3.0):
        assert relative_error(attention(parts, 2, scale), expected(*parts, 2, scale)) < 5e-6


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
    with pytest.raises(ValueError, match=r"must have the same shape .*\(2, 4, 32\)"):
        attention((x, x[:, :4], x), 2, 1.0)
    with pytest.raises(ValueError, match="for 5 heads"):
        attention((x, x, x), 5, 1.0)
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        attention((x, x, x.double()), 2, 1.0)


@pytest.mark.parametrize("name", [b"torchcram_attention", b"torchcram_pad"])
def test_a_library_that_has_no_such_kernel_is_refused(name, tmp_path, monkeypatch):
    older = tmp_path / "older.so"
    older.write_bytes(library.LIBRARY.read_bytes().replace(name, name[:-1] + b"X"))
    monkeypatch.setattr(library, "LIBRARY", older)
    monkeypatch.setattr(library._state, "why", "")
    assert library.find.__wrapped__() is None
    assert name.decode() in library._state.why


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


def test_the_attention_of_torch_gives_the_same_outputs():
    original = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in "qkv"})
    original.query, original.key, original.value = original["q"], original["k"], original["v"]
    x = torch.randn(3, 11, 32)
    with torch.no_grad():
        (ours, _), (theirs, _) = (
            SelfAttention(original, 2, 0.25, own_kernel=own)(x) for own in (True, False)
        )
    assert relative_error(ours, theirs.double()) < 1e-6
