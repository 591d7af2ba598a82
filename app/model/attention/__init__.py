"""Attention as one function of ours that every supported transformers model calls, over a table of backends."""

from app.model.attention.backends import BACKENDS, select
from app.model.attention.dense import plain, sdpa
from app.model.attention.interface import NAME, register, register_kernel
from app.model.attention.needs import needs_of
from app.model.attention.own import right_own
from app.model.attention.rules import Backend, Kernel, Needs, Rules

__all__ = [
    "BACKENDS",
    "NAME",
    "Backend",
    "Kernel",
    "Needs",
    "Rules",
    "needs_of",
    "plain",
    "register",
    "register_kernel",
    "right_own",
    "sdpa",
    "select",
]
