"""Adapter layers with gradients written by hand: the numbers of PEFT's forward, with less memory and fewer passes."""

from app.model.fused.install import NOTHING_FUSED, Fused, fuse

__all__ = ["NOTHING_FUSED", "Fused", "fuse"]
