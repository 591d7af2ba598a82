"""Folder, ranking and leaderboard of a sweep."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import AppError, CheckpointError, ConfigError, EnvironmentProblem
from app.sweeps.search_space import settings_of
from app.sweeps.sweep import default_path
from app.sweeps.trials import Outcome, SweepFolder, best, leaderboard, ranked
from tests.harness.child import run

FACTS = {"identity": "one", "command": ["finetune", "train", "-m", "seed=1,2", "dataset.path=a b"]}


def path_of(*overrides: str) -> str:
    return default_path(settings_of(overrides)[0])


def test_default_path_same_command_same_folder() -> None:
    path = path_of("recipe=lora,qlora", "optimizer.lr=1e-3,3e-4", "seed=1")
    assert path.startswith("runs/sweep-recipe-lr-")
    assert path == path_of("recipe=choice(lora,qlora)", "++optimizer.lr=0.001,3e-4", "seed=1")
    assert path == path_of("recipe=lora,qlora", "optimizer.lr=1e-3,3e-4", "seed=1", "dry_run=true")
    others = [
        path_of("recipe=lora,qlora", "optimizer.lr=1e-3,3e-4", "seed=2"),
        path_of("recipe=lora,qlora", "optimizer.lr=1e-3,3e-4"),
        path_of("recipe=lora,qlora", "optimizer.lr=3e-4,1e-3", "seed=1"),
        path_of("recipe=lora,full", "optimizer.lr=1e-3,3e-4", "seed=1"),
    ]
    assert len({path, *others}) == 5
    assert path_of().startswith("runs/sweep-")
    assert len(path_of(*(f"{key}=1,2" for key in ("seed", "eval.sample_tokens", "training.max_bad_steps")))) < 70


def written(folder: SweepFolder, **trial: Any) -> None:
    outcome = Outcome(**{"number": 1, "overrides": ("a=1",), "swept": (), "folder": "f", **trial})
    folder.write(FACTS, [outcome])


def test_sweep_folder_read_by_same_sweep_only(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here"
    with SweepFolder.claim(str(path), "one") as folder:
        written(folder, objective=1.5, status="finished")
    with SweepFolder.claim(str(path), "one") as folder:
        (trial,) = folder.read()["trials"]
        assert (trial["objective"], trial["status"], trial["overrides"]) == (1.5, "finished", ["a=1"])
    with pytest.raises(ConfigError, match="has another sweep") as refusal:
        SweepFolder.claim(str(path), "two")
    assert "finetune train -m seed=1,2 'dataset.path=a b'" in str(refusal.value)
    assert [entry.name for entry in path.iterdir()] == ["sweep.json"]


def test_sweep_folder_redacts_secrets(tmp_path: Path) -> None:
    with SweepFolder.claim(str(tmp_path), "one") as folder:
        written(folder, overrides=("hub.token=abcdefghijk", "seed=1"))
    content = (tmp_path / "sweep.json").read_text()
    assert "abcdefghijk" not in content
    assert "seed=1" in content


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("mine.txt", "", ConfigError, "not empty and not a sweep (found mine.txt)"),
        ("run.yaml", "", ConfigError, "not a sweep (found run.yaml)"),
        ("sweep.json", "{", CheckpointError, "sweep.json cannot be read"),
        ("sweep.json", '{"trials": []}', CheckpointError, "sweep.json cannot be read (command or trials are missing"),
        ("../folder", None, EnvironmentProblem, "not a folder"),
    ],
)
def test_sweep_folder_foreign_refused(
    tmp_path: Path, name: str, content: str | None, kind: type[AppError], message: str
) -> None:
    place = tmp_path / "folder"
    if content is None:
        place.touch()
    else:
        place.mkdir()
        (place / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind) as refusal:
        SweepFolder.claim(str(place), "one")
    assert message in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_sweep_folder_second_process_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from app.errors import EnvironmentProblem; from app.sweeps.trials import SweepFolder\n"
        "try: SweepFolder.claim(sys.argv[1], 'one')\n"
        "except EnvironmentProblem as problem: print(problem)"
    )
    with SweepFolder.claim(str(tmp_path), "one") as folder:
        written(folder)
        ended = run(code, str(tmp_path))
        assert ended[0] == 0, ended[2]
        assert "; wait for it to end" in ended[1]
    assert run(code, str(tmp_path))[1] == ""
    assert json.loads((tmp_path / "sweep.json").read_text())["identity"] == "one"


def outcome(number: int, objective: float | None, status: str = "finished", **more: Any) -> Outcome:
    swept = (f"++optimizer.lr={number}e-3", "recipe=lora")
    values = {"overrides": (*swept, "dataset.path=a b"), "swept": swept, "folder": f"s/{number}"}
    return Outcome(**{**values, "number": number, "objective": objective, "status": status, **more})


def shown(*outcomes: Outcome) -> list[list[str]]:
    return [line.split() for line in leaderboard(outcomes).splitlines()]


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_ranked_lowest_first_missing_last(objectives: list[float | None]) -> None:
    outcomes = [outcome(number, value) for number, value in enumerate(objectives, 1)]
    found = [each.objective for each in ranked(outcomes)]
    known = [value for value in objectives if value is not None]
    assert found == sorted(known) + [None] * (len(objectives) - len(known))
    winner = best(outcomes)
    assert (winner and winner["objective"]) == (min(known) if known else None)


def test_best_trial_as_command_line() -> None:
    winner = best([outcome(1, 3.0), outcome(2, 2.0), outcome(3, None, "failed")])
    assert winner is not None
    assert winner["line"] == "++optimizer.lr=2e-3 recipe=lora 'dataset.path=a b'"
    assert shlex.split(winner["line"]) == winner["overrides"]
    assert (winner["number"], winner["folder"]) == (2, "s/2")
    assert best([outcome(1, None, "dry_run")]) is None


def test_leaderboard_trials_with_other_keys() -> None:
    several = outcome(1, 3.0, swept=["recipe=full"]), outcome(2, 2.0, swept=["recipe=lora", "adapter.r=8"])
    header, *rows = shown(*several)
    assert header[-3:] == ["recipe", "adapter.r", "status"]
    assert [row[-3:] for row in rows] == [["lora", "8", "finished"], ["full", "-", "finished"]]


def test_leaderboard_columns() -> None:
    header, *rows = shown(
        outcome(1, 3.0, steps=40, tokens_per_second=5125.0, samples_per_second=8.86, seconds=57.8),
        outcome(2, None, "failed", exit_code=2),
        outcome(3, 2.5, steps=1200, tokens_per_second=900.0),
        outcome(4, None, steps=7),
        outcome(5, None, "pending"),
    )
    columns = "rank trial objective steps tokens/s samples/s time optimizer.lr recipe status"
    assert header == columns.split()
    assert rows == [
        ["1", "3", "2.5000", "1,200", "900", "-", "-", "3e-3", "lora", "finished"],
        ["2", "1", "3.0000", "40", "5.1k", "8.86", "0:00:58", "1e-3", "lora", "finished"],
        ["-", "2", "-", "-", "-", "-", "-", "2e-3", "lora", "failed", "(2)"],
        ["-", "4", "-", "7", "-", "-", "-", "4e-3", "lora", "finished"],
        ["-", "5", "-", "-", "-", "-", "-", "5e-3", "lora", "pending"],
    ]
