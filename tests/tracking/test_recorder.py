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
from app.errors import ConfigError, EnvironmentProblem
from app.tracking.console import open_console
from app.tracking.formatting import Sample
from app.tracking.output_dir import RunFolder, read_lines
from app.tracking.recorder import RESULT_KEYS, Recorder, samples_table
from tests.tracking.test_jsonl_metrics import STEP

NO_TRACKER = TrackerConfig(kind="none")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.claim(str(tmp_path / "run"), "auto") as claimed:
        yield claimed


def opened(folder: RunFolder, screen: StringIO | None = None, **facts: Any) -> Recorder:
    console = open_console(screen or StringIO())
    return Recorder.open(folder, NO_TRACKER, {"seed": 0, "model": {"path": "x"}}, facts, console)


def result_of(folder: RunFolder) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(folder.result.read_text())
    return result


def test_recorder_finished_run_files(folder: RunFolder) -> None:
    screen = StringIO()
    with opened(folder, screen, seed=0) as record:
        record.message("model  tiny\ndata   sample")
        record.begin(10)
        record.evaluation({"step": 0, "eval_loss": 9.5, "exact_match": 0.0})  # no result of the training
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
    assert [values["step"] for values in read_lines(folder.metrics)] == [0, 5, 5, 10]
    assert list(read_lines(folder.samples)) == [{"step": 5, "prompt": "2+2?", "expected": "4", "answer": "5"}]
    result = result_of(folder)
    assert list(result) == ["status", *RESULT_KEYS]
    assert {key: value for key, value in result.items() if value is not None} == {
        "status": "finished",
        "objective": 1.25,
        "steps": 10,
        "train_loss_first": STEP["loss"],
        "train_loss_last": 0.5,
        "eval_loss": 1.25,
        "tokens_per_second": 1234.5,
        "peak_memory_bytes": 1073741824,
        "final": str(folder.final),
    }
    log = folder.log.read_text()
    for text in ("model  tiny\ndata   sample", "step 5/10 | loss 1.0986", "evaluation at step 5", "answer    5"):
        assert text in screen.getvalue()
        assert text in log


def test_recorder_run_yaml_is_the_run(folder: RunFolder) -> None:
    chosen = asdict(compose_run(["model=llama", "optimizer.lr=1e-5"]))
    Recorder.open(folder, NO_TRACKER, chosen, {}, open_console(StringIO())).finish("dry_run")
    assert OmegaConf.to_container(OmegaConf.load(folder.run_yaml)) == chosen


def test_recorder_sync_without_its_folder_is_refused(folder: RunFolder) -> None:
    """What is saved then could not be continued, nor found."""
    record = opened(folder)
    folder.run_yaml.unlink()
    with pytest.raises(EnvironmentProblem, match=r"run\.yaml was deleted"):
        record.sync()


