"""The reference of a loss over answers: which runs share it, and how it is kept."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from app.config.load import compose_run
from app.errors import CheckpointError
from app.files import checksummed_folder
from app.training.initial_model import _key, _share, read_reference


def test_references_of_other_vocabularies_are_others() -> None:
    def key(*words: str) -> str:
        run = compose_run(["recipe=dpo", "model=tiny", *words])
        data = SimpleNamespace(train=SimpleNamespace(fingerprint="rows"), eval=None)
        choices = SimpleNamespace(precision="fp32", attention="sdpa")
        plan: Any = SimpleNamespace(run=run, rows=SimpleNamespace(data=data), choices=choices)
        return _key(plan, "weights")

    assert key("preference.beta=0.5") == key() != key("model.vocab_size=2048")


def test_runs_that_end_at_once_share_one_whole_reference(tmp_path: Path) -> None:
    scores, together = {row: (float(row), 0.5) for row in range(5000)}, Barrier(4, timeout=10)

    def share(number: int) -> None:
        together.wait()
        _share(tmp_path / f"kept-{number // 4}", scores)

    with ThreadPoolExecutor(4) as runs:
        list(runs.map(share, range(20)))
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"kept-{number}" for number in range(5)]
    assert all(read_reference(each) == scores for each in tmp_path.iterdir())


@pytest.mark.parametrize(
    "stored",
    [
        pickle.dumps({"rows": [1]}),
        save({"row": np.arange(2, dtype=np.uint64), "log_probabilities": np.zeros((2, 2))}),
        save({"rows": np.arange(2, dtype=np.uint64), "log_probabilities": np.full((2, 2), np.nan)}),
        save({"rows": np.arange(3, dtype=np.uint64), "log_probabilities": np.zeros((2, 2))}),
        save({"rows": np.arange(2, dtype=np.uint64), "log_probabilities": np.zeros(2)}),
    ],
    ids=["pickle", "other names", "NaN", "fewer rows", "another shape"],
)
def test_reference_with_another_content_is_refused(stored: bytes, tmp_path: Path) -> None:
    """Its checksum is right: whoever sends a folder may have written that too."""
    with checksummed_folder(tmp_path / "reference") as folder:
        (folder / "answers.safetensors").write_bytes(stored)
    with pytest.raises(CheckpointError, match=r"answers\.safetensors cannot be read \(.*Restore the folder, or"):
        read_reference(tmp_path / "reference")
