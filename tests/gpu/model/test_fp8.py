"""A base in fp8: its bytes, its products and what reaches the rows, all against float64; the whole model around it."""

from app.model import fp8
from app.model.fp8 import Fp8Linear
from tests.model.small import (
    distance,
)
from tests.model.test_fp8 import random


def test_a_gpu_multiplies_what_the_cpu_multiplies() -> None:
    layer = Fp8Linear(random(4096, 1024), None)
    x, given = random(300, 1024, seed=1).bfloat16(), random(300, 4096, seed=2).bfloat16()
    here, back = layer(x.float()), layer.back(given.float())
    layer.cuda()
    assert all(proof.holds for proof in fp8.prove(layer))
    assert distance(layer(x.cuda()).float().cpu(), here) < 0.02
    assert distance(layer.back(given.cuda()).float().cpu(), back) < 0.01, "with exact sums"
