"""Fine-tune language models: full, LoRA and QLoRA, from one entry point."""

__version__ = "0.1.0"
