"""Inputs behind pruned layers: blocks run by themselves give what the whole model gives."""

import copy
from functools import partial

import pytest
import torch
from nets import mlp
from torch import nn

from torchcram import compressible_weights
from torchcram.layers import some_of
from torchcram.pruners import Calibration, prune_, sparsegpt
from torchcram.pruners.activations import products
from torchcram.pruners.propagation import _groups, products_in_order

WIDTH = 16


class Block(nn.Module):
    """Two layers with one input, a third behind them, and a residual."""

    def __init__(self, *, inplace=False, returns=lambda x: x):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.inplace, self.returns = inplace, returns

    def forward(self, x, scale=1.0):
        added = self.c(torch.tanh(self.a(x)) * self.b(x)) * scale
        return self.returns(x.add_(added) if self.inplace else x + added)


class Stack(nn.Module):
    """A first layer, blocks, and a head."""

    def __init__(self, blocks):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)

    def call(self, block, x):
        return block(x)


class NamedBlock(Block):
    def forward(self, hidden_states, scale):
        return super().forward(hidden_states, scale)


class ByName(Stack):
    """Blocks as Transformers calls them."""

    def call(self, block, x):
        return block(hidden_states=x, scale=torch.full((), 0.5))


class Skipping(Stack):
    """Every block also gets what the first one returned: no chain."""

    def forward(self, x):
        x = before = self.first(x)
        for block in self.blocks:
            x = block(x, scale=before)
            before = x if block is self.blocks[0] else before
        return self.head(x)


class Reversed(Stack):
    """Blocks run from the last to the first."""

    def forward(self, x):
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Inside(Stack):
    """The parts of the blocks run, never the blocks: no chain."""

    def call(self, block, x):
        return x + block.c(torch.tanh(block.a(x)) * block.b(x))


class PreparedBlock(Block):
    prepared = None

    def forward(self, x):
        return super().forward(x, self.prepared.mean())


class Prepared(Stack):
    """Blocks read what the model prepares for every batch: they cannot run by themselves."""

    def forward(self, x):
        for block in self.blocks:
            block.prepared = x
        outputs = super().forward(x)
        for block in self.blocks:
            block.prepared = None
        return outputs


class Memory(list):
    """What blocks remember, as the caches of keys and values do."""


class CachedBlock(Block):
    def forward(self, x, memory):
        memory.append(x)
        return super().forward(x, 1.0 / len(memory))


class Cached(Stack):
    """Blocks get an object that remembers earlier calls: no chain."""

    def forward(self, x):
        self.memory = Memory()
        outputs = super().forward(x)
        del self.memory
        return outputs

    def call(self, block, x):
        return block(x, self.memory)


def blocks(count=3, kind=Block, **options):
    return [kind(**options) for _ in range(count)]


def tied():
    model = Stack(blocks())
    model.blocks[2].a = model.blocks[0].a
    return model


def repeated():
    block = Block()
    return Stack([block, Block(), block])


def convolutions():
    parts = [
        (nn.Conv2d(n, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)) for n in (3, 6, 6)
    ]
    return nn.Sequential(*(layer for part in parts for layer in part))


# model, and whether blocks run by themselves
MODELS = {
    "mlp": (mlp, True),
    "blocks": (lambda: Stack(blocks()), True),
    "tuples": (lambda: Stack(blocks(returns=lambda x: (x, x.mean()))), True),
    "by name": (lambda: ByName(blocks(kind=NamedBlock)), True),
    "convolutions": (convolutions, True),
    "tied": (tied, True),  # the layer that two blocks share takes passes over the model
    "skipping": (lambda: Skipping(blocks()), False),
    "reversed": (lambda: Reversed(blocks()), True),  # every block is a chain of its own
    "inside": (lambda: Inside(blocks()), False),
    "prepared": (lambda: Prepared(blocks(kind=PreparedBlock)), False),
    "cached": (lambda: Cached(blocks(kind=CachedBlock)), False),
    "in place": (lambda: Stack(blocks(inplace=True)), False),
    "repeated": (repeated, False),
}


def by_whole_passes(calibration, weights):
    """What `products_in_order` yields, from passes over the whole model for each layer alone."""
    for group in _groups(calibration, weights):
        for name in group:
            yield products(calibration, some_of(weights, [name]))


def batches_for(model):
    shape = {nn.Conv2d: (5, 3, 6, 6)}.get(type(next(model.children())), (7, WIDTH))
    shape = (7, 8) if isinstance(model, nn.Sequential) and len(shape) == 2 else shape
    return [torch.randn(shape) for _ in range(3)]


def pruned_both_ways(model, batches, monkeypatch, operator="sparsegpt@uniform:0.6", **options):
    """The pruned model, and the same by passes over the whole model for each layer."""
    ours, theirs = model, copy.deepcopy(model)
    prune_(ours, operator, batches, **options)
    with monkeypatch.context() as patch:
        patch.setattr(sparsegpt, "products_in_order", by_whole_passes)
        prune_(theirs, operator, batches, **options)
    return ours.state_dict(), theirs.state_dict()


