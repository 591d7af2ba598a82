"""A small regression and the sections that its optimizers are built from."""

from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import Optimizer

from app.config.conf_files import CONF, choices_by_group
from app.config.schema import OptimizerConfig
from app.optim.optimizers import build_optimizer
from app.optim.requirements import check

# What a regression of this size wants; a sign update and a momentum of 0.9 take smaller steps than AdamW.
LEARNING_RATES = {"sgd": 1e-3, "lion_8bit": 1e-3, "adafactor": 0.3}


def section(words: str, **values: Any) -> OptimizerConfig:
    """The section as conf/ has it for `adamw optimizer.implementation=loop`, say."""
    kind, *options = words.split()
    values |= dict(each.removeprefix("optimizer.").split("=") for each in options)
    in_file = OmegaConf.load(CONF / "optimizer" / f"{kind}.yaml")
    all_values = {"lr": LEARNING_RATES.get(kind, 1e-2), **values}
    schema = OmegaConf.structured(OptimizerConfig)
    return cast(OptimizerConfig, OmegaConf.to_object(OmegaConf.merge(schema, in_file, all_values)))


KINDS = [kind for kind in choices_by_group()["optimizer"] if not check(section(kind))]  # apex may be missing
OPTIONS = [
    "adamw optimizer.implementation=foreach",
    "adamw optimizer.implementation=loop",
    "sgd optimizer.implementation=foreach",
    "sgd optimizer.implementation=loop",
    "adamw_8bit optimizer.embedding_states=32bit",
    "paged_adamw_8bit optimizer.embedding_states=32bit",
    "lion_8bit optimizer.embedding_states=32bit",
]  # of kinds that are installed everywhere


class Regression(nn.Module):
    """An embedding and two matrices of 4096 elements (8-bit states begin there), a norm, biases, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.wide = nn.Linear(32, 128)
        self.norm = nn.LayerNorm(128)
        self.narrow = nn.Linear(128, 32)
        self.head = nn.Linear(32, 1)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.narrow(self.norm(torch.tanh(self.wide(self.embedding(ids))))))
        answer: torch.Tensor = self.head(hidden).squeeze(-1)
        return answer


def regression(seed: int = 0) -> Regression:
    torch.manual_seed(seed)
    return Regression()


def train(model: Regression, optimizer: Optimizer, steps: range) -> list[float]:
    """The losses of these steps; the data of a step depend on its number only."""
    losses = []
    for step in steps:
        ids = torch.randint(0, 11, (64,), generator=torch.Generator().manual_seed(step))
        loss = (model(ids) - ids.float().sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built(kind: str, seed: int = 0, **values: Any) -> tuple[Regression, Optimizer]:
    model = regression(seed)
    return model, build_optimizer(section(kind, **values), model)


def narrow(kind: str, seed: int = 0, **values: Any) -> tuple[Regression, Optimizer]:
    """With weights in bfloat16."""
    model = regression(seed).to(torch.bfloat16)
    return model, build_optimizer(section(kind, **values), model, seed=5)
