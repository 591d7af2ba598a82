"""Properties of an adapter that vLLM refuses or ignores, by its adapter_config.json.

The rules are copied from `vllm/lora/peft_helper.py`, which needs a GPU to run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = "0.33"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
_DEFAULT_RANK = 16  # of --max-lora-rank


class _Rule(NamedTuple):
    key: str  # of adapter_config.json
    taken: tuple[Any, ...]  # values that vLLM supports
    words: str


_EMPTY: tuple[Any, ...] = (None, False, [], {})
_REFUSED = (
    _Rule("peft_type", ("LORA",), "PEFT type {}"),
    _Rule("use_dora", _EMPTY, "DoRA"),
    _Rule("modules_to_save", _EMPTY, "fully trained modules, {}"),
    _Rule("bias", (*_EMPTY, "none"), "trained biases"),
)
_IGNORED = (
    _Rule("rank_pattern", _EMPTY, "ranks by layer (their scale)"),
    _Rule("alpha_pattern", _EMPTY, "alphas by layer"),
    _Rule("target_parameters", _EMPTY, "stacked experts, {}, for some model types"),
)


def in_vllm(adapter: Mapping[str, Any], rows: int | None = None) -> str:
    """Return the problems of an adapter in vLLM or the options to serve it; `rows`: as in `problems_in_vllm`."""
    if lines := problems_in_vllm(adapter, rows):
        return "\n".join([*lines, f"use kind=merged (rules of vLLM {VERSION}, not tested)"])
    return f"takes it with {options_of_vllm(adapter, _DEFAULT_RANK)} (rules of vLLM {VERSION}, not tested)"


def problems_in_vllm(adapter: Mapping[str, Any], rows: int | None = None) -> list[str]:
    """Return what vLLM refuses and ignores; `rows`: vocabulary size to which the base must be resized first."""
    refused, ignored = (_broken(rules, adapter) for rules in (_REFUSED, _IGNORED))
    refused += [] if rows is None else [f"a resized vocabulary ({rows} rows)"]
    if _rank(adapter) > _RANKS[-1]:
        refused.append(f"rank {_rank(adapter)}, above {_RANKS[-1]}")
    return [f"refuses {problem}" for problem in refused] + [f"ignores {problem}" for problem in ignored]


def options_of_vllm(adapter: Mapping[str, Any], default_rank: int = 0) -> str:
    """Return the options to serve an adapter; a rank of up to `default_rank` needs none."""
    indices = adapter.get("trainable_token_indices") or {}
    tokens = max(map(len, indices.values()), default=0) if isinstance(indices, Mapping) else len(indices)
    served = next(rank for rank in _RANKS if rank >= _rank(adapter))
    options = ["--enable-lora", *([f"--max-lora-rank {served}"] if served > default_rank else [])]
    return " ".join([*options, *([f"--max-lora-trainable-tokens {tokens}"] if tokens else [])])


def _rank(adapter: Mapping[str, Any]) -> int:
    return max(map(int, [adapter.get("r") or 0, *(adapter.get("rank_pattern") or {}).values()]))


def _broken(rules: tuple[_Rule, ...], adapter: Mapping[str, Any]) -> list[str]:
    broken = [(rule.words, adapter.get(rule.key)) for rule in rules if adapter.get(rule.key) not in rule.taken]
    return [words.format(", ".join(value) if isinstance(value, list) else value) for words, value in broken]
