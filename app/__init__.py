"""Fine-tune language models: full, LoRA and QLoRA, from one entry point."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and find_spec("hydra") is None:  # python -m app...
    sys.stderr.write(
        f"error: the packages of this program are not installed for {sys.executable}. Run scripts/train, or activate "
        "its environment: source .venv/bin/activate\n"
    )
    sys.exit(2)
