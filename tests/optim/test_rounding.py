"""Rounding by chance: right on average, exact where nothing is to be rounded, the same again from the same numbers."""

import pytest
import torch
from torch import Tensor

from app.optim import rounding
from app.optim.rounding import round_into


def rounded(exact: Tensor, seed: int = 0, step: int = 0, index: int = 0) -> Tensor:
    weight = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_into(weight, exact, f"{seed}/{step}/{index}")
    return weight


def spacing(value: Tensor) -> Tensor:
    """Between the two numbers of bfloat16 on either side."""
    below = (value.view(torch.int32) & -65536).view(torch.float32)
    above = ((value.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return (above.double() - below.double()).abs()


@pytest.mark.parametrize(
    "value", [1.001, -1.001, 0.3, 1.0039062, -7e-3, 123456.78, 1e-30, -3e-39, 2.5e-40], ids=str
)
def test_the_mean_of_many_roundings_is_the_number(value: float) -> None:
    """Nearest rounding would be off by up to half of a spacing, cutting off by a whole one; allowed is a hundredth."""
    exact = torch.full((200_000,), value)
    mean = rounded(exact).double().mean()
    allowed = 5 * 0.5 / 200_000**0.5  # five standard errors at most, as a share of the spacing
    assert abs(mean - exact[0].double()) / spacing(exact[:1])[0] < allowed < 0.01


def test_a_number_becomes_one_of_its_neighbours_and_the_nearer_one_more_often() -> None:
    exact = torch.full((100_000,), 1 + 0.25 / 128)
    values, counts = rounded(exact).float().unique(return_counts=True)
    assert values.tolist() == [1.0, 1 + 1 / 128]
    assert counts[0] / counts.sum() == pytest.approx(0.75, abs=0.01)


def test_all_that_bfloat16_can_tell_stays_as_it_is() -> None:
    """All of its 65536 patterns; those that are no number stay none."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = rounded(every.float())
    numbers = ~every.isnan()
    assert torch.equal(found[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert found[~numbers].isnan().all()


def test_what_is_not_a_number_stays_none_whatever_its_bits() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -8388607], dtype=torch.int32)
    assert patterns.view(torch.float32).isnan().all()
    for seed in range(20):
        assert rounded(patterns.view(torch.float32), seed).isnan().all()


def test_what_is_finite_stays_finite_below_the_largest_number() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert rounded(torch.tensor([largest, -largest, 3.3e38, -3.3e38]).repeat(1000)).isfinite().all()


def test_the_same_numbers_again_and_others_for_each_step_weight_and_seed() -> None:
    exact = torch.randn(64, 65, generator=torch.Generator().manual_seed(0))
    first = rounded(exact, 1, 2, 3)
    assert torch.equal(first, rounded(exact, 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, rounded(exact, *other))


def test_the_programs_own_random_numbers_are_not_touched() -> None:
    before = torch.get_rng_state()
    rounded(torch.randn(100, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_any_layout_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    columns = torch.empty(7, 30, dtype=torch.bfloat16).t()
    round_into(columns, exact, "0/0/0")
    assert torch.equal(columns, rounded(exact))
    assert torch.equal(rounded(exact.t().contiguous().t()), rounded(exact))
    monkeypatch.setattr(rounding, "_PIECE_NUMBERS", 16)
    difference = (rounded(exact).double() - exact.double()).abs()
    assert (difference < spacing(exact)).all()


def test_rows_of_a_shard_are_rounded_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_PIECE_NUMBERS", 16)
    exact = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    whole = rounded(exact)
    for low, high in ((0, 10), (10, 20), (20, 30), (3, 4), (29, 30)):
        rows = torch.empty(high - low, 7, dtype=torch.bfloat16)
        round_into(rows, exact[low:high], "0/0/0", first=low * 7)
        assert torch.equal(rows, whole[low:high])


def test_autograd_is_told_that_a_weight_changed() -> None:
    """Whoever kept it for its backward pass must not go on with another one silently."""
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    out = (weight * weight).sum()
    round_into(weight, torch.zeros(3), "0/0/0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
