"""The reference of a loss over answers: which runs share it, and how it is kept."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

from app.config.load import compose_run
from app.training.reference import _key, _share, read_reference


def test_references_of_other_vocabularies_are_others() -> None:
    def key(*words: str) -> str:
        run = compose_run(["recipe=dpo", "model=tiny", *words])
        data = SimpleNamespace(train=SimpleNamespace(fingerprint="rows"), eval=None)
        resolved: Any = SimpleNamespace(
            config=run, data=data, choices=SimpleNamespace(precision="fp32", attention="sdpa")
        )
        return _key(resolved, "weights")

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
