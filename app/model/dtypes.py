"""In which numbers weights are stored and arithmetic is done, for each precision."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Dtypes:
    """`base` stores frozen weights, `compute` is what autocast works in; None: no autocast.

    Trained weights are fp32, or bf16 where `precision.trained` says so, and then rounded by chance
    (`optim.rounding`): most updates of a fine-tune are smaller than the spacing of these numbers and would be lost.
    """

    base: torch.dtype
    compute: torch.dtype | None


DTYPES = {
    "fp32": Dtypes(base=torch.float32, compute=None),
    "tf32": Dtypes(base=torch.float32, compute=None),
    "bf16": Dtypes(base=torch.bfloat16, compute=torch.bfloat16),
    "fp16": Dtypes(base=torch.float16, compute=torch.float16),
}
