"""Obstacles to compiled layers that are known before a weight is loaded, and FLOPs of what would be compiled."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from app.batch import Batch
from app.config.schema import CompileConfig
from app.layers import compile
from app.layers.compile import attention_obstacles, machine_obstacles, model_obstacles, product_flops
from tests.model import small

CPU, GPU = torch.device("cpu"), torch.device("cuda")
INDUCTOR = CompileConfig(kind="blocks", backend="inductor")
SEVERAL, ONE = (small.packed(small.documents_of(lengths)) for lengths in ((20, 5, 11), (48, 48)))
DROPOUT = "model.architecture.attention_dropout=0.1: compiled layers have no dropout"


@pytest.mark.parametrize(
    ("attention", "device", "dropout", "batch", "words"),
    [
        ("sdpa", CPU, 0.1, SEVERAL, DROPOUT),
        ("varlen", GPU, 0.1, SEVERAL, DROPOUT),
        ("sdpa", GPU, 0.0, SEVERAL, "attention=sdpa on a GPU makes one call per document"),
        ("sdpa", GPU, 0.0, ONE, None),
        ("varlen", GPU, 0.0, SEVERAL, None),
        ("sdpa", CPU, 0.0, SEVERAL, None),
    ],
)
def test_attention_obstacles_of_one_graph(
    attention: str, device: torch.device, dropout: float, batch: Batch, words: str | None
) -> None:
    lm = SimpleNamespace(config=LlamaConfig(attention_dropout=dropout))
    found = [*model_obstacles(lm), *attention_obstacles(attention, device, lambda: batch)]
    assert [each.reason.startswith(words or "") for each in found] == [True] * (words is not None)
    assert all("Set " in each.remedy and "compile=none" in each.remedy for each in found)


def test_layers_that_share_keys_and_values_are_an_obstacle() -> None:
    config = Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2)
    (found,) = model_obstacles(SimpleNamespace(config=config))
    assert found.reason.startswith("2 layers read keys and values of earlier layers")


@pytest.mark.parametrize(
    ("config", "device", "missing", "words"),
    [
        (replace(INDUCTOR, graphs=True), CPU, "", ["compile.graphs=true records kernels of an NVIDIA GPU"]),
        (INDUCTOR, CPU, "which", ["no C++ compiler found (g++ or clang++ or c++)"]),
        (INDUCTOR, GPU, "find_spec which", ["the package triton is not installed", "no C compiler found"]),
        (INDUCTOR, GPU, "", []),
        (replace(INDUCTOR, backend="aot_eager"), CPU, "which", []),
    ],
)
def test_machine_obstacles_missing_parts(
    config: CompileConfig, device: torch.device, missing: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if "which" in missing else f"/bin/{name}")
    monkeypatch.setattr(compile, "find_spec", lambda _name: None if "find_spec" in missing else object())
    found = [each.reason for each in machine_obstacles(config, device)]
    assert len(found) == len(words)
    assert all(each.startswith(start) for each, start in zip(found, words, strict=True))


def test_machine_obstacles_compiler_of_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setenv("CXX", "/opt/cxx")
    assert not list(machine_obstacles(INDUCTOR, CPU))


def linear_weights(layer: torch.nn.Module) -> int:
    return sum(each.weight.numel() for each in layer.modules() if isinstance(each, torch.nn.Linear))


def test_product_flops_of_frozen_and_trained_layers() -> None:
    lm = small.built("llama")
    weights = sum(map(linear_weights, lm.model.layers))
    assert product_flops(lm, trains_all=False) == 4 * weights
    assert product_flops(lm, trains_all=True) == 6 * weights


def test_product_flops_count_chosen_experts_and_no_recurrent_layers() -> None:
    mixture = small.built("mixtral")
    stacks = sum(each.numel() for each in mixture.parameters() if each.ndim == 3)
    others = sum(map(linear_weights, mixture.model.layers)) + sum(
        each.numel() for name, each in mixture.named_parameters() if name.endswith("gate.weight") and each.ndim == 2
    )
    assert product_flops(mixture, trains_all=False) == pytest.approx(4 * (others + stacks * 2 / 4))
    assert product_flops(small.built("mamba2"), trains_all=True) == 0
