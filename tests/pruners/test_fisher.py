"""F and what follows from it, against dense matrices in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.pruners.obs import Fisher

LAMBDA = 1e-7


def made(gradients, shape, *, block, chunk=16, damping=LAMBDA):
    weight = torch.zeros(shape, dtype=gradients.dtype)
    fisher = Fisher({"w": weight}, block=block, damping=damping, chunk=chunk)
    for gradient in gradients:
        fisher.add({"w": gradient.view(shape)})
    fisher.finish()
    return fisher, weight


def dense(gradients, block, damping=LAMBDA):
    """The whole F of definition, zero between blocks."""
    g = gradients.double()
    whole = g.T @ g / len(g) + damping * torch.eye(g.shape[1], dtype=torch.float64)
    number = torch.arange(g.shape[1]) // block
    return whole.masked_fill(number[:, None] != number, 0)


def correlated(count, size, seed, scale=1e-3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator, dtype=dtype) / size**0.5
    return scale * torch.randn(count, size, generator=generator, dtype=dtype) @ mix


SIZES = {
    "rows": st.integers(1, 7),
    "columns": st.integers(1, 9),
    "block": st.integers(1, 70),
    "count": st.integers(1, 40),
    "chunk": st.integers(1, 20),
    "seed": st.integers(0, 2**16),
}


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_float64_equals_the_dense_inverse(rows, columns, block, count, chunk, seed):
    gradients = correlated(count, rows * columns, seed, dtype=torch.float64)
    fisher, weight = made(gradients, (rows, columns), block=block, chunk=chunk)
    expected = torch.linalg.inv(dense(gradients, block)).diagonal().view(rows, columns)
    assert torch.allclose(fisher.inverse_diagonal("w", weight), expected, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(**SIZES)
def test_float32_is_within_a_thousandth_at_usual_gradients(
    rows, columns, block, count, chunk, seed
):
    gradients = correlated(count, rows * columns, seed)
    fisher, weight = made(gradients, (rows, columns), block=block, chunk=chunk)
    expected = torch.linalg.inv(dense(gradients, block)).diagonal().view(rows, columns)
    assert torch.allclose(fisher.inverse_diagonal("w", weight), expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
def test_float32_holds_where_updates_of_the_inverse_in_float32_do_not(scale):
    gradients = scale * torch.randn(1024, 50)
    fisher, weight = made(gradients, (50,), block=50)
    expected = torch.linalg.inv(dense(gradients, 50)).diagonal()
    assert torch.allclose(fisher.inverse_diagonal("w", weight), expected, rtol=1e-4)


def test_fewer_large_gradients_than_weights_leave_a_finite_positive_inverse():
    gradients = 100 * torch.randn(3, 2) @ torch.randn(2, 50)
    fisher, weight = made(gradients, (50,), block=50)
    found = fisher.inverse_diagonal("w", weight)
    assert bool(found.isfinite().all())
    assert bool((found > 0).all())


@settings(max_examples=40, deadline=None)
@given(**SIZES, share=st.floats(0, 1))
def test_the_rest_moves_as_the_formula_with_the_dense_inverse_says(
    rows, columns, block, count, chunk, seed, share
):
    size = rows * columns
    gradients = correlated(count, size, seed, dtype=torch.float64)
    fisher, _ = made(gradients, (rows, columns), block=block, chunk=chunk, damping=1e-5)
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=generator, dtype=torch.float64)
    kept = torch.rand(size, generator=generator) >= share
    q = kept.logical_not().nonzero().flatten()
    inverse = torch.linalg.inv(dense(gradients, block, 1e-5))
    step = -inverse[:, q] @ torch.linalg.solve(inverse[q][:, q], w[q])
    found = fisher.remove("w", w.view(rows, columns), kept.view(rows, columns)).flatten()
    assert torch.allclose(found, w + step, rtol=1e-6, atol=1e-9)
    assert int(torch.count_nonzero(found[q])) == 0


def test_the_chunk_changes_nothing_beyond_rounding():
    gradients = correlated(50, 130, 0)
    diagonals = [made(gradients, (130,), block=50, chunk=c) for c in (1, 7, 16, 64)]
    first, *others = (fisher.inverse_diagonal("w", weight) for fisher, weight in diagonals)
    for other in others:
        assert torch.allclose(first, other, rtol=1e-5)


def test_blocks_factored_at_a_time_change_nothing(monkeypatch):
    gradients, w = correlated(30, 130, 0), torch.randn(130)
    kept = torch.rand(130) < 0.5
    fisher, _ = made(gradients, (130,), block=10)
    together = fisher.inverse_diagonal("w", w), fisher.remove("w", w, kept)
    monkeypatch.setattr("torchcram.pruners.obs.AT_ONCE", 3)
    apart = fisher.inverse_diagonal("w", w), fisher.remove("w", w, kept)
    assert torch.allclose(together[0], apart[0], rtol=1e-12)
    assert torch.allclose(together[1], apart[1])


def test_a_gradient_that_is_left_out_counts_as_zero():
    weights = {"a": torch.zeros(4), "b": torch.zeros(4)}
    fisher = Fisher(weights, block=4, damping=1.0, chunk=2)
    fisher.add({"a": torch.ones(4), "b": torch.ones(4)})
    fisher.add({"a": torch.ones(4), "b": torch.ones(4)})
    fisher.add({"a": torch.ones(4)})  # what b had in this place of the chunk must be gone
    fisher.add({"a": torch.ones(4)})
    fisher.finish()
    ones = torch.ones(4, 4, dtype=torch.float64)
    for name, share in (("a", 1.0), ("b", 0.5)):
        expected = torch.linalg.inv(share * ones + torch.eye(4)).diagonal()
        assert torch.allclose(fisher.inverse_diagonal(name, weights[name]), expected)


def test_weights_that_take_no_part_are_as_if_they_were_not_there():
    gradients = correlated(30, 20, 0)
    part = torch.arange(20) < 12
    fisher = Fisher({"w": torch.zeros(20)}, block=20)
    for gradient in gradients:
        fisher.add({"w": gradient}, {"w": part})
    fisher.finish()
    expected = torch.linalg.inv(dense(gradients[:, :12], 20)).diagonal()
    found = fisher.inverse_diagonal("w", torch.zeros(20))
    assert torch.allclose(found[:12], expected, rtol=1e-3)


def test_no_gradient_and_bad_gradients_are_named():
    fisher = Fisher({"w": torch.zeros(4)}, block=2)
    with pytest.raises(ValueError, match="no gradients at all"):
        fisher.finish()
    fisher.add({"w": torch.tensor([1.0, 2.0, float("nan"), 3.0])})
    with pytest.raises(ValueError, match="not finite in: w"):
        fisher.finish()


def test_memory_is_weights_times_block_and_a_chunk():
    fisher = Fisher({"w": torch.zeros(1000)}, block=50, chunk=16)
    held = sum(t.nbytes for t in (*fisher._sums.values(), *fisher._held.values()))
    assert held == 4 * 1000 * (50 + 16)
    fisher.add({"w": torch.ones(1000)})
    fisher.finish()
    assert not fisher._held


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("cut", [0, 1, 4, 6])
def test_a_state_continues_bit_for_bit(chunk, cut):
    gradients = correlated(9, 24, seed=2)
    whole, weight = made(gradients, (4, 6), block=5, chunk=chunk)
    first, second = (Fisher({"w": weight}, block=5, chunk=chunk) for _ in range(2))
    for gradient in gradients[:cut]:
        first.add({"w": gradient.view(4, 6)})
    second.load_state_dict(first.state_dict())
    for gradient in gradients[cut:]:
        second.add({"w": gradient.view(4, 6)})
    second.finish()
    assert second.count == 9
    for expected, ours in (
        (whole.inverse_diagonal("w", weight), second.inverse_diagonal("w", weight)),
        (whole._sums["w"], second._sums["w"]),
    ):
        assert torch.equal(ours, expected)


def test_a_state_with_other_blocks_is_refused():
    weight = torch.zeros(4, 6)
    state = Fisher({"w": weight}, block=5).state_dict()
    with pytest.raises(ValueError, match="other blocks than those of 6 weights"):
        Fisher({"w": weight}, block=6).load_state_dict(state)
