import pytest
import torch
from nets import ConvNet, images, same, snapshot
from torch import nn

from torchcram import frozen_statistics, tune_batchnorm_


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("layer", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_every_batch_norm_is_one_that_freezes(layer):
    model = nn.Sequential(layer(4) if layer is not nn.LazyBatchNorm2d else layer())
    if layer is nn.SyncBatchNorm:  # needs a process group to run; the flag is what it goes by
        with frozen_statistics(model):
            assert not model[0].track_running_stats
        assert model[0].track_running_stats
        return
    model(images()[0])
    before = buffers(model)
    with frozen_statistics(model):
        model(images()[0])
    assert same(buffers(model), before)
    model(images()[0])
    assert not same(buffers(model), before)


def test_instance_norm_freezes_too():
    model = nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True))
    x = images()[0]
    expected = model(x)
    before = buffers(model)
    with frozen_statistics(model):
        assert torch.equal(model(x), expected)
    assert same(buffers(model), before)
    model.eval()
    evaluated = model(x)
    with frozen_statistics(model):
        assert torch.equal(model(x), evaluated)


def test_batch_statistics_normalise_while_frozen():
    model = ConvNet()
    x, _ = images()
    expected = model(x)
    with frozen_statistics(model):
        assert torch.equal(model(x), expected)
    model.eval()
    evaluated = model(x)
    with frozen_statistics(model):
        assert torch.equal(model(x), evaluated)


def test_statistics_thaw_after_an_exception():
    model = ConvNet()
    with pytest.raises(KeyError), frozen_statistics(model):
        raise KeyError
    assert model.bn1.track_running_stats


def test_tuning_is_the_plain_average_over_batches():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=0.3))
    model.train()
    model[1].eval()
    batches = [torch.randn(8, 3) * 2 + 1 for _ in range(4)]
    tune_batchnorm_(model, batches)
    mean = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variance = torch.stack([batch.var(0) for batch in batches]).mean(0)
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[0].running_var, variance)
    assert [m.training for m in model] == [True, False, True]
    assert [model[0].momentum, model[2].momentum] == [0.1, 0.3]


def test_old_statistics_do_not_count_and_momentum_does():
    model = nn.Sequential(nn.BatchNorm1d(3)).eval()
    model[0].running_mean.fill_(100)
    tune_batchnorm_(model, [torch.ones(4, 3), torch.ones(4, 3)], momentum=0.5)
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), 0.75))
    assert not model.training


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 0), lambda x: [x], lambda x: {"x": x}])
def test_kinds_of_batches(wrap):
    model, other = ConvNet(), ConvNet()
    other.load_state_dict(model.state_dict())
    x = images()[0]
    tune_batchnorm_(model, [wrap(x)])
    tune_batchnorm_(other, iter([x]))
    assert same(snapshot(model), snapshot(other))


def test_a_tensor_is_no_iterable_of_batches():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"batches is a tensor; allowed: .* \[tensor\]"):
        tune_batchnorm_(model, torch.randn(8, 4))


def test_an_empty_loader_is_an_error_and_changes_nothing():
    model = ConvNet()
    model(images()[0])
    before = snapshot(model)
    with pytest.raises(ValueError, match="at least one batch"):
        tune_batchnorm_(model, [])
    assert same(snapshot(model), before)


def test_a_broken_batch_changes_nothing():
    model = ConvNet()
    model(images()[0])
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        tune_batchnorm_(model, [images()[0], torch.zeros(2, 9, 6, 6)])
    assert same(snapshot(model), before)
    assert model.training
    assert model.bn1.training
    assert model.bn1.momentum == 0.1


def test_a_model_without_batch_norm_is_left_alone():
    model, batches = nn.Linear(2, 2), iter([torch.ones(1, 2)])
    before = snapshot(model)
    tune_batchnorm_(model, batches)
    assert same(snapshot(model), before)
    assert len(list(batches)) == 1  # not looked at
