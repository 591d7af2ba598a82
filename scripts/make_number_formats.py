"""python -m scripts.make_number_formats: writes the tables of number formats in docs/quantization.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bitsandbytes.functional import get_4bit_type

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"
_MARKS = ("<!-- made by python -m scripts.make_number_formats -->", "<!-- end -->")
_HEAD = ("", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "step at 1", "bytes a weight")


@dataclass(frozen=True)
class FloatLayout:
    """A sign, an exponent with the usual bias 2^(e-1) - 1, and a mantissa."""

    name: str
    exponent: int
    mantissa: int
    bytes: float
    # codes at the top that are no numbers: those of the last exponent (as IEEE 754 has it), the last one, or none
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
        """With the exponent 0, where the mantissa has no leading one."""
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
_BLOCK_SCALE = 4 / 64  # bytes a weight of one scale in fp32 for 64 weights


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and value < 1e6 else f"{value:.4g}"


def scaled_rows() -> Iterator[tuple[str, ...]]:
    """Formats whose numbers mean something only times a scale; the largest is 1."""
    for name, codes in (
        ("int8", [each / 127 for each in range(128)]),
        *((kind.upper(), _codes(kind)) for kind in ("nf4", "fp4")),
    ):
        bits = 8 if name == "int8" else 4
        size = 1 if name == "int8" else 0.5 + _BLOCK_SCALE
        above_zero = [each for each in sorted(codes) if each > 0]
        step = above_zero[-1] - above_zero[-2]
        yield (name, str(bits), "", "", "1", "", _number(above_zero[0]), _number(step), f"{size:g}")


def _codes(kind: str) -> list[float]:
    found: list[float] = get_4bit_type(kind, device="cpu").tolist()
    return found


def tables() -> str:
    """All rows in Markdown."""
    rows = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *(each.row() for each in FLOATS), *scaled_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text("utf-8").partition(_MARKS[0])
    return f"{before}{_MARKS[0]}\n\n{tables()}\n\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
