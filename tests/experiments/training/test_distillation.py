import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import recipe
from torch.nn.functional import kl_div

from torchcram.experiments.recipe.schema import DistillConfig, TrainConfig
from torchcram.experiments.training.steps import distillation_loss, loss_of


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.5, 8), st.integers(0, 99))
def test_it_is_the_divergence_of_what_the_scores_say(n, classes, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    scores, wanted = (3 * torch.randn(2, n, classes, generator=generator)).unbind()
    found = distillation_loss(scores, wanted, temperature)
    log, target = ((one / temperature).log_softmax(1) for one in (scores, wanted))
    expected = kl_div(log, target, reduction="batchmean", log_target=True)
    assert float(found) == pytest.approx(float(expected) * temperature**2, rel=1e-4, abs=1e-5)
    assert float(distillation_loss(wanted, wanted, temperature)) == pytest.approx(0, abs=1e-6)


def test_padding_counts_for_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, wanted = torch.randn(2, 3, 5, 2, generator=generator).unbind()
    padded, other = (
        torch.cat((one, torch.full((3, 2, 2), -torch.inf)), 1) for one in (scores, wanted)
    )
    scores.requires_grad_()
    padded.requires_grad_()
    losses = [distillation_loss(scores, wanted, 2.0), distillation_loss(padded, other, 2.0)]
    assert losses[0].item() == pytest.approx(losses[1].item())
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(padded.grad[:, :5], scores.grad)
    assert not padded.grad[:, 5:].any()


def test_labels_have_the_rest_of_the_loss():
    scores, wanted = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).unbind()
    labels = torch.tensor([0, 1, 2, 0])
    config = TrainConfig(epochs=1, batch_size=4, distillation=DistillConfig(0.25, 3.0))
    hard = loss_of(scores, labels, config)
    assert hard == loss_of(scores, labels, TrainConfig(epochs=1, batch_size=4))
    expected = 0.75 * hard + 0.25 * distillation_loss(scores, wanted, 3.0)
    torch.testing.assert_close(loss_of(scores, labels, config, wanted), expected)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("weight=0", "train.distillation.weight is 0.0; allowed: above 0 and at most 1"),
        ("weight=1.5", "train.distillation.weight is 1.5; allowed: above 0 and at most 1"),
        ("temperature=0", "train.distillation.temperature is 0.0; allowed: above 0"),
    ],
)
def test_impossible_settings_are_named(setting, said):
    with pytest.raises(ValueError, match=said):
        recipe(f"train.distillation.{setting}")


def test_it_is_written_only_where_it_is_set():
    assert "distillation" not in recipe().to_dict()["train"]
    section = recipe("train.distillation.weight=0.5").to_dict()["train"]["distillation"]
    assert section == {"weight": 0.5, "temperature": 2.0}
