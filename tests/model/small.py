"""Tiny random models of many kinds, built from numbers alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.base.base_model import model_class
from app.batch import IGNORE, Batch, PackedSequences
from app.config.schema import (
    AdapterConfig,
    CompileConfig,
    ModelConfig,
    PreferenceConfig,
    QuantizationConfig,
    TaskConfig,
)
from app.config.tasks import TASKS, Task
from app.layers.attention import register
from app.layers.comparison import Comparison
from app.model.build import ModelSections, build_training_model
from app.model.training_model import TrainingModel
from app.model.verification import verify_compiled
from app.tasks.table import IMPLEMENTATIONS

CAUSAL = TASKS["causal"]
VOCABULARY = 64
WIDTH = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # large enough that a wrong attention or head shows in the logits
    "initializer_range": 0.3,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOW = 8

# what differs from the numbers above, by kind
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": _WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "tie_word_embeddings": True,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "cohere2": {"sliding_window": _WINDOW, "logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"head_dim": 8, "sliding_window": _WINDOW, **_EXPERTS},
    "mixtral": {"sliding_window": None, **_EXPERTS},
}
_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,  # values narrower than keys
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
    **{kind: {"head_dim": 8} for kind in ("gemma", "glm4", "olmo3", "smollm3")},
    **{kind: {} for kind in ("cohere", "gpt_neox", "phi", "starcoder2")},
    "opt": {"dropout": 0.0},
    "apertus": {},
    "biogpt": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"), 0.0),
    "ctrl": {
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "dff": 48,
        "n_positions": 64,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
    },
    "gemma3n_text": {
        "head_dim": 8,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    **{kind: {"num_experts": 4, **_EXPERTS} for kind in ("granitemoe", "olmoe", "qwen2_moe", "qwen3_moe")},
}
MORE_KINDS = tuple(_MORE)  # for the slow tier

_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_SMALL_EXPERTS = {**_EXPERTS, "num_experts": 4, **dict.fromkeys(_EXPERT_SIZES, 16)}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
# kinds with recurrent mixers, beside attention where they have both
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "falcon_h1": _MAMBA | {"head_dim": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "qwen3_next": _DELTA | _SMALL_EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "jamba": {
        **{f"{each}_layer_{name}": n for each in ("attn", "expert") for name, n in (("offset", 1), ("period", 2))},
        **_SMALL_EXPERTS,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "bamba": _MAMBA | {"mamba_expand": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"mamba_expand": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "mamba2": {
        "expand": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "tie_word_embeddings": True,
    },
}

_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "modernbert": {"local_attention": 2 * _WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
_UNDROPPED = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
# without dropout
ENCODERS = {
    kind: {"num_key_value_heads": None, "tie_word_embeddings": True, **dict.fromkeys(_UNDROPPED, 0.0), **given}
    for kind, given in _ENCODERS.items()
}
ALL_KINDS = (*KINDS, *ENCODERS)


def task_of(kind: str) -> Task:
    """The task that a tiny model of this kind is built for."""
    return TASKS["masked" if kind in ENCODERS else "causal"]


def numbers(kind: str, **changes: Any) -> dict[str, Any]:
    """An architecture, as it stands in a YAML of conf/model."""
    return {"model_type": kind, **_COMMON, **(KINDS | _MORE | ENCODERS | RECURRENT).get(kind, {}), **changes}


def wide_numbers(kind: str, **changes: Any) -> dict[str, Any]:
    """Numbers of an architecture that can be quantized: inputs of every layer are multiples of 64."""
    sizes = {"hidden_size": 64, "n_embd": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.2}
    sizes |= {"expand": 1, "mamba_expand": 1}  # of heads that stay as many
    plain = numbers(kind)
    return plain | {key: size for key, size in sizes.items() if key in plain} | changes


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    given = numbers(kind, **changes)
    return AutoConfig.for_model(given.pop("model_type"), **given)


def documents_of(lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]


def padded(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and positions of rows with padding on the right, [R, S]."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return ids, torch.arange(ids.shape[1]).expand_as(ids).contiguous()


def batch_of(documents: list[Tensor], labels_from: int = 1, fill: int = 0, *, isolate: bool = False) -> Batch:
    """Padded rows; the tokens of each from `labels_from` on are trained, and `fill` rows of the head are IGNORE.

    `isolate` for encoders: their tokens would see the padding.
    """
    ids, positions = padded(documents)
    size = ids.shape[1]
    rows = [r * size + s - 1 for r, d in enumerate(documents) for s in range(labels_from, len(d))]
    targets = [int(d[s]) for d in documents for s in range(labels_from, len(d))]
    return Batch(
        ids=ids,
        positions=positions,
        label_rows=torch.tensor(rows + [0] * fill, dtype=torch.long),
        targets=torch.tensor(targets + [IGNORE] * fill, dtype=torch.long),
        lengths=tuple(len(d) for d in documents),
        num_labels=len(targets),
        num_tokens=sum(len(d) for d in documents),
        documents=PackedSequences.from_lengths([part for d in documents for part in (len(d), size - len(d)) if part])
        if isolate
        else None,
    )


def packed(documents: list[Tensor], labels_from: int = 1, filling: int = 0) -> Batch:
    """Documents in one row; `filling` tokens at its end belong to none of them."""
    padded_rows = batch_of(documents, labels_from)
    size = padded_rows.ids.shape[1]
    starts = [sum(len(d) for d in documents[:i]) for i in range(len(documents))]
    rows = [starts[int(flat) // size] + int(flat) % size for flat in padded_rows.label_rows]
    parts = [*documents, torch.full((filling,), 3)] if filling else documents
    return replace(
        padded_rows,
        ids=torch.cat(parts)[None],
        positions=torch.cat([torch.arange(len(d)) for d in parts])[None],
        label_rows=torch.tensor(rows, dtype=torch.long),
        documents=PackedSequences.from_lengths([len(d) for d in parts]),
    )


def built(kind: str, attention: str = "packed", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in eval mode, with weights that depend on the kind alone."""
    register("sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lm = model_class(task_of(kind)).from_config(
            config_of(kind, **changes), attn_implementation=attention, dtype=dtype
        )
        for parameter in lm.parameters():  # biases and norms too: at zero and one they would hide mistakes
            parameter.data += 0.05 * torch.randn_like(parameter)
    return lm.eval()


