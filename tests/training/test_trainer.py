"""Training loop: evaluation, patience, saves, messages, stops, time left, time by kind of operation."""

import json
import math
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.data.loader import Loader
from app.data.prepare import Data
from app.errors import TrainingError
from app.optim.optimizers import LossScale
from app.signals import StopRequest
from app.tracking.formatting import PHASES
from app.tracking.output_dir import RunFolder
from app.training.eta import Eta
from app.training.final_model import result_of
from app.training.scores import score
from app.training.trainer import BETWEEN, OTHER, Prefetch, kind_of
from tests.harness.runs import samples_of
from tests.harness.scarcity import scarce
from tests.training.conftest import MakeLoop, small_run
from tests.training.test_train_step import AS_THEY_COME, BF16, FULL

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUIET = ("record.every=1000", "eval.every=0", "checkpoint.every=0")


def saved(folder: Path) -> list[int]:
    return sorted(int(f.name.removeprefix("step-")) for f in folder.iterdir())


def test_trainer_records_evaluates_and_saves_when_due(make_loop: MakeLoop, folder: Path) -> None:
    run = small_run("record.every=3", "eval.every=4", "checkpoint.every=5", "checkpoint.keep=9")
    loop, notebook = make_loop(run, 10)
    assert loop.fit(StopRequest()) is True
    assert [line["step"] for line in notebook.steps] == [1, 3, 4, 6, 8, 9, 10]
    assert [line["step"] for line in notebook.evaluations] == notebook.sampled == [0, 4, 8, 10]
    assert saved(folder) == [5, 10]
    assert notebook.synced == 2, "a checkpoint says that its lines are on the disk"
    last = notebook.steps[-1]
    assert list(last) == [
        "step", "epoch", "loss", "lr", "grad_norm", "tokens", "trained_tokens", "tokens_per_second",
        "samples_per_second", "seconds", *PHASES, "peak_memory_bytes",
    ]  # fmt: skip
    assert last["epoch"] == pytest.approx(10 / 8)
    assert loop.progress.first_loss == notebook.steps[0]["loss"]
    assert loop.speed["seconds"] == pytest.approx(sum(line["seconds"] for line in notebook.steps))
    assert loop.speed["tokens_per_second"] * loop.speed["seconds"] == pytest.approx(last["tokens"])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_samples_of_an_epoch_are_its_rows_also_where_steps_are_repeated(
    packed: bool, make_loop: MakeLoop, packed_loader_of: Callable[..., Loader], data: Data
) -> None:
    loop, notebook = make_loop(small_run("eval.every=0", "record.every=2", "checkpoint.every=0"), 1)
    loader = packed_loader_of(64, 2) if packed else loop.parts.loader
    loop.parts = replace(loop.parts, loader=loader, plan=replace(loop.parts.plan, steps=loader.steps_per_epoch))
    loop.prefetch = Prefetch(loader.batches, CPU)
    with scarce("backward", 40, calls=4) as memory:
        assert loop.fit(StopRequest())
    assert memory.times
    assert sum(samples_of(line) for line in notebook.steps) == len(data.train)
    assert samples_of(loop.speed) == len(data.train)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("eval.every=3",), [0, 3, 4]),
        (("eval.every=3", "eval.at_start=false"), [3, 4]),
        (("eval.every=0",), [4]),
        (("eval.every=0", "eval.at_start=true"), [0, 4]),
    ],
)
def test_evaluation_at_start_when_wanted_changes_no_number(
    words: tuple[str, ...], steps: list[int], make_loop: MakeLoop
) -> None:
    always = ("recipe=lora", "adapter.dropout=0.3", "record.every=1", "checkpoint.every=2")
    (plain, expected), (loop, notebook) = (
        make_loop(small_run(*always, *setting), 4) for setting in (QUIET[1:2], words)
    )
    for trainer in (plain, loop):
        torch.manual_seed(1)
        trainer.fit(StopRequest())
    assert [line["step"] for line in notebook.evaluations] == steps
    assert notebook.sampled == sorted({0, *steps}), "answers of the untrained model are always shown"
    assert [line["loss"] for line in notebook.steps] == [line["loss"] for line in expected.steps]
    saved_at_two = json.loads((loop.parts.checkpoints.folder / "step-000002/state.json").read_text())["progress"]
    start = saved_at_two["start_metrics"]
    assert start.get("eval_loss") == (notebook.evaluations[0]["eval_loss"] if steps[0] == 0 else None)
    assert loop.progress.best_step in steps[-2:]
    assert loop.progress.best_step > 0


