"""Methods of `adapter=peft`, by their names in PEFT: what each can do, or why it is refused.

tests/full/model/test_peft_methods.py tries them all.
"""

from typing import NamedTuple


class PeftMethod(NamedTuple):
    """What a method does beside training tensors of its own in each linear layer."""

    quantized: bool = True  # whether it works on a base in nf4 or fp4
    indivisible: str = ""  # what it has that FSDP cannot divide
    merges: bool = True  # whether PEFT merges it into one weight after the other
    of_norms: bool = False  # whether it adapts norms in place of linear layers
    compiles: bool = True  # whether torch.compile can trace its layers as one graph


SHARED = "has trained tensors that layers share"
_PLAIN, _READS_BASE = PeftMethod(), PeftMethod(quantized=False)
METHODS = {
    "BEFT": PeftMethod(indivisible="has trained tensors of one row", merges=False),
    "C3A": _PLAIN,
    "DEFT": _READS_BASE,
    "DELORA": _READS_BASE,
    "FOURIERFT": _PLAIN,
    "GLORA": _READS_BASE,
    "GRALORA": _PLAIN,
    "HIRA": _PLAIN,
    "HRA": _READS_BASE,
    "IA3": _PLAIN,
    "LILY": PeftMethod(indivisible=SHARED, merges=False),
    "LN_TUNING": PeftMethod(of_norms=True),
    "LOHA": PeftMethod(quantized=False, compiles=False),
    "LOKR": PeftMethod(quantized=False, compiles=False),
    "MISS": _PLAIN,
    "OFT": _PLAIN,
    "OSF": PeftMethod(quantized=False, indivisible="projects the gradients of whole matrices"),
    "PEANUT": _READS_BASE,
    "PSOFT": _READS_BASE,
    "PVERA": _PLAIN,
    "RANDLORA": _PLAIN,
    "ROAD": _PLAIN,
    "SUPERTUNING": _READS_BASE,
    "TINYLORA": PeftMethod(quantized=False, indivisible=SHARED, merges=False),
    "VBLORA": PeftMethod(indivisible=SHARED, compiles=False),
    "VERA": _PLAIN,
}

_OF_PROMPTS = "trains vectors before the prompt, which packed documents have no place for. Set adapter=lora"
_TOO_LATE = (
    "cannot be attached to a model without weights, so the memory of the run is not known before they are read. "
    "Set adapter.method={}, or adapter=lora"
)
REFUSED = {
    **dict.fromkeys(("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), _OF_PROMPTS),
    **dict.fromkeys(("ADAPTION_PROMPT", "PROMPT_TUNING"), _OF_PROMPTS),
    "ADALORA": "takes ranks away by a call in each step, which is not made here. Set adapter=lora",
    "ADAMSS": _TOO_LATE.format("OSF"),
    "BOFT": _TOO_LATE.format("OFT"),
    "FROD": _TOO_LATE.format("VERA"),
    "LORA": "is adapter=lora, which has keys of its own. Set adapter=lora",
    "POLY": "chooses among adapters by ids of tasks, which rows do not have. Set adapter=lora",
    "SHADOW": "trains a second model beside the base. Set adapter=lora",
    "SHIRA": _TOO_LATE.format("SUPERTUNING"),
    "TRAINABLE_TOKENS": "is adapter.train_tokens. Set adapter=lora adapter.train_tokens=[IDS]",
    "UNILORA": _TOO_LATE.format("VBLORA"),
    "WAVEFT": _TOO_LATE.format("FOURIERFT"),
    "XLORA": "mixes adapters that are trained already. app.export adapters=[...] sums such",
}
