"""Where the inputs and outputs of every kind of layer are, and what operators make of it."""

import copy
import inspect

import pytest
import torch
from nets import (
    OPERATORS,
    RULES,
    Experts,
    SequenceNet,
    closure_for,
    images,
    same,
    snapshot,
)
from torch import nn
from torch.optim import SGD, AdamW

from torchcram import (
    NM,
    CrAM,
    GlobalTopK,
    Quantize,
    RowTopK,
    UniformTopK,
    compress,
    compress_,
    compressible_weights,
    hold_masks,
    masks_of,
    sparsity,
)
from torchcram.layers import Layout, count_inputs, reduction_last
from torchcram.selection import count_kept

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,  # so that shapes do not tell the inputs of the second matrix
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "DeepseekV3": DEEPSEEK,
    "GraniteMoe": {"num_local_experts": 4},
    "JetMoe": {"num_local_experts": 4, "kv_channels": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_theta": 1e4}},
    "Llama4": {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 16},
}
TRANSPOSED = ("GptOss", "Llama4")


def mixture(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    if not hasattr(transformers, config):
        pytest.skip(f"this version of transformers has no {name}")
    make = getattr(transformers, config)
    sizes = dict(SIZES)
    if name == "JetMoe":
        del sizes["num_attention_heads"]
    model = getattr(transformers, f"{name}ForCausalLM")(make(**sizes, **MIXTURES[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def calls_of(model, module):
    """The arguments that a module of the model is called with, and what it returns for others."""
    kept = []
    with torch.no_grad():
        hook = module.register_forward_pre_hook(
            lambda _, args, named: kept.append((args, named)), with_kwargs=True
        )
        model(torch.arange(8).unsqueeze(0))
        hook.remove()
    bound = inspect.signature(type(module).forward).bind(module, *kept[0][0], **kept[0][1])
    _, first, *others = bound.arguments.values()

    def call(inputs):
        with torch.no_grad():
            return module(inputs, *others)

    return first.clone(), call


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_sum_over_the_inputs(name):
    model = mixture(name)
    weights = compressible_weights(model)
    fused = [name for name, layout in weights.layouts.items() if layout.stacked]
    assert len(fused) == (4 if name == "JetMoe" else 2)  # which has experts in its attention, too
    for key in fused:
        path = key.rpartition(".")[0]
        module = model.get_submodule(path)
        for bias in (p for n, p in module.named_parameters() if "bias" in n):
            bias.data.zero_()
        inputs, call = calls_of(model, module)
        assert weights.layouts[key].layers == 4
        assert weights.layouts[key].transposed == (name in TRANSPOSED)
        view = reduction_last(weights, key).detach()  # (experts, outputs, inputs)
        assert view.shape[2] == count_inputs(weights, key)
        before = view.clone()
        if not key.endswith("down_proj"):  # without its weights an input has no influence
            view[:, :, 3] = 0
            changed = inputs.index_fill(-1, torch.tensor([3]), 7.0)
            assert torch.equal(call(changed), call(inputs))
            view.copy_(before)
            assert not torch.equal(call(changed), call(inputs))
        if not key.endswith("gate_up_proj"):  # without its weights an output is zero
            assert call(inputs)[..., 5].any()
            view[:, 5] = 0
            assert not call(inputs)[..., 5].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_tell_the_inputs_where_no_attribute_does(transposed):
    experts = Experts(3, 8, 8, transposed=transposed)
    del experts.is_transposed
    model = nn.ModuleDict({"experts": experts})
    assert compressible_weights(model).layouts == {
        f"experts.{name}": Layout(transposed=transposed, layers=3, stacked=True)
        for name in ("gate_up_proj", "down_proj")
    }


def test_only_matrices_of_experts_are_weights():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(3, 8, 4))
            self.w1_bias = nn.Parameter(torch.randn(3, 8, 1))
            self.w1_scale = nn.Parameter(torch.randn(3, 8, 1))
            self.w2 = nn.Parameter(torch.randn(3, 4))
            self.inner = nn.Linear(4, 4)

    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Module()]), "mixture": Experts()})
    model["experts"][0].kernel = nn.Parameter(torch.randn(2, 2, 2))  # of one expert
    names = compressible_weights(model, only=".")
    assert list(names) == ["mixture.w1", "mixture.inner.weight"]
    assert names.layouts == {"mixture.w1": Layout(layers=3, stacked=True)}


# what an output sums over, of every weight of the net: a matrix per layer, (outputs, inputs)
MATRICES = {
    "rnn.weight_ih_l0": lambda w: [w],
    "rnn.weight_hh_l0": lambda w: [w],
    "attention.in_proj_weight": lambda w: w.split(8),
    "attention.out_proj.weight": lambda w: [w],
    "conv.weight": lambda w: [w.T],
    "experts.gate_up_proj": lambda w: w.unbind(),
    "experts.down_proj": lambda w: w.unbind(),
    "turned.experts.gate_up_proj": lambda w: w.mT.unbind(),
    "turned.experts.down_proj": lambda w: w.mT.unbind(),
    "fc.weight": lambda w: [w],
}


