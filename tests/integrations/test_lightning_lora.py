"""LoRA in Lightning: what is validated is the merged model, compressed."""

import pytest
import torch
from nets import same, snapshot
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader

from torchcram import CrAM
from torchcram.weights import compressible_weights

L = pytest.importorskip("lightning")
peft = pytest.importorskip("peft")
from torchcram.integrations.lightning import CompressedPass, CompressedValidation  # noqa: E402
from torchcram.integrations.peft import LoraCrAM, merge_sparse  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
TARGETS = ("global:0.6", "int4")


class Net(L.LightningModule):
    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 4))
        options = {"init_lora_weights": False, "lora_dropout": 0.5, **options}
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], modules_to_save=["3"], **options)
        self.net, self.kind = peft.get_peft_model(net, config), kind

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        base = AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return base if self.kind is AdamW else self.kind(self, base, "global:0.5")


def loader():
    return DataLoader([(torch.randn(6, 8), torch.randint(4, (6,)))], batch_size=None)


def trainer(*callbacks):
    return L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("kind", [LoraCrAM, CrAM, AdamW])
def test_the_merged_model_is_what_is_compressed(kind):
    module, test = Net(kind), loader()
    passes = [] if kind is AdamW else [CompressedPass()]
    fit = trainer(*passes, CompressedValidation(TARGETS))
    fit.fit(module, loader(), test)
    before = snapshot(module)
    for target in TARGETS:
        merged = merge_sparse(module.net, target).eval()
        (batch,) = test
        with torch.no_grad():
            expected = cross_entropy(merged(batch[0]), batch[1])
        torch.testing.assert_close(fit.callback_metrics[f"loss/{target}"], expected)
    assert same(snapshot(module), before)
    assert not any(getattr(layer, "merged", False) for layer in module.modules())


def test_a_head_alone_is_compressed_beside_adapters():
    def head(module):
        return compressible_weights(module, only="modules_to_save")

    module, test = Net(AdamW), loader()
    whole = trainer(CompressedValidation(["global:0.6"], weights=head))
    before = snapshot(module)
    whole.validate(module, test, verbose=False)
    assert same(snapshot(module), before)
    with torch.no_grad():
        weight = compressible_weights(module, only="modules_to_save").popitem()[1]
        weight.masked_fill_(weight.abs() < weight.abs().flatten().kthvalue(11)[0], 0)
        (batch,) = test
        expected = cross_entropy(module.eval().net(batch[0]), batch[1])
    torch.testing.assert_close(whole.callback_metrics["loss/global:0.6"], expected)


def test_adapters_alone_are_no_weights_to_compress():
    watch = CompressedValidation(["nm:2:4"], weights=lambda m: compressible_weights(m, only="lora"))
    with pytest.raises(ValueError, match=r"no weight remains after a merge.*lora_A"):
        trainer(watch).validate(Net(AdamW), loader(), verbose=False)


def test_what_does_not_merge_is_refused():
    watch = CompressedValidation(["nm:2:4"])
    with pytest.raises(ValueError, match="a variant of LoRA"):
        trainer(watch).validate(Net(AdamW, use_dora=True), loader(), verbose=False)


@pytest.mark.parametrize("kind", [LoraCrAM, CrAM])
def test_a_search_for_unused_parameters_is_refused(tmp_path, kind):
    meet = (tmp_path / "meet").as_uri()
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    try:
        module = Net(kind)
        fit = trainer()
        fit.strategy.optimizers = [module.configure_optimizers()]
        fit.strategy.model = DistributedDataParallel(module, find_unused_parameters=True)
        callback = CompressedPass()
        if kind is LoraCrAM:
            with pytest.raises(ValueError, match="set it to False"):
                callback.on_fit_start(fit, module)
        else:
            callback.on_fit_start(fit, module)
    finally:
        dist.destroy_process_group()
