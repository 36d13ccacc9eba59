"""A net whose shards are uneven in every way, and how to put it next to one process."""

import copy

import torch
from nets import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


class UnevenNet(nn.Module):
    """Few rows, rows that no number of ranks divides, inputs that shards cut, an unused layer.

    Shards cut the q, k and v of attention, and hold two of three experts, one or none.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 24, 2)  # 3 inputs on each of 4 ranks
        self.grouped = nn.ConvTranspose2d(24, 24, 2, groups=3)  # 6 of inputs in groups of 8
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.experts = Experts(3, 24, 4, transposed=True)
        self.fc = nn.Linear(24, 5)
        self.gate = nn.Linear(24, 1)
        self.unused = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.grouped(torch.relu(self.up(torch.relu(self.conv(x))))))
        x = self.norm(x.mean((2, 3)))
        tokens = x.unflatten(1, (4, 6))
        x = x + self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1)
        x = x + self.experts(x)
        return self.fc(x) * torch.sigmoid(self.gate(x))


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return UnevenNet().to(dtype)


def shard(model, mesh=None, **options):
    """Applies FSDP to some layers and to the rest of the model, a copy of which it returns."""
    model = copy.deepcopy(model)
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.up, mesh=mesh, **options)
    fully_shard([model.conv, model.fc], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicated_shards():
    """A mesh of two replicas, each cut in two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def rows_here(whole, parameter):
    """The rows of a whole tensor that go with the shard of `parameter`."""
    if not hasattr(parameter, "placements"):
        return whole
    (dim,) = (i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    mesh = parameter.device_mesh
    chunks = whole.chunk(mesh.size(dim))
    at = mesh.get_local_rank(dim)
    return chunks[at] if at < len(chunks) else whole[:0]


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state(model):
    return {name: whole_of(p.detach()).clone() for name, p in model.named_parameters()}


def local_state(model):
    with torch.no_grad():
        return {
            n: (p.to_local() if hasattr(p, "to_local") else p).clone()
            for n, p in model.named_parameters()
        }


def batches(steps, count=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(steps, count, 4, 4, 4, generator=generator, dtype=dtype)
    return list(zip(inputs, torch.randint(5, (steps, count), generator=generator), strict=True))


def ours(batch):
    """The part of a batch that this rank trains on."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return tuple(values.chunk(size)[rank] for values in batch)


def train(model, optimizer, data):
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
