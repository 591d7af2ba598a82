"""batching.tokens=auto: a step has the same tokens whatever its bins are."""

from dataclasses import dataclass
from typing import Any

import pytest

from app.base.base_model import BaseModel
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.distributed.process_group import HostGroup
from app.errors import ConfigError
from app.training.auto_settings import (
    AutoSettings,
    Choices,
    bin_sizes,
    size_notes,
    step_tokens,
    suggested_bin,
    with_bins,
)
from tests.training.planners import planner

CHOICES = Choices("fp32", "sdpa")
ALONE = HostGroup(0, 1)
PLANNER = planner()


def asked(*words: str) -> RunConfig:
    return compose_run(["model.weights=random", "batching.tokens=auto", *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("batching.accumulation=1",), [256]),
        (("batching.accumulation=4",), [1024, 512, 256]),
        (("batching.accumulation=4", "dataset.max_length=100"), [1024, 512, 256, 128]),
        (("batching.accumulation=3", "dataset.max_length=64"), [768, 384, 192, 96]),
        (("model.suggest.tokens=90", "dataset.max_length=20"), [90, 45]),
    ],
)
def test_bin_sizes_divide_the_step_and_hold_a_row(words: tuple[str, ...], expected: list[int]) -> None:
    run = asked(*words)
    assert bin_sizes(run) == expected
    for tokens in expected:
        batching = with_bins(run, tokens).batching
        assert batching.bin_tokens * batching.accumulation == step_tokens(run)


def test_suggested_bin_divides_the_step() -> None:
    assert suggested_bin(asked("batching.accumulation=4", "dataset.max_length=64")) == 256
    assert suggested_bin(asked("batching.accumulation=3", "dataset.max_length=64")) == 192
    assert suggested_bin(asked("batching.accumulation=3", "dataset.max_length=250")) == 384


def auto_settings(planner: Any = PLANNER, host_group: HostGroup = ALONE, **stored: Any) -> AutoSettings:
    return AutoSettings(planner, CHOICES, stored, host_group, lambda _text: None)


def test_auto_bins_planned_stored_or_typed() -> None:
    run = asked("batching.accumulation=4")
    planned = auto_settings().with_bins(run).batching
    assert (planned.tokens, planned.accumulation) == (512, 2)
    kept = auto_settings(tokens="1024").with_bins(run).batching
    assert (kept.tokens, kept.accumulation) == (1024, 1)
    typed = compose_run(["model.weights=random"])
    assert auto_settings(tokens="512").with_bins(typed) == typed


@pytest.mark.parametrize(("stored", "layers"), [({}, 3), ({"recompute": "2"}, 2), ({"recompute": "True"}, True)])
def test_auto_recompute_planned_or_stored(stored: dict[str, Any], layers: int) -> None:
    run = compose_run(["model.weights=random", "training.recompute=auto"])
    settled = auto_settings(planner(recompute=((3, 0.4), "so")), **stored)
    assert settled.with_recompute(run, largest=lambda: None, layers=4).training.recompute == layers  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("words", "stored", "expected"),
    [
        (("compile=blocks",), {}, 0.4),
        (("compile=blocks",), {"recompute": "0", "memory_budget": "0.3"}, 0.3),
        (("compile=blocks",), {"recompute": "0"}, 0.6),
        (("compile=blocks", "compile.memory_budget=0.5"), {"recompute": "0", "memory_budget": "0.3"}, 0.5),
        (("compile=blocks", "compile.backend=aot_eager"), {}, 0.6),
    ],
)
def test_auto_memory_budget_planned_stored_or_typed(
    words: tuple[str, ...], stored: dict[str, Any], expected: float
) -> None:
    run = compose_run(["model.weights=random", "training.recompute=0", *words])
    settled = auto_settings(planner(recompute=((3, 0.4), "so")), **stored)
    found = settled.with_recompute(run, largest=lambda: None, layers=4)  # type: ignore[arg-type,return-value]
    assert (found.compile.memory_budget, found.training.recompute) == (expected, 0)


def test_auto_settings_of_a_model_that_cannot_be_planned_fall_back() -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("an operation")

    messages: list[str] = []
    auto = AutoSettings(planner(bin_tokens=fails), CHOICES, {}, ALONE, messages.append)
    assert auto.with_bins(asked()).batching.tokens == 256
    assert messages == ["batching.tokens=auto: 256 tokens; no plan for this model (NotImplementedError)"]


def test_with_bins_that_do_not_divide_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"began with bins of 1024 tokens, and a step of 512"):
        with_bins(asked("batching.accumulation=2"), 1024)


@dataclass(frozen=True)
class Two(HostGroup):
    """The first of two processes; the other one has the same."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]


def test_auto_parallel_planned_stored_or_typed() -> None:
    run, two = compose_run(["model.weights=random"]), Two(0, 2)
    planned = auto_settings(host_group=two).with_parallel(run)
    assert planned.parallel.kind == "fsdp"
    assert auto_settings(host_group=two, parallel="ddp").with_parallel(run).parallel.kind == "ddp"
    assert auto_settings().with_parallel(run) == run
    typed = compose_run(["model.weights=random", "parallel=hsdp"])
    assert auto_settings(host_group=two, parallel="ddp").with_parallel(typed) == typed
    begun_by_one = auto_settings(host_group=two, parallel="auto")
    assert begun_by_one.with_parallel(run).parallel.kind == "fsdp"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model=llama",), None),
        (("model=tiny",), None),
        (("model=bert", "dataset=text", "dataset.path=x.txt"), "at least of 8: vocab_size=30522 is 2 above one of 8"),
        (("model=bert", "task=classification", "dataset=labelled_text", "dataset.path=x.csv"), None),
        (("model=gpt2_xl",), "vocab_size=50257 is 1 above one of 8"),
        (("model=tiny", "batching.tokens=1000"), "batching.tokens=1000 is 40 above one of 64"),
        (("model=tiny", "batching.tokens=1000", "batching.packing=false"), None),
        (
            ("model=tiny", "model.architecture.hidden_size=204", "batching.tokens=260"),
            "hidden_size=204 is 4 above one of 8, batching.tokens=260 is 4 above one of 8",
        ),
    ],
)
def test_sizes_that_miss_multiples_are_told(words: tuple[str, ...], told: str | None) -> None:
    run = compose_run(["model.weights=random", *words])
    notes = list(size_notes(run, BaseModel(run.model, task_of(run.task))))
    assert [note.endswith(told) for note in notes] == [True] if told else notes == []
