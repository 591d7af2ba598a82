"""What vLLM would refuse or ignore of an adapter, by its adapter_config.json.

The rules are those of `vllm/lora/peft_helper.py`, read and not run: it needs a GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = "0.33"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank takes
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


def in_vllm(adapter: Mapping[str, Any], rows: int | None = None) -> str:
    """What happens to an adapter, line by line, and the options to serve it with; `rows`: as in `problems_in_vllm`."""
    if lines := problems_in_vllm(adapter, rows):
        return "\n".join([*lines, f"give it kind=merged (rules of vLLM {VERSION}, not run)"])
    return f"takes it with {options_of_vllm(adapter, _DEFAULT_RANK)} (rules of vLLM {VERSION}, not run)"


def problems_in_vllm(adapter: Mapping[str, Any], rows: int | None = None) -> list[str]:
    """What it refuses of an adapter, and what it ignores; `rows` that its base must be given before it is loaded."""
    refused, ignored = (_broken(rules, adapter) for rules in (_REFUSED, _IGNORED))
    refused += [] if rows is None else [f"a vocabulary of other than its base's rows, {rows}"]
    if _rank(adapter) > _RANKS[-1]:
        refused.append(f"rank {_rank(adapter)}, above {_RANKS[-1]}")
    return [f"refuses {each}" for each in refused] + [f"ignores {each}" for each in ignored]


def options_of_vllm(adapter: Mapping[str, Any], default_rank: int = 0) -> str:
    """The options to serve an adapter with; a rank of up to `default_rank` needs none."""
    given = adapter.get("trainable_token_indices") or {}
    tokens = max(map(len, given.values()), default=0) if isinstance(given, Mapping) else len(given)
    served = next(each for each in _RANKS if each >= _rank(adapter))
    options = ["--enable-lora", *([f"--max-lora-rank {served}"] if served > default_rank else [])]
    return " ".join([*options, *([f"--max-lora-trainable-tokens {tokens}"] if tokens else [])])


def _rank(adapter: Mapping[str, Any]) -> int:
    return max(map(int, [adapter.get("r") or 0, *(adapter.get("rank_pattern") or {}).values()]))


def _broken(rules: tuple[_Rule, ...], adapter: Mapping[str, Any]) -> list[str]:
    found = [(rule.words, adapter.get(rule.key)) for rule in rules if adapter.get(rule.key) not in rule.taken]
    return [words.format(", ".join(value) if isinstance(value, list) else value) for words, value in found]
