"""Adapters, and initial LoRA weights by EVA, CorDA and LoftQ against their definitions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from torch import Tensor, nn

from app.adapters import lora_inits
from app.adapters.adapters import layers_to_adapt
from app.batch import Batch
from app.config.schema import QuantizationConfig
from app.errors import ConfigError, TrainingError
from app.layers import recurrent
from app.layers.quantization import weight_of
from app.model.build import build_base, count_weights
from app.model.checks import check_adapter
from app.model.training_model import TrainingModel
from scripts.tiny_kinds import architecture
from tests.model.small import (
    CAUSAL,
    batch_of,
    build_model,
    built,
    distance,
    documents_of,
    lora,
    model_config,
    numbers,
    packed,
    sections,
    training_model_of,
    wide_numbers,
)

BATCH = batch_of(documents_of((9, 4)))
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(training_model: Any) -> set[str]:
    """Adapted layers by their names in the transformers model."""
    ends = (".lora_A.default.weight", ".lora_B.default.weight")
    names = list(training_model.trained())
    assert all(name.endswith(ends) for name in names), names
    return {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}


def test_all_linear_is_every_linear_layer_of_backbone() -> None:
    training_model = training_model_of("llama", lora())
    expected = {
        f"model.layers.{i}.{'mlp' if name in PROJECTIONS[4:] else 'self_attn'}.{name}"
        for i in range(2)
        for name in PROJECTIONS
    }
    assert adapted(training_model) == expected
    assert len(training_model.trained()) == 2 * len(expected)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_all_linear_leaves_head_embedding_and_routers(kind: str) -> None:
    training_model = training_model_of(kind, lora())
    layers = adapted(training_model)
    lm = training_model.language_model
    assert layers
    assert not [name for name in layers if name.startswith(("lm_head", "model.embed", "transformer.wte"))]
    assert not [name for name in layers if {"gate", "router"} & set(name.split("."))]
    assert not lm.get_output_embeddings().weight.requires_grad
    assert not lm.get_input_embeddings().weight.requires_grad


def test_all_linear_leaves_router_unless_named() -> None:
    lm = built("qwen2_moe")
    assert not [n for n in layers_to_adapt(["all-linear"], lm) if n.endswith("shared_expert_gate")]
    named = layers_to_adapt(["shared_expert_gate"], lm)
    assert named == [f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)]


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "mixtral", "olmoe"])
def test_all_linear_of_experts_is_attention(kind: str) -> None:
    """PEFT takes gate_proj and its like for the stacked experts, even where they name a dense or a shared one."""
    training_model = training_model_of(kind, lora())
    assert {name.split(".")[3] for name in adapted(training_model)} == {"self_attn"}
    with pytest.raises(ConfigError, match=r"adapter\.targets: down_proj matches no linear layer"):
        training_model_of(kind, lora(targets=["down_proj"]))


def gemma3n(**given: Any) -> TrainingModel:
    config = model_config(architecture=architecture("gemma3n_text"))
    return build_model(sections(config, lora(**given)), torch.device("cpu"), seed=0, base_path="base")


def test_all_linear_leaves_layers_that_training_does_not_call() -> None:
    """Gemma 3n reads the weight of `correction_coefs` in training, and calls the layer in evaluation alone."""
    training_model = gemma3n()
    layers = adapted(training_model)
    assert "model.layers.0.altup.prediction_coefs" in layers
    assert not [name for name in layers if name.endswith("correction_coefs")]
    check_adapter(training_model, lora(), BATCH)
    loss, _ = training_model.train()(BATCH)
    loss.backward()
    assert all(each.grad is not None for each in training_model.trained().values())


def test_check_adapter_uncalled_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "uncalled_modules", lambda _kind: ())
    training_model = gemma3n()
    with pytest.raises(TrainingError, match=r"reaches the adapter of model\.layers\.\*\.altup\.correction_coefs, so"):
        check_adapter(training_model, lora(), BATCH)


def test_check_adapter_one_called_layer_speaks_for_its_name() -> None:
    training_model = training_model_of("llama", lora())
    mlp = training_model.language_model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _module, args, _out: args[0])  # as an expert without tokens
    check_adapter(training_model, lora(), BATCH)


def test_targets_by_any_end_of_their_names() -> None:
    assert adapted(training_model_of("llama", lora(targets=["q_proj", "1.mlp.down_proj"]))) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        training_model_of("llama", lora(targets=["q_proj", "qproj", "lm_head", "proj"]))
    messages = refused.value.problems
    assert [m.split(" matches")[0] for m in messages] == [
        "adapter.targets: qproj",
        "adapter.targets: lm_head",
        "adapter.targets: proj",
    ]
    assert "down_proj, gate_proj" in messages[0]
    assert "Did you mean q_proj?" in messages[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rank_above_all_adapted_weights_is_refused(kind: str) -> None:
    assert training_model_of(kind, lora(r=32)).trained()
    with pytest.raises(
        ConfigError, match=r"adapter\.r=100000: the adapted layers of this model have a maximum rank of 32\."
    ):
        count_weights(sections(model_config(kind, architecture=numbers(kind)), lora(r=100_000)))


def test_short_name_not_used_where_it_reaches_other_layers() -> None:
    """The head of this model ends like layers of its backbone; PEFT would adapt it as well."""
    lm = built("llama")
    lm.add_module("q_proj", nn.Linear(4, 4))
    from app.adapters.adapters import add_adapter

    network = add_adapter(lora(targets=["q_proj"]), CAUSAL, lm, "base")
    assert len([n for n, p in network.named_parameters() if p.requires_grad]) == 4


def test_full_training_trains_all_weights() -> None:
    training_model = training_model_of("llama")
    assert training_model.trained().keys() == dict(training_model.language_model.named_parameters()).keys()
    tied = training_model_of("gemma2")
    assert "lm_head.weight" not in tied.trained()
    assert "model.embed_tokens.weight" in tied.trained()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trained_weights_fp32_under_half_precision(precision: str) -> None:
    model = training_model_of("llama", lora(), precision)
    assert {p.dtype for p in model.trained().values()} == {torch.float32}
    frozen = {p.dtype for p in model.network.parameters() if not p.requires_grad}
    assert frozen == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert {p.dtype for p in training_model_of("llama", None, precision).parameters()} == {torch.float32}


def test_adapter_drawn_from_seed_alone() -> None:
    first, again = (training_model_of("llama", lora()).trained() for _ in range(2))
    torch.manual_seed(99)
    third = training_model_of("llama", lora()).trained()

    other = build_model(sections(model_config(), lora()), torch.device("cpu"), 1, "base").trained()
    halves = [name for name in first if ".lora_A." in name]
    assert all(torch.equal(first[n], again[n]) and torch.equal(first[n], third[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in halves)


def test_adapter_file_has_names_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open

    names = []
    ours = training_model_of("llama", lora()).network
    theirs = get_peft_model(built("llama"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for folder, network in (("ours", ours), ("theirs", theirs)):
        network.save_pretrained(str(tmp_path / folder), save_embedding_layers=False)  # type: ignore[operator]
        with safe_open(str(tmp_path / folder / "adapter_model.safetensors"), "pt") as file:
            names.append({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    assert names[0] == names[1]
    assert len(names[0]) == 28


def test_first_gradient_reaches_b_alone() -> None:

    training_model = build_model(sections(model_config(), lora()), torch.device("cpu"), 0, "base")
    training_model(BATCH)[0].backward()
    for name, p in training_model.trained().items():
        assert p.grad is not None
        assert bool(p.grad.any()) == (".lora_B." in name), name


CPU = torch.device("cpu")
DOCUMENTS = documents_of((30, 60, 20))


def begun(init: str, kind: str, rows: list[Batch], **given: Any) -> TrainingModel:
    """A model of `kind` as `init` begins it, in eval mode."""
    architecture = (wide_numbers if given else numbers)(kind)
    parts = sections(model_config(kind, architecture=architecture), lora(init=init), **given)
    return build_model(parts, CPU, 0, "base", rows=lambda: rows).eval()


def layers_of(model: TrainingModel) -> dict[str, Any]:
    found = {name: each for name, each in model.network.named_modules() if hasattr(each, "lora_A")}
    return {name.removeprefix("base_model.model."): each for name, each in found.items()}


def update_of(layer: Any) -> Tensor:
    result: Tensor = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    return result.detach()


@torch.no_grad()
def inputs_of(kind: str, documents: list[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The base, and what its layers get of each document by itself."""
    lm = build_base(sections(model_config(kind), lora()), CPU, 0).eval()
    found: dict[str, list[Tensor]] = {}
    for name, module in lm.named_modules():
        module.register_forward_pre_hook(lambda _m, args, name=name: found.setdefault(name, []).extend(args[:1]))
    for document in documents:
        lm(input_ids=document[None], use_cache=False)
    rows = {name: each for name, each in found.items() if each and isinstance(each[0], Tensor) and each[0].ndim == 3}
    return lm, {name: torch.cat([each[0] for each in tensors]) for name, tensors in rows.items()}


