"""An evaluation of a finished run: which rows, progress messages, the table."""

from pathlib import Path

import pytest

from app.base.base_model import BaseModel
from app.config.tasks import TASKS
from app.data.collate import Padded
from app.data.prepare import Data
from app.distributed.process_group import Runtime
from app.evaluation.run import Evaluation
from app.training.auto_settings import Choices
from tests.training.conftest import small_run


def evaluation_of(data: Data, runtime: Runtime, hashes: dict[str, str], *overrides: str) -> Evaluation:
    assert data.eval is not None
    return Evaluation(
        folder=Path("runs/mine"),
        run=small_run(*overrides),
        hashes=hashes,
        base=BaseModel(small_run().model, TASKS["causal"]),
        rows=data.eval,
        row_lines=["scored: some"],
        layout=Padded(3, pad_id=0),
        choices=Choices(precision="fp32", attention="sdpa"),
        runtime=runtime,
    )


def test_batches_report_progress_every_few_seconds(
    data: Data, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    parts = evaluation_of(data, runtime, {})
    total = int(parts.rows.lengths.sum())
    assert len(list(parts.batches(said.append))) == 7
    assert said == [], "it was over at once"
    monkeypatch.setattr("app.evaluation.run.SECONDS_BETWEEN_MESSAGES", -1.0)
    assert sum(batch.num_tokens for batch in parts.batches(said.append)) == total
    assert len(said) == 6, "none after the last batch"
    assert all(text.startswith("scored ") and f" of {total:,} tokens | " in text for text in said)


def test_rows_are_recognized_by_their_tokens(data: Data, runtime: Runtime) -> None:
    assert data.eval is not None
    ours = data.eval.fingerprint
    known = [evaluation_of(data, runtime, hashes).rows_are for hashes in ({"eval": ours}, {"train": ours}, {})]
    assert known == ["held_out", "trained_on", "other"]


def test_file_name_of_other_rows_and_settings_differs(data: Data, runtime: Runtime) -> None:
    assert data.eval is not None
    ours = data.eval.fingerprint
    own = evaluation_of(data, runtime, {"eval": ours})
    assert own.file_name("tuned", "fp32") == own.file_name("both", "fp32") == "evaluate.json"
    assert own.file_name("base", "bf16") == "evaluate-base-fp32.json"
    other = evaluation_of(data, runtime, {}, "dataset.eval_path='some where/my (rows).jsonl'")
    assert other.file_name("tuned", "fp32") == f"evaluate-my-rows-{ours[:6]}.json"


def test_table_has_rows_and_machine(data: Data, runtime: Runtime) -> None:
    names, values = zip(*evaluation_of(data, runtime, {}, "eval.rows=3", "batching.packing=false").table(), strict=True)
    assert names == ("data", "with")
    assert values[0] == "scored: some\nthese rows are not the eval set of the run"
    assert values[1] == f"3 rows at a time, fp32, sdpa attention, {runtime.device.type}"
    all_rows = evaluation_of(data, runtime, {}, "dataset.eval_path=null").table()[0][1]
    assert "these are all rows of asset:sample/train.jsonl (no eval split)" in all_rows
