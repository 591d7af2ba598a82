"""The tables of docs/quantization.md are those of the layouts, and the layouts those of torch."""

import pytest
import torch

from app.layers.quantization import NUMBER_FORMATS
from scripts.make_number_formats import FLOATS, PAGE, page

LAYOUTS = {each.name: each for each in FLOATS}


def test_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run python -m scripts.make_number_formats"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("E4M3", torch.float8_e4m3fn),
        ("E5M2", torch.float8_e5m2),
    ],
)
def test_layout_is_that_of_torch(name: str, dtype: torch.dtype) -> None:
    layout, known = LAYOUTS[name], torch.finfo(dtype)
    assert (layout.largest, layout.smallest_normal, layout.step) == (known.max, known.smallest_normal, known.eps)
    assert float(torch.tensor(layout.smallest, dtype=torch.float64).to(dtype)) == layout.smallest


@pytest.mark.parametrize("name", ["E2M1", "E3M0"])
def test_layout_is_that_of_the_check(name: str) -> None:
    """A group whose largest weight is the largest number has the scale 1: others go to the numbers of the layout."""
    layout, rounding = LAYOUTS[name], NUMBER_FORMATS[f"{name}, for 64 weights"].rounded
    numbers = torch.tensor([[layout.largest, layout.smallest, 1 + layout.step, 0.4 * layout.smallest]])
    assert rounding(numbers).tolist() == [[layout.largest, layout.smallest, 1 + layout.step, 0]]
