"""Random command lines, files and preparations end well, or in one message. `python -m scripts.fuzz` tries more."""

from pathlib import Path
from random import Random

import pytest

from scripts import fuzz

SOME = {"overrides": 150, "files": 2500, "preparations": 250, "received": 700}


@pytest.mark.parametrize("name", fuzz.FUZZERS)
def test_fuzzed_input_ends_well_or_in_one_message(name: str) -> None:
    figures = fuzz.run(name, range(SOME[name]))
    assert not figures.crashes, "\n".join(
        f"python -m scripts.fuzz {name} {seed}\n{crash}" for seed, crash in figures.crashes
    )
    assert min(figures.outcomes[outcome] for outcome in ("accepted", "refused")) > SOME[name] // 10


def test_fuzz_crash_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sometimes(random: Random, _folder: Path) -> None:
        assert random.random() > 0.5, "too small"

    monkeypatch.setitem(fuzz.FUZZERS, "overrides", (8, sometimes))
    assert fuzz.main(["overrides"]) == 1
    printed = capsys.readouterr().out
    seed = next(seed for seed in range(8) if Random(seed).random() <= 0.5)
    assert f"python -m scripts.fuzz overrides {seed}\n" in printed
    assert "AssertionError: too small" in printed
    assert fuzz.main(["overrides", str(seed)]) == 1