def test_trainer_counts_tokens_of_the_whole_run(make_loop: MakeLoop, data: Data) -> None:
    loop, _ = make_loop(small_run("eval.every=0", "checkpoint.every=0"), 8)
    loop.fit(StopRequest())
    assert loop.progress.tokens == int(data.train.lengths.sum())
    assert loop.progress.trained_tokens == data.train.num_trained


def test_intervals_in_parts_of_an_epoch(make_loop: MakeLoop, folder: Path) -> None:
    run = small_run("eval.every=0.25epoch", "checkpoint.every=0.5epoch", "checkpoint.keep=9", "eval.samples=0")
    loop, notebook = make_loop(run, 12)
    assert loop.parts.plan.steps_per_epoch == 8
    assert loop.fit(StopRequest())
    assert [line["step"] for line in notebook.evaluations] == [0, 2, 4, 6, 8, 10, 12]
    assert saved(folder) == [4, 8, 12]
    assert [loop.parts.plan.every(interval) for interval in (0, 7, "0.001epoch", "2epoch")] == [0, 7, 1, 16]


def test_patience_ends_a_run_without_gain(make_loop: MakeLoop, folder: Path) -> None:
    run = small_run("recipe=full", "eval.every=1", "eval.patience=2", "checkpoint.every=0", "checkpoint.final=best")
    loop, notebook = make_loop(run, 50, lr=0.0)
    assert loop.fit(StopRequest()) is True
    assert loop.progress.step == 3
    assert [line["step"] for line in notebook.evaluations] == [0, 1, 2, 3]
    assert loop.progress.best_step == 1
    assert saved(folder) == [1, 3], "the best one, and the end"
    assert loop.fit(StopRequest()) is True
    assert loop.progress.step == 3, "a start after the end trains no further"


