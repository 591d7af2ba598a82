"""Merged weights against the trained model, and combined adapters against the sum of their updates."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.adapters.merged_weights import Combination, Member, combine, read_updates
from app.base.base_model import model_class
from app.base.source import base_path
from app.base.tokenizer import load_tokenizer
from app.config.schema import AdapterConfig, ModelConfig, QuantizationConfig, TaskConfig
from app.errors import CheckpointError, ConfigError
from app.finished.save import Merge, merged_config, plan_merge, save_base, save_model
from app.model.build import ModelSections, random_base
from app.model.training_model import TrainingModel
from tests.model.classes import CLASSES
from tests.model.small import (
    build_model,
    distance,
    documents_of,
    full,
    lora,
    model_config,
    numbers,
    sections,
    task_of,
    wide_numbers,
)
from tests.model.test_conversion import mxfp4_folder

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]
NF4 = QuantizationConfig(kind="nf4", double_quant=True)
GIB = 2.0**30
NOISE = 2e-6  # of logits in fp32: W x + B (A x) is summed up in another order than (W + B A) x


class Tuned:
    """A training_model whose adapter, or weights, are far from where they began, and its folders."""

    def __init__(
        self,
        place: Path,
        kind: str,
        adapter: AdapterConfig,
        precision: str,
        *,
        nf4: bool = False,
        task: TaskConfig | None = None,
    ) -> None:
        self.final, self.base = place / "final", place / "base"
        architecture = (wide_numbers if nf4 else numbers)(kind)
        config = model_config(kind, architecture=architecture)
        parts = sections(config, adapter, precision, quantization=NF4 if nf4 else None, task=task)
        self.training_model = build_model(parts, CPU, 0, base_path(config, self.base)).eval()
        generator = torch.Generator().manual_seed(3)
        for parameter in self.training_model.trained().values():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        tokenizer = load_tokenizer(model_config(), needs_template=True)
        if adapter.kind != "none":
            save_base(self.training_model, tokenizer, self.base, random_base(parts, CPU, 0))
        save_model(self.training_model, tokenizer, self.final)
        self.kind = kind
        self.weights = self.base if adapter.kind != "none" else self.final
        model = ModelConfig(path=str(self.weights), weights="pretrained", architecture={})
        self.parts = sections(model, adapter, precision, quantization=parts.quantization, task=parts.task)

    def plan(self, dtype: str = "fp32", parts: ModelSections | None = None) -> Merge:
        if self.weights == self.final:
            return plan_merge(parts or self.parts, {}, dtype, CPU)
        return plan_merge(parts or self.parts, read_updates(self.final), dtype, CPU, self.final)

    def merged(self, place: Path, dtype: str = "fp32", shard_bytes: float = GIB) -> Any:
        """The model that transformers loads from what was written."""
        place.mkdir()
        (place / "config.json").write_text(json.dumps(merged_config(self.weights, dtype)))
        self.plan(dtype).write(place, shard_bytes)
        lm, found = model_class(task_of(self.kind)).from_pretrained(
            str(place), output_loading_info=True, attn_implementation="eager"
        )
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        return lm.eval()


def tuned(
    place: Path,
    kind: str = "llama",
    adapter: AdapterConfig | None = None,
    precision: str = "fp32",
    *,
    nf4: bool = False,
) -> Tuned:
    return Tuned(place, kind, adapter or lora(), precision, nf4=nf4)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A run on a base in NF4, for tests that change no file of it."""
    return tuned(tmp_path_factory.mktemp("packed"), nf4=True)


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    found: torch.Tensor = lm(input_ids=IDS).logits
    return found.float()


def weights_of(run: Tuned) -> dict[str, torch.Tensor]:
    """Of each adapted layer, as bitsandbytes and PEFT hold them."""
    from bitsandbytes.functional import dequantize_4bit
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, layer in run.training_model.language_model.named_modules():
        if isinstance(layer, LoraLayer):
            weight: Any = layer.base_layer.weight
            state = getattr(weight, "quant_state", None)
            if state is not None:
                state.dtype = torch.float32
            plain = weight.float() if state is None else dequantize_4bit(weight.data, state)
            delta: Any = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            if run.kind == "gpt2":  # Conv1D has its weight transposed; packed it is an ordinary linear layer
                plain, delta = plain if state is None else plain.T, delta.T
            found[f"{name}.weight"] = (plain + layer.scaling["default"] * delta).detach()
    assert found
    return found


def in_fp32(training_model: TrainingModel) -> torch.Tensor:
    from app.exports.reload import in_fp32 as convert

    convert(training_model)
    return logits(training_model.language_model)


