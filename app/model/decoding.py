"""Plain text generation from token IDs."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from app.errors import refuse
from app.layers.attention import NAME, own_attention


def end_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Return the token IDs that end an answer, from the model and the tokenizer."""
    of_model = getattr(lm.config.get_text_config(), "eos_token_id", None)  # not an attribute of every model type
    declared = [lm.generation_config.eos_token_id, of_model, tokenizer.eos_token_id]
    flat: list[Any] = [i for d in declared if d is not None for i in (d if isinstance(d, list) else [d])]
    refuse(
        f"generation_config.json: eos_token_id has {token!r}, which is not a token id. Fix or delete that file."
        for token in flat
        if not isinstance(token, int)
    )
    return sorted(set(flat))


def generate(
    lm: Any, prompts: Sequence[Sequence[int]], ends: list[int], max_new: int, *, together: bool = False, **sampling: Any
) -> list[list[int]]:
    """Return new IDs for each prompt, up to an end ID or `max_new`.

    Prompts are generated one at a time, without padding, or all `together`, if passes of the model are expensive.
    """
    attention, mode = lm.config._attn_implementation, lm.training
    if attention in {NAME, "sdpa"}:  # this program's attention has no key-value cache
        lm.set_attn_implementation(own_attention(lm))
    lm.eval()
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    try:
        return [ids for part in batches for ids in new_ids(lm, part, ends, max_new, **{"do_sample": False} | sampling)]
    finally:
        lm.train(mode)
        if attention in {NAME, "sdpa"}:
            lm.set_attn_implementation(attention)


@torch.no_grad()
def new_ids(
    lm: Any, prompts: Sequence[Sequence[int]], ends: list[int], max_new: int, **options: Any
) -> list[list[int]]:
    """Return new IDs for each prompt, up to the first end ID; prompts are left-padded, so answers start together."""
    width, pad = max(map(len, prompts)), ends[0] if ends else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=lm.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=lm.device)
    out = lm.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_new,
        eos_token_id=ends or None,
        pad_token_id=pad,
        use_cache=True,
        **options,
    )
    return [list(takewhile(lambda token: token not in ends, row)) for row in out[:, width:].tolist()]
