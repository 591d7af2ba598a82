import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config.load import compose_run
from app.config.schema import TrackerConfig
from app.errors import ConfigError
from app.record.folder import RunFolder
from app.record.lines import Sample
from app.record.metrics import read_lines
from app.record.record import Record
from app.record.summary import RESULT_KEYS
from app.record.terminal import open_console
from app.record.tracker import NoTracker, TrackerError
from tests.record.child import run
from tests.record.test_metrics import STEP

NO_TRACKER = TrackerConfig(kind="none")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.claim(str(tmp_path / "run"), "auto") as claimed:
        yield claimed


def opened(folder: RunFolder, screen: StringIO | None = None, **facts: Any) -> Record:
    console = open_console(screen or StringIO())
    return Record.open(folder, NO_TRACKER, {"seed": 0, "model": {"path": "x"}}, facts, console)


def result_of(folder: RunFolder) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(folder.result.read_text())
    return result


def test_a_run_leaves_the_files_that_others_read(folder: RunFolder) -> None:
    screen = StringIO()
    with opened(folder, screen, seed=0) as record:
        record.table([("model", "tiny"), ("data", "sample")])
        record.begin(10)
        record.step(STEP)
        record.evaluation({"step": 5, "eval_loss": 1.25})
        record.samples(5, [Sample("2+2?", "4", "5")])
        record.step({**STEP, "step": 10, "loss": 0.5})
        record.sync()
        record.finish("finished", objective=1.25, final=str(folder.final), steps=10)
    assert sorted(path.name for path in folder.path.iterdir() if not path.name.startswith(".")) == [
        "log.txt",
        "manifest.json",
        "metrics.jsonl",
        "result.json",
        "run.yaml",
        "samples.jsonl",
    ]
    assert [values["step"] for values in read_lines(folder.metrics)] == [5, 5, 10]
    assert list(read_lines(folder.samples)) == [{"step": 5, "prompt": "2+2?", "expected": "4", "answer": "5"}]
    result = result_of(folder)
    assert list(result) == ["status", *RESULT_KEYS]
    assert result == {
        "status": "finished",
        "objective": 1.25,
        "steps": 10,
        "train_loss_first": STEP["loss"],
        "train_loss_last": 0.5,
        "eval_loss": 1.25,
        "exact_match": None,
        "tokens_per_second": 1234.5,
        "peak_memory_bytes": 1073741824,
        "memory_predicted_bytes": None,
        "memory_measured_bytes": None,
        "final": str(folder.final),
    }
    log = folder.log.read_text()
    for text in (
        "model  tiny\ndata   sample",
        "step 5/10 | loss 1.0986",
        "evaluation at step 5",
        "answer    5",
    ):
        assert text in screen.getvalue()
        assert text in log


def test_run_yaml_is_the_run_again(folder: RunFolder) -> None:
    chosen = asdict(compose_run(["model=llama", "optimizer.lr=1e-5"]))
    Record.open(folder, NO_TRACKER, chosen, {}, open_console(StringIO())).finish("dry_run")
    assert OmegaConf.to_container(OmegaConf.load(folder.run_yaml)) == chosen


def test_secrets_reach_no_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    screen = StringIO()
    run = {"model": {"path": "https://correct-horse-battery@host"}, "hub_token": "geheim"}
    with Record.open(
        folder, NO_TRACKER, run, {"overrides": ["+hub_token=geheim"]}, open_console(screen)
    ) as record:
        record.message("401 for correct-horse-battery")
        with pytest.raises(ConfigError):
            fail_within(record, ConfigError("bad correct-horse-battery"))
    everything = screen.getvalue() + "".join(path.read_text() for path in folder.path.iterdir())
    assert "***" in everything
    assert "correct-horse" not in everything
    assert "geheim" not in everything


def fail_within(record: Record, fault: BaseException) -> None:
    with record:
        record.step(STEP)
        raise fault


