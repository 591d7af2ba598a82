"""Where graphs are kept, told to torch before it is loaded."""

import os
from pathlib import Path

import pytest

from app.training.inductor_cache import keep_graphs
from tests.training.conftest import small_run

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that what is set below is taken back
    monkeypatch.delenv(NAME)


def test_graphs_are_kept_beside_the_tokens(tmp_path: Path) -> None:
    keep_graphs(small_run("compile=blocks", f"cache_dir={tmp_path}"))
    assert os.environ[NAME] == str(tmp_path / "inductor")


def test_what_the_user_said_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "/elsewhere")
    keep_graphs(small_run("compile=blocks", f"cache_dir={tmp_path}"))
    assert os.environ[NAME] == "/elsewhere"


def test_nothing_is_said_where_nothing_is_compiled(tmp_path: Path) -> None:
    keep_graphs(small_run(f"cache_dir={tmp_path}"))
    assert NAME not in os.environ
