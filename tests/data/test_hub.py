"""Hub datasets: what is said when the hub does not give them, and what the local copies still give."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from app.data.sources import train_source
from app.errors import DataError, EnvironmentProblem
from tests.data.small import config

ROWS = [{"text": "one"}, {"text": "two"}]


@contextlib.contextmanager
def hub_that_answers(status: int, code: str) -> Iterator[str]:
    """A server that gives every question the same answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return monkeypatch


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def problem(**changes: str) -> str:
    with pytest.raises(EnvironmentProblem) as error:
        list(train_source(config("org/name", "text", **changes)).rows())
    assert str(error.value).startswith("dataset.path=org/name: ")
    assert "set HF_TOKEN" in str(error.value)
    assert "set dataset.path=FILE" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "gated: accept its terms at https://huggingface.co/datasets/org/name"),
        (404, "RepoNotFound", "not on the hub, or private"),
        (404, "RevisionNotFound", "dataset.revision=v9 is not on the hub"),
        (503, "", "the hub cannot be reached (Server error '503"),
    ],
)
def test_hub_refusal_reported(online: pytest.MonkeyPatch, status: int, code: str, said: str) -> None:
    with hub_that_answers(status, code) as address:
        online.setattr(huggingface_hub.constants, "ENDPOINT", address)
        assert said in problem(revision="v9")


def test_hub_unreachable_reported_at_once(online: pytest.MonkeyPatch) -> None:
    online.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    said = problem()
    assert "the hub cannot be reached (" in said
    assert "and it is not in the local cache" in said
    assert time.monotonic() - began < 10  # `datasets` by itself tries for half a minute
    assert not datasets.config.HF_HUB_OFFLINE  # nothing stays switched


def test_hub_offline_reported() -> None:
    assert "offline (HF_HUB_OFFLINE is set), and it is not in the local cache" in problem()


@pytest.fixture
def downloaded(hub_cache: Path, tmp_path: Path) -> str:
    """What a download leaves in the cache; returns its revision."""
    datasets.disable_progress_bars()
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(hub_cache))
    [made] = hub_cache.glob("json/*/*/*/dataset_info.json")
    revision = made.parent.name
    (hub_cache / "org___name" / "default" / "0.0.0").mkdir(parents=True)
    shutil.move(made.parent, hub_cache / "org___name" / "default" / "0.0.0" / revision)
    for arrow in hub_cache.glob("org___name/*/*/*/json-train.arrow"):
        arrow.rename(arrow.with_name("name-train.arrow"))
    info = hub_cache / "org___name" / "default" / "0.0.0" / revision / "dataset_info.json"
    info.write_text(info.read_text().replace('"dataset_name": "json"', '"dataset_name": "name"'))
    return revision


def test_hub_downloaded_dataset_read_offline(downloaded: str) -> None:
    for revision in (None, downloaded):
        source = train_source(config("org/name", "text", revision=revision))
        assert list(source.rows()) == [("org/name[train] row 0", ROWS[0]), ("org/name[train] row 1", ROWS[1])]
    assert source.fingerprint() == train_source(config("org/name", "text")).fingerprint()


def test_hub_other_cached_revision_refused(downloaded: str) -> None:
    assert "the local cache does not have revision 0123abc" in problem(revision="0123abc")


def test_hub_unknown_split_reported(downloaded: str) -> None:
    with pytest.raises(DataError, match=r"dataset\.path=org/name dataset\.split=trian .*Unknown split"):
        list(train_source(config("org/name", "text", split="trian")).rows())


@pytest.mark.parametrize("several", [False, True])
def test_saved_dataset_read(tmp_path: Path, several: bool) -> None:
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    place = tmp_path / "saved"
    (datasets.DatasetDict({"train": saved, "test": saved}) if several else saved).save_to_disk(str(place))
    source = train_source(config(place, "text"))
    shown = f"{place}[train]" if several else str(place)
    assert list(source.rows()) == [(f"{shown} row 0", ROWS[0]), (f"{shown} row 1", ROWS[1])]
    before = source.fingerprint()
    assert train_source(config(place, "text")).fingerprint() == before
    datasets.Dataset.from_list(ROWS[:1]).save_to_disk(str(tmp_path / "other"))
    assert train_source(config(tmp_path / "other", "text")).fingerprint() != before
    if several:
        with pytest.raises(DataError, match=r"no dataset\.split=dev; splits: test, train"):
            list(train_source(config(place, "text", split="dev")).rows())


def test_saved_dataset_torn_reported(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path))
    [arrow] = tmp_path.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read"):
        list(train_source(config(tmp_path, "text")).rows())
