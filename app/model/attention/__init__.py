"""Attention as one function of ours that every supported transformers model calls, over a table of backends."""

from app.config.model_kinds import OWN
from app.model.attention.registry import BACKENDS, NAME, Backend, own_attention, register, register_kernel, select
from app.model.attention.requirements import Kernel, Needs, Rules, dropouts_of, needs_of
from app.model.attention.sdpa import own_heads, plain, plain_packed, sdpa, shares_heads

__all__ = [
    "BACKENDS",
    "NAME",
    "OWN",
    "Backend",
    "Kernel",
    "Needs",
    "Rules",
    "dropouts_of",
    "needs_of",
    "own_attention",
    "own_heads",
    "plain",
    "plain_packed",
    "register",
    "register_kernel",
    "sdpa",
    "select",
    "shares_heads",
]