@pytest.mark.parametrize(("kind", "batch"), [("llama", packed(DOCUMENTS, filling=40)), ("gpt2", batch_of(DOCUMENTS))])
def test_eva_begins_with_leading_right_singular_vectors_of_real_inputs(
    monkeypatch: pytest.MonkeyPatch, kind: str, batch: Batch
) -> None:
    monkeypatch.setattr(lora_inits, "MAX_MOMENT_BYTES", 3 * 4 * 32**2)  # so that the rows are read several times
    model = begun("eva", kind, [batch])
    lm, inputs = inputs_of(kind, DOCUMENTS)
    assert any(
        "adapter.init=eva: computed from layer inputs for 110 training tokens" in each for each in model.remarks()
    )
    assert len(layers_of(model)) >= 8
    for name, layer in layers_of(model).items():
        a = layer.lora_A["default"].weight.detach()
        best = torch.linalg.svdvals(inputs[name])[: len(a)].square().sum()
        assert distance(a @ a.T, torch.eye(len(a))) <= 1e-5
        assert (inputs[name] @ a.T).square().sum() == pytest.approx(float(best), rel=1e-5)
        assert not layer.lora_B["default"].weight.any()
        assert torch.equal(layer.get_base_layer().weight, lm.get_submodule(name).weight)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_corda_splits_the_base_as_peft_does(kind: str) -> None:
    from peft.tuners.lora.corda import preprocess_corda

    (document,) = documents_of((60,))
    model = begun("corda", kind, [packed([document])])
    lm, _ = inputs_of(kind, [])
    targets = sorted({name.rpartition(".")[2] for name in layers_of(model)})
    targets = list(layers_of(model)) if kind == "gpt2" else targets
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        init_lora_weights="corda",
        corda_config=CordaConfig(),
        fan_in_fan_out=kind == "gpt2",
    )
    with torch.no_grad():
        plain = lm(input_ids=document[None]).logits
        preprocess_corda(lm, config, run_model=lambda: lm(input_ids=document[None]))
        theirs = get_peft_model(lm, config)
        assert distance(model.language_model(input_ids=document[None]).logits, plain) <= 1e-5
    for name, layer in layers_of(model).items():
        other = theirs.get_submodule(f"base_model.model.{name}")
        assert distance(update_of(layer), update_of(other)) <= 1e-3
        assert distance(layer.get_base_layer().weight, other.get_base_layer().weight) <= 1e-3


def require_best_update(model: TrainingModel, base: Any) -> None:
    """The adapter leaves as little of what packing lost of `base` as any of its rank can."""
    assert model.quantizer is not None
    for name, layer in layers_of(model).items():
        plain, kept = base.get_submodule(name), model.quantizer.unpacked(layer.get_base_layer(), torch.float32)
        error = weight_of(plain).to(kept.device) - kept
        best = torch.linalg.svdvals(error)[4:].square().sum().sqrt()
        assert 0 < best < 0.95 * error.norm()
        assert float((error - update_of(layer)).norm()) == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loftq_begins_with_best_update_for_what_packing_lost(kind: str) -> None:
    nf4 = QuantizationConfig(kind="nf4", double_quant=True)
    model = begun("loftq", kind, [packed(DOCUMENTS)], quantization=nf4)
    base = build_base(sections(model_config(kind, architecture=wide_numbers(kind)), lora()), CPU, 0)
    assert any("adapter.init=loftq: corrects" in each for each in model.remarks())
    require_best_update(model, base)
