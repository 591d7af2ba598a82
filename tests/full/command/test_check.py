"""app.check as a process: what is shown, written and returned is what a run would find."""

import os

import pytest

from tests.conftest import RunApp


@pytest.mark.parametrize(
    "words",
    [
        ("model=llama", "recipe=qlora", "hardware=rtx4090"),
        ("model=llama_70b", "recipe=qlora", "hardware=h100"),
    ],
)
def test_it_takes_ten_seconds_imports_included(run_app: RunApp, words: tuple[str, ...]) -> None:
    before = os.times()
    ended = run_app("memory", *words, module="app.check")
    after = os.times()
    assert ended.returncode == 0, ended.stderr
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 10
