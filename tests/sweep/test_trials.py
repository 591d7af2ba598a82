"""The folder of a sweep: the same for the same command, and for one sweep only."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import AppError, CheckpointError, ConfigError, EnvironmentProblem
from app.sweep.grid import settings_of
from app.sweep.sweep import default_path
from app.sweep.trials import Outcome, SweepFolder
from tests.record.child import run

FACTS = {"identity": "one", "command": ["python", "-m", "app.train", "-m", "seed=1,2", "dataset.path=a b"]}


def path_of(*overrides: str) -> str:
    return default_path(settings_of(overrides)[0])


def test_the_same_command_finds_its_folder_again() -> None:
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
    assert (
        len(path_of(*(f"{key}=1,2" for key in ("seed", "eval.sample_tokens", "training.max_bad_steps")))) < 70
    )


def written(folder: SweepFolder, **trial: Any) -> None:
    outcome = Outcome(**{"number": 1, "overrides": ("a=1",), "swept": (), "folder": "f", **trial})
    folder.write(FACTS, [outcome])


def test_what_was_written_is_read_by_the_same_sweep_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here"
    with SweepFolder.claim(str(path), "one") as folder:
        written(folder, objective=1.5, status="finished")
    with SweepFolder.claim(str(path), "one") as folder:
        (trial,) = folder.read()["trials"]
        assert (trial["objective"], trial["status"], trial["overrides"]) == (1.5, "finished", ["a=1"])
    with pytest.raises(ConfigError, match="has another sweep") as refusal:
        SweepFolder.claim(str(path), "two")
    assert "python -m app.train -m seed=1,2 'dataset.path=a b'" in str(refusal.value)
    assert [entry.name for entry in path.iterdir()] == ["sweep.json"]


def test_secrets_are_not_written(tmp_path: Path) -> None:
    with SweepFolder.claim(str(tmp_path), "one") as folder:
        written(folder, overrides=("hub.token=abcdefghijk", "seed=1"))
    content = (tmp_path / "sweep.json").read_text()
    assert "abcdefghijk" not in content
    assert "seed=1" in content


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("mine.txt", "", ConfigError, "not empty and not that of a sweep (it has mine.txt)"),
        ("run.yaml", "", ConfigError, "not that of a sweep (it has run.yaml)"),
        ("sweep.json", "{", CheckpointError, "sweep.json cannot be read"),
        ("../folder", None, EnvironmentProblem, "this is a file"),
    ],
)
def test_other_folders_are_left_as_they_are(
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


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from app.errors import EnvironmentProblem; from app.sweep.trials import SweepFolder\n"
        "try: SweepFolder.claim(sys.argv[1], 'one')\n"
        "except EnvironmentProblem as problem: print(problem)"
    )
    with SweepFolder.claim(str(tmp_path), "one") as folder:
        written(folder)
        ended = run(code, str(tmp_path))
        assert ended[0] == 0, ended[2]
        assert "is at work on this sweep; wait until that ends" in ended[1]
    assert run(code, str(tmp_path))[1] == ""
    assert json.loads((tmp_path / "sweep.json").read_text())["identity"] == "one"
