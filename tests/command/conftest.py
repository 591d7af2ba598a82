"""One zygote serves all tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.conftest import DROPPED, OFFLINE, RANKS, REPO
from tests.runs import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED) and k not in RANKS}
    served = Zygote(
        kept | OFFLINE | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    )
    yield served
    served.close()
