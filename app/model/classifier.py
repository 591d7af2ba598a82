"""Texts to labels, by transformers alone, as anybody else would ask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.model.pooled import takes_segments


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model that is ready to be asked; no text is longer than `max_length` tokens to it."""

    lm: Any
    tokenizer: Any
    max_length: int

    def answers(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[dict[str, float], bool]]:
        """Of each text or pair the probability of every label, likeliest first, and whether it had to be cut off.

        One at a time: then no padding can change a probability.
        """
        for each in texts:
            cut = len(self.tokenizer(*each, verbose=False).input_ids) > self.max_length
            yield self._likelihoods(each), cut

    @torch.no_grad()
    def _likelihoods(self, texts: Sequence[str]) -> dict[str, float]:
        read = self.tokenizer(*texts, truncation=True, max_length=self.max_length, return_tensors="pt")
        wanted = ["input_ids", *(["token_type_ids"] if len(texts) > 1 and takes_segments(self.lm) else [])]
        given = {name: read[name].to(self.lm.device) for name in wanted if name in read}
        found = self.lm(**given).logits[0].float().softmax(-1).tolist()
        names = self.lm.config.id2label
        return dict(sorted(((names[at], p) for at, p in enumerate(found)), key=lambda each: -each[1]))
