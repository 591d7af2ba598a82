"""Sharded models and reduced gradients: the same numbers for any number of processes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.config.schema import ParallelConfig
from app.distributed.fsdp import MeshSizes, Sharding, is_sharded
from app.distributed.gradient_reduction import AllReduce
from app.distributed.process_group import Runtime, fake_device_mesh
from app.errors import AppError, EnvironmentProblem
from app.layers.activation_checkpointing import repeated_layers
from app.model.build import choose_loss_head
from app.model.checks import check_head, check_packing
from app.model.training_model import TrainingModel
from app.signals import START_ME_AGAIN
from app.training.setup import check_on_loader, check_reduction
from tests.harness.processes import ProcessesByCount
from tests.harness.scarcity import scarce
from tests.model.small import documents_of, lora, packed, training_model_of

PROCESSES = 3
PARALLEL = ParallelConfig(
    kind="fsdp", shard="auto", replicate="auto", reshard=True, sync="each", overlap=False, offload=False, tensor=1,
    context=1,
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": lora()}}


def divided(runtime: Runtime, method: str) -> tuple[TrainingModel, Sharding]:
    model = training_model_of("llama", **METHODS[method])
    sharding = runtime.sharding(PARALLEL)
    assert sharding is not None
    model.divide(sharding)
    return model, sharding


def gathered_units(runtime: Runtime, method: str) -> list[int]:
    """Layers and rest of the model that are gathered after each check, and when all are done."""
    model, sharding = divided(runtime, method)
    batch, found = packed(documents_of((20, 5, 11))), []
    layers = repeated_layers(model.language_model)
    of_layers = {id(each) for layer in layers for each in layer.modules()}

    def count() -> None:
        rest = [part for part in model.modules() if id(part) not in of_layers]
        own = [[p for part in layer.modules() for p in part._parameters.values()] for layer in layers]
        own.append([p for part in rest for p in part._parameters.values()])
        found.append(sum(any(p is not None and not is_sharded(p) for p in unit) for unit in own))

    def check() -> None:
        for work in (check_head, choose_loss_head, check_packing):
            work(model, batch)
            count()

    with sharding.checking():
        model.within(check)
    count()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_checks_gather_one_unit_at_a_time(processes: ProcessesByCount, method: str) -> None:
    for *after_checks, at_end in processes(PROCESSES).run(gathered_units, method):
        assert max(after_checks) <= 1
        assert at_end == 0


def test_total_sums_on_device_of_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has no backend for the host, as that of GPUs, and the gradient of a shard that is there."""

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        group._get_backend(tensor.device)  # torch's own refusal, which it makes for real tensors alone

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with fake_device_mesh(MeshSizes(1, 2)), FakeTensorMode():
        group = torch.distributed.new_group([0, 1], backend="lazy:fake")
        mesh: Any = SimpleNamespace(device_type="lazy", ndim=1, get_group=lambda _dimension: group)
        squares = torch.ones((), dtype=torch.float64)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            all_reduce(squares, group)
        total = Sharding(mesh, replace(PARALLEL, offload=True)).total(squares)
        assert total.device == squares.device


def difference_or_refusal(runtime: Runtime, method: str, is_wrong: bool) -> float | str:
    model, sharding = divided(runtime, method)
    if is_wrong:
        for unit in sharding.units:
            unit.set_gradient_divide_factor(float(PROCESSES))  # a mean, as FSDP does by itself
    try:
        with scarce("backward", tokens=4 * 9):  # few rows are enough
            found = check_reduction(model, sharding, packed(documents_of((9,) * 30)))
    except EnvironmentProblem as refusal:
        return str(refusal)
    assert model.training
    assert all(each.grad is None for each in model.trained().values())
    return found.difference


@pytest.mark.parametrize("method", METHODS)
def test_first_reduced_gradient_is_checked(processes: ProcessesByCount, method: str) -> None:
    several = processes(PROCESSES)
    assert max(several.run(difference_or_refusal, method, False)) <= 1e-6
    refusals = several.run(difference_or_refusal, method, True)
    assert all("is not the sum over all processes" in refusal for refusal in refusals)


