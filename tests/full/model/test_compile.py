"""Compiled layers: the numbers of the layers' own forward, one graph for all that are alike, and no other later."""

import pytest

from app.model import compile as compiling
from tests.model import small
from tests.model.test_compile import (
    BLOCKS,
    GRAPHS,
    METHODS,
    blocks_of,
    by_its_own,
    max_difference,
    outcome,
    packed,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # inductor's own
def test_real_code_has_the_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    given = METHODS["lora"]
    expected = by_its_own(range(1, 3), **given)
    training_model = small.training_model_of("llama", compile=BLOCKS, recompute=1, **given)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    for seed, wanted in enumerate(expected, 1):
        assert max_difference(outcome(training_model, packed(seed)), wanted) <= 1e-5
    assert blocks_of(training_model).graphs == GRAPHS["lora"]
