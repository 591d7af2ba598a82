"""The preset for speed with 70 billion weights keeps what it promises, by the plan."""

from tests.memory.test_presets import planned


def test_the_fast_one_fits_an_h200_and_recomputes_no_more_than_it_must() -> None:
    found = planned("llama_70b_16k", "h200")
    assert found.shape.width == 16384
    assert found.verdict.fits
    assert found.chosen
    assert 0 < int(found.run.training.recompute) < 80
    spare = found.verdict.memory_bytes - found.verdict.needed_bytes
    a_layer = 4.5e9  # what one keeps that is not computed again, and a margin
    assert spare < a_layer
