"""dataset.streaming: the tokens of a downloaded hub dataset, without the download."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config.schema import DatasetConfig
from app.data.detect_format import detect_formats
from app.data.prepare import prepare
from app.data.sources import train_source
from app.errors import DataError, EnvironmentProblem
from tests.data.dataset_hub import DatasetHub
from tests.data.small import config, greetings, locations, tokenizer, write_jsonl

FILES = {"train-0": greetings(700), "train-1": greetings(60, 700), "test": greetings(20, 900)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    """This process speaks to it, with an empty cache."""
    served = DatasetHub(tmp_path / "org_name")
    served.folder.mkdir()
    datasets.disable_progress_bars()
    for name, value in {
        "ENDPOINT": served.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": served.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    for name, value in {
        "HF_ENDPOINT": served.address,
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_CACHE": str(tmp_path / "home" / "datasets"),
    }.items():
        monkeypatch.setattr(datasets.config, name, value)
    yield served
    served.close()


def write_files(folder: Path, kind: str) -> None:
    for name, chats in FILES.items():
        rows = [{"messages": messages, "number": at} for at, messages in enumerate(chats)]
        if kind == "jsonl":
            write_jsonl(folder / f"{name}.jsonl", rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=100)


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def prepared(section: DatasetConfig, cache: Path) -> tuple[Any, ...]:
    """Everything that a run takes from the rows."""
    section, notes = detect_formats(section)
    data = prepare(section, tokenizer(), str(cache))
    assert data.eval is not None
    prints = [rows.fingerprint for rows in (data.train, data.eval)]
    return prints, locations(data.train), locations(data.eval), data.report, notes


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streaming_equals_download_and_keeps_no_rows(hub: DatasetHub, tmp_path: Path, kind: str) -> None:
    write_files(hub.folder, kind)
    settings: list[dict[str, Any]] = [
        {"eval_split": "test"},
        {"split": "train+test", "max_rows": 650, "eval_fraction": 0.2},
        {"sample": 90, "eval_fraction": 0.1, "revision": "main"},
    ]
    sections = [config("org/name", "auto", leave_out=["number"], **changes) for changes in settings]
    for section in sections:
        section.streaming = True
    streamed = [prepared(section, tmp_path / "cache") for section in sections]
    assert len(streamed[0][1]) == 760
    rows_bytes = disk_bytes(hub.folder)
    assert disk_bytes(tmp_path / "home") < rows_bytes // 20

    for section in sections:
        section.streaming = False
    assert [prepared(section, tmp_path / "cache") for section in sections] == streamed
    assert disk_bytes(tmp_path / "home") > rows_bytes


def test_streaming_max_rows_reads_first_files_only(hub: DatasetHub, tmp_path: Path) -> None:
    for name in ("train-0", "train-1"):
        write_jsonl(hub.folder / f"{name}.jsonl", [{"text": f"{name} {at}"} for at in range(5000)])
    section = config("org/name", "text", streaming=True, max_rows=20)
    assert len(prepare(section, tokenizer(), str(tmp_path / "cache")).train) == 20
    assert "train-1.jsonl" not in hub.files_sent


def test_streaming_cache_key_changes_with_commit(hub: DatasetHub) -> None:
    write_jsonl(hub.folder / "train.jsonl", [{"text": "one"}])

    def fingerprint(**changes: Any) -> str:
        return train_source(config("org/name", "text", streaming=True, **changes)).fingerprint()

    before = fingerprint()
    assert fingerprint(revision="main") == fingerprint(revision=hub.commit) == before
    assert fingerprint(split="test") != before
    hub.commit = "b" * 40
    assert fingerprint(revision="main") != before
    assert fingerprint(revision="a" * 40) == before


def test_streaming_offline_reads_cached_tokens_of_a_commit(
    hub: DatasetHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(hub.folder / "train.jsonl", [{"text": "one"}])
    section = config("org/name", "text", streaming=True, revision=hub.commit)
    before = prepare(section, tokenizer(), str(tmp_path / "cache")).train.fingerprint
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert prepare(section, tokenizer(), str(tmp_path / "cache")).train.fingerprint == before
    section.revision = "main"
    with pytest.raises(EnvironmentProblem, match=r"^dataset\.path=org/name: offline .*keeps no local copy of the rows"):
        prepare(section, tokenizer(), str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.csv", "question,answer\na,b\n", r"^dataset\.streaming=true: dataset\.path=org/name has .* CSV"),
        ("train.jsonl", '{"text": "one"}\n{"text": 7', r"^dataset\.path=org/name .*: Unexpected character"),
        ("test.jsonl", '{"text": "one"}\n', r"^dataset\.path=org/name dataset\.split=train .*Bad split: train"),
    ],
)
def test_streaming_unreadable_set_refused(
    hub: DatasetHub, tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (hub.folder / name).write_text(content)
    with pytest.raises(DataError, match=problem):
        prepare(config("org/name", "text", streaming=True), tokenizer(), str(tmp_path / "cache"))
    assert not [*(tmp_path / "cache").rglob("*.part"), *(tmp_path / "cache").rglob("*.arrow")]


def test_streaming_cut_connection_reported_without_a_partial_cache(
    hub: DatasetHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # of `datasets` and `huggingface_hub`, before they retry
    write_files(hub.folder, "jsonl")
    section = config("org/name", streaming=True, leave_out=["number"])
    hub.torn_files = {"train-1.jsonl"}
    problem = r"^dataset\.path=org/name: could not be streamed \(.*To retry, run the same command again"
    with pytest.raises(EnvironmentProblem, match=problem) as error:
        prepare(section, tokenizer(), str(tmp_path / "cache"))
    assert error.value.exit_code == 2
    assert "train-0.jsonl" in hub.files_sent
    assert not [*(tmp_path / "cache" / "tokens").iterdir()]
    hub.torn_files = set()
    assert len(prepare(section, tokenizer(), str(tmp_path / "cache")).train) == 760
