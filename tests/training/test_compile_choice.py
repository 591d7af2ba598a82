"""compile=auto: on where nothing stands against it and the run repays it; kept by a continued run; never an error."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.base.base_model import BaseModel
from app.batch import Batch
from app.config.finished_run import with_recorded_choices
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.distributed.process_group import HostGroup
from app.errors import EnvironmentProblem
from app.layers import compile
from app.layers.compile import attention_obstacles, machine_obstacles
from app.training import auto_settings
from app.training.auto_settings import (
    REPAYING_FLOPS,
    Choices,
    CompileChoice,
    CompileFacts,
    Savings,
    choose_compile,
    compile_facts,
    sections_of,
    settle_compile,
    with_planned_compile,
    with_recompute,
)
from app.training.plan import without_compiled_layers
from app.training.summary import manifest_facts, run_table
from tests.harness.composed import composed
from tests.harness.runs import FinishedRuns
from tests.model import small
from tests.training.conftest import plan_of, small_run
from tests.training.planners import planner

CHOICES, GPU = Choices("bf16", "varlen"), torch.device("cuda")
LONG = CompileFacts("cuda", flops=REPAYING_FLOPS)
ALONE, NOTHING = HostGroup(0, 1), dict[str, str]()


def off(*reasons: str) -> CompileChoice:
    return CompileChoice("none", reasons)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (LONG, CompileChoice("blocks")),
        (replace(LONG, device="cpu"), off()),
        (replace(LONG, device="cpu", obstacles=("padded rows",), stored="blocks"), off()),
        (replace(LONG, obstacles=("padded rows", "no triton")), off("padded rows", "no triton")),
        (replace(LONG, is_rocm=True), off("not tested on ROCm")),
        (replace(LONG, trains_experts=True), off("adapter.experts=true")),
        (replace(LONG, router_coefficient=0.001), off("the router loss (coefficient 0.001) reads inside layers")),
        (replace(LONG, flops=0), off("every layer has a recurrent mixer, whose rows have many shapes")),
        (replace(LONG, flops=2.7e16), off("too few steps to repay compilation (27 PFLOP, at least 30)")),
        (replace(LONG, flops=1, stored="blocks"), CompileChoice("blocks")),
        (replace(LONG, stored="none"), off("as in the first start")),
        (replace(LONG, stored="blocks", obstacles=("no triton",)), off("no triton")),
    ],
)
def test_choose_compile_by_facts(facts: CompileFacts, expected: CompileChoice) -> None:
    assert choose_compile(facts) == expected


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with triton and a compiler, as far as files tell."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(compile, "find_spec", lambda _name: object())


def run_of(*words: str) -> RunConfig:
    return composed("model.weights=random", "batching.packing=true", *words)


def facts_of(run: RunConfig, attention: str = "varlen", steps: int = 10, kind: str = "llama") -> CompileFacts:
    lm = small.built(kind)
    obstacles = (*machine_obstacles(run.compile, GPU), *attention_obstacles(attention, GPU, lambda: BATCH))
    return compile_facts(run, lm, "cuda", obstacles, steps)


BATCH: Batch = small.packed(small.documents_of((20, 5, 11)))


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize(
    ("words", "attention", "reason"),
    [
        (("batching.packing=false",), "varlen", "padded rows"),
        (("task.router_loss=0.1",), "varlen", "task.router_loss=0.1"),
        ((), "sdpa", "attention=sdpa on a GPU"),
        (("adapter=lora", "adapter.dora=true"), "varlen", "adapter.dora=true: torch.compile cannot trace"),
        (("adapter=peft", "adapter.method=lokr"), "varlen", "adapter.method=lokr: torch.compile cannot trace"),
    ],
)
def test_compile_facts_obstacles_are_reasons_of_auto(words: tuple[str, ...], attention: str, reason: str) -> None:
    (text,) = choose_compile(facts_of(run_of(*words), attention)).reasons
    assert text.startswith(reason)


@pytest.mark.usefixtures("capable")
def test_compile_facts_of_mixtures() -> None:
    full = facts_of(run_of("recipe=full"), kind="mixtral")
    assert full.router_coefficient > 0
    frozen = facts_of(run_of("recipe=lora"), kind="mixtral")
    assert (frozen.router_coefficient, frozen.trains_experts) == (0, False)
    assert facts_of(run_of("recipe=lora", "adapter.experts=true"), kind="mixtral").trains_experts


@pytest.mark.usefixtures("capable")
def test_compile_facts_flops_grow_with_tokens_of_the_run() -> None:
    once, more = (facts_of(run_of(f"batching.accumulation={n}"), steps=10 * n).flops for n in (1, 3))
    assert more == 9 * once > 0


def test_compile_facts_of_8b_repaid_after_65_steps() -> None:
    """The measured run: 457 TFLOP a step of 16,384 tokens."""
    run = composed("model=llama", "model.weights=random", "recipe=lora", "batching.tokens=16384")
    lm = BaseModel(run.model, task_of(run.task)).on_meta()
    facts = compile_facts(run, lm, "cuda", steps=66)
    assert facts.flops == pytest.approx(66 * 457.4e12, rel=0.01)
    assert facts.flops > REPAYING_FLOPS


def test_with_planned_compile_of_a_gpu_needs_no_compiler_here() -> None:
    lm = small.built("llama")
    assert with_planned_compile(run_of(), lm, "gpu").compile.kind == "blocks"
    assert with_planned_compile(run_of(), lm, "cpu").compile.kind == "none"
    assert with_planned_compile(run_of("batching.packing=false"), lm, "gpu").compile.kind == "none"
    assert with_planned_compile(run_of("compile=blocks"), lm, "cpu").compile.kind == "blocks"


def settled(
    run: RunConfig, facts: CompileFacts, stored: Mapping[str, str] = NOTHING, group: HostGroup = ALONE
) -> CompileChoice:
    return settle_compile(run, stored, group, lambda stored_choice: replace(facts, stored=stored_choice))


def test_settle_compile_decided_typed_or_stored() -> None:
    run, stored = run_of(), {"precision": "bf16", "compile": "blocks", "memory_budget": "0.4"}
    assert settled(run, LONG) == CompileChoice("blocks")
    assert settled(run, replace(LONG, flops=1), stored) == CompileChoice("blocks")
    for kind in ("none", "blocks"):
        typed = run_of(f"compile={kind}")
        assert settled(typed, LONG, stored) == CompileChoice(kind)


@dataclass(frozen=True)
class Two(HostGroup):
    """The first of two processes; the other one has no compiler."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, off("no C compiler")]