def model_config(kind: str = "llama", **given: Any) -> ModelConfig:
    """The section of a run; random weights unless `path` is given."""
    weights = "pretrained" if "path" in given else "random"
    section: dict[str, Any] = {"path": "asset:tiny", "weights": weights, "architecture": numbers(kind)} | given
    return ModelConfig(**section)


def lora(**given: Any) -> AdapterConfig:
    """An adapter section."""
    section: dict[str, Any] = {"kind": "lora", "r": 4, "alpha": 8.0, "targets": ["all-linear"]} | given
    return AdapterConfig(**section)


def full() -> AdapterConfig:
    """No adapter: the whole model is trained."""
    return AdapterConfig(kind="none")


def sections(model: ModelConfig, adapter: AdapterConfig, precision: str = "fp32", **given: Any) -> ModelSections:
    """Sections for `build_training_model`."""
    return ModelSections(
        model=model,
        task=given.get("task") or TaskConfig(kind="masked" if _is_encoder(model) else "causal"),
        adapter=adapter,
        quantization=given.get("quantization") or QuantizationConfig(kind="none"),
        attention=given.get("attention", "sdpa"),
        precision=precision,
        recompute=given.get("recompute", False),
        tile=given.get("tile", 0),
        freeze=given.get("freeze", ()),
        neftune=given.get("neftune", 0.0),
        compile=given.get("compile") or CompileConfig(kind="none"),
    )


def _is_encoder(model: ModelConfig) -> bool:
    return model.architecture.get("model_type") in ENCODERS


def build_model(
    parts: ModelSections, device: torch.device, seed: int, base_path: str, sharding: Any = None, rows: Any = None
) -> TrainingModel:
    """The model of `parts` with the loss of its task."""
    loss = IMPLEMENTATIONS[parts.task.kind].loss(parts.task, PreferenceConfig(kind="none"))
    return build_training_model(parts, loss, device, seed, base_path, sharding, rows)


def training_model_of(
    kind: str = "llama", adapter: AdapterConfig | None = None, precision: str = "fp32", **given: Any
) -> TrainingModel:
    """A tiny training_model with random weights; a fresh adapter changes nothing, so give it some weight."""
    numbers_of = wide_numbers if given.get("quantization") else numbers
    model = given.pop("model", None) or model_config(kind, architecture=numbers_of(kind))
    parts = sections(model, adapter or full(), precision, **given)
    training_model = build_model(parts, torch.device("cpu"), seed=0, base_path="base")
    generator = torch.Generator().manual_seed(3)
    for name, parameter in training_model.network.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return training_model


def with_one_graph(training_model: TrainingModel) -> TrainingModel:
    """The model itself, whose first layer has an input that needs a gradient, as the others: they compile alike."""
    embeddings = training_model.language_model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _args, states: states.requires_grad_())
    return training_model


def three_steps(training_model: TrainingModel) -> TrainingModel:
    """The model itself, trained far enough to see."""
    optimizer = torch.optim.AdamW(training_model.trained().values(), lr=1e-2)
    for seed in range(3):
        training_model(batch_of(documents_of((8, 5), seed)))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return training_model


def gradients(training_model: TrainingModel) -> dict[str, Tensor]:
    """Copies, by name; a parameter that got none counts as zero."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in training_model.trained().items()
    }


def outcome(model: TrainingModel, work: Batch | Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch, or the one that `work` returns, and its gradients."""
    model.zero_grad()
    torch.manual_seed(0)  # dropout draws the same each time
    loss = model(work)[0] if isinstance(work, Batch) else work()
    loss.backward()
    return float(loss.detach()), gradients(model)


def distance(found: Any, expected: Any) -> float:
    """The relative difference of all values together: a tensor, or several by name or place."""
    pairs = _pairs(found, expected)
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return float((apart / size) ** 0.5)


def _pairs(found: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    if isinstance(expected, Tensor):
        return [(found, expected)]
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return [(found[name], expected[name]) for name in expected]
    return list(zip(found, expected, strict=True))


def verified(training_model: TrainingModel, batch: Batch) -> Comparison | None:
    """Compare compiled layers with their own forward."""
    layers = training_model.compiled_layers
    assert layers is not None
    found = verify_compiled(training_model, layers, batch)
    return next(iter(found.or_leave(layers.give_up)), None)
