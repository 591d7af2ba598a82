"""How a sweep takes what its trials do; the trials are stand-ins (see stand_in.py), the processes and signals real."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from app.sweeps import trials as trial_process
from app.sweeps.ladder import Ladder
from app.sweeps.search import Search
from app.sweeps.search_space import NO_PRESET, Preset, Rung, SweepConfig, dimensions_in, settings_of
from app.sweeps.sweep import Runner, proposer_of
from app.sweeps.trials import SweepFolder, TrialLog, reason
from tests.harness.composed import composed

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **options: Any) -> Popen[bytes]:
        assert command[:3] == [sys.executable, "-m", "app.train"]
        return Popen([sys.executable, "-S", STAND_IN, *command[3:]], **options)

    monkeypatch.setattr(trial_process, "Popen", start)


def run(folder: Path, *seeds: int) -> int:
    settings, _ = settings_of([f"seed={','.join(map(str, seeds))}"])
    with SweepFolder.claim(str(folder), "same") as claimed:
        return Runner(claimed, "same", proposer_of(settings, NO_PRESET.config), ["python"]).run()


def search(folder: Path, trials: int = 5) -> int:
    """Over seeds of which one fails and one has no objective."""
    space, _ = dimensions_in({"seed": [3, 10, 1, 4, 2]})
    proposer = Search(space, SweepConfig(proposer="tpe", trials=trials))
    with SweepFolder.claim(str(folder), "same") as claimed:
        return Runner(claimed, "same", proposer, ["python"], ["        seed 3 10 1 4 2"]).run()


def content(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return values


def column(folder: Path, name: str) -> list[Any]:
    return [trial[name] for trial in content(folder)["trials"]]


def test_runner_failed_trials_unranked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, 3, 10, 4, 11, 1) == 3
    assert column(tmp_path, "status") == ["finished", "failed", "finished", "failed", "finished"]
    assert column(tmp_path, "objective") == [3.0, None, None, None, 1.0]
    assert column(tmp_path, "exit_code") == [0, 1, 0, -9, 0]
    assert column(tmp_path, "error") == [None, "error: not today", None, "killed by SIGKILL: out of memory?", None]
    assert content(tmp_path)["best"] == {
        "number": 5,
        "objective": 1.0,
        "folder": str(tmp_path / "5-seed=1"),
        "overrides": ["seed=1"],
        "line": "seed=1",
    }
    shown = capfd.readouterr()
    assert shown.err == ""
    assert "trial 2/5  seed=10\n  failed with exit code 1 after " in shown.out
    assert f"full output in {tmp_path}/2-seed=10.txt\n    error: not today\n" in shown.out
    assert "  finished, no objective, 3 steps, " in shown.out
    assert "2 of 5 trials failed; run the same command to retry them" in shown.out


def test_runner_restart_repeats_failed_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, 1, 10, 2) == 3
    first = content(tmp_path)["trials"]
    capfd.readouterr()
    assert run(tmp_path, 1, 10, 2) == 3
    again = content(tmp_path)["trials"]
    assert (again[0], again[2]) == (first[0], first[2])
    assert again[1]["seconds"] > first[1]["seconds"]
    starts = [(tmp_path / f"{name}.txt").read_text().count("resume=auto") for name in ("1-seed=1", "2-seed=10")]
    assert starts == [1, 2]
    assert capfd.readouterr().out.count("already finished, objective") == 2


@pytest.mark.parametrize(("seed", "code"), [(20, 130), (21, 75), (22, 130), (75, 75), (130, 130)])
def test_runner_stop_request(tmp_path: Path, capfd: pytest.CaptureFixture[str], seed: int, code: int) -> None:
    """A stop request for the sweep, which passes it on; twice, for a trial that ignores it; or for the trial alone."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handler = signal.getsignal(signal.SIGINT)
    assert run(tmp_path, 1, seed, 2) == code
    assert signal.getsignal(signal.SIGINT) is handler
    assert column(tmp_path, "status") == ["finished", "stopped", "pending"]
    assert column(tmp_path, "exit_code") == [0, -9 if seed == 22 else code, None]
    assert not (tmp_path / "3-seed=2").exists()
    shown = capfd.readouterr().out
    assert "Stopped. Run the same command to continue." in shown
    assert ("Ctrl-C again to kill it" in shown) == (seed < 75)


def test_runner_search_continues_after_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert search(tmp_path, trials=2) in (0, 3)
    first = content(tmp_path)["trials"]
    assert search(tmp_path) == 3
    trials = content(tmp_path)["trials"]
    assert [trial["values"] for trial in trials[:2]] == [trial["values"] for trial in first]
    objectives = {trial["values"]["seed"]: trial["objective"] for trial in trials}
    assert objectives == {1: 1.0, 2: 2.0, 3: 3.0, 4: None, 10: None}
    assert sorted(column(tmp_path, "status")) == ["failed", *["finished"] * 4]
    assert all(trial["proposed"] == {"seed": trial["swept"][0]} for trial in trials)
    assert content(tmp_path)["best"]["line"] == "seed=1"
    shown = capfd.readouterr().out
    assert "5 trials\n        seed 3 10 1 4 2\ntrial 1/5  seed=" in shown
    assert "1 of 5 trials failed; run the same command to retry them" in shown
    assert search(tmp_path) == 3
    assert column(tmp_path, "values") == [trial["values"] for trial in trials]