@pytest.mark.parametrize(
    ("fault", "status", "error", "logged"),
    [
        (KeyError("rank"), "failed", "KeyError: 'rank'", "Traceback"),
        (ConfigError(["a", "b"]), "failed", "error: 2 problems\n  1. a\n  2. b", "error: 2 problems"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt: ", None),
        (SystemExit(75), "stopped", "SystemExit: 75", None),
    ],
)
def test_how_a_run_ends_by_an_exception_is_written_and_raised_on(
    fault: BaseException, status: str, error: str, logged: str | None, folder: RunFolder
) -> None:
    with pytest.raises(type(fault)) as raised:
        fail_within(opened(folder), fault)
    assert raised.value is fault
    result = result_of(folder)
    assert (result["status"], result["error"], result["train_loss_last"]) == (status, error, STEP["loss"])
    assert ("Traceback" in folder.log.read_text()) is (logged == "Traceback")
    if logged:
        assert logged in folder.log.read_text()


def test_a_failure_keeps_its_own_face_when_nothing_can_be_written(folder: RunFolder) -> None:
    record = opened(folder)
    shutil.rmtree(folder.path)
    with pytest.raises(KeyError, match="rank"), record:
        raise KeyError("rank")


def test_a_finished_result_stays_when_the_end_of_the_program_fails(folder: RunFolder) -> None:
    record = opened(folder)
    record.finish("finished")
    with pytest.raises(KeyError), record:
        raise KeyError
    assert result_of(folder)["status"] == "finished"


def test_leaving_without_a_result_is_our_fault_and_written_as_such(folder: RunFolder) -> None:
    with pytest.raises(AssertionError, match="without a result"), opened(folder):
        pass
    assert result_of(folder)["status"] == "failed"


@pytest.mark.parametrize("values", [{"status": "done"}, {"status": "finished", "speed": 3}])
def test_a_result_that_nobody_expects_is_our_fault(values: dict[str, Any], folder: RunFolder) -> None:
    with pytest.raises(AssertionError):
        opened(folder).finish(**values)


def test_a_result_is_json_whatever_the_losses_were(folder: RunFolder) -> None:
    opened(folder).finish("finished", objective=float("nan"), eval_loss=float("inf"))
    assert result_of(folder)["objective"] is None
    assert result_of(folder)["eval_loss"] is None


def test_a_continued_run_forgets_what_it_will_do_again(folder: RunFolder) -> None:
    with opened(folder) as first:
        for step in (2, 4, 6):
            first.step({"step": step, "loss": 10.0 - step})
            first.samples(step, [Sample("a", "b", str(step))])
        first.finish("stopped")
    with opened(folder) as second:
        assert not folder.result.exists()
        second.rewind(4)
        second.step({"step": 6, "loss": 3.5})
        second.finish("finished")
    assert [(values["step"], values["loss"]) for values in read_lines(folder.metrics)] == [
        (2, 8.0),
        (4, 6.0),
        (6, 3.5),
    ]
    assert [values["answer"] for values in read_lines(folder.samples)] == ["2", "4"]
    result = result_of(folder)
    assert (result["train_loss_first"], result["train_loss_last"], result["steps"]) == (8.0, 3.5, 6)
    assert len(json.loads(folder.manifest.read_text())["starts"]) == 2


def test_facts_that_come_later_are_added(folder: RunFolder) -> None:
    record = opened(folder, counts={"rows": 3})
    record.add_facts(counts={"tokens": 9}, choices={"attention": "sdpa"})
    manifest = json.loads(folder.manifest.read_text())
    assert (manifest["counts"], manifest["choices"]) == ({"rows": 3, "tokens": 9}, {"attention": "sdpa"})


class Broken(NoTracker):
    def log(self, values: Any, /) -> None:
        raise TrackerError("the tracker stopped working")

    def close(self, status: str, /) -> None:
        raise TrackerError("the tracker stopped working")


def test_a_tracker_that_breaks_is_said_once_and_the_run_goes_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.record.record.open_tracker", lambda *_: Broken())
    screen = StringIO()
    with opened(folder, screen) as record:
        record.step(STEP)
        record.step({**STEP, "step": 10})
        record.finish("finished")
    assert screen.getvalue().count("the tracker stopped working") == 1
    assert [values["step"] for values in read_lines(folder.metrics)] == [5, 10]
    assert result_of(folder)["status"] == "finished"


def test_a_tracker_that_breaks_at_the_end_does_not_spoil_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.record.record.open_tracker", lambda *_: Broken())
    screen = StringIO()
    opened(folder, screen).finish("finished")
    assert screen.getvalue().count("the tracker stopped working") == 1
    assert result_of(folder)["status"] == "finished"


def test_a_disk_that_fills_up_ends_the_run_with_a_message_and_keeps_the_lines(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from app.config.schema import TrackerConfig\n"
        "from app.record.folder import RunFolder\n"
        "from app.record.record import Record\n"
        "with RunFolder.claim(sys.argv[1], None) as folder:\n"
        "    with Record.open(folder, TrackerConfig(kind='none'), {}, {}) as record:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "        for step in range(1000): record.step({'step': step, 'loss': 1.5})\n"
    )
    returncode, _, err = run(code, str(tmp_path / "run"))
    assert returncode == 1
    assert "EnvironmentProblem" in err
    assert "free disk space" in err
    steps = [values["step"] for values in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert len(steps) > 10
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"
