"""Plan of the fast preset for models of 70 billion weights."""

from tests.memory.test_presets import planned


def test_llama_70b_16k_fits_h200_with_fewest_recomputed_layers() -> None:
    found = planned("llama_70b_16k", "h200")
    assert found.shape.width == 16384
    assert found.verdict.fits
    assert found.chosen
    assert 0 < int(found.run.training.recompute) < 80
    spare = found.verdict.memory_bytes - found.verdict.needed_bytes
    stored_layer_bytes = 4.5e9  # activations of one layer, and a margin
    assert spare < stored_layer_bytes
