"""Expandable segments are asked for unless somebody has said how memory is to be taken."""

import os

import pytest

from app.training.segments import let_segments_grow, segments_grow

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)


def test_they_grow_by_default() -> None:
    assert segments_grow()
    let_segments_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert segments_grow()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("told", "grow"),
    [
        ("expandable_segments:False", False),
        ("max_split_size_mb:64, expandable_segments: true", True),
        ("", False),
    ],
)
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, name: str, told: str, grow: bool) -> None:
    monkeypatch.setenv(name, told)
    let_segments_grow()
    assert {each: os.environ[each] for each in NAMES if each in os.environ} == {name: told}
    assert segments_grow() == grow
