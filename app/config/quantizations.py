"""Kinds of quantisation of a model, as facts that messages, pages and memory suggestions share."""

from typing import NamedTuple


class QuantizationKind(NamedTuple):
    """One kind; what it does to a model is `model.quantization`."""

    tuning: str  # on such a base, around the name of the adapter
    smaller: tuple[str, str]  # a change of the command line that saves memory, and how
    rounds_to: str = ""  # where an adapter makes up for the rounding
    needs_fp8: bool = False  # of a GPU
    trains: bool = False  # weights are rounded as they are used, and trained; else they are stored so, and frozen
    # weights for each byte of scales, with them plain and with them quantised too: those are unpacked at each use
    weights_per_scale_byte: tuple[float, float] = (0.0, 0.0)


_FOUR_BITS = QuantizationKind(
    "Q{}",
    ("quantization.double_quant=true", "the scales of the 4-bit weights have 8 bits"),
    rounds_to="four bits",
    weights_per_scale_byte=(16.0, 63.0),  # one scale per 64 weights, of 32 bits or of 8
)
QUANTIZATION_KINDS = {
    "none": QuantizationKind("{}", ("recipe=qlora", "the frozen base has 4 bits a weight, unpacked at each use")),
    "nf4": _FOUR_BITS,
    "fp4": _FOUR_BITS,
    "int8": QuantizationKind("{} on an int8 base", ("quantization=nf4", "4 bits a weight in place of 8")),
    "fp8": QuantizationKind(
        "{} on an fp8 base",
        ("quantization=nf4", "4 bits a weight in place of two times 8, unpacked at each use"),
        needs_fp8=True,
    ),
    "qat": QuantizationKind(
        "{}, quantisation-aware", ("quantization=none", "weights are not rounded in the forward pass"), trains=True
    ),
}