CASES = [
    ("llama", "bf16", False), ("gemma2", "fp32", False), ("phi3", "fp32", False), ("mixtral", "fp32", False),
    ("gpt_oss", "fp32", False), ("bert", "fp32", False), ("llama", "fp32", True), ("gpt2", "bf16", True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "precision", "nf4"), CASES)
def test_merged_is_the_base_that_was_trained_against_and_the_adapter(
    tmp_path: Path, kind: str, precision: str, nf4: bool
) -> None:
    run = tuned(tmp_path, kind, precision=precision, nf4=nf4)
    ours = in_fp32(run.training_model)
    lm = run.merged(tmp_path / "merged")
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert not hasattr(lm.config, "quantization_config")
    assert distance(logits(lm), ours) <= NOISE
    expected = weights_of(run)
    assert distance({name: lm.get_parameter(name).detach() for name in expected}, expected) <= 1e-7
    with torch.no_grad():
        base = (
            model_class(task_of(kind))
            .from_pretrained(str(run.base), dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
    assert distance(logits(base), ours) > 1e-2


def test_longest_name_of_a_pattern_counts_in_training_and_in_the_files(tmp_path: Path) -> None:
    pattern = {"down_proj": 8.0, "layers.1.mlp.down_proj": 64.0}
    run = tuned(tmp_path, adapter=lora(rank_pattern={"down_proj": 2}, alpha_pattern=pattern))
    lm = run.training_model.language_model
    scales = [lm.get_submodule(f"model.layers.{at}.mlp.down_proj").scaling["default"] for at in (0, 1)]
    assert scales == [4.0, 32.0]
    assert distance(logits(run.merged(tmp_path / "merged")), in_fp32(run.training_model)) <= NOISE


@pytest.mark.parametrize(("kind", "nf4"), [("mixtral", False), ("qwen3_moe", True), ("gpt_oss", True)])
def test_stacks_of_experts_are_merged_in_the_tensors_of_the_files(tmp_path: Path, kind: str, nf4: bool) -> None:
    run = tuned(tmp_path, kind, lora(experts=True, rslora=kind == "mixtral"), nf4=nf4)
    ours = in_fp32(run.training_model)
    assert distance(logits(run.merged(tmp_path / "merged")), ours) <= NOISE
    stored = load_file(run.base / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: each.shape for name, each in merged.items()} == {name: each.shape for name, each in stored.items()}
    changed = {name for name, each in merged.items() if not each.equal(stored[name])}
    assert {name for name in stored if "experts" in name and not name.endswith("bias")} <= changed


def test_experts_stored_in_mxfp4_are_merged_unpacked(tmp_path: Path) -> None:
    folder, final, merged = mxfp4_folder(tmp_path / "base"), tmp_path / "final", tmp_path / "merged"
    model = ModelConfig(path=str(folder), weights="pretrained", architecture={})
    parts = sections(model, lora(experts=True), "fp32")
    run = build_model(parts, CPU, 0, str(folder)).eval()
    for parameter in run.trained().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    save_model(run, load_tokenizer(model_config(), needs_template=True), final)
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps(merged_config(folder, "fp32")))
    plan_merge(parts, read_updates(final), "fp32", CPU).write(merged, GIB)
    lm = model_class(task_of("gpt_oss")).from_pretrained(str(merged), attn_implementation="eager").eval()
    assert distance(logits(lm), in_fp32(run)) <= NOISE


def test_merging_onto_the_base_before_it_was_packed_is_seen(packed: Tuned, tmp_path: Path) -> None:
    ours = in_fp32(packed.training_model)
    parts = sections(packed.parts.model, packed.parts.adapter, "fp32")
    careless = tmp_path / "careless"
    careless.mkdir()
    (careless / "config.json").write_text(json.dumps(merged_config(packed.base, "fp32")))
    packed.plan(parts=parts).write(careless, GIB)
    lm = model_class(task_of("llama")).from_pretrained(str(careless)).eval()
    assert distance(logits(lm), ours) > 3e-2
    assert distance(logits(packed.merged(tmp_path / "merged")), ours) <= NOISE


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_weights_are_rounded_once(packed: Tuned, tmp_path: Path, dtype: str, bound: float) -> None:
    exact, rounded = packed.plan("fp32"), packed.plan(dtype)
    for name in exact.tensors:
        whole, short = exact.weight(name)[0], rounded.weight(name)[0]
        assert short.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert short.equal(whole.to(short.dtype)), name
    place = tmp_path / "merged"
    place.mkdir()
    assert rounded.write(place, GIB) == 16  # 14 layers, embedding and head
    stored = load_file(place / "model.safetensors")
    assert sum(t.numel() * t.element_size() for t in stored.values()) == rounded.bytes
    again = packed.merged(tmp_path / "again", dtype)
    assert 0 < distance(logits(again.float()), in_fp32(packed.training_model)) <= bound * 16**0.5


def test_merge_adapter_head_of_bf16_base_stays_fp32(tmp_path: Path) -> None:
    run = Tuned(tmp_path, "llama", lora(), "bf16", task=CLASSES)
    (head,) = (each for name, each in run.training_model.trained().items() if "score" in name)
    assert not head.equal(head.bfloat16().float())
    assert run.plan("fp32").weight("score.weight")[0].equal(head)


def test_only_what_changes_counts_as_rounded(tmp_path: Path) -> None:
    run = tuned(tmp_path, precision="bf16", adapter=lora(targets=["q_proj"]))
    place = tmp_path / "merged"
    place.mkdir()
    assert run.plan("bf16").write(place, GIB) == 2
    base = load_file(run.base / "model.safetensors")
    same = {name for name, tensor in load_file(place / "model.safetensors").items() if tensor.equal(base[name])}
    assert base.keys() - same == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_a_whole_model_is_converted(tmp_path: Path) -> None:
    run = tuned(tmp_path, adapter=full())
    assert run.plan().updates == {}
    assert distance(logits(run.merged(tmp_path / "merged")), in_fp32(run.training_model)) <= NOISE
    assert run.merged(tmp_path / "half", "bf16").dtype == torch.bfloat16


def test_no_file_is_larger_than_asked_and_all_are_found(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    lm = run.merged(tmp_path / "merged", shard_bytes=20_000)
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == run.plan().bytes
    for file in files:
        with safe_open(file, "pt") as content:
            names = list(content.keys())
            size = sum(content.get_tensor(name).nbytes for name in names)
        assert size <= 20_000 or len(names) == 1
        assert {index["weight_map"][name] for name in names} == {file.name}
    assert distance(logits(lm), in_fp32(run.training_model)) <= NOISE


def test_names_without_the_prefix_of_the_backbone_are_known(tmp_path: Path) -> None:
    """As the checkpoints of GPT-2 on the hub have them."""
    run = tuned(tmp_path, "gpt2")
    file = run.base / "model.safetensors"
    save_file({name.removeprefix("transformer."): t for name, t in load_file(file).items()}, file, {"format": "pt"})
    plan, name = run.plan(), "transformer.h.0.attn.c_attn.weight"
    assert name in plan.updates
    assert plan.names.files[name] == "h.0.attn.c_attn.weight"
    assert distance(logits(run.merged(tmp_path / "merged")), in_fp32(run.training_model)) <= NOISE


def test_an_adapter_without_its_weight_is_refused(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    file = run.base / "model.safetensors"
    tensors = {name.replace("q_proj", "query"): t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"for 2 layers of the model \(model.layers.0.self_attn.q_proj"):
        run.plan()


def test_other_tensors_in_an_adapter_are_not_left_out_unseen(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    file = run.final / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"merging the tensor base_model\.model\.lm_head\.weight"):
        run.plan()


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    file = run.base / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "merged").mkdir()
    with pytest.raises(CheckpointError, match=r"model.norm.weight has a value that does not fit into torch.float16"):
        run.plan("fp16").write(tmp_path / "merged", GIB)


def test_weights_that_are_quantized_already_are_refused(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    file = run.base / "config.json"
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
    with pytest.raises(ConfigError, match="already quantized"):
        run.plan()


def test_the_configuration_names_the_new_dtype_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"torch_dtype": "float16", "a": 1, "_name_or_path": "x", "text_config": {"dtype": "float16"}})
    )
    assert merged_config(tmp_path, "bf16") == {"dtype": "bfloat16", "a": 1, "text_config": {"dtype": "bfloat16"}}


