"""Adapters combined: the weighted sum of their updates, compared with that sum and with PEFT's own combinations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from app.adapters.merged_weights import Member, combine
from app.errors import ConfigError

FACTORS = (0.7, -0.3, 1.2)
RANKS, ALPHAS = (2, 3, 2), (4, 3, 1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6, bias=False), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def adapters_in(place: Path) -> list[Member]:
    """The second adapter has one layer, the others two."""
    for i, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True)):
        targets = ["first"] if i == 1 else ["first", "second"]
        small: Any = Small()
        model: Any = get_peft_model(small, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
        torch.manual_seed(i + 1)
        for name, each in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(each)
        model.save_pretrained(str(place / str(i)))
    return [Member(str(i), place / str(i), factor) for i, factor in enumerate(FACTORS)]


def updates_of(folder: Path) -> dict[str, Tensor]:
    small: Any = Small()
    model: Any = PeftModel.from_pretrained(small, str(folder))
    layers = {name: getattr(model.base_model.model, name) for name in ("first", "second")}
    return {name: each.get_delta_weight("default").double() for name, each in layers.items() if hasattr(each, "lora_A")}


def weighted_sum(members: list[Member]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for member in members:
        for name, update in updates_of(member.folder).items():
            found[name] = found.get(name, torch.zeros_like(update)) + member.factor * update
    return found


def combined_in(place: Path, members: list[Member], how: str, rank: int | None = None) -> tuple[int, float]:
    place.mkdir()
    (place / "adapter_config.json").write_bytes((members[0].folder / "adapter_config.json").read_bytes())
    return combine(members, how, rank, place)


def test_cat_is_the_weighted_sum_of_updates(tmp_path: Path) -> None:
    """Ranks and layers differ, a factor is negative."""
    members = adapters_in(tmp_path)
    rank, apart = combined_in(tmp_path / "sum", members, "cat")
    assert rank == sum(RANKS)
    assert apart < 1e-6
    found, expected = updates_of(tmp_path / "sum"), weighted_sum(members)
    assert found.keys() == expected.keys()
    for name, update in found.items():
        torch.testing.assert_close(update, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


def test_svd_is_the_nearest_sum_of_a_rank(tmp_path: Path) -> None:
    members = adapters_in(tmp_path)
    rank, apart = combined_in(tmp_path / "sum", members, "svd", 3)
    expected, found = weighted_sum(members), updates_of(tmp_path / "sum")
    assert rank == 3
    missed = {name: float(torch.linalg.svdvals(each)[3:].square().sum()) for name, each in expected.items()}
    for name, update in found.items():
        assert float((update - expected[name]).square().sum()) == pytest.approx(missed[name], rel=1e-4, abs=1e-9)
    whole = sum(float(each.square().sum()) for each in expected.values())
    assert apart == pytest.approx((sum(missed.values()) / whole) ** 0.5, rel=1e-4)
    with pytest.raises(ConfigError, match="rank=9: together the adapters have rank"):
        combined_in(tmp_path / "more", members, "svd", 9)


@pytest.mark.parametrize(("how", "rank"), [("cat", None), ("svd", 2), ("linear", None)])
def test_combinations_are_those_of_peft(how: str, rank: int | None, tmp_path: Path) -> None:
    members = [each for each in adapters_in(tmp_path) if each.given != "1"]
    _, apart = combined_in(tmp_path / "sum", members, how, rank)
    small: Any = Small()
    theirs: Any = PeftModel.from_pretrained(small, str(members[0].folder), adapter_name="0")
    theirs.load_adapter(str(members[1].folder), adapter_name="2")
    named = {"adapters": ["0", "2"], "weights": [each.factor for each in members], "adapter_name": "sum"}
    theirs.add_weighted_adapter(**named, combination_type=how, **({} if rank is None else {"svd_rank": rank}))
    for name, update in updates_of(tmp_path / "sum").items():
        expected = getattr(theirs.base_model.model, name).get_delta_weight("sum").double()
        torch.testing.assert_close(update, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert (apart > 0.1) == (how != "cat")


def test_adapter_of_more_than_two_halves_is_refused(tmp_path: Path) -> None:
    members = adapters_in(tmp_path)
    small: Any = Small()
    model: Any = get_peft_model(small, LoraConfig(r=2, target_modules=["first"], modules_to_save=["second"]))
    model.save_pretrained(str(tmp_path / "1"))
    with pytest.raises(ConfigError, match="adapters: 1 is more than A and B of LoRA"):
        combined_in(tmp_path / "sum", members, "cat")


def test_linear_of_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="combine=linear: the adapters have other ranks"):
        combined_in(tmp_path / "sum", adapters_in(tmp_path), "linear")
