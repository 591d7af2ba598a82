"""Random command lines, files and preparations end well, or in one message. `python -m scripts.fuzz` tries more."""

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
