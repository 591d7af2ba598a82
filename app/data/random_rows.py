"""`dataset.path=random:`: rows made from a seed, for measurements without a dataset."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from app.config.dataset_schema import RandomRowsConfig
from app.data.types import Located

_WORDS = 1000  # of the vocabulary, without the labels
_LETTERS = 5  # of a word, which is at least one token in any tokenizer


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Texts of random words of which the first is the label, so that a model can learn it."""

    name: str
    key: str
    config: RandomRowsConfig
    labelled: bool  # whether a row has its label beside the text
    split: str = ""
    left_out: tuple[str, ...] = ()
    other_splits: tuple[str, ...] = ()

    @property
    def on_overflow(self) -> str:
        """What `auto` does: rows of equal length have a word for each token and are made to be cut."""
        return "truncate" if self.config.shortest is None else "error"

    def rows(self) -> Iterator[Located]:
        """Yield the rows; those of `dataset.eval_path` have the same words and are drawn anew."""
        import numpy as np  # late: a sweep looks at its sources before anything heavy is loaded

        made = self.config
        letters = np.random.default_rng(made.seed).integers(97, 123, (_WORDS + made.classes, _LETTERS), dtype=np.uint8)
        labels, words = np.split(np.array([bytes(word).decode() for word in letters]), [made.classes])
        draw = np.random.default_rng([made.seed, 1 + self.key.endswith("eval_path")])
        for index in range(made.rows):
            label = str(labels[index % made.classes])
            count = made.length if made.shortest is None else int(draw.integers(made.shortest, made.length + 1))
            text = " ".join([label, *words[draw.integers(_WORDS, size=count - 1)]])
            yield f"random row {index}", {"text": text} | ({"label": label} if self.labelled else {})

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(("random rows 1", self.key.endswith("eval_path"), self.config)).encode()).hexdigest()
