"""Where torch's compiler keeps what it made, unless the user has said it: read before torch is loaded."""

import os
from pathlib import Path

from app.config.schema import RunConfig

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_graphs(run: RunConfig) -> None:
    """Beside the tokens: another run of the same model finds them."""
    if run.compile.kind != "none":
        os.environ.setdefault(_VARIABLE, str((Path(run.cache_dir) / "inductor").expanduser().resolve()))
