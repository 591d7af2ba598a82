"""Micro-batches made before they are asked for are those that would have been made; between lines nobody waits."""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.batch import Batch
from app.data.loader import Loader
from app.signals import StopRequest
from app.training.trainer import Prefetch
from tests.training.conftest import MakeLoop, small_run
from tests.training.test_optimizer_in_backward import AS_THEY_COME, BF16, FULL

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUIET = ("record.every=1000", "eval.every=0", "checkpoint.every=0")


def test_prefetch_gives_each_step_its_batches(loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(4, 2)
    made: list[int] = []

    def make(step: int) -> list[Batch]:
        made.append(step)
        return loader.batches(step)

    ahead = Prefetch(make, CPU)
    for step, prepared in ((0, 1), (1, 2), (7, 8), (3, None), (3, 3)):
        found = ahead.batches(step)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, loader.batches(step), strict=True))
        if prepared is not None:
            ahead.prepare(prepared)
    assert made == [0, 1, 2, 7, 8, 3, 3, 3], "what was prepared is not made again"


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


def test_prefetch_stops_at_the_end_of_the_run(make_loop: MakeLoop) -> None:
    made: list[int] = []
    loop, _ = make_loop(small_run("recipe=full", "training.stop_after=3", *QUIET), 5)

    def make(step: int) -> list[Batch]:
        made.append(step)
        return loop.parts.loader.batches(step)

    loop._prefetch = Prefetch(make, CPU)
    loop.fit(StopRequest())
    assert made == [0, 1, 2, 3]
    loop.fit(StopRequest())
    assert made == [0, 1, 2, 3, 4]


class Readings(TorchDispatchMode):
    """Places at which a number of a tensor is asked for, which waits for the device if it is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [
                f
                for f in traceback.extract_stack()
                if "/app/" in f.filename or "/transformers/" in f.filename
            ]
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
    """The first two steps look whether the gradient reaches every adapter."""
    loop, _ = make_loop(small_run(*words, *QUIET), 20)
    for _ in range(3):
        loop._step()
    with Readings() as readings:
        for _ in range(3):
            loop._step()
    assert loop.progress.step == 6
    assert not readings.places


def test_device_reads_are_detected(make_loop: MakeLoop) -> None:
    """Muon cannot skip a step on the device: it asks."""
    loop, _ = make_loop(small_run("recipe=full", "optimizer=muon", *QUIET), 20)
    for _ in range(3):
        loop._step()
    with Readings() as readings:
        loop._step()
    assert [place.partition(":")[0] for place in readings.places] == ["train_step.py"]
