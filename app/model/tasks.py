"""What a model can be built to do: the class of transformers, and what that class must be like."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One head on a backbone."""

    words: str  # of a model that can do it
    auto_class: str  # of transformers
    kinds: str  # transformers' table of the classes that have it, by configuration
    both_ways: bool  # whether tokens see those after them
    peft_type: str | None  # what PEFT writes down
    examples: str

    @property
    def model_class(self) -> Any:
        """What loads or makes the model."""
        import transformers

        return getattr(transformers, self.auto_class)

    def does(self, kind: str) -> bool:
        """Whether transformers has such a class for a kind at all."""
        from transformers.models.auto import modeling_auto

        return kind in getattr(modeling_auto, f"{self.kinds}_NAMES")

    def class_of(self, numbers: Any) -> Any | None:
        """The model class for a configuration of transformers, None where its kind has none."""
        import transformers

        return getattr(transformers, self.kinds).get(type(numbers), None)


TASKS: dict[str, Task] = {
    "causal": Task(
        words="a causal language model",
        auto_class="AutoModelForCausalLM",
        kinds="MODEL_FOR_CAUSAL_LM_MAPPING",
        both_ways=False,
        peft_type="CAUSAL_LM",
        examples="llama, qwen3, mistral, gemma3_text, phi3, olmo2, gpt_oss and most kinds whose layers are "
        "full or sliding attention",
    ),
    "masked": Task(
        words="an encoder with a head for hidden tokens",
        auto_class="AutoModelForMaskedLM",
        kinds="MODEL_FOR_MASKED_LM_MAPPING",
        both_ways=True,
        peft_type=None,  # PEFT has no name for it
        examples="bert, roberta, modernbert, distilbert, electra",
    ),
}