def test_recorder_redacts_secrets(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    screen = StringIO()
    run = {"model": {"path": "https://correct-horse-battery@host"}, "hub_token": "geheim"}
    with Recorder.open(folder, NO_TRACKER, run, {"overrides": ["+hub_token=geheim"]}, open_console(screen)) as record:
        record.message("401 for correct-horse-battery\x1b[2J\u202e")
        record.samples(0, [Sample("\x1b]0;a", "correct-horse-battery", "https://me:geheim@host")])
        with pytest.raises(ConfigError):
            fail_within(record, ConfigError("bad correct-horse-battery"))
    everything = screen.getvalue() + "".join(path.read_text() for path in folder.path.iterdir())
    assert "***" in everything
    assert "correct-horse" not in everything
    assert "geheim" not in everything
    assert not set(folder.log.read_text()) & {"\x1b", "\u202e"}


def fail_within(record: Recorder, fault: BaseException) -> None:
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
def test_recorder_exception_recorded_and_raised(
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


def test_recorder_unwritable_folder_keeps_exception(folder: RunFolder) -> None:
    record = opened(folder)
    shutil.rmtree(folder.path)
    with pytest.raises(KeyError, match="rank"), record:
        raise KeyError("rank")


def test_recorder_result_kept_after_later_failure(folder: RunFolder) -> None:
    record = opened(folder)
    record.finish("finished")
    with pytest.raises(KeyError), record:
        raise KeyError
    assert result_of(folder)["status"] == "finished"


def test_recorder_result_non_finite_is_json(folder: RunFolder) -> None:
    opened(folder).finish("finished", objective=float("nan"), eval_loss=float("inf"))
    assert result_of(folder)["objective"] is None
    assert result_of(folder)["eval_loss"] is None


def test_recorder_resume_truncates_later_lines(folder: RunFolder) -> None:
    with opened(folder) as first:
        for step in (2, 4, 6):
            first.step({"step": step, "loss": 10.0 - step})
            first.samples(step, [Sample("a", "b", str(step))])
        first.finish("stopped")
    screen = open_console(StringIO())
    with Recorder.open(folder, NO_TRACKER, {"seed": 0}, {}, screen, step=4) as second:
        assert not folder.result.exists()
        second.step({"step": 6, "loss": 3.5})
        second.finish("finished")
    assert [(values["step"], values["loss"]) for values in read_lines(folder.metrics)] == [(2, 8.0), (4, 6.0), (6, 3.5)]
    assert [values["answer"] for values in read_lines(folder.samples)] == ["2", "4"]
    result = result_of(folder)
    assert (result["train_loss_first"], result["train_loss_last"], result["steps"]) == (8.0, 3.5, 6)
    manifest = json.loads(folder.manifest.read_text())
    assert len(manifest["starts"]) == 2
    assert manifest["created"] == manifest["starts"][0]["time"]


class Broken:
    location = "nowhere"

    def log(self, values: Any) -> None:
        raise RuntimeError("no connection")

    def close(self, *, failed: bool) -> None:
        raise RuntimeError("no connection")


@pytest.mark.parametrize("steps", [(5, 10), ()])
def test_recorder_broken_tracker_reported_once(
    steps: tuple[int, ...], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.tracking.recorder.open_tracker", lambda *_: Broken())
    screen = StringIO()
    with opened(folder, screen) as record:
        for step in steps:
            record.step({**STEP, "step": step})
        record.finish("finished")
    assert screen.getvalue().count("tracker failed (no connection)") == 1
    assert [line["step"] for line in (read_lines(folder.metrics) if steps else ())] == list(steps)
    assert result_of(folder)["status"] == "finished"


def test_recorder_other_rank_writes_log_only(folder: RunFolder) -> None:
    record = Recorder(folder, rank=1)
    record.add_facts(seed=0)
    record.message("model  tiny")
    record.begin(10)
    record.evaluation({"step": 5, "eval_loss": 1.25})
    record.samples(5, [Sample("2+2?", "4", "5")])
    record.sync()
    with pytest.raises(KeyError):
        fail_within(record, KeyError("rank"))
    record.finish("finished")
    (log,) = (path for path in folder.path.iterdir() if path.name != ".lock")
    assert log.name == "log-rank-1.txt"
    assert [line[27:] for line in log.read_text().splitlines()] == ["model  tiny", "KeyError: 'rank'", "finished"]


def answers(folder: Path, *lines: tuple[int, str, str, str]) -> Path:
    file = folder / "samples.jsonl"
    keys = ("step", "prompt", "expected", "answer")
    file.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    return file


def test_samples_table_first_and_last_answers(tmp_path: Path) -> None:
    file = answers(
        tmp_path,
        (0, "2+2?", "4", "the\nmoon"),
        (0, "x" * 60 + " and why?", "so", "y" * 60),
        (5, "2+2?", "4", "5"),
        (9, "2+2?", "4", "4"),
        (9, "x" * 60 + " and why?", "so", "so"),
    )
    assert samples_table(file) == (
        f"{'prompt':<37}  expected  before{' ' * 31}  after step 9\n"
        f"{'2+2?':<37}  4         the moon{' ' * 29}  4\n"
        f"…{'x' * 27} and why?  so        {'y' * 36}…  so"
    )


TOLD = "Which of these many words is the past tense of sell, please?"
BEFORE = "said: The past tense of sell is sold, or so they say in the town"
ANSWERS = [(0, TOLD, "sold", BEFORE), (9, TOLD, "sold", "sold")]


@pytest.mark.parametrize("width", [40, 80, 89, 90, 120, 200])
def test_samples_table_fits_the_width_and_breaks_no_word(width: int, tmp_path: Path) -> None:
    table = samples_table(answers(tmp_path, *ANSWERS), width)
    assert table is not None
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == (4 if width < 90 else 2)
    words = set(" ".join(text for line in ANSWERS for text in map(str, line)).split())
    heads = {"prompt", "expected", "before", "after", "step", "9"}
    assert {word.strip("…") for word in table.split()} <= words | heads
    assert (TOLD in table) == (width in {80, 89, 200})


@pytest.mark.parametrize("lines", [[(0, "a", "b", "c")], [(4, "a", "b", "c"), (9, "a", "b", "b")]])
def test_samples_table_without_both_ends_is_none(lines: list[Any], tmp_path: Path) -> None:
    assert samples_table(answers(tmp_path, *lines)) is None
