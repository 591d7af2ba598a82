"""transformers' own attention, where ours does not serve: with a key-value cache, and as what ours is measured by."""

from typing import Any


def right_own(lm: Any) -> str:
    """The fastest that is right: its sdpa has no sinks, nor caps, which 5.17 leaves out without a word."""
    capped = getattr(lm.config, "attn_logit_softcapping", None) is not None
    return "sdpa" if lm._supports_sdpa and not capped else "eager"
