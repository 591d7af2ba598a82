"""What vLLM would refuse or ignore of an adapter, by its adapter_config.json.

The rules are those of `vllm/lora/peft_helper.py`, read and not run: it needs a GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from app.tracking.model_card import VLLM_RANKS

VERSION = "0.33"
_DEFAULT_RANK = 16  # of --max-lora-rank


class _Rule(NamedTuple):
    key: str  # of adapter_config.json
    taken: tuple[Any, ...]  # values that mean nothing, or what vLLM computes too
    words: str


_EMPTY: tuple[Any, ...] = (None, False, [], {})
_REFUSED = (
    _Rule("peft_type", ("LORA",), "adapters of the kind {}"),
    _Rule("use_dora", _EMPTY, "DoRA"),
    _Rule("modules_to_save", _EMPTY, "modules that were trained as a whole, {}"),
    _Rule("bias", (*_EMPTY, "none"), "trained biases"),
)
_IGNORED = (
    _Rule("rank_pattern", _EMPTY, "ranks by layer (their scale)"),
    _Rule("alpha_pattern", _EMPTY, "alphas by layer"),
    _Rule("target_parameters", _EMPTY, "stacks of experts, {}, for some kinds of model"),
)


def in_vllm(adapter: Mapping[str, Any]) -> str:
    """What happens to an adapter, line by line, and the options to serve it with."""
    refused, ignored = (_broken(rules, adapter) for rules in (_REFUSED, _IGNORED))
    rank = max([int(adapter.get("r") or 0), *(adapter.get("rank_pattern") or {}).values()])
    served = next((each for each in VLLM_RANKS if each >= rank), None)
    if served is None:
        refused.append(f"rank {rank}, above {VLLM_RANKS[-1]}")
    lines = [f"refuses {each}" for each in refused] + [f"ignores {each}" for each in ignored]
    if lines:
        return "\n".join([*lines, f"give it kind=merged (rules of vLLM {VERSION}, not run)"])
    given = adapter.get("trainable_token_indices") or {}
    tokens = max(map(len, given.values()), default=0) if isinstance(given, Mapping) else len(given)
    options = [f" --max-lora-rank {served}"] if rank > _DEFAULT_RANK else []
    options += [f" --max-lora-trainable-tokens {tokens}"] if tokens else []
    return f"takes it with --enable-lora{''.join(options)} (rules of vLLM {VERSION}, not run)"


def _broken(rules: tuple[_Rule, ...], adapter: Mapping[str, Any]) -> list[str]:
    found = [(rule.words, adapter.get(rule.key)) for rule in rules if adapter.get(rule.key) not in rule.taken]
    return [words.format(", ".join(value) if isinstance(value, list) else value) for words, value in found]
