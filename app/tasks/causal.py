"""Next-token prediction for all text or only answers."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.dataset import trains_answers
from app.config.schema import PreferenceConfig, RunConfig, TaskConfig
from app.data.objectives import NEXT_TOKEN
from app.data.token_dataset import TokenRows
from app.model.decoding import end_ids, generate
from app.model.losses import TOKEN_LOSS, Loss, LossHead
from app.model.training_model import TrainingModel
from app.tasks.interface import ANSWERS, EXACT, HITS, LABELS, LOSS, WEIGHT, Counts, HeldOutRows, Implementation, Sums
from app.tracking.formatting import Sample


def _loss_of_likely_tokens(head: LossHead, states: Tensor, batch: Batch) -> Tensor:
    """Return the dynamic fine-tuning loss: each token is weighted by its probability, which bounds its gradient."""
    losses, _ = head.token_scores(states.detach(), batch.targets)
    factors = (-losses.float()).exp()
    if batch.weights is not None:
        factors = factors * batch.weights.per_target
    return head.token_loss_sum(states, batch.targets, factors)


_LOSSES = {"nll": TOKEN_LOSS, "dft": Loss(_loss_of_likely_tokens)}


def _loss(task: TaskConfig, _preference: PreferenceConfig) -> Loss:
    return _LOSSES[task.loss]


def count_tokens(run: RunConfig) -> Counts:
    """Return counts for token accuracy and for exact match of answers under greedy decoding."""
    ratios = {"eval_loss": (LOSS, WEIGHT), "token_accuracy": (HITS, LABELS), "exact_match": (EXACT, ANSWERS)}
    return Counts(ratios, _perplexity, answers=trains_answers(run.dataset))


def _perplexity(sums: Sums) -> dict[str, NDArray[np.float64]]:
    return {"perplexity": np.exp(sums[..., LOSS] / sums[..., WEIGHT])}


def answer(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Generate from the prompt of each row."""
    pairs = [_split(held_out.rows, i) for i in held_out.indices]
    lm = model.language_model
    ends = end_ids(lm, held_out.tokenizer)
    together = model.sharding is not None  # each forward pass gathers the whole model
    answers = generate(lm, [prompt for prompt, _ in pairs], ends, held_out.max_new_tokens, together=together)
    return [
        Sample(prompt=held_out.text(prompt), expected=held_out.text(expected), answer=held_out.text(answer))
        for (prompt, expected), answer in zip(pairs, answers, strict=True)
    ]


def _split(rows: TokenRows, i: int) -> tuple[list[int], list[int]]:
    """Split a row into the tokens before the first trained one, and the first trained span."""
    ids, trained = rows.ids(i), rows.loss_mask(i)
    start = int(np.argmax(trained))
    untrained_after = np.flatnonzero(~trained[start:])
    end = start + int(untrained_after[0]) if len(untrained_after) else len(ids)
    return ids[:start].tolist(), ids[start:end].tolist()


CAUSAL = Implementation(objective=lambda *_: NEXT_TOKEN, loss=_loss, counts=count_tokens, answers=answer)
