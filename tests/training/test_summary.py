"""Notes on unusual settings, and the line that says from where a run resumes."""

from app.config.load import compose_run
from app.training.summary import _unusual_settings


def notes(*words: str, epochs: float = 1.0) -> list[str]:
    return list(_unusual_settings(compose_run(words), epochs))


def test_notes_name_unusual_learning_rate_epochs_and_rank() -> None:
    assert notes() == notes("recipe=full") == notes("optimizer.lr=1e-4") == notes(epochs=10) == []
    assert notes("optimizer.lr=3e4") == [
        "optimizer.lr=30000 is 15,000,000 times the learning rate suggested for this model (0.002)"
    ]
    assert notes("optimizer.lr=1e-9")[0].startswith("optimizer.lr=1e-09 is 1/")
    assert notes(epochs=300)[0].startswith("300 epochs: every row is trained 300 times")
    assert notes("dataset.max_rows=16", epochs=300) == []
    assert notes("adapter.r=512") == ["adapter.r=512: ranks of 8 to 128 are usual"]
