"""A model that is compressed for a while computes as such, and then as before."""

import torch
from nets import same
from ranks import run_ranks
from shards import local_state
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchcram import compress, compressible_weights, parse_operator
from torchcram.integrations.adapters import compressed_to


class Net(nn.Module):
    """A root with a layer of its own, whose gathered copy outlives a forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


@torch.no_grad()
def compress_shards(rank):
    del rank
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    targets = [parse_operator("global:0.8"), parse_operator("int4")]
    expected = [compress(Net(), target)(x) for target in targets]
    net = Net()
    fully_shard(net.body)
    fully_shard(net)
    weights, before, dense = compressible_weights(net), local_state(net), net(x)
    for target, there in zip(targets, expected, strict=True):
        with compressed_to(target, net, weights):
            torch.testing.assert_close(net(x), there)
        assert same(local_state(net), before)
        assert torch.equal(net(x), dense)


def test_shards_are_compressed_and_put_back_with_what_is_gathered():
    assert run_ranks(2, compress_shards) == 2
