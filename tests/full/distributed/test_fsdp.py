"""FSDP on one to three processes: gradients, memory, failures, sharded checkpoints."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import Batch
from app.config.schema import QuantizationConfig
from app.distributed.fsdp import Sharding, is_sharded, local
from app.distributed.gradient_reduction import GradientReduction, ShardedGradients
from app.distributed.launch import FailureFlag
from app.distributed.process_group import Runtime
from app.model.training_model import TrainingModel
from app.training.storage_counter import kept_bytes
from tests.distributed.test_fsdp import PARALLEL
from tests.harness.processes import ProcessesByCount
from tests.harness.runs import Zygote
from tests.model import classes
from tests.model.small import (
    ALL_KINDS,
    ENCODERS,
    MORE_KINDS,
    batch_of,
    distance,
    documents_of,
    lora,
    model_config,
    numbers,
    packed,
    training_model_of,
)

PROCESSES = 2
NF4 = QuantizationConfig(kind="nf4", double_quant=True)
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": lora()},
    "qlora": {"adapter": lora(), "quantization": NF4},
    "int8": {"adapter": lora(), "quantization": QuantizationConfig(kind="int8")},
    "llm_int8": {"adapter": lora(), "quantization": QuantizationConfig(kind="llm_int8")},
}
LENGTHS = ((20, 5, 11), (7, 16, 9), (13, 12))  # of the documents of each process


# ---- in each of the processes


def built(kind: str, method: str, **more: Any) -> TrainingModel:
    """In eval mode: what is dropped out differs between processes."""
    given = METHODS[method] | more
    if kind == "classifier":
        return classes.of_classes("llama", **given).eval()
    if kind == "tied":
        return training_model_of("llama", model=model_config(architecture=tied_numbers()), **given).eval()
    return training_model_of(kind, **given).eval()


def tied_numbers() -> dict[str, Any]:
    return numbers("llama", tie_word_embeddings=True)


def batch(kind: str, rank: int) -> Batch:
    if kind == "classifier":
        return classes.in_one_row("llama") if rank else classes.in_rows("llama")
    documents = documents_of(LENGTHS[rank], seed=rank)
    return batch_of(documents, isolate=True) if kind in ENCODERS else packed(documents)


def shard(runtime: Runtime, model: TrainingModel) -> tuple[Sharding, GradientReduction]:
    sharding = runtime.sharding(PARALLEL)
    assert sharding is not None
    model.divide(sharding)
    trained = list(model.trained().values())
    return sharding, ShardedGradients(trained, sharding, whole_matrices=False)


def one_step(model: TrainingModel, reduction: GradientReduction, batches: list[Batch]) -> None:
    reduction.begin()
    for each in batches:
        reduction.last_loss(model(each)[0]).backward()
    reduction.finish()


def whole_gradients(model: TrainingModel) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.trained().items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = gradient.full_tensor() if is_sharded(gradient) else gradient.clone()
    return found


def gradients_of_one_process(kind: str, method: str, **more: Any) -> dict[str, Tensor]:
    model = built(kind, method, **more)
    for rank in range(PROCESSES):
        model(batch(kind, rank))[0].backward()
    return whole_gradients(model)


def distance_to_one_process(runtime: Runtime, kind: str, method: str) -> float:
    expected = gradients_of_one_process(kind, method)
    model = built(kind, method)
    _, reduction = shard(runtime, model)
    one_step(model, reduction, [batch(kind, runtime.rank)])
    return distance(whole_gradients(model), expected)


def bytes_of_shards(runtime: Runtime, method: str) -> None:
    """Of every tensor each process keeps its rows alone: after sharding, steps, evaluations and checks."""
    model = built("llama", method)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    scales = kept_bytes(model, torch.optim.SGD(model.trained().values()))["quantization_constants"]
    assert (scales > 0) == (method == "qlora")
    sharding, reduction = shard(runtime, model)

    def keeps_its_rows() -> None:
        for name, parameter in model.named_parameters():
            assert is_sharded(parameter), name
            parts = torch.arange(shapes[name][0]).chunk(runtime.processes)
            own = len(parts[runtime.rank]) if runtime.rank < len(parts) else 0
            assert tuple(local(parameter).shape) == (own, *shapes[name][1:]), name
            row_bytes = parameter.nbytes // shapes[name][0]
            assert local(parameter).untyped_storage().nbytes() <= len(parts[0]) * row_bytes, name

    keeps_its_rows()
    one_step(model, reduction, [batch("llama", runtime.rank)])
    for gradient in (each.grad for each in model.trained().values()):
        assert gradient is not None
        assert is_sharded(gradient)
    reduction.begin()
    keeps_its_rows()
    model.scores(batch("llama", 0))
    sharding.at_rest()
    keeps_its_rows()
    with sharding.checking():
        model.within(model(batch("llama", 0))[0].backward)
    keeps_its_rows()
    assert all(each.grad is None for each in model.parameters())
    sharded = kept_bytes(model, torch.optim.SGD(model.trained().values()))
    assert sharded["quantization_constants"] == scales


# ---- the tests


KINDS = (*ALL_KINDS, *MORE_KINDS, "tied", "classifier")
CASES = [
    *((kind, method) for kind in KINDS for method in ("full", "lora")),
    *((kind, "qlora") for kind in ("llama", "gemma2", "classifier", "bert")),
    ("llama", "int8"),
    ("llama", "llm_int8"),
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_fsdp_of_each_kind_gives_gradients_of_one_process(processes: ProcessesByCount, kind: str, method: str) -> None:
    first, second = processes(PROCESSES).run(distance_to_one_process, kind, method)
    assert first == second <= 1e-6


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("count", [2, 3])
def test_fsdp_each_process_keeps_its_rows_alone(processes: ProcessesByCount, method: str, count: int) -> None:
    processes(count).run(bytes_of_shards, method)


UNFINISHED = 75
STAYS_SECONDS = 15.0
WITHIN_SECONDS = 5.0


def main() -> None:
    """Process 1 raises the flag and stays alive; the others wait for it in a collective."""
    from app.config.schema import LaunchConfig
    from app.distributed.process_group import start

    runtime = start(LaunchConfig(num_processes=1, threads=1), "fp32", 0)
    if runtime.rank != 1:
        runtime.host_group.wait_for_all()
    FailureFlag(1).raise_first(UNFINISHED, "out of memory", has_met=True)
    Path(sys.argv[1]).write_text(str(time.time()))
    time.sleep(STAYS_SECONDS)
    os._exit(UNFINISHED)


def test_failure_flag_ends_processes_that_wait_in_a_collective(zygote: Zygote, tmp_path: Path) -> None:
    raised = tmp_path / "raised"
    runs = zygote.start_together(tmp_path, 3, str(raised), module="tests.full.distributed.test_fsdp")
    assert [runs[rank].wait().code for rank in (0, 2)] == [UNFINISHED] * 2
    assert time.time() - float(raised.read_text()) < WITHIN_SECONDS
    runs[1].kill()
