"""Text generated one token at a time in the kernels is that of Transformers."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import compress_
from torchcram.kernels.cpu.library import LEVELS, level, use_level
from torchcram.runtime import available, prepare, prepare_generation, report
from torchcram.runtime.cpu.generation import (
    prepare_prompts,
    round_for_generation,
    with_single_tokens,
)
from torchcram.runtime.cpu.modules import SparseLinear
from torchcram.runtime.cpu.row_matrix import RoundedLinear, RowLinear

pytestmark = pytest.mark.skipif(not available(), reason="the kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 3e-2}


@pytest.fixture(params=LEVELS)
def _each_level(request):
    before = level()
    try:
        use_level(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield
    use_level(before)


def matrix(rows, inner, sparsity, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, inner, generator=generator)
    return weight.masked_fill_(torch.rand(rows, inner, generator=generator) < sparsity, 0)


@pytest.mark.usefixtures("_each_level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 200),
    count=st.integers(1, 9),
    sparsity=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 100),
)
def test_products_are_those_of_a_linear_layer(dtype, rows, inner, count, sparsity, biased, seed):
    weight, x = matrix(rows, inner, sparsity, seed), matrix(count, inner, 0.0, seed + 1)
    bias = matrix(1, rows, 0.0, seed + 2)[0] if biased else None
    expected = nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    y = RowLinear(weight, bias, dtype)(x).double()
    lengths = weight.double().norm(dim=1) * x.double().norm(dim=1, keepdim=True)
    assert ((y - expected).abs() <= TOLERANCES[dtype] * lengths + 1e-6).all()


def test_int8_keeps_weights_that_are_rounded_already():
    layer = nn.Linear(128, 40, bias=False)
    compress_(layer, "uniform:0.5+int8")
    x = torch.eye(128)[:4]  # rounding the activations loses nothing
    torch.testing.assert_close(RowLinear(layer.weight, None, torch.int8)(x), layer(x))


@pytest.mark.usefixtures("_each_level")
@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 200),
    count=st.integers(1, 5),
    target=st.sampled_from(["int4:g32", "int4:g64", "int4:g128", "int4", "int3", "int2:g64"]),
    sparsity=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
@pytest.mark.filterwarnings("ignore:int.*takes one scale")
def test_weights_of_4_bits_are_kept_as_they_are(rows, inner, count, target, sparsity, dtype, seed):
    layer = nn.Linear(inner, rows)
    with torch.no_grad():
        layer.weight.copy_(matrix(rows, inner, sparsity, seed))
        compress_(layer, target)
        weight = layer.weight.to(dtype)
    packed = RowLinear(weight, layer.bias, torch.int4)
    rounded = RoundedLinear(weight, layer.bias, torch.int4)
    assert packed.dtype == rounded.dtype == torch.int4
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert (rounded.weight - weight).abs().max() <= tolerance * weight.abs().max()
    assert torch.equal(rounded.weight != 0, weight != 0)
    x = matrix(count, inner, 0.0, seed + 1)
    torch.testing.assert_close(packed(x), rounded(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_each_level")
@given(st.integers(1, 20), st.integers(1, 5), st.booleans(), st.integers(0, 100))
def test_integers_from_minus_8_to_7_are_kept_as_they_are(rows, count, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (rows, 4, 32), generator=generator)
    integers[..., 0] = -8  # as in blocks of Q4_0 files, where scales may be negative
    if masked:
        integers[..., 1::2] = 0
    scales = torch.randn(rows, 4, 1, generator=generator)
    weight = (integers * scales).flatten(1)
    packed = RowLinear(weight, None, torch.int4)
    rounded = RoundedLinear(weight, None, torch.int4)
    assert packed.dtype == torch.int4
    torch.testing.assert_close(rounded.weight, weight)
    x = matrix(count, 128, 0.0, seed + 1)
    torch.testing.assert_close(packed(x), rounded(x), rtol=1e-4, atol=1e-4)


def test_the_integer_8_does_not_have_4_bits():
    weight = torch.tensor([-8.0, 8.0, 7.0, 5.0]).expand(3, 4)
    assert RowLinear(weight, None, torch.int4).dtype == torch.int8


@pytest.mark.parametrize("target", ["int5", "int4:g16", "uniform:0.5"])
def test_weights_of_more_than_4_bits_are_kept_in_8(target):
    layer = nn.Linear(128, 40)
    compress_(layer, target)
    packed = RowLinear(layer.weight, layer.bias, torch.int4)
    assert packed.dtype == torch.int8
    x = matrix(3, 128, 0.0, 0)
    assert torch.equal(packed(x), RowLinear(layer.weight, layer.bias, torch.int8)(x))


def test_4_bits_take_half_the_room_of_8():
    layer = nn.Linear(512, 100, bias=False)
    for target, least, most in (
        ("int4:g64", 0.54, 0.58),  # of what 8 bits take; 4 bits and a scale for every 64 weights
        ("int4:g32", 0.60, 0.65),  # or for every 32
        ("uniform:0.5+int4:g64", 0.68, 0.74),  # the masks are the same
    ):
        compress_(layer, target)
        small, large = (RowLinear(layer.weight, None, each) for each in (torch.int4, torch.int8))
        assert least < small.nbytes / large.nbytes < most


@pytest.mark.parametrize(("sparsity", "masked"), [(0.0, False), (0.1, False), (0.5, True)])
def test_masks_are_kept_where_they_save_room(sparsity, masked):
    layer = RowLinear(matrix(64, 256, sparsity, 0), None, torch.int8)
    assert (layer.masks is not None) == masked
    assert layer.nbytes < 64 * 256 + 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_not_hidden(value):
    x = torch.zeros(1, 128)
    x[0, 70] = value
    for dtype in DTYPES:
        y = RowLinear(matrix(8, 128, 0.0, 0), None, dtype)(x)
        assert not torch.isfinite(y).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), None, torch.float16), "dtype must be one of"),
        ((torch.full((2, 3), torch.nan), None, torch.float32), "NaN or infinite"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RowLinear(*arguments)


@pytest.mark.parametrize("x", [torch.ones(1, 4), torch.ones(1, 3, dtype=torch.float64)], ids=str)
def test_inputs_that_do_not_fit_are_refused(x):
    with pytest.raises(ValueError, match="x must be float32 on the CPU with 3 inputs"):
        RowLinear(torch.ones(2, 3), None, torch.float32)(x)


SIZES = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def language_model(name="Llama", **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that tokens and positions matter
            parameter.mul_(3 if parameter.dim() > 1 else 1).add_(0.1 if parameter.dim() == 1 else 0)
    return model


def prompt(sequences=1, tokens=7):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, 61, (sequences, tokens), generator=generator)


def generated(model, ids, tokens=20, **options):
    options = {"do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)


@pytest.mark.usefixtures("_each_level")
def test_the_text_is_the_same_with_every_instruction_set():
    model = language_model()
    assert torch.equal(generated(prepare_generation(model), prompt()), generated(model, prompt()))


FAMILIES = [
    ("Llama", {}),
    ("Llama", {"head_dim": 32, "num_key_value_heads": 6, "attention_bias": True}),
    ("Llama", {"num_key_value_heads": 1}),
    ("Qwen2", {}),
    ("Mistral", {"sliding_window": None}),
    ("Granite", {"attention_multiplier": 0.1, "logits_scaling": 2.0}),
]


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"num_return_sequences": 2, "num_beams": 2},
    ],
    ids=str,
)
def test_generate_works_unchanged(name, options, how):
    model = language_model(name, **options)
    texts = []
    for each in (model, prepare_generation(model)):
        torch.manual_seed(1)
        texts.append(generated(each, prompt(), **how))
    assert torch.equal(*texts)


@pytest.mark.parametrize("sequences", [2, 4, 5])
def test_several_sequences(sequences):
    model = language_model()
    ids = prompt(sequences)
    assert torch.equal(generated(prepare_generation(model), ids), generated(model, ids))


def test_padding_on_the_left_runs_as_before():
    model = language_model()
    ids, mask = prompt(2), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    fast = prepare_generation(model)
    expected = generated(model, ids, attention_mask=mask)
    assert torch.equal(generated(fast, ids, attention_mask=mask), expected)


def test_the_memory_grows_with_the_text():
    model = language_model()
    assert torch.equal(
        generated(prepare_generation(model), prompt(), 300), generated(model, prompt(), 300)
    )


@torch.no_grad()
def logits_of(model, parts):
    """Returns the logits of all tokens, given part by part with one cache."""
    cache, logits = None, []
    for part in parts:
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.usefixtures("_each_level")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"head_dim": 48}, {"num_key_value_heads": 1}], ids=str)
def test_attention_to_many_tokens_is_split_into_parts(options, threads):
    model, ids = language_model(**options), prompt(2, 303)
    expected, _ = logits_of(model, [ids])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
            parts = ids.split([300, 1, 1, 1], dim=1)
            logits, _ = logits_of(prepare_generation(model, dtype), parts)
            assert (logits - expected).abs().max() < close * expected.abs().max()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_prompts_and_single_tokens_may_follow_each_other(dtype, close):
    model, ids = language_model(), prompt(2, 20)
    fast = prepare_generation(model, dtype)
    expected, _ = logits_of(model, [ids])
    parts = ids.split([5, 1, 1, 4, 1, 1, 1, 6], dim=1)
    logits, cache = logits_of(fast, parts)
    torch.testing.assert_close(logits, expected, rtol=close, atol=close)
    cache.crop(-14)
    assert cache.get_seq_length() == 6
    with torch.no_grad():
        output = fast(ids[:, 6:7], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(output.logits, expected[:, 6:7], rtol=close, atol=close)


@pytest.mark.usefixtures("sparse_wins")
def test_prompts_run_in_the_sparse_kernels_where_an_example_is_given():
    model = language_model(tie_word_embeddings=True)
    compress_(model, "uniform:0.7")
    fast = prepare_generation(model, prompt=prompt(1, 32))
    choices = report(fast)
    assert len(choices) == 14
    assert all(choice.sparse for choice in choices)
    assert choices[0].name == "model.layers.0.self_attn.q_proj"
    assert isinstance(fast.model.dense.layers[0].self_attn.q_proj, SparseLinear)
    assert fast.model.dense.embed_tokens.weight is fast.lm_head.weight
    assert torch.equal(generated(fast, prompt(1, 32)), generated(model, prompt(1, 32)))
    assert torch.equal(generated(copy.deepcopy(fast), prompt(2)), generated(model, prompt(2)))


def test_without_a_prompt_there_is_nothing_to_report():
    with pytest.raises(ValueError, match=r"does not come from torchcram\.runtime\.prepare"):
        report(prepare_generation(language_model()))


@pytest.mark.parametrize(
    "example", [torch.ones(3).long(), torch.ones(1, 3), torch.ones(1, 0).int()]
)
def test_a_prompt_that_is_none_is_refused(example):
    with pytest.raises(ValueError, match="prompt must hold token numbers"):
        prepare_generation(language_model(), prompt=example)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_fewer_bits_change_the_scores_little(dtype):
    model, ids = language_model(), prompt(1, 12)
    compress_(model, "uniform:0.5+int8", weights=None)
    expected, _ = logits_of(model, [ids])
    logits, _ = logits_of(prepare_generation(model, dtype), ids.split([4] + [1] * 8, dim=1))
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("target", ["int4:g32", "nm:2:4+int4:g64", "uniform:0.7+int4"])
@pytest.mark.filterwarnings("ignore:int4.*takes one scale")
def test_models_of_4_bits_are_kept_as_they_are(target):
    model = language_model()
    compress_(model.model, target)
    fast = prepare_generation(model, torch.int4)
    kinds = {name: part.dtype for name, part in fast.named_modules() if isinstance(part, RowLinear)}
    assert kinds.pop("lm_head.rows") == torch.int8
    assert set(kinds.values()) == {torch.int4}


@pytest.mark.parametrize("target", [None, "uniform:0.5", "int8", "int4:g16"])
def test_models_without_weights_of_4_bits_are_not_prepared_for_them(target):
    model = language_model()
    if target:
        compress_(model.model, target)
    for refuse in (prepare_generation, round_for_generation):
        with pytest.raises(ValueError, match="no layer of the decoder has symmetric weights of 4"):
            refuse(model, torch.int4)


@pytest.mark.filterwarnings("ignore:int4 takes one scale")
def test_layers_without_weights_of_4_bits_are_named():
    model = language_model()
    compress_(model.model.layers[0].mlp, "int4")
    message = r"11 of 14 layers .* in torch\.int8: model\.layers\.0\.self_attn\.q_proj, .* and 3"
    with pytest.warns(UserWarning, match=message):
        fast = prepare_generation(model, torch.int4)
    assert [layer.dtype == torch.int4 for layer in fast.model.packed].count(True) == 3


def test_small_scales_of_float16_do_not_hide_4_bits():
    weight = torch.randint(-7, 8, (64, 128)).float() * 0.01
    weight[3, :64] = torch.randint(-7, 8, (64,)).float() * 3.3e-6  # below the normal numbers
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert RowLinear(weight.to(dtype), None, torch.int4).dtype == torch.int4


@pytest.mark.parametrize("dtype", ["int4", torch.float16, None])
def test_other_types_are_refused_before_anything_is_measured(dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got"):
        prepare_generation(language_model(), dtype, prompt=torch.ones(1, 0).int())


def test_copies_and_pickles_generate_the_same():
    fast = prepare_generation(language_model())
    expected = generated(fast, prompt())
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fast), torch.load(buffer, weights_only=False)):
        assert torch.equal(generated(other, prompt()), expected)


@pytest.mark.filterwarnings("ignore")  # of Transformers, about names of files
def test_a_prepared_model_is_not_saved_as_another_one(tmp_path):
    model = language_model()
    compress_(model, "uniform:0.9")
    example = {"input_ids": prompt(1, 32)}
    for fast in (prepare_generation(model), prepare(model), prepare(model, example)):
        if fast.state_dict().keys() == model.state_dict().keys():
            continue  # all layers stay dense
        with pytest.raises(RuntimeError, match="Save the model that it was prepared from"):
            fast.save_pretrained(tmp_path / "prepared")
        with pytest.raises(RuntimeError, match="Save the model that it was prepared from"):
            copy.deepcopy(fast).save_pretrained(tmp_path / "prepared")
        assert not (tmp_path / "prepared").exists()
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").exists()


def test_the_model_itself_stays_unchanged():
    model = language_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepare_generation(model, torch.int8)
    assert type(model.model).__name__ == "LlamaModel"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("GPTNeoX", {}, "not a causal model of Transformers with layers at model.layers"),
        ("Mistral", {"sliding_window": 16}, "attends to a window of 16 tokens"),
        ("Llama", {"hidden_act": "gelu"}, "activation is gelu, not silu"),
        ("Llama", {"head_dim": 8}, "layer 0: a head has 8 features, not a multiple of 16"),
        ("Qwen3", {}, "layer 0: it has q_norm"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "layer 1: it does not compute what .* of Llama"),
        ("HunYuanDenseV1", {"head_dim": 16}, "layer 0: it does not compute what .* of Llama"),
        ("Ernie4_5", {}, "layer 0: it does not compute what .* of Llama"),
        ("Helium", {"head_dim": 16}, "layer 0: it does not compute what .* of Llama"),
        ("BitNet", {"hidden_act": "silu"}, "layer 0: it does not compute what .* of Llama"),
        ("DiffLlama", {}, "layer 0: it does not compute what .* of Llama"),
        ("Granite", {"residual_multiplier": 0.2}, "layer 0: it does not compute what .* of Llama"),
        ("Granite", {"embedding_multiplier": 12.0}, "does not give embeddings to its layers as"),
    ],
)
def test_other_decoders_are_refused_with_the_reason(name, options, message):
    with pytest.raises(ValueError, match=f"{name}ForCausalLM cannot generate.*{message}"):
        prepare_generation(language_model(name, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_generate_what_they_generate_in_float32(dtype):
    model = language_model().to(dtype).train()
    ids = prompt(tokens=18)
    parts = ids.split([4, 1, 1, 1, 3, 1, 1, 6], dim=1)
    logits, _ = logits_of(prepare_generation(model), parts)
    assert model.training
    expected, _ = logits_of(copy.deepcopy(model).float().eval(), [ids])
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert generated(prepare_generation(model, torch.int8), ids[:, :5]).shape == (1, 25)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotations_generate_the_same(rope):
    model = language_model(rope_parameters={"rope_theta": 10000.0, **rope})
    assert torch.equal(generated(prepare_generation(model), prompt()), generated(model, prompt()))


def test_a_final_norm_of_another_kind_is_refused():
    model = language_model()
    model.model.norm = nn.LayerNorm(96)
    with pytest.raises(ValueError, match="norm is LayerNorm, not an RMSNorm"):
        prepare_generation(model)


def test_norms_with_another_epsilon_are_refused():
    model = language_model()
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-4
    with pytest.raises(ValueError, match=r"layer 1: input_layernorm adds 0\.0001 to"):
        prepare_generation(model)


def test_layers_that_add_nothing_are_allowed():
    model = language_model()
    with torch.no_grad():
        for part in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            part.weight.zero_()
    assert torch.equal(generated(prepare_generation(model), prompt()), generated(model, prompt()))


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="Linear cannot generate in the kernels"):
        prepare_generation(nn.Linear(4, 4))


def test_shared_weights_are_those_of_the_model():
    model = language_model()
    compress_(model, "uniform:0.5", weights=None)

    def address(other):
        return other.model.layers[0].mlp.up_proj.weight.data_ptr()

    assert address(prepare_prompts(model, None)) != address(model)
    for example in (None, prompt()):
        shared = prepare_prompts(model, example, share_weights=True)
        assert shared.model.embed_tokens.weight.data_ptr() == (
            model.model.embed_tokens.weight.data_ptr()
        )
        for layer in shared.modules():
            if isinstance(layer, nn.Linear):
                assert layer.weight.data_ptr() in {w.data_ptr() for w in model.parameters()}
        assert not any(weight.requires_grad for weight in shared.parameters())
        expected = generated(model, prompt())
        for dtype in (torch.float32, torch.int8, torch.float32):
            fast = with_single_tokens(shared, model, dtype)
            assert dtype == torch.int8 or torch.equal(generated(fast, prompt()), expected)
        assert not any(isinstance(layer, RowLinear) for layer in shared.modules())
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.usefixtures("_each_level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(
    rows=st.integers(1, 40),
    inner=st.integers(1, 200),
    sparsity=st.sampled_from([0.0, 0.7, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 100),
)
def test_torch_computes_what_the_kernels_round(dtype, rows, inner, sparsity, biased, seed):
    weight, x = matrix(rows, inner, sparsity, seed), matrix(3, inner, 0.0, seed + 1)
    bias = matrix(1, rows, 0.0, seed + 2)[0] if biased else None
    y = RoundedLinear(weight, bias, dtype)(x)
    lengths = weight.norm(dim=1) * x.norm(dim=1, keepdim=True)
    error = (RowLinear(weight, bias, dtype)(x) - y).abs()
    assert (error <= 1e-5 * lengths + 1e-5).all()


@pytest.mark.usefixtures("_each_level")
@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.bfloat16, None),
        (torch.int8, None),
        (torch.int4, "int4:g32"),
        (torch.int4, "nm:2:4+int4"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:int4.*takes one scale")
def test_rounded_prompts_have_the_scores_of_single_tokens(dtype, target):
    model, ids = language_model(), prompt(2, 12)
    if target:
        compress_(model.model, target)
    fast, rounded = prepare_generation(model, dtype), round_for_generation(model, dtype)
    expected, _ = logits_of(rounded, [ids])
    with torch.no_grad():
        cache = rounded(ids[:, :1], use_cache=True).past_key_values
        scores = []
        for token in ids[:, 1:].split(1, dim=1):
            output = fast(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            scores.append(output.logits)
    apart = (torch.cat(scores, dim=1) - expected[:, 1:]).abs()
    assert apart.median() < 1e-3
    assert apart.max() < 0.05  # an activation between two integers may be rounded to either
    exact, _ = logits_of(model, [ids])
    assert (exact - expected).abs().max() > 5e-3  # rounding is seen
    half, _ = logits_of(round_for_generation(copy.deepcopy(model).bfloat16(), dtype), [ids])
    assert half.dtype == torch.float32
    assert (half - expected).abs().max() < 0.2 * expected.abs().max()
