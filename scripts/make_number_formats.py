"""python -m scripts.make_number_formats: writes the tables of number formats in docs/quantization.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bitsandbytes.functional import get_4bit_type

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"
_MARKS = ("<!-- made by python -m scripts.make_number_formats -->", "<!-- end -->")
_HEAD = ("", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "step at 1", "bytes per weight")


@dataclass(frozen=True)
class FloatLayout:
    """Sign, exponent with the usual bias 2^(e-1) - 1, and mantissa."""

    name: str
    exponent: int
    mantissa: int
    bytes: float
    # highest codes that are not numbers: those of the last exponent (IEEE 754), the last code, or none
    reserved: str = "exponent"

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def largest(self) -> float:
        top = 2**self.exponent - 1 - (self.reserved == "exponent")
        fraction = 2 - (1 + (self.reserved == "code")) * 2.0**-self.mantissa
        return float(2.0 ** (top - self.bias) * fraction)

    @property
    def smallest_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest(self) -> float:
        """Smallest subnormal number: exponent 0, no leading one in the mantissa."""
        return float(2.0 ** (1 - self.bias - self.mantissa))

    @property
    def step(self) -> float:
        return float(2.0**-self.mantissa)

    def row(self) -> tuple[str, ...]:
        sizes = (self.largest, self.smallest_normal, self.smallest, self.step)
        bits = (1 + self.exponent + self.mantissa, self.exponent, self.mantissa)
        return (self.name, *map(str, bits), *map(_number, sizes), f"{self.bytes:g}")


FLOATS = (
    FloatLayout("fp32", 8, 23, 4),
    FloatLayout("tf32", 8, 10, 4),
    FloatLayout("bf16", 8, 7, 2),
    FloatLayout("fp16", 5, 10, 2),
    FloatLayout("E5M2", 5, 2, 1),
    FloatLayout("E4M3", 4, 3, 1, "code"),
    FloatLayout("E2M1", 2, 1, 0.5, "none"),
    FloatLayout("E3M0", 3, 0, 0.5, "none"),
)
_BLOCK_SCALE = 4 / 64  # bytes per weight of one fp32 scale for 64 weights


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and value < 1e6 else f"{value:.4g}"


def scaled_rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of formats whose values are multiplied by a scale; the largest is 1."""
    for name, codes in (
        ("int8", [code / 127 for code in range(128)]),
        *((kind.upper(), _codes(kind)) for kind in ("nf4", "fp4")),
    ):
        bits = 8 if name == "int8" else 4
        size = 1 if name == "int8" else 0.5 + _BLOCK_SCALE
        above_zero = [code for code in sorted(codes) if code > 0]
        step = above_zero[-1] - above_zero[-2]
        yield (name, str(bits), "", "", "1", "", _number(above_zero[0]), _number(step), f"{size:g}")


def _codes(kind: str) -> list[float]:
    codes: list[float] = get_4bit_type(kind, device="cpu").tolist()
    return codes


def tables() -> str:
    """Return all rows in Markdown."""
    rows = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *(layout.row() for layout in FLOATS), *scaled_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text("utf-8").partition(_MARKS[0])
    return f"{before}{_MARKS[0]}\n\n{tables()}\n\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
