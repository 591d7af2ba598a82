"""What decides whether runs share the reference of a loss over answers."""

from types import SimpleNamespace
from typing import Any

from app.config.load import compose_run
from app.training.reference import _key


def test_references_of_other_vocabularies_are_others() -> None:
    def key(*words: str) -> str:
        run = compose_run(["recipe=dpo", "model=tiny", *words])
        data = SimpleNamespace(train=SimpleNamespace(fingerprint="rows"), eval=None)
        resolved: Any = SimpleNamespace(
            config=run, data=data, choices=SimpleNamespace(precision="fp32", attention="sdpa")
        )
        return _key(resolved, "weights")

    assert key("preference.beta=0.5") == key() != key("model.vocab_size=2048")