def checked_where_few_rows_fit(runtime: Runtime, depth: int, tokens: int) -> tuple[int, str] | list[str]:
    """What is compared, or the exit code and message of a start with this split depth."""
    model, _ = divided(runtime, "lora")
    batch = packed(documents_of((9,) * 30))
    loader: Any = SimpleNamespace(with_most_rows=lambda: batch)
    try:
        with scarce("backward", tokens):
            found = check_on_loader(model, lora(), loader, torch.device("cpu"), depth)
    except AppError as fault:
        return (fault.exit_code, str(fault))
    return [each.what for each in found]


def test_checks_out_of_memory_next_start_takes_few_rows(processes: ProcessesByCount) -> None:
    """Each process by itself finds out, and gathers nothing more."""
    several = processes(PROCESSES)
    for code, message in several.run(checked_where_few_rows_fit, 0, 36):
        assert code == START_ME_AGAIN
        assert message.startswith("out of memory: a check of the model does not fit")
    first, *others = several.run(checked_where_few_rows_fit, 1, 36)
    assert others == [first] * (PROCESSES - 1)
    assert len(first) > 3
    for code, message in several.run(checked_where_few_rows_fit, 1, 3):
        assert code == 2
        assert message.startswith("out of memory: a check of the model on 36 tokens does not fit next to")


SMALL_BUCKETS_MB = 0.0001
STEPS, MICRO_BATCHES = 3, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


def rows(step: int, rank: int, micro_batch: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch))


def loss(network: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = network(x).square().sum()
    return found


def expected(step: int) -> list[Tensor]:
    plain = layers().double()
    for rank in range(PROCESSES):
        for micro_batch in range(MICRO_BATCHES):
            loss(plain, rows(step, rank, micro_batch).double()).backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def accumulate(network: nn.Module, reduction: AllReduce, step: int, rank: int) -> None:
    for micro_batch in range(MICRO_BATCHES):
        found = loss(network, rows(step, rank, micro_batch))
        if micro_batch == MICRO_BATCHES - 1:
            found = reduction.last_loss(found)
        found.backward()
    reduction.finish()


def copies(network: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def gradients_of_steps(runtime: Runtime, overlap: bool, failing_step: int | None) -> list[list[Tensor]]:
    """Rank 1 fails midway in a backward pass of `failing_step`, and repeats its micro-batches."""
    network, unused = layers(), nn.Parameter(torch.ones(7))
    reduction = AllReduce([*network.parameters(), unused], overlap=overlap, bucket_mb=SMALL_BUCKETS_MB)
    found = []
    for step in range(STEPS):
        reduction.begin()
        if step == failing_step and runtime.rank == 1:
            loss(network, rows(step, 1, 0)).backward()
            hook = network[1].register_full_backward_pre_hook(run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loss(network, rows(step, 1, 1)).backward()
            hook.remove()
            reduction.begin()
        accumulate(network, reduction, step, runtime.rank)
        assert unused.grad is not None
        assert not unused.grad.any()
        found.append(copies(network))
    return found


def run_out_of_memory(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


def test_all_reduce_gives_sums_and_one_process_repeats_its_passes(processes: ProcessesByCount) -> None:
    several = processes(PROCESSES)
    undisturbed, *others = several.run(gradients_of_steps, False, None)
    for step in range(STEPS):
        for found, exact in zip(undisturbed[step], expected(step), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    disturbed = several.run(gradients_of_steps, False, 1)
    overlapping = several.run(gradients_of_steps, True, None)
    for other in (*others, *disturbed, *overlapping):
        for step in range(STEPS):
            assert all(map(torch.equal, other[step], undisturbed[step]))


def first_equals_second(runtime: Runtime) -> bool:
    """Whether the gradient of a batch is the same as the first one of a start and as a later one."""
    network = layers()
    reduction = AllReduce(list(network.parameters()), bucket_mb=SMALL_BUCKETS_MB)
    found = []
    for _ in range(2):
        reduction.begin()
        accumulate(network, reduction, 0, runtime.rank)
        found.append(copies(network))
    return all(map(torch.equal, *found))


def test_all_reduce_sums_in_one_order_from_the_first_step(processes: ProcessesByCount) -> None:
    """DDP by itself rebuilds its buckets after the first."""
    assert processes(PROCESSES).run(first_equals_second) == [True] * PROCESSES
