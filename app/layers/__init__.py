"""Layers: attention, quantized and compiled layers, experts, kernels, norms, gradient checkpointing, the head."""
