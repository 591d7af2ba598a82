"""Models as llama.cpp has them: kinds for which it gives the same loss, their metadata, names and order of rows."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.errors import CheckpointError, ConfigError

OTHER_WAY = "Give llama_cpp=DIR, a folder of llama.cpp: its own converter knows more kinds."
_LARGEST_F16 = 65504.0


class Kind(NamedTuple):
    """What llama.cpp's model of an architecture reads otherwise than transformers'."""

    architecture: str  # its name in gguf.MODEL_ARCH
    pairs: bool = False  # RoPE turns neighbouring rows of q and k, not those half a head apart
    norm_offset: float = 0.0  # added to what the files have of a norm
    window_every: int = 0  # of so many layers the last one alone sees all tokens


KINDS = {
    "llama": Kind("LLAMA", pairs=True),
    "mistral": Kind("LLAMA", pairs=True),
    "qwen2": Kind("QWEN2"),
    "qwen3": Kind("QWEN3"),
    "gemma3_text": Kind("GEMMA3", norm_offset=1.0, window_every=6),
}


class Place(NamedTuple):
    """A tensor of the file."""

    name: str
    model_name: str  # in the model of transformers
    source: str  # in the files that are merged
    shape: tuple[int, ...]
    type: Any  # GGMLQuantizationType

    @property
    def stored_shape(self) -> tuple[int, ...]:
        from gguf.quants import quant_shape_to_byte_shape

        return quant_shape_to_byte_shape(self.shape, self.type)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.stored_shape))


@dataclass(frozen=True)
class Described:
    """A model of a known kind, for llama.cpp."""

    kind: Kind
    numbers: Any  # its configuration
    quant: str

    @property
    def head_dim(self) -> int:
        own: int | None = getattr(self.numbers, "head_dim", None)
        return own or int(self.numbers.hidden_size // self.numbers.num_attention_heads)

    @property
    def rope(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """That of layers that see all tokens, and that of layers with a window."""
        given = self.numbers.rope_parameters
        return given.get("full_attention", given), given.get("sliding_attention", given)

    @cached_property
    def _names(self) -> Any:
        from gguf import MODEL_ARCH, get_tensor_name_map

        return get_tensor_name_map(MODEL_ARCH[self.kind.architecture], self.numbers.num_hidden_layers)

    def place(self, name: str, source: str, shape: tuple[int, ...]) -> Place:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        known = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise CheckpointError(f"kind=gguf: gguf has no name for {source}. Give kind=merged.")
        packed = GGMLQuantizationType[self.quant.upper()]
        if len(shape) < 2:
            packed = GGMLQuantizationType.F32
        elif shape[-1] % GGML_QUANT_SIZES[packed][0]:
            packed = GGMLQuantizationType.F16
        return Place(known, name, source, shape, packed)

    def reordered(self, place: Place, weight: Tensor) -> Tensor:
        """The weight as llama.cpp's model computes with it."""
        _, _, last = place.model_name.rpartition("self_attn.")
        if self.kind.pairs and last.startswith(("q_proj.", "k_proj.")):
            halves: Tensor = weight.unflatten(0, (-1, 2, self.head_dim // 2))
            weight = halves.transpose(1, 2).reshape(weight.shape).contiguous()
        return weight + self.kind.norm_offset if place.model_name.endswith("norm.weight") else weight

    def packed(self, place: Place, weight: Tensor) -> Any:
        from gguf.quants import quantize

        values: Any = self.reordered(place, weight).numpy()
        if place.type.name == "F16" and bool((np.abs(values) > _LARGEST_F16).any()):
            raise CheckpointError(
                f"quant={self.quant}: {place.source} has a value that f16 cannot hold. Give quant=bf16."
            )
        return np.ascontiguousarray(quantize(values, place.type)).view(np.uint8).reshape(place.stored_shape)

    def rope_factors(self) -> Any:
        """What divides the frequencies, where no metadata says it."""
        rope, _ = self.rope
        if rope["rope_type"] != "llama3":
            return None
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.numbers, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        return (plain / scaled.double()).float().numpy()

    def writer(self, file: Path) -> Any:
        """A writer with the metadata of the model."""
        import gguf

        numbers, (rope, local) = self.numbers, self.rope
        writer: Any = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[self.kind.architecture]])
        window = getattr(numbers, "sliding_window", None)
        context = numbers.max_position_embeddings
        if self.kind.window_every:
            writer.add_sliding_window(window)
            writer.add_rope_freq_base_swa(local["rope_theta"])
        elif window:
            context = min(context, window)  # beyond it, transformers sees less than llama.cpp
        writer.add_block_count(numbers.num_hidden_layers)
        writer.add_context_length(context)
        writer.add_embedding_length(numbers.hidden_size)
        writer.add_feed_forward_length(numbers.intermediate_size)
        writer.add_head_count(numbers.num_attention_heads)
        writer.add_head_count_kv(numbers.num_key_value_heads or numbers.num_attention_heads)
        writer.add_layer_norm_rms_eps(numbers.rms_norm_eps)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_vocab_size(numbers.vocab_size)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{self.quant.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        return writer


def described(numbers: Any, quant: str) -> Described:
    """The model, or a refusal of what llama.cpp would compute otherwise."""
    if numbers.model_type not in KINDS:
        raise ConfigError(
            f"kind=gguf: models of the kind {numbers.model_type} are not written here, only {', '.join(KINDS)}. "
            f"{OTHER_WAY}"
        )
    model = Described(KINDS[numbers.model_type], numbers, quant)
    every, layers = model.kind.window_every, getattr(numbers, "layer_types", None) or []
    windowed = [at for at, each in enumerate(layers) if each == "sliding_attention"]
    expected = [at for at in range(len(layers)) if (at + 1) % every] if every else []
    attends = getattr(numbers, "query_pre_attn_scalar", model.head_dim)
    unknown = {
        f"rope_type={each['rope_type']}"
        for each in model.rope
        if each["rope_type"] not in ("default", "linear", "llama3") or each.get("partial_rotary_factor", 1) != 1
    }
    if windowed and windowed != expected and not (not every and len(windowed) == len(layers)):
        unknown.add("layer_types")
    if attends != model.head_dim:
        unknown.add(f"query_pre_attn_scalar={attends}")
    unknown |= {name for name in ("final_logit_softcapping", "attn_logit_softcapping") if getattr(numbers, name, None)}
    if unknown:
        raise ConfigError(
            f"kind=gguf: the model's config.json has {', '.join(sorted(unknown))}, which is not written here. "
            f"{OTHER_WAY}"
        )
    return model