def test_settle_compile_all_processes_or_none() -> None:
    assert settled(run_of(), LONG, group=Two(0, 2)) == off("no C compiler")


def test_sections_of_auto_are_of_the_choice() -> None:
    assert sections_of(run_of(), CHOICES).compile.kind == "none"
    assert sections_of(run_of(), replace(CHOICES, compile="blocks")).compile.kind == "blocks"
    assert sections_of(run_of("compile=blocks"), CHOICES).compile.kind == "blocks"


@pytest.mark.parametrize("choice", [CompileChoice("blocks"), off("padded rows", "no triton"), off()])
def test_compile_choice_noted_recorded_and_stored(
    choice: CompileChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU decides, shown by a resolved run of a CPU."""
    monkeypatch.setattr(auto_settings, "choose_compile", lambda _facts: choice)
    resolved = plan_of(small_run("compile.memory_budget=0.5"), tmp_path / "checkpoints")
    assert resolved.sections.compile.kind == choice.kind
    notes = [text for name, text in run_table(resolved) if name == "note" and "compiled" in text]
    note = f"layers are not compiled: {'; '.join(choice.reasons)} (compile=auto)"
    assert notes == ([note] if choice.reasons else [])
    recorded = manifest_facts(resolved)["choices"]
    assert recorded["compile"] == choice.kind
    assert recorded.get("memory_budget") == (0.5 if choice.kind == "blocks" else None)
    assert recorded.get("uncompiled_because", []) == list(choice.reasons)
    stored = resolved.stored_choices()
    assert (stored["compile"], stored["memory_budget"]) == (choice.kind, "0.5")
    again = with_recorded_choices(resolved.run, recorded).compile
    assert (again.kind, again.memory_budget) == (choice.kind, 0.5)


def test_auto_on_cpu_compiles_nothing_and_says_nothing(finished: FinishedRuns) -> None:
    run = finished("lora")
    assert "compile" not in finished.said["lora"]
    assert json.loads((run / "manifest.json").read_text())["choices"]["compile"] == "none"


PLANNER = planner(recompute=(Savings(1, 0.6, 0), "1 layer"))


@pytest.mark.parametrize(
    ("recompute", "planner", "expected"),
    [("auto", PLANNER, 1), ("auto", None, 2), ("1", PLANNER, 1), ("true", PLANNER, True), ("0", None, 0)],
)
def test_run_without_compiled_layers_is_planned_again(
    recompute: str, planner: Any, expected: bool | int, tmp_path: Path
) -> None:
    run = small_run("compile=blocks", "compile.backend=eager", f"training.recompute={recompute}")
    resolved = plan_of(run, tmp_path / "checkpoints")
    if recompute == "auto":  # as planned for compiled layers
        resolved = replace(resolved, run=with_recompute(resolved.run, 0, 0.6))
    again = without_compiled_layers(resolved, "layer 1, output", planner, lambda _text: None)
    assert again.run.training.recompute == expected
    assert (again.run.compile.kind, again.choices.compile, again.sections.compile.kind) == ("none",) * 3


def test_run_without_compiled_layers_that_does_not_fit_names_the_number(tmp_path: Path) -> None:
    run = small_run("compile=blocks", "compile.backend=eager", "training.recompute=0")
    resolved = plan_of(run, tmp_path / "checkpoints")
    words = r"disabled: layer 1, output\. .*training\.recompute=0 does not fit\. Set training\.recompute=1, or auto"
    with pytest.raises(EnvironmentProblem, match=words):
        without_compiled_layers(resolved, "layer 1, output", PLANNER, lambda _text: None)