@pytest.mark.parametrize("own", [None, "mine"])
def test_runner_wandb_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    if own:
        monkeypatch.setenv("WANDB_RUN_GROUP", own)
    run(tmp_path / "sweep-x", 1)
    assert f"group={own or 'sweep-x'}\n" in (tmp_path / "sweep-x" / "1.txt").read_text()
    assert os.environ.get("WANDB_RUN_GROUP") == own


@pytest.mark.parametrize(
    ("device", "compiled", "later"), [("cuda", "none", "none"), ("cuda", "blocks", "None"), ("cpu", "none", "None")]
)
def test_runner_trials_after_an_uncompiled_first_compile_nothing(
    device: str, compiled: str, later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", device)
    monkeypatch.setenv("COMPILE", compiled)
    run(tmp_path, 1, 2, 3)
    said = [(tmp_path / f"{seed}-seed={seed}.txt").read_text().split() for seed in (1, 2, 3)]
    assert [words[1] for words in said] == ["compile=None", f"compile={later}", f"compile={later}"]


def climb(folder: Path, seeds: Mapping[str, int | None], repeats: int = 1) -> int:
    """Run a ladder of stand-ins, of which those without a seed are refused before the start."""
    rungs = {name: Rung(overrides=[f"seed={seed or 0}"], claimed={"samples/s": 2}) for name, seed in seeds.items()}
    config = SweepConfig(proposer="rungs", source="a paper", rungs=rungs, repeats=repeats)
    ladder = Ladder(Preset("mine", config), [])
    numbers = dict(enumerate(seeds.values(), 1))
    ladder.check(
        {number: composed() for number, seed in numbers.items() if seed},
        {number: ["no such package"] for number, seed in numbers.items() if not seed},
    )
    with SweepFolder.claim(str(folder), "same") as claimed:
        return Runner(claimed, "same", ladder, ["python"]).run()


def test_runner_refused_rungs_are_named_and_the_others_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rungs = {"first": 1, "missing": None, "elsewhere": 13, "second": 2}
    assert [climb(tmp_path, rungs), climb(tmp_path, rungs)] == [0, 0]
    assert column(tmp_path, "status") == ["finished", "refused", "refused", "finished"]
    assert column(tmp_path, "error") == [None, "no such package", "not on this machine", None]
    assert content(tmp_path)["best"] is None
    ladder = content(tmp_path)["ladder"]
    assert [(rung["name"], rung["status"]) for rung in ladder["rungs"]] == [
        ("first", "finished"),
        ("missing", "refused"),
        ("elsewhere", "refused"),
        ("second", "finished"),
    ]
    shown = capfd.readouterr().out
    assert shown.count("already finished") == 2
    assert "  refused: no such package\n" in shown
    assert "\nelsewhere: not on this machine\n" in shown
    written = (tmp_path / "ladder.md").read_text()
    assert "Claimed by the source: a paper" in written
    assert "| elsewhere |" in written
    assert "<h2>Claimed by the source: a paper</h2>" in (tmp_path / "report.html").read_text()


def test_runner_second_turn_repeats_the_rungs_that_ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rungs = {"first": 1, "elsewhere": 13}
    assert [climb(tmp_path, rungs), climb(tmp_path, rungs, repeats=2)] == [0, 0]
    assert [Path(place).name for place in column(tmp_path, "folder")] == [
        "1-first",
        "2-elsewhere",
        "1-first-2",
        "2-elsewhere-2",
    ]
    assert column(tmp_path, "status") == ["finished", "refused", "finished", "refused"]
    assert capfd.readouterr().out.count("already finished") == 1
    assert not (tmp_path / "2-elsewhere-2.txt").exists(), "refused without a process"
    assert [rung.get("repeats") for rung in content(tmp_path)["ladder"]["rungs"]] == [2, None]


@pytest.mark.parametrize(("rungs", "code"), [({"first": 1, "crashed": 10}, 3), ({"only": 13}, 3), ({"only": 12}, 0)])
def test_runner_exit_code_of_a_ladder(tmp_path: Path, rungs: dict[str, int], code: int) -> None:
    assert climb(tmp_path, rungs) == code


def test_trial_log_latest_step_of_this_start(tmp_path: Path) -> None:
    path = tmp_path / "1.txt"
    path.write_text("step 9/9 | of an earlier start\n")
    printed = TrialLog(path)
    assert (printed.latest(), printed.text()) == ("starting", "")
    seen = []
    for text in ("output  here\n", "data  ", "two lines\n", "step 1/9\nstep 2/", "9\nsamples at step 2\n", ""):
        with path.open("a") as file:
            file.write(text)
        seen.append(printed.latest())
    assert seen == ["output  here", "output  here", "data  two lines", "step 1/9", "step 2/9", "step 2/9"]
    assert printed.text().startswith("output  here\n")


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (2, "output  x\nerror: seed is wrong. Do this.\n", "error: seed is wrong. Do this."),
        (2, "a\nerror: 2 problems\n  1. one\n  2. two\n", "error: 2 problems\n  1. one\n  2. two"),
        (1, "a\nTraceback (most recent call last):\n  File\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        (1, "", "no output"),
        (-9, "step 3\n", "killed by SIGKILL: out of memory?"),
        (-11, "step 3\n", "killed by SIGSEGV"),
    ],
)
def test_reason_short(code: int, text: str, expected: str) -> None:
    assert reason(code, text) == expected
