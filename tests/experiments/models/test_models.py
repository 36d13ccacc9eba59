import hashlib
from dataclasses import replace

import pytest
import torch
from nets import same, snapshot
from torch import nn

from torchcram import compressible_weights
from torchcram.experiments.models import (
    VGG,
    BasicBlock,
    ConvNet,
    ResNet,
    ResNet18,
    TransformerBlock,
    VisionTransformer,
    build_model,
    model_names,
    own_model_names,
    replace_head_,
    resnet20,
)


def on_meta(name, classes=10):
    with torch.device("meta"):
        return build_model(name, classes=classes)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions", "shape"),
    [
        ("convnet-digits", 0.0137, (2, 1, 8, 8)),
        ("resnet20", 0.270, (2, 3, 32, 32)),
        ("resnet18-cifar", 11.17, (2, 3, 32, 32)),
        ("vgg16-cifar", 14.72, (2, 3, 32, 32)),
        ("vit-cifar", 2.693, (2, 3, 32, 32)),
        ("resnet18-64", 11.17, (2, 3, 64, 64)),
        ("resnet50-64", 23.52, (2, 3, 64, 64)),
        ("torchvision/resnet50", 23.53, (2, 3, 224, 224)),
        ("torchvision/mobilenet_v3_small", 1.53, (2, 3, 224, 224)),
    ],
)
def test_size_and_shape(name, millions, shape):
    model = on_meta(name)
    assert count(model) / 1e6 == pytest.approx(millions, rel=0.005)
    assert model(torch.empty(shape, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("name", own_model_names())
def test_classes_are_the_outputs_of_the_last_layer(name):
    weights = compressible_weights(on_meta(name, classes=7))
    assert next(reversed(weights.values())).shape[0] == 7


@pytest.mark.parametrize(
    ("name", "stride"), [("resnet18-64", 2), ("resnet50-64", 2), ("resnet18-cifar", 1)]
)
def test_blocks_of_nets_for_small_images_begin_at_32x32(name, stride):
    stem = on_meta(name).conv1
    assert (stem.kernel_size, stem.stride, stem.padding) == ((3, 3), (stride, stride), (1, 1))


def test_the_vision_transformer_is_compressed_but_for_its_positions_norms_and_biases():
    model = on_meta("vit-cifar")
    dense = [name for name in dict(model.named_parameters()) if name.endswith("weight")]
    dense = [name for name in dense if "norm" not in name]
    assert sorted(compressible_weights(model)) == sorted(dense)


def test_the_attention_of_the_vision_transformer_is_that_of_torch():
    torch.manual_seed(0)
    ours, x = TransformerBlock(12, 3), torch.randn(2, 5, 12)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    attention = theirs.self_attn
    pairs = {
        attention.in_proj_weight: ours.qkv.weight, attention.in_proj_bias: ours.qkv.bias,
        attention.out_proj.weight: ours.proj.weight, attention.out_proj.bias: ours.proj.bias,
        theirs.linear1.weight: ours.fc1.weight, theirs.linear1.bias: ours.fc1.bias,
        theirs.linear2.weight: ours.fc2.weight, theirs.linear2.bias: ours.fc2.bias,
    }  # fmt: skip
    with torch.no_grad():
        for target, value in pairs.items():
            target.copy_(value)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_patch_knows_its_position():
    torch.manual_seed(0)
    model = VisionTransformer(8, 4, 12, depth=1, classes=3)
    images = torch.randn(2, 3, 8, 8)
    assert not model(images).allclose(model(images.flip(3)), atol=1e-5)
    with torch.no_grad():
        model.pos_embed.zero_()
    halves = images.unflatten(3, (2, 4))[:, :, :, [1, 0]].flatten(3)  # the patches change places
    torch.testing.assert_close(model(images), model(halves))


def test_nets_for_64x64_images_do_not_pool_before_the_blocks():
    assert isinstance(on_meta("resnet18-64").maxpool, nn.Identity)


def test_resnet18_has_the_shape_of_the_other_one_of_torchvision():
    ours = [tuple(p.shape) for p in on_meta("resnet18-cifar").parameters()]
    theirs = [tuple(p.shape) for p in on_meta("resnet18-64").parameters()]
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("model", [ResNet18(), VGG(((64,), (128, 256)))])
def test_convolutions_start_at_the_scale_of_their_outputs(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_the_seed_decides_the_start():
    def start(seed):
        torch.manual_seed(seed)
        return build_model("resnet20", classes=10).fc.weight

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_the_classes_are_importable():
    assert isinstance(resnet20(), ResNet)
    assert isinstance(resnet20().blocks[0], BasicBlock)
    assert isinstance(build_model("convnet-digits", classes=10), ConvNet)


def test_every_name_is_known():
    names = model_names()
    assert names[: len(own_model_names())] == own_model_names()
    assert "torchvision/resnet50" in names
    assert len(names) > 50


def test_models_with_a_second_output_have_none():
    model = on_meta("torchvision/googlenet")
    assert model(torch.empty(2, 3, 96, 96, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet21", r"no model 'resnet21' \(did you mean 'resnet20'\?\); allowed: convnet-digits"),
        ("torchvision/", "no model 'torchvision/'"),
        ("torchvision/resnet51", r"torchvision has no model 'resnet51' \(did you mean 'resnet50'"),
        ("torchvision/fcn_resnet50", "torchvision has no model 'fcn_resnet50'"),
    ],
)
def test_an_unknown_model_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, classes=10)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="classes must be at least 1, got 0"):
        build_model("resnet20", classes=0)
    with pytest.raises(ValueError, match="resnet20 has no pretrained weights; allowed: torchv"):
        build_model("resnet20", classes=10, pretrained=True)


# heads


def test_a_new_head_is_the_only_change():
    model = resnet20()
    before = dict(model.named_parameters())
    replace_head_(model, 3)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] is not before[name]} == {"fc.weight", "fc.bias"}
    assert after["fc.weight"].shape == (3, 64)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_a_new_head_is_like_the_old_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 9, bias=False)))
    replace_head_(model.double(), 2)
    head = model[1][0]
    assert head.bias is None
    assert (head.weight.shape, head.weight.dtype) == ((2, 4), torch.float64)
    assert model[0].weight.shape == (4, 4)


