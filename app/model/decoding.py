"""Plain text generation from token ids."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from app.errors import refuse
from app.layers.attention import NAME, own_attention


def end_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, by the model and by the tokenizer."""
    declared = [lm.generation_config.eos_token_id, lm.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    flat: list[Any] = [i for d in declared if d is not None for i in (d if isinstance(d, list) else [d])]
    refuse(
        f"generation_config.json: eos_token_id has {each!r}, which is not a token id. Fix or delete that file."
        for each in flat
        if not isinstance(each, int)
    )
    return sorted(set(flat))


def generate(
    lm: Any, prompts: Sequence[Sequence[int]], ends: list[int], max_new: int, *, together: bool = False, **sampling: Any
) -> list[list[int]]:
    """New ids for each prompt, up to an end id or `max_new`.

    One prompt at a time, so that none is padded; or all `together`, where each pass of the model is dear.
    """
    own, mode = lm.config._attn_implementation, lm.training
    if own in {NAME, "sdpa"}:  # ours knows no key-value cache
        lm.set_attn_implementation(own_attention(lm))
    lm.eval()
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    try:
        return [ids for each in batches for ids in new_ids(lm, each, ends, max_new, **{"do_sample": False} | sampling)]
    finally:
        lm.train(mode)
        if own in {NAME, "sdpa"}:
            lm.set_attn_implementation(own)


@torch.no_grad()
def new_ids(
    lm: Any, prompts: Sequence[Sequence[int]], ends: list[int], max_new: int, **options: Any
) -> list[list[int]]:
    """New ids for each prompt, up to the first end id; padded on the left, so that they begin in one column."""
    width, pad = max(map(len, prompts)), ends[0] if ends else 0
    ids = torch.tensor([[pad] * (width - len(each)) + list(each) for each in prompts], device=lm.device)
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=lm.device)
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
