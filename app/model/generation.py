"""Answers of a model: greedy or sampled continuations of token ids."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from app.model.attention import NAME, right_own


def end_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer, of the model and of the tokenizer."""
    declared = [lm.generation_config.eos_token_id, lm.config.eos_token_id, tokenizer.eos_token_id]
    flat: Iterable[int] = (i for d in declared if d is not None for i in (d if isinstance(d, list) else [d]))
    return sorted(set(flat))


@torch.no_grad()
def generate(
    lm: Any, prompts: Sequence[Sequence[int]], ends: list[int], max_new: int, **sampling: Any
) -> list[list[int]]:
    """New ids for each prompt, up to an end id or `max_new`; one prompt at a time, so that none is padded."""
    own, mode = lm.config._attn_implementation, lm.training
    if own in {NAME, "sdpa"}:  # ours knows no key-value cache
        lm.set_attn_implementation(right_own(lm))
    lm.eval()
    try:
        return [_answer(lm, prompt, ends, max_new, sampling) for prompt in prompts]
    finally:
        lm.train(mode)
        if own in {NAME, "sdpa"}:
            lm.set_attn_implementation(own)


def _answer(
    lm: Any, prompt: Sequence[int], ends: list[int], max_new: int, sampling: dict[str, Any]
) -> list[int]:
    ids = torch.tensor([list(prompt)], device=lm.device)
    out = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
        use_cache=True,
        **({"do_sample": False} | sampling),
    )
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new[:-1] if new and new[-1] in ends else new