def count_model_passes(model, batches):
    """Passes over the whole model, and groups of layers, while all layers are pruned."""
    passes, calibration = [], Calibration(model, batches)
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    groups = len(list(products_in_order(calibration, compressible_weights(model))))
    hook.remove()
    return len(passes), groups


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_gets_the_weights_that_whole_passes_give(kind, monkeypatch):
    torch.manual_seed(0)
    make, _ = MODELS[kind]
    model = make()
    ours, theirs = pruned_both_ways(model, batches_for(model), monkeypatch)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, msg=name)
    hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert not hooks


@pytest.mark.parametrize("kind", MODELS)
def test_only_chains_of_blocks_save_passes(kind):
    make, is_chain = MODELS[kind]
    model = make()
    batches = batches_for(model)
    passes, groups = count_model_passes(model, batches)
    whole = len(batches) * (1 + groups)  # the order of the layers, and a pass for each group
    assert (passes < whole) == is_chain


def test_passes_over_the_model_do_not_grow_with_its_depth():
    counts = {
        count_model_passes(Stack(blocks(depth)), [torch.randn(4, WIDTH)] * 2)[0]
        for depth in (3, 6, 12)
    }
    assert len(counts) == 1


def test_layers_with_one_input_share_a_group_and_the_order_is_that_of_the_forward():
    model = Reversed(blocks(2))
    calibration = Calibration(model, [torch.randn(4, WIDTH)] * 2)
    assert _groups(calibration, compressible_weights(model)) == [
        ["first.weight"],
        ["blocks.1.a.weight", "blocks.1.b.weight"],
        ["blocks.1.c.weight"],
        ["blocks.0.a.weight", "blocks.0.b.weight"],
        ["blocks.0.c.weight"],
        ["head.weight"],
    ]


def test_an_input_that_was_changed_in_place_is_another_input():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = x + 1
            first = self.a(x)
            return first + self.b(x.mul_(2))

    model = Net()
    calibration = Calibration(model, [torch.randn(3, 4)])
    groups = _groups(calibration, compressible_weights(model))
    assert groups == [["a.weight"], ["b.weight"]]


def test_layers_that_no_batch_reaches_are_named():
    model = Stack(blocks())
    model.blocks[1].unused = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ValueError, match=r"no input reaches the layers of: blocks\.1\.unused"):
        prune_(model, "sparsegpt@uniform:0.5", [torch.randn(4, WIDTH)])


@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_run_under_the_autocast_of_the_loss(autocast, monkeypatch):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch).float().square().mean()

    torch.manual_seed(0)
    batches = [torch.randn(9, WIDTH) for _ in range(2)]
    ours, theirs = pruned_both_ways(Stack(blocks()), batches, monkeypatch, loss=loss)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def _llama(config, transformers):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_key_value_heads=2, intermediate_size=32, use_cache=False, **config
        )
    )


def _gemma(config, transformers):
    """Layers with a sliding and with full attention take turns: their masks differ."""
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            num_key_value_heads=2,
            intermediate_size=32,
            head_dim=4,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            use_cache=False,
            **config,
        )
    )


def _gpt2(config, transformers):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=config["hidden_size"],
            n_layer=3,
            n_head=4,
            vocab_size=config["vocab_size"],
            use_cache=False,
        )
    )


def _bert(config, transformers):
    return transformers.BertModel(transformers.BertConfig(intermediate_size=32, **config))


def _vit(config, transformers):
    config = {key: value for key, value in config.items() if key != "vocab_size"}
    return transformers.ViTModel(
        transformers.ViTConfig(image_size=8, patch_size=4, intermediate_size=32, **config)
    )


@pytest.mark.parametrize("make", [_llama, _gemma, _gpt2, _bert, _vit])
def test_models_of_transformers_run_layer_by_layer(make, monkeypatch):
    import transformers

    torch.manual_seed(0)
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    model = make(config, transformers).eval()
    if make is _vit:
        batches = [{"pixel_values": torch.randn(4, 3, 8, 8)} for _ in range(2)]
    else:
        tokens = [torch.randint(50, (3, 12)) for _ in range(2)]
        batches = [{"input_ids": each, "attention_mask": (each > 4).long()} for each in tokens]
    skip = "embed|lm_head|pooler|wte|wpe"
    weights = partial(compressible_weights, skip=skip)
    passes = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    groups = len(list(products_in_order(Calibration(model, batches), weights(model))))
    hook.remove()
    assert groups >= 12
    assert len(passes) <= 2 * len(batches) + 2 + (2 if make is _vit else 0)
    theirs = copy.deepcopy(model)
    prune_(model, "sparsegpt@nm:2:4", batches, weights=weights(model))
    monkeypatch.setattr(sparsegpt, "products_in_order", by_whole_passes)
    prune_(theirs, "sparsegpt@nm:2:4", batches, weights=weights(theirs))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_model_that_caches_its_keys_takes_whole_passes(monkeypatch):
    import transformers

    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    model = _llama(config, transformers).eval()
    model.config.use_cache = True
    batches = [torch.randint(50, (2, 8))]
    theirs = copy.deepcopy(model)
    weights = partial(compressible_weights, only=r"\.\d+\.")
    prune_(model, "sparsegpt@uniform:0.5", batches, weights=weights(model))
    monkeypatch.setattr(sparsegpt, "products_in_order", by_whole_passes)
    prune_(theirs, "sparsegpt@uniform:0.5", batches, weights=weights(theirs))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)
