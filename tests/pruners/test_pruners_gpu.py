import pytest
import torch
from nets import mlp
from torch.nn.functional import cross_entropy

from torchcram import NM, GlobalTopK, RowTopK, UniformTopK
from torchcram.pruners import Obs, SparseGPT, Wanda, prune_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRUNERS = [
    Obs(GlobalTopK(0.5), gradients=40, damping=1e-4),
    Obs(NM(2, 4), gradients=40, damping=1e-4),
    Wanda(RowTopK(0.5)),
    Wanda(UniformTopK(0.5)),
    SparseGPT(UniformTopK(0.5)),
    SparseGPT(NM(2, 4)),
]


@pytest.mark.parametrize("pruner", PRUNERS, ids=str)
def test_cuda_and_cpu_agree(pruner):
    def loss(model, batch):
        device = model[0].weight.device
        return cross_entropy(model(batch[0].to(device)), batch[1].to(device))

    batches = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(40)]
    here, there = mlp(), mlp().cuda()
    there.load_state_dict(here.state_dict())
    ours = prune_(here, pruner, batches, loss=loss)
    theirs = prune_(there, pruner, batches, loss=loss)
    for name, mask in ours.items():
        assert torch.equal(mask, theirs[name].cpu())
        found = there.get_parameter(name).cpu()
        assert torch.allclose(found, here.get_parameter(name), rtol=1e-3, atol=1e-4)
