"""What only a CUDA device can show. Run by hand: pytest -m gpu"""

import copy

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, same, snapshot
from test_selection import by_sorting
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import CRAM_PLUS, NM, CrAM, GlobalTopK, Quantize, UniformTopK, sparsity
from torchcram.artifact.integers import fit
from torchcram.selection import keep_largest, keep_largest_, keep_largest_each

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*(leaves dense|one scale per output|debug mode is a)"),
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def there(batch):
    return tuple(part.cuda() for part in batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_selection_over_many_real_sizes(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 3, 7, 7), (256, 64, 1, 1), (512, 512, 3, 3), (1000, 2048), (17, 3)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    total = sum(t.numel() for t in tensors)
    for channels_last in (False, True):
        form = torch.channels_last if channels_last else torch.contiguous_format
        moved = [t.cuda().to(memory_format=form) if t.dim() == 4 else t.cuda() for t in tensors]
        for keep in (1, total // 20, total // 2, total - 3):
            masks = keep_largest(moved, keep)
            pruned = [t.clone() for t in moved]
            again = keep_largest_(pruned, keep)
            for i, expected in enumerate(by_sorting(tensors, keep)):
                assert torch.equal(masks[i].cpu(), expected)
                assert torch.equal(again[i], masks[i])
                assert torch.equal(pruned[i], moved[i].masked_fill(~masks[i], 0))


@pytest.mark.parametrize("layers", [1, 6, 24])
def test_selection_of_almost_all_weights(layers):
    shapes = [(384, 384)] * 4 + [(1536, 384), (384, 1536), (96, 300)]
    tensors = [torch.randn(shape, device="cuda") * 0.05 for _ in range(layers) for shape in shapes]
    for dropped in (0, 1, 40):
        keep = [tensor.numel() - dropped for tensor in tensors]
        each = keep_largest_each(tensors, keep)
        assert [int(mask.sum()) for mask in each] == keep
        total = sum(keep)
        assert sum(int(mask.sum()) for mask in keep_largest(tensors, total)) == total
        for mask, tensor in zip(each, tensors, strict=True):
            assert not dropped or tensor[~mask].abs().max() < tensor[mask].abs().min()


@pytest.mark.parametrize("operator", [Quantize(8), Quantize(4), Quantize(3, 16)], ids=str)
def test_quantized_weights_are_those_of_the_cpu(operator):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    here, there_ = {"0.weight": weight.clone()}, {"0.weight": weight.cuda()}
    operator.compress_(here)
    operator.compress_(there_)
    assert torch.equal(there_["0.weight"].cpu(), here["0.weight"])
    assert fit(there_["0.weight"].view(-1, operator.group_size or 256), operator.bits) is not None


def test_selection_and_masking_never_wait_for_the_device():
    model = ConvNet().cuda()
    weights = dict(model.named_parameters())
    weights = {name: w for name, w in weights.items() if w.dim() > 1}
    operators = [GlobalTopK(0.5), UniformTopK(0.7), NM(2, 4), Quantize(4)]
    for operator in operators:
        operator.compress_({n: w.detach().clone() for n, w in weights.items()})  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    compressed = []
    try:
        for operator in operators:
            compressed.append({n: w.detach().clone() for n, w in weights.items()})
            operator.compress_(compressed[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sparsity(compressed[0]) == pytest.approx(0.5, abs=0.01)
    assert sparsity(compressed[1]) == pytest.approx(0.7, abs=0.01)


@rules
def test_a_step_on_the_gpu_is_that_on_the_cpu(rule):
    model, batch = ConvNet(), images()
    twin = copy.deepcopy(model).cuda()
    first = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.5), rule=rule)
    second = CrAM(twin, SGD(twin.parameters(), lr=0.1, fused=True), GlobalTopK(0.5), rule=rule)
    first.step(closure_for(model, first, batch))
    second.step(closure_for(twin, second, there(batch)))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


@rules
def test_without_learning_rate_nothing_moves(rule):
    model = ConvNet().cuda().to(memory_format=torch.channels_last)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    operators = [GlobalTopK(0.5), UniformTopK(0.7), NM(2, 4), Quantize(4)]
    optimizer = CrAM(
        model, AdamW(model.parameters(), lr=0.0, weight_decay=0.0), operators, rule=rule
    )
    for _ in range(6):
        optimizer.step(closure_for(model, optimizer, there(images())))
    assert same({n: p.detach() for n, p in model.named_parameters()}, before)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_not_finite_leave_weights_and_state_alone(fused):
    model = ConvNet().cuda()
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused), GlobalTopK(0.5)
    )
    x, y = there(images())
    optimizer.step(closure_for(model, optimizer, (x, y)))
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    bad = closure_for(model, optimizer, (x * torch.inf, y))
    if fused:
        optimizer.step(bad)  # skipped on the device, told at the next step
    with pytest.raises(FloatingPointError):
        optimizer.step(closure_for(model, optimizer, (x, y)) if fused else bad)
    assert all(torch.equal(p, named[n]) for n, p in model.named_parameters())
    state = [v for entry in optimizer.state.values() for v in entry.values() if v is not None]
    assert all(torch.isfinite(v).all() for v in state)
    optimizer.step(closure_for(model, optimizer, (x, y)))
    assert not all(torch.equal(p, named[n]) for n, p in model.named_parameters())


