"""A frozen base in fp8: what holds it, what computes with it, and the proof that it does."""

from app.model.fp8.layer import Fp8Linear, rows_as_they_are
from app.model.fp8.pack import EightBit
from app.model.fp8.proof import prove

__all__ = ["EightBit", "Fp8Linear", "prove", "rows_as_they_are"]
