"""The last lines of a run are commands that a shell takes."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.finished_run import finished_folder
from app.config.schema import DatasetConfig, TaskConfig
from app.errors import CheckpointError
from app.tracking.output_dir import RunFolder
from app.training.checkpoint import Progress
from app.training.summary import closing_facts


def test_closing_facts_scores_and_command(tmp_path: Path) -> None:
    model = SimpleNamespace(trust_remote_code=False, vocab_size=None)
    dataset = DatasetConfig(eval_path=None, eval_split=None, eval_fraction=0.0)
    run: Any = SimpleNamespace(
        adapter=SimpleNamespace(kind="lora"), model=model, task=TaskConfig(kind="causal"), dataset=dataset
    )
    start = {"eval_loss": 2.0, "exact_match": 0.0}
    progress: Any = Progress(step=1, first_loss=2.0, last_loss=1.0, last_eval_loss=0.5, start_metrics=start)
    folder = RunFolder(tmp_path / "a b")
    result = {"memory_predicted_bytes": 2e6, "memory_measured_bytes": 1.9e6, "peak_memory_bytes": 9e8}
    progress.metrics = {"eval_loss": 0.5, "exact_match": 0.9424}
    told = dict(closing_facts(run, folder, result, progress))
    scores = "eval loss 0.5000, exact match 94.24% (was 0.00%); nothing was left to do"
    assert told["done"] == f"1 step, loss 2.0000 -> 1.0000, {scores}"
    assert told["adapter"] == str(folder.final)
    assert told["memory"].startswith("2 MB planned for tensors, 2 MB measured")
    assert shlex.split(told["try it"])[1:] == ["-m", "app.generate", f"run={folder.path}", "prompt=..."]
    model.trust_remote_code, progress.metrics = True, {}
    start["chosen_log_probability"] = -1.0  # of rows that this start does not hold out
    assert "model.trust_remote_code=true prompt=" in dict(closing_facts(run, folder, result, progress))["try it"]
    run.task.kind, model.trust_remote_code = "masked", False  # it answers nothing
    result |= {"tokens_per_second": 5200.4, "samples_per_second": 8.861, "seconds": 57.82}
    told = dict(closing_facts(run, folder, result, progress))
    assert told["speed"] == "5,200 tokens/s, 8.86 samples/s, 57.8 s"
    assert shlex.split(told["try it"])[1:] == ["-m", "app.evaluate", f"run={folder.path}", "dataset.path=..."]
    dataset.eval_fraction = 0.1
    assert dict(closing_facts(run, folder, result, progress))["try it"].endswith(f"{folder.path}'")


def test_unfinished_run_command_quoted(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    with pytest.raises(CheckpointError) as refusal:
        finished_folder(f"{tmp_path}/a b")
    assert f"'output_dir={tmp_path}/a b'" in str(refusal.value)
