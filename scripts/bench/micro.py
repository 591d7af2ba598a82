"""What single operations reach on this machine, at the shapes of Llama models.

python -m scripts.bench.micro ITEM --device cuda --out FILE.jsonl

A line of JSON for each measurement; what cannot be done here is a line with `error`. `--tiny` takes small shapes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.bench import micro_attention, micro_head, micro_linear, micro_rounding
from scripts.bench.timing import Lines, Scale

ITEMS: dict[str, Callable[[Scale, Lines], None]] = {
    "gemm": micro_linear.gemm,
    "attention": micro_attention.attention,
    "adapter": micro_linear.adapter,
    "nf4": micro_linear.nf4,
    "head": micro_head.head,
    "rounding": micro_rounding.rounding,
}


def main() -> None:
    """One item."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether everything runs")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    device = torch.device(told.device)
    torch.manual_seed(0)
    scale = Scale(device, 64 if told.tiny else 1)
    ITEMS[told.item](scale, Lines(told.out, told.item, device))


if __name__ == "__main__":
    main()
