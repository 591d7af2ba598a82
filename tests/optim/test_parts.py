"""States saved by several who step a part each come back to whoever steps what then, to the last bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from app.config.load import compose_run
from app.errors import CheckpointError
from app.optim.optimizers import build_optimizer
from app.optim.parts import load_parts
from app.optim.state import flatten

Share = list[int]  # places among the parameters


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 80), nn.LayerNorm(80), nn.Linear(80, 96, bias=False), nn.Linear(96, 8)]
    return nn.Sequential(*layers).to(dtype)


def optimizers(kind: str, model: nn.Module, shares: list[Share]) -> list[Optimizer]:
    config = compose_run(["recipe=full", f"optimizer={kind}", "optimizer.weight_decay=0.1"]).optimizer
    parameters = list(model.parameters())
    return [build_optimizer(config, model, 5, [parameters[at] for at in share]) for share in shares]


def step(model: nn.Module, every: list[Optimizer], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
    for optimizer in every:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (seed + 1)
        optimizer.step()


def saved(every: list[Optimizer], folder: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    files, plains = [], []
    for at, optimizer in enumerate(every):
        tensors, plain = flatten(optimizer.state_dict())
        files.append(folder / f"{at}.safetensors")
        plains.append(plain)
        save_file({name: each.contiguous() for name, each in tensors.items()}, files[-1])
    return files, plains


ONE, TWO = [[0, 1, 2, 3, 4, 5, 6]], [[0, 3, 4], [1, 2, 5, 6]]
THREE = [[6, 0], [2, 4, 5], [1, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["adamw", "muon", "sgd", "adafactor", "adamw_8bit", "paged_adamw_32bit", "lion_8bit"]
)
@pytest.mark.parametrize(("before", "after"), [(ONE, TWO), (TWO, ONE), (TWO, THREE)])
def test_they_go_on_as_if_nothing_had_happened(
    tmp_path: Path, kind: str, dtype: torch.dtype, before: list[Share], after: list[Share]
) -> None:
    model = network(dtype)
    every = optimizers(kind, model, before)
    for seed in range(3):
        step(model, every, seed)
    files, plains = saved(every, tmp_path)
    other = copy.deepcopy(model)
    again = optimizers(kind, other, after)
    for optimizer in again:
        load_parts(optimizer, files, plains)
    for seed in (3, 4):
        step(model, every, seed)
        step(other, again, seed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_optimizer_without_states_goes_on_too(tmp_path: Path) -> None:
    model = network(torch.float32)
    config = compose_run(["recipe=full", "optimizer=sgd", "optimizer.momentum=0"]).optimizer
    every = [build_optimizer(config, model, 5, [*model.parameters()]) for _ in range(2)]
    step(model, every[:1], 0)
    files, plains = saved(every[:1], tmp_path)
    load_parts(every[1], files, plains)
    assert every[1].param_groups[0]["lr"] == every[0].param_groups[0]["lr"]


def test_what_nobody_saved_is_missed(tmp_path: Path) -> None:
    model = network(torch.float32)
    first, second = optimizers("adamw", model, TWO)
    step(model, [first, second], 0)
    files, plains = saved([first], tmp_path)
    load_parts(first, files, plains)
    with pytest.raises(CheckpointError, match=r"no optimizer state of 0\.bias, which this run trains"):
        load_parts(second, files, plains)
