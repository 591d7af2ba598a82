"""Exports for other programs (adapter, merged or quantized model, GGUF), verified in a new process."""