@rules
def test_float16_with_a_scaler(rule):
    model = ConvNet().cuda()
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.05, momentum=0.9), GlobalTopK(0.5), rule=rule
    )
    scaler = GradScaler("cuda", init_scale=2.0**40)  # overflows at first
    x, y = there(images(32))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()

        def backward():
            with torch.autocast("cuda", torch.float16):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            return loss

        losses.append(float(backward().detach()))
        for _ in rule.passes:
            with optimizer.compressed(grad_scaler=scaler):
                backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**40
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert losses[-1] < losses[0]


def test_the_memory_of_a_step_is_what_is_promised():
    """One copy of the parameters, one of the gradients, one byte per compressible weight."""

    def peak(wrap):
        torch.cuda.empty_cache()
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]).cuda()
        optimizer = wrap(model, SGD(model.parameters(), lr=0.01))
        x, y = torch.randn(16, 1024, device="cuda"), torch.randint(1024, (16,), device="cuda")
        for _ in range(3):
            if isinstance(optimizer, CrAM):
                optimizer.step(closure_for(model, optimizer, (x, y)))
            else:
                closure_for(model, optimizer, (x, y))()
                optimizer.step()
            torch.cuda.reset_peak_memory_stats()
        if isinstance(optimizer, CrAM):
            optimizer.step(closure_for(model, optimizer, (x, y)))
        else:
            closure_for(model, optimizer, (x, y))()
            optimizer.step()
        return torch.cuda.max_memory_allocated()

    plain = peak(lambda _, base: base)
    ours = peak(lambda model, base: CrAM(model, base, GlobalTopK(0.9), rule=CRAM_PLUS))
    weights = 16 * 1024 * 1024
    parameters = 4 * (weights + 16 * 1024)
    assert ours - plain <= 2 * parameters + weights + 4 * 2**20


def test_training_resumes_exactly_on_the_gpu():
    def build():
        torch.manual_seed(3)
        model = ConvNet().cuda()
        base = AdamW(model.parameters(), lr=0.01, fused=True)
        return model, CrAM(model, base, [GlobalTopK(0.5), Quantize(4)], mask_interval=2)

    batches = [there(images()) for _ in range(8)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    model, optimizer = build()
    for number, batch in enumerate(batches):
        if number == 4:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.step(closure_for(model, optimizer, batch))
    other, resumed = build()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for batch in batches[4:]:
        resumed.step(closure_for(other, resumed, batch))
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    assert same(snapshot(model), snapshot(other))