FACTORS = (0.7, -0.3, 1.2)
RANKS, ALPHAS = (2, 3, 2), (4, 3, 1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6, bias=False), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def adapters_in(place: Path) -> list[Member]:
    """The second adapter has one layer, the others two."""
    for i, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True)):
        targets = ["first"] if i == 1 else ["first", "second"]
        small: Any = Small()
        model: Any = get_peft_model(small, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
        torch.manual_seed(i + 1)
        for name, each in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(each)
        model.save_pretrained(str(place / str(i)))
    return [Member(str(i), place / str(i), factor) for i, factor in enumerate(FACTORS)]


def updates_of(folder: Path) -> dict[str, Tensor]:
    small: Any = Small()
    model: Any = PeftModel.from_pretrained(small, str(folder))
    layers = {name: getattr(model.base_model.model, name) for name in ("first", "second")}
    return {name: each.get_delta_weight("default").double() for name, each in layers.items() if hasattr(each, "lora_A")}


def weighted_sum(members: list[Member]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for member in members:
        for name, update in updates_of(member.folder).items():
            found[name] = found.get(name, torch.zeros_like(update)) + member.factor * update
    return found


def combined_in(place: Path, members: list[Member], how: str, *numbers: Any) -> tuple[int, float]:
    place.mkdir()
    (place / "adapter_config.json").write_bytes((members[0].folder / "adapter_config.json").read_bytes())
    return combine(members, Combination(how, *numbers), place)


def test_cat_is_the_weighted_sum_of_updates(tmp_path: Path) -> None:
    """Ranks and layers differ, a factor is negative."""
    members = adapters_in(tmp_path)
    rank, apart = combined_in(tmp_path / "sum", members, "cat")
    assert rank == sum(RANKS)
    assert apart < 1e-6
    found, expected = updates_of(tmp_path / "sum"), weighted_sum(members)
    assert found.keys() == expected.keys()
    for name, update in found.items():
        torch.testing.assert_close(update, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


def test_svd_is_the_nearest_sum_of_a_rank(tmp_path: Path) -> None:
    members = adapters_in(tmp_path)
    rank, apart = combined_in(tmp_path / "sum", members, "svd", 3)
    expected, found = weighted_sum(members), updates_of(tmp_path / "sum")
    assert rank == 3
    missed = {name: float(torch.linalg.svdvals(each)[3:].square().sum()) for name, each in expected.items()}
    for name, update in found.items():
        assert float((update - expected[name]).square().sum()) == pytest.approx(missed[name], rel=1e-4, abs=1e-9)
    whole = sum(float(each.square().sum()) for each in expected.values())
    assert apart == pytest.approx((sum(missed.values()) / whole) ** 0.5, rel=1e-4)
    with pytest.raises(ConfigError, match="rank=9: the adapters have a total rank of"):
        combined_in(tmp_path / "more", members, "svd", 9)


@pytest.mark.parametrize(
    ("how", "rank", "density"),
    [
        ("cat", None, None),
        ("svd", 2, None),
        ("linear", None, None),
        *((how, None, 0.5) for how in ("ties", "dare_ties", "dare_linear", "magnitude_prune")),
        *((f"{how}_svd", 2, 0.5) for how in ("ties", "dare_ties", "dare_linear", "magnitude_prune")),
        ("ties", None, 1.0),
    ],
)
def test_combinations_are_those_of_peft(how: str, rank: int | None, density: float | None, tmp_path: Path) -> None:
    """Also the values that DARE draws, from the same seed."""
    members = [each for each in adapters_in(tmp_path) if each.path != "1"]
    _, apart = combined_in(tmp_path / "sum", members, how, rank, density, 5)
    small: Any = Small()
    theirs: Any = PeftModel.from_pretrained(small, str(members[0].folder), adapter_name="0")
    theirs.load_adapter(str(members[1].folder), adapter_name="2")
    named = {"adapters": ["0", "2"], "weights": [each.factor for each in members], "adapter_name": "sum"}
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The density")
        theirs.add_weighted_adapter(**named, combination_type=how, svd_rank=rank, density=density)
    for name, update in updates_of(tmp_path / "sum").items():
        expected = getattr(theirs.base_model.model, name).get_delta_weight("sum").double()
        torch.testing.assert_close(update, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert (apart > 0.1) == (how != "cat")


def test_adapter_of_more_than_two_halves_is_refused(tmp_path: Path) -> None:
    members = adapters_in(tmp_path)
    small: Any = Small()
    model: Any = get_peft_model(small, LoraConfig(r=2, target_modules=["first"], modules_to_save=["second"]))
    model.save_pretrained(str(tmp_path / "1"))
    with pytest.raises(ConfigError, match="adapters: 1 has more than A and B of LoRA"):
        combined_in(tmp_path / "sum", members, "cat")


@pytest.mark.parametrize("how", ["linear", "ties"])
def test_sum_of_other_ranks_is_refused(how: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"combine={how}: the adapters have different ranks"):
        combined_in(tmp_path / "sum", adapters_in(tmp_path), how, None, 0.5)