@pytest.mark.parametrize("name", ["vgg11", "mobilenet_v3_small", "densenet121", "vit_b_32"])
def test_a_new_head_for_models_of_torchvision(name):
    model = on_meta(f"torchvision/{name}")
    replace_head_(model, 3)
    assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 3)


@pytest.mark.parametrize("model", [nn.Conv2d(3, 3, 1), nn.Linear(2, 2), nn.Sequential()])
def test_without_a_layer_to_replace_there_is_an_error(model):
    with pytest.raises(ValueError, match="no Linear layer"):
        replace_head_(model, 3)


# weights of torchvision


SMALLEST = "torchvision/shufflenet_v2_x0_5"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of torch.hub with weights made here, which torchvision is told are its own."""
    from torchvision.models import ShuffleNet_V2_X0_5_Weights as Weights

    saved = build_model(SMALLEST, classes=1000)
    written = tmp_path / "written.pth"
    torch.save(saved.state_dict(), written)
    digest = hashlib.sha256(written.read_bytes()).hexdigest()
    path = tmp_path / "checkpoints" / f"shufflenet-{digest[:8]}.pth"
    path.parent.mkdir()
    written.rename(path)
    known = replace(Weights.DEFAULT.value, url=f"https://download.invalid/{path.name}")
    monkeypatch.setattr(Weights.DEFAULT, "_value_", known)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return path, saved


def test_pretrained_weights_come_from_the_cache(cache):
    _, saved = cache
    model = build_model(SMALLEST, classes=1000, pretrained=True)
    assert same(snapshot(model), snapshot(saved))


def test_pretrained_weights_get_a_new_head_for_other_classes(cache):
    _, saved = cache
    model = build_model(SMALLEST, classes=7, pretrained=True)
    assert model.fc.weight.shape == (7, 1024)
    del model.fc, saved.fc
    assert same(snapshot(model), snapshot(saved))


def test_a_damaged_file_of_weights_is_refused_by_name(cache):
    path, _ = cache
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"shufflenet-\w+\.pth is damaged: its SHA-256"):
        build_model(SMALLEST, classes=7, pretrained=True)


def test_weights_that_are_not_there_are_not_downloaded(cache):
    path, _ = cache
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"put https://\S+\.pth at /\S+/checkpoints/"):
        build_model(SMALLEST, classes=7, pretrained=True)
