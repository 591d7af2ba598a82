"""The board over HTTP: who may ask, what the pages show of a finished run, and what is refused before anything runs."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from app import board as command
from app.errors import AppError
from app.web.runs import Runs
from tests.conftest import _environment_of_processes
from tests.harness.board import Served, served
from tests.harness.runs import FinishedRuns, content_of, wait_until
from tests.pages.folders import made_run, made_sweep, trial

DONE = "done, <i>100%"  # a name that must be escaped
PATH = f"/run/{quote(DONE)}"


@dataclass
class Board:
    at: Served
    folder: Path
    empty: str

    @property
    def client(self) -> httpx.Client:
        return self.at.client


@pytest.fixture(scope="module")
def board(finished: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    folder, said = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("said") / "stderr"
    with served(folder, _environment_of_processes(), said, "-X", "importtime") as at:
        first = at.client.get(at.entry)
        assert first.status_code == 200
        for name in (DONE, "other"):
            finished.copy(folder / name)
        (folder / os.fsdecode(b"odd\xff")).mkdir()  # of other bytes than UTF-8
        (folder / os.fsdecode(b"odd\xff") / "result.json").write_text("{}")
        made_sweep(folder / "rates", [trial(1, ["optimizer.lr=1e-3"], 3.5), trial(2, ["optimizer.lr=1e-4"], 3.25)])
        yield Board(at, folder, first.text)


def test_board_lists_runs_of_its_folder(board: Board) -> None:
    assert "No runs yet." in board.empty
    assert urlsplit(board.at.entry).hostname == "127.0.0.1"
    listed = board.client.get("/").text
    assert 'value="done, &lt;i&gt;100%"' in listed
    assert f'href="{PATH}"' in listed
    assert DONE not in listed
    assert 'href="/sweep/rates">rates</a>' in listed


def test_board_shows_leaderboard_and_comparison(board: Board) -> None:
    page = unescape(board.client.get("/sweep/rates").text)
    assert "Leaderboard" in page
    assert f"finetune report sweep={board.folder}/rates" in page
    page = unescape(board.client.get("/compare", params={"run": [DONE, "other", "../other"]}).text)
    assert "2 runs" in page
    assert "finetune report 'runs=" in page


def test_run_page_shows_metrics_chart_and_commands_without_torch(board: Board) -> None:
    page = unescape(board.client.get(PATH).text)
    assert "<b>step 6 of 6</b>" in page
    assert '<div class="tile"><b>' in page
    assert '<svg role="img" aria-label="Loss"' in page
    assert f"finetune report 'run={board.folder}/{DONE}'" in page
    assert f"finetune generate 'run={board.folder}/{DONE}'" in page
    assert 'name="question"' in page
    assert "finetune train" not in page, "a finished run is not resumed"
    imported = {line.rpartition("|")[2].strip() for line in board.at.said.read_text().splitlines()}
    assert "app.web.board" in imported
    assert not {"torch", "numpy", "transformers"} & imported


def test_report_is_a_page_without_scripts_and_forms(board: Board) -> None:
    assert f'href="{PATH}/report"' in board.client.get(PATH).text
    report = board.client.get(f"{PATH}/report")
    assert f"<title>{DONE}: finished</title>" in unescape(report.text)
    (policy,) = report.headers.get_list("content-security-policy")
    assert policy.startswith("default-src 'none'; ")
    assert "form-action 'none'; frame-ancestors 'none'" in policy
    assert "script-src" not in policy
    (policy,) = board.client.get(PATH).headers.get_list("content-security-policy")
    assert "script-src 'self'" in policy


@pytest.mark.parametrize(
    ("method", "path", "headers", "code"),
    [
        ("GET", "/", {"Cookie": ""}, 403),
        ("GET", "/?token=guessed", {"Cookie": ""}, 403),
        ("GET", "/board.js", {"Cookie": "board=é"}, 403),
        ("GET", "/", {"Host": "rebound.example"}, 403),
        ("GET", "/", {"Host": "127.0.0.1:1"}, 403),
        ("POST", "/new", {"Origin": ""}, 403),
        ("POST", "/new", {"Origin": "http://127.0.0.1:1"}, 403),
        ("POST", "/new", {"Origin": "null"}, 403),
        ("POST", "/new", {"Cookie": ""}, 403),
        ("GET", "/new", {}, 405),
        ("GET", "/run/absent", {}, 404),
        ("GET", "/run/absent/report", {}, 404),
        ("GET", "/run/absent/chat", {}, 404),
        ("GET", "/run/other/chat", {"Cookie": ""}, 403),
        ("POST", "/run/other/ask", {"Origin": "http://rebound.example"}, 403),
        ("GET", "/run/..%2f", {}, 404),
        ("GET", "/run/%2e%2e", {}, 404),
        ("GET", "/run/..%2f..%2fetc%2fpasswd", {}, 404),
        ("GET", "/sweep/%2e", {}, 404),
        ("POST", "/run/..%2fruns/stop", {}, 404),
        ("POST", "/run/%2e%2e/resume", {}, 404),
        ("GET", "/compare?run=../a&run=../b", {}, 409),
    ],
)
def test_board_refuses_request(board: Board, method: str, path: str, headers: dict[str, str], code: int) -> None:
    before = content_of(board.folder)
    own = {
        "Origin": board.client.headers["origin"],
        "Cookie": "; ".join(f"{each.name}={each.value}" for each in board.client.cookies.jar),
    }
    given = [(key.encode(), value.encode()) for key, value in {**own, **headers}.items()]
    asked = httpx.Request(method, board.client.base_url.join(path), headers=given)
    with httpx.Client() as client:
        answer = client.send(asked)
    assert answer.status_code == code, answer.text
    assert content_of(board.folder) == before
    if code == 403:
        assert not answer.headers.get("set-cookie")


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("new", "recipe=lroa\r\noptimizer.lrr=3", ["Did you mean lora?", "Did you mean optimizer.lr?"]),
        ("../new", "seed=x", ["set a new name of letters", "seed=x"]),
        (".new", "output_dir=/tmp/there", ["set a new name of letters", "output_dir=/tmp/there: set by the run name."]),
        ("new", "-m\nseed=1,2", ["-m starts a sweep"]),
        ("new", "--no-such", ["Unknown option --no-such"]),
    ],
)
def test_new_run_refused_with_all_problems(board: Board, name: str, settings: str, told: list[str]) -> None:
    answer = board.client.post("/new", data={"name": name, "settings": settings, "what": "train"})
    page = unescape(answer.text)
    assert answer.status_code == 400
    assert [text for text in told if text not in page] == []
    assert settings.splitlines()[0] in page.partition("<textarea")[2], "what was typed stays"
    assert not (board.folder / name).exists()


def test_run_that_does_not_start_shows_why(board: Board) -> None:
    sent = {"name": "wrong", "settings": "dataset=auto\ndataset.path=absent.jsonl", "what": "train"}
    answer = board.client.post("/new", data=sent)
    assert answer.url.path == "/run/wrong"
    wait_until(lambda: "did not start" in board.client.get("/run/wrong").text, 60)
    page = board.client.get("/run/wrong").text
    assert "error: dataset.path=absent.jsonl" in page.partition('<details id="open-log" open>')[2]
    assert board.client.get("/run/wrong/report").status_code == 404, "it has no files"
    assert not (board.folder / "wrong").exists()


def test_existing_run_is_neither_replaced_nor_resumed(board: Board) -> None:
    answer = board.client.post("/new", data={"name": "none", "settings": "sead=1", "what": "memory"})
    assert "finetune check memory sead=1" in answer.text
    assert "only a stopped, killed or failed run" in board.client.post(f"{PATH}/resume").text
    assert "not started by this board" in board.client.post(f"{PATH}/stop").text
    taken = board.client.post("/new", data={"name": "other", "settings": "", "what": "train"})
    assert (taken.status_code, "name=other: set a new name" in taken.text) == (400, True)


def test_run_started_twice_at_once_is_started_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    monkeypatch.setattr(runs, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    runs.start("new", [])
    first = runs.stop_command("new")
    with pytest.raises(AppError, match="already started"):
        runs.start("new", [])
    assert runs.stop_command("new") == first, "the board can still stop the first one"
    runs.stop("new")
    runs._processes["new"].wait()


def test_log_that_is_a_link_is_neither_read_nor_written(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("private text")
    (tmp_path / "new.board.log").symlink_to(private)
    runs = Runs(tmp_path)
    assert runs.log("new") == ""
    with pytest.raises(AppError, match="cannot write"):
        runs.start("new", [])
    assert private.read_text() == "private text"


def test_run_that_has_just_finished_is_not_starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs, result = Runs(tmp_path), tmp_path / "one" / "result.json"
    monkeypatch.setattr(runs, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    made_run(tmp_path / "one", result={"status": "stopped"})
    runs.start("one")
    assert runs.row("one")["badge"][0] == "starting", "the result is that of the earlier start"
    result.write_text(json.dumps({"status": "finished"}))
    assert runs.row("one")["badge"][0] == "still running"
    runs.stop("one")
    runs._processes["one"].wait()


def test_command_refuses_missing_folder_taken_port_and_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: str) -> str:
        with pytest.raises(AppError) as refused:
            command._command(words)
        assert refused.value.exit_code == 2
        return refused.value.report()

    assert "no such folder" in refusal(str(tmp_path / "absent"))
    assert "folder= is required" in refusal("port=1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port={port}: " in refusal(str(tmp_path), f"port={port}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install starlette uvicorn python-multipart" in refusal(str(tmp_path))
