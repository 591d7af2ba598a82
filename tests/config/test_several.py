"""Many runs composed together are the runs that they are alone."""

import time

import pytest

from app.config import several
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.several import compose_runs
from app.errors import ConfigError

COMMANDS = [
    [],
    ["recipe=full", "seed=3"],
    ["recipe=full", "optimizer.lr=1e-3"],
    [
        "model=llama",
        "model.weights=random",
        "training.max_steps=null",
        "+model.architecture.another={a: [1, 2]}",
    ],
    ["model.path=somewhere", "dataset={max_rows: 3}", "adapter.targets=[q_proj, 'v proj']"],
    ["debug=fast", "~debug"],
    ["output_dir=${cache_dir}/${seed}", "cache_dir=c", "seed=7"],
    ["seed=1", "seed=2"],
    [
        "model.weights=random",
        "model.architecture.rope_scaling={type: linear}",
        "model.architecture.rope_scaling.factor=2",
    ],
]
WRONG = [
    ["sed=1"],
    ["optimizer.lr=fast", "seed=-1"],
    ["seed=${sed}"],
    ["recipe=full", "quantization=nf4"],
    ["dataset=3"],
    ["model.architecture.hidden_size=64", "seed=3"],
    ["model.weights=random", "model.architecture=[1]"],
    ["model.weights=random", "model.architecture={null: 3}", "seed=3"],
]


def outcome(overrides: list[str]) -> RunConfig | tuple[str, ...]:
    try:
        run = compose_run(overrides)
    except ConfigError as problem:
        return problem.problems
    run.output_dir = run.output_dir if any("output_dir" in text for text in overrides) else "by the clock"
    return run


def together(commands: list[list[str]]) -> list[RunConfig | tuple[str, ...]]:
    found: list[RunConfig | tuple[str, ...]] = []
    for overrides, run in zip(commands, compose_runs(commands), strict=True):
        if isinstance(run, RunConfig) and not any("output_dir" in text for text in overrides):
            run.output_dir = "by the clock"
        found.append(run.problems if isinstance(run, ConfigError) else run)
    return found


def test_they_are_what_they_are_alone() -> None:
    alone = [outcome(command) for command in (*COMMANDS, *WRONG)]
    assert [isinstance(each, tuple) for each in alone] == [False] * len(COMMANDS) + [True] * len(WRONG)
    assert together([*COMMANDS, *WRONG] * 2) == alone * 2  # the second time from what the first has left


def test_a_file_that_is_broken_is_broken_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(overrides: tuple[str, ...]) -> None:
        tries.append(overrides)
        raise ConfigError("broken")

    monkeypatch.setattr(several, "compose_plain", refuse)
    assert together([["seed=1"], ["seed=2"], ["recipe=full"]]) == [("broken",)] * 3
    assert len(tries) == 2  # one for each set of choices


def test_values_cost_next_to_nothing() -> None:
    commands = [[f"seed={number}", "optimizer.lr=1e-3"] for number in range(20)]
    compose_run([])
    begin = time.process_time()
    compose_run(commands[0])
    middle = time.process_time()
    assert all(isinstance(run, RunConfig) for run in compose_runs(commands))
    assert time.process_time() - middle < 10 * (middle - begin)
