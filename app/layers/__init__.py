"""What computes: attention, quantized and compiled layers, experts, kernels, norms, recomputed layers, the head."""
