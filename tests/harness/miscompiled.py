"""A machine whose compiler makes wrong code: outputs of compiled layers are 10 % too large.

python -m tests.harness.miscompiled WORDS...       finetune train; RANKS: the processes with that compiler ("1")
"""

import os
from typing import Any


def main() -> None:
    """Run finetune train."""
    from app import train
    from app.layers.compile import CompiledLayers

    compiled = CompiledLayers.compiled

    def wrong(self: CompiledLayers, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, layer, *args, **kwargs) * 1.1

    if os.environ.get("RANK", "0") in os.environ["RANKS"]:
        CompiledLayers.compiled = wrong  # type: ignore[method-assign]
    train.main()


if __name__ == "__main__":
    main()
