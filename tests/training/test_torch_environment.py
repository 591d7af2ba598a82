"""Environment variables that torch reads: set unless the user has set them."""

import os
from pathlib import Path

import pytest

from app.training.torch_environment import has_expandable_segments, set_inductor_cache, use_expandable_segments
from tests.training.conftest import small_run

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATOR, INDUCTOR):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)


def test_expandable_segments_default() -> None:
    assert has_expandable_segments()
    use_expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert has_expandable_segments()


@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize(
    ("value", "expandable"),
    [("expandable_segments:False", False), ("max_split_size_mb:64, expandable_segments: true", True), ("", False)],
)
def test_expandable_segments_user_settings_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expandable: bool
) -> None:
    monkeypatch.setenv(name, value)
    use_expandable_segments()
    assert {variable: os.environ[variable] for variable in ALLOCATOR if variable in os.environ} == {name: value}
    assert has_expandable_segments() == expandable


def test_inductor_cache_beside_tokens_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_inductor_cache(small_run("compile=none", f"cache_dir={tmp_path}"))
    assert INDUCTOR not in os.environ, "nothing is compiled"
    compiled = small_run("compile=blocks", f"cache_dir={tmp_path}")
    set_inductor_cache(compiled)
    assert os.environ[INDUCTOR] == str(tmp_path / "inductor")
    monkeypatch.setenv(INDUCTOR, "/elsewhere")
    set_inductor_cache(compiled)
    assert os.environ[INDUCTOR] == "/elsewhere"