@pytest.mark.parametrize(("losses", "best_step"), [([math.nan, 2.0], 4), ([math.nan, math.nan], 0)])
def test_first_evaluation_not_finite_is_not_the_best(
    losses: list[float], best_step: int, make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = iter([0.5, *losses])  # the model before the first step is never the best
    monkeypatch.setattr("app.training.trainer.score", lambda *_, **__: {"eval_loss": next(remaining)})
    loop, _ = make_loop(small_run("eval.every=2", "checkpoint.every=0", "checkpoint.final=best"), 4)
    assert loop.fit(StopRequest())
    assert loop.progress.best_step == best_step
    objective = result_of(loop, None)["objective"]
    assert objective == pytest.approx(losses[-1], nan_ok=True), "never the loss of training rows"


def test_stop_request_saves_after_the_step(make_loop: MakeLoop, folder: Path) -> None:
    loop, notebook = make_loop(small_run("eval.every=0", "checkpoint.every=0"), 10)
    assert loop.fit(StopRequest(exit_code=75)) is False
    assert loop.progress.step == 1
    assert saved(folder) == [1]
    assert len(notebook.steps) == 1


def test_stop_after_ends_a_start_and_the_next_continues(make_loop: MakeLoop, folder: Path) -> None:
    run = small_run("eval.every=0", "checkpoint.every=0", "record.every=5", "training.stop_after=3")
    loop, notebook = make_loop(run, 6)
    request = StopRequest()
    assert loop.fit(request) is False
    assert (loop.progress.step, request.exit_code, saved(folder)) == (3, 75, [3])
    assert [line["step"] for line in notebook.steps] == [1, 3]
    assert loop.fit(StopRequest()) is True
    assert loop.progress.step == 6


def test_nonfinite_steps_are_named_and_end_the_run(make_loop: MakeLoop, folder: Path) -> None:
    run = small_run("eval.every=0", "checkpoint.every=0", "training.max_bad_steps=3", "record.every=2")
    loop, notebook = make_loop(run, 20)
    parameter = next(iter(loop.parts.stepper.model.trained().values()))
    parameter.register_hook(lambda g: g * float("nan") if loop.progress.step in {0, 2, 3, 4, 5} else g)
    with pytest.raises(TrainingError, match=r"consecutive steps with NaN/Inf gradients.*optimizer\.lr"):
        loop.fit(StopRequest())
    assert loop.progress.step == 6
    assert loop.progress.skipped_steps == 5
    named = [m for m in notebook.messages if m.startswith("step 4 skipped")]
    assert len(named) == 1
    assert all(place in named[0] for place in loop.parts.loader.source_locations(3)[:8])


@pytest.mark.parametrize(("half", "step"), [("lora_B", 1), ("lora_A", 2)])
def test_adapter_without_gradient_is_an_error(make_loop: MakeLoop, half: str, step: int) -> None:
    loop, _ = make_loop(small_run("eval.every=0", "checkpoint.every=0"), 4)
    cut = {name: p for name, p in loop.parts.stepper.model.trained().items() if f"q_proj.{half}" in name}
    for parameter in cut.values():
        parameter.register_hook(lambda g: g * 0)
    with pytest.raises(TrainingError, match=r"no gradient reaches the adapter of model\.layers\.0\.self_attn\.q_proj"):
        loop.fit(StopRequest())
    assert loop.progress.step == step


def test_trainer_eta_equals_the_time_that_passes(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that moves by 2 seconds a step, 30 an evaluation and 11 a save."""
    now, lines = [100.0], []

    def costs(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **named)

        return timed

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("app.training.trainer.score", costs(30.0, score))
    loop, notebook = make_loop(small_run("record.every=1", "eval.every=4", "checkpoint.every=5"), 10)
    monkeypatch.setattr(loop.parts.stepper, "run", costs(2.0, loop.parts.stepper.run))
    monkeypatch.setattr(loop.parts.checkpoints, "save", costs(11.0, loop.parts.checkpoints.save))
    write = notebook.step

    def step(values: Any, seconds_left: float | None) -> None:
        write(values, seconds_left)
        lines.append(now[0])

    monkeypatch.setattr(notebook, "step", step)
    loop.fit(StopRequest())
    measured = slice(5, 9)  # from here on one evaluation and one save have been measured
    assert len(notebook.left) == 10
    assert (notebook.left[0], notebook.left[-1]) == (None, None)
    assert notebook.left[measured] == pytest.approx([now[0] - at for at in lines[measured]])


def test_skipped_step_reports_no_adapter(make_loop: MakeLoop) -> None:
    """Its B is still zero, so no gradient reaches A in the second step either."""
    run = small_run("recipe=lora", "precision=fp16", "eval.every=0", "checkpoint.every=0", "record.every=1")
    loop, notebook = make_loop(run, 6)
    loop.parts.stepper.scale = LossScale(torch.device("cpu"), 2.0**20)
    assert loop.fit(StopRequest()) is True
    assert any("skipped" in message for message in notebook.messages), "nothing overflowed"
    assert loop.progress.skipped_steps < 6


def test_prefetch_pins_all_tensors_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, packed_loader_of: Callable[..., Loader]
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (batch,) = Prefetch(packed_loader_of(256, 1).batches, GPU).batches(0)
    assert len(pinned) == len(batch.tensors) == 5
    assert all(torch.equal(a, b) for a, b in zip(batch.tensors, batch.to(CPU).tensors, strict=True))


def test_prefetch_without_memory_to_pin_gives_pageable_batches(
    monkeypatch: pytest.MonkeyPatch, packed_loader_of: Callable[..., Loader]
) -> None:
    def pin(_tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = packed_loader_of(256, 1)
    (batch,), (expected,) = Prefetch(loader.batches, GPU).batches(0), loader.batches(0)
    assert all(torch.equal(a, b) for a, b in zip(batch.tensors, expected.tensors, strict=True))


class Readings(TorchDispatchMode):
    """Counts reads of numbers from tensors, each of which waits for the device, by their place in the code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [f for f in traceback.extract_stack() if "/app/" in f.filename or "/transformers/" in f.filename]
            self.places[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=lora",),
        ("recipe=lora", "adapter.dropout=0.1", "optimizer=sgd"),
        ("recipe=full", "precision=fp16"),
        ("recipe=full", *BF16),
        (*FULL, *BF16, AS_THEY_COME),
    ],
    ids=" ".join,
)
def test_trainer_reads_no_number_between_lines(words: tuple[str, ...], make_loop: MakeLoop) -> None:
    """After the first steps, which check the gradients of adapters."""
    loop, _ = make_loop(small_run(*words, *QUIET), 20)
    for _ in range(3):
        loop.take_step()
    with Readings() as readings:
        for _ in range(3):
            loop.take_step()
    assert loop.progress.step == 6
    assert not readings.places


def test_device_reads_are_detected(make_loop: MakeLoop) -> None:
    """Muon cannot skip a step on the device: it reads a flag."""
    loop, _ = make_loop(small_run("recipe=full", "optimizer=muon", *QUIET), 20)
    for _ in range(3):
        loop.take_step()
    with Readings() as readings:
        loop.take_step()
    assert [place.partition(":")[0] for place in readings.places] == ["train_step.py"]


Line = tuple[float, float | None, float]  # seconds since the start, the time left as estimated, and as it was


def estimates(end: int, seconds_of: Callable[[int], float], every: int = 5) -> list[Line]:
    now, lines = 1000.0, []
    eta = Eta(end, {})
    for step in range(1, end + 1):
        now += seconds_of(step)
        if step == 1 or step % every == 0 or step == end:
            with patch("time.perf_counter", return_value=now):
                lines.append((now, eta.seconds_left(step)))
    return [(at - 1000.0, left, now - at) for at, left in lines]


def largest_error(lines: list[Line], after: float = 60.0) -> float:
    """Relative to the time that was left, of all lines that came so many seconds after the start."""
    errors = [abs((left or 0.0) - true) / true for since, left, true in lines if since >= after and true > 0]
    assert len(errors) >= 3, "the run is too short to say anything"
    return max(errors)


def test_eta_forgets_slow_first_steps() -> None:
    assert largest_error(estimates(600, lambda step: 20.0 if step == 1 else 1.0 if step <= 10 else 0.5)) <= 0.1


def test_eta_averages_uneven_steps() -> None:
    lengths = np.random.default_rng(0).uniform(0.25, 0.75, 1001)
    assert largest_error(estimates(1000, lambda step: float(lengths[step]))[:-40]) <= 0.1


def test_eta_adapts_to_a_change_of_speed() -> None:
    """A machine that has another run for its first hour: what was then says nothing of the rest."""
    lines = estimates(20_000, lambda step: 1.5 if step <= 2400 else 0.5, every=50)
    assert largest_error(lines, after=3600 + 300) <= 0.1


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "contractions": "aten::mm aten::addmm_ aten::bmm aten::_scaled_mm aten::_flash_attention_backward",
        "normalisations": "aten::native_layer_norm aten::_softmax aten::linalg_vector_norm aten::mean triton_red_add",
        "element-wise": "aten::mul_ aten::_fused_adamw_ aten::silu_backward bitsandbytes::dequantize_4bit triton_poi_0",
        "copies": "aten::copy_ aten::_to_copy aten::cat aten::zero_ aten::index_select aten::embedding_dense_backward",
        "own kernels": "app_kernels::loss_and_grad app_kernels::dequantize_4bit",
        "collectives": "c10d::allreduce_ gloo:all_reduce fsdp::all_gather_copy_in",
        OTHER: "aten::view aten::empty autograd::engine::evaluate_function:_MulBackward0",
    }.items(),
)
def test_operations_have_kinds_by_name(kind: str, names: str) -> None:
    assert {name: kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_profiled_step_changes_no_number_and_does_not_count_in_the_speed(make_loop: MakeLoop, tmp_path: Path) -> None:
    words = ("recipe=lora", "eval.every=0", "checkpoint.every=0", "record.every=1")
    (plain, expected), (loop, notebook) = (
        make_loop(small_run(*words, *more), 4) for more in ((), ("training.profile_step=3",))
    )
    notebook.folder = RunFolder(tmp_path)
    assert plain.fit(StopRequest())
    assert loop.fit(StopRequest())
    assert [line["loss"] for line in notebook.steps] == [line["loss"] for line in expected.steps]
    assert [line["step"] for line in notebook.steps if "tokens_per_second" not in line] == [3]
    rows = [samples_of(line) for line in expected.steps]
    assert samples_of(loop.speed) == sum(rows) - rows[2]
    assert loop.memory.bytes == plain.memory.bytes

    facts = json.loads((tmp_path / "profile.json").read_text())
    assert (facts["step"], facts["device"]) == (3, "cpu")
    assert sum(facts["kinds"].values()) == pytest.approx(facts["seconds"])
    of_operations = sum(row["seconds"] for row in facts["operations"])
    assert of_operations == pytest.approx(facts["seconds"] - facts["kinds"][BETWEEN])
    assert all(facts["kinds"][kind] > 0 for kind in ("contractions", "normalisations", "element-wise", "copies"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (table,) = [text for text in notebook.messages if text.startswith("profile of step 3")]
    assert "contractions" in table