def matrices(weights):
    assert weights.keys() == MATRICES.keys()
    return [
        (part, name) for name, weight in weights.items() for part in MATRICES[name](weight.detach())
    ]


def compressed(operator):
    model = SequenceNet()
    twin = compress(model, operator)
    pairs = zip(
        matrices(compressible_weights(model)), matrices(compressible_weights(twin)), strict=True
    )
    return [(before, after, name) for (before, name), (after, _) in pairs]


def test_uniform_sparsity_is_that_of_every_layer():
    layers = compressed(UniformTopK(0.7))
    assert len(layers) == 2 + 3 + 2 + 4 * 3 + 1
    for before, after, name in layers:
        kept = count_kept(before.numel(), 0.7)
        assert int(after.count_nonzero()) == kept, name
        least = before.abs().flatten().sort(descending=True).values[kept - 1]
        assert torch.equal(after, before.where(before.abs() >= least, 0)), name


def test_global_sparsity_is_that_of_all_together():
    model = SequenceNet()
    total = sum(weight.numel() for weight in compressible_weights(model).values())
    kept = sum(int(after.count_nonzero()) for _, after, _ in compressed(GlobalTopK(0.8)))
    assert kept == count_kept(total, 0.8)
    assert total > 0.95 * sum(p.numel() for p in model.parameters() if p.dim() > 1)


def test_patterns_and_rows_run_along_the_inputs():
    for _, after, name in compressed(NM(2, 4)):
        assert after.unflatten(1, (-1, 4)).count_nonzero(-1).eq(2).all(), name
    for before, after, name in compressed(RowTopK(0.5)):
        assert after.count_nonzero(1).eq(before.shape[1] // 2).all(), name


@pytest.mark.parametrize("size", [None, 4])
def test_scales_are_those_of_outputs_of_each_layer(size):
    for before, after, name in compressed(Quantize(3, size)):
        rows = before if size is None else before.unflatten(1, (-1, size))
        scale = rows.abs().amax(-1, keepdim=True) / torch.full((1,), 3.0)
        assert torch.equal((rows / scale).round().mul(scale).view(before.shape), after), name


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_with_what_was_compressed(kind):
    model = kind(6, 8, num_layers=2, bidirectional=True)
    assert len(compressible_weights(model)) == 8
    x = torch.randn(3, 2, 6)
    dense = model(x)[0]
    twin = compress(model, "uniform:0.9")
    assert torch.equal(model(x)[0], dense)
    by_hand = kind(6, 8, num_layers=2, bidirectional=True)
    by_hand.load_state_dict(twin.state_dict())
    assert torch.equal(twin(x)[0], by_hand(x)[0])
    assert not torch.allclose(twin(x)[0], dense)
    assert torch.equal(copy.deepcopy(twin)(x)[0], twin(x)[0])
    compress_(model, "uniform:0.9")
    assert torch.equal(model(x)[0], twin(x)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_a_gpu_compute_with_what_was_compressed(kind):
    model = kind(6, 8, num_layers=2, bidirectional=True).cuda()  # one buffer holds all weights
    x = torch.randn(3, 2, 6, device="cuda")
    twin = compress(model, "uniform:0.9")
    expected = copy.deepcopy(twin).cpu()(x.cpu())[0]
    compress_(model, "uniform:0.9")
    for net in (model, twin):
        torch.testing.assert_close(net(x)[0].cpu(), expected, rtol=1e-3, atol=1e-3)


def test_a_net_of_all_kinds_computes_with_what_was_compressed():
    model, (x, _) = SequenceNet(), images()
    for name in compressible_weights(model):
        twin = compress(model, "uniform:0.9", weights={name: model.get_parameter(name)})
        assert sparsity({name: twin.get_parameter(name)}) == pytest.approx(0.9, abs=0.02)
        assert not torch.allclose(twin(x), model(x), atol=1e-5), name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_step_without_learning_rate_moves_nothing(rule, operator):
    model, batch = SequenceNet(), images()
    before = snapshot(model)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), operator, rule=rule, rho=0.3)
    optimizer.step(closure_for(model, optimizer, batch))
    assert same(snapshot(model), before)


def test_training_goes_on_where_it_was_saved():
    def trained(steps, state=None):
        torch.manual_seed(0)
        model = SequenceNet()
        base = AdamW(model.parameters(), lr=0.01)
        optimizer = CrAM(model, base, ["uniform:0.7", "nm:2:4", "int4"], mask_interval=3)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for batch in steps:
            optimizer.step(closure_for(model, optimizer, batch))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    batches = [images() for _ in range(8)]
    whole = trained(batches)
    in_two = trained(batches[5:], trained(batches[:5]))
    assert same(whole[0], in_two[0])


def test_masks_are_held():
    model = SequenceNet()
    weights = compressible_weights(model)
    masks = compress_(model, "uniform:0.8")
    optimizer = AdamW(model.parameters(), lr=0.05)
    hold_masks(optimizer, weights, masks)
    for _ in range(3):
        closure_for(model, optimizer, images())()
        optimizer.step()
    assert all(not weights[name][~mask].any() for name, mask in masks.items())
    assert masks_of(weights).keys() == masks.keys()
