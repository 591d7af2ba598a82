"""Heads and their cross-entropy in chunks, compared with one document at a time, all logits at once and float64."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.base.base_model import drawing_by, load_base, read_weights
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.batch import IGNORE, Batch, LossWeights
from app.config.schema import ModelConfig, TaskConfig
from app.config.tasks import task_of
from app.data.objectives import LabeledTokens
from app.errors import ConfigError, EnvironmentProblem
from app.finished.save import save_model
from app.layers import head as chunked_loss
from app.layers.attention import NAME, register
from app.layers.head import LinearHead, head_modules, own_head, rows_of_a_chunk, token_loss_sum
from app.layers.operations import as_on_gpu, loss_and_grad_inplace
from app.model import build
from app.model.build import choose_loss_head
from app.model.checks import check_head, check_packing
from app.model.training_model import TrainingModel
from app.oom_retry import split_batch
from app.training.storage_counter import StorageCounter
from tests.choices import pairwise, taking_turns
from tests.model.classes import CLASSES, LABELS, POOLED, adapted, in_one_row, in_rows, of_classes
from tests.model.classes import rows as labeled_rows
from tests.model.small import (
    ALL_KINDS,
    KINDS,
    VOCABULARY,
    WIDTH,
    batch_of,
    built,
    distance,
    documents_of,
    gradients,
    lora,
    model_config,
    outcome,
    training_model_of,
)
from tests.model.test_training_model import METHODS

CPU = torch.device("cpu")


def one_by_one(training_model: TrainingModel, kind: str) -> tuple[float, dict[str, Tensor]]:
    lm = training_model.language_model
    lm.set_attn_implementation("eager")
    try:
        return outcome(training_model, lambda: torch.stack([alone(lm, row) for row in labeled_rows(kind)]).sum())
    finally:
        lm.set_attn_implementation(NAME)


def alone(lm: Any, row: LabeledTokens) -> Tensor:
    ids = torch.from_numpy(row.ids)
    sides = {}
    if row.second_start >= 0:
        sides["token_type_ids"] = (torch.arange(len(ids)) >= row.second_start).long()[None]
    logits = lm(input_ids=ids[None], use_cache=False, **sides).logits
    return F.cross_entropy(logits, torch.from_numpy(row.targets).long(), reduction="sum")


@pytest.mark.parametrize(("kind", "method"), taking_turns(tuple(POOLED), tuple(METHODS)))
def test_class_loss_equals_one_document_at_a_time(kind: str, method: str) -> None:
    training_model = of_classes(kind, **METHODS[method])
    expected_loss, expected = one_by_one(training_model, kind)
    assert all(float(each.norm()) > 0 for name, each in expected.items() if "modules_to_save" in name)
    for layout in (in_one_row, in_rows):
        loss, found = outcome(training_model, layout(kind))
        assert loss == pytest.approx(expected_loss, rel=1e-5), layout.__name__
        assert distance(found, expected) <= 1e-5, layout.__name__


@pytest.mark.parametrize("layout", [in_one_row, in_rows])
def test_split_parts_keep_token_type_ids(layout: Callable[[str], Batch]) -> None:
    model, whole = of_classes("bert").eval(), layout("bert")
    parts = split_batch(whole, 2)
    assert len(parts) == 3
    loss = sum(float(model(part)[0].detach()) for part in parts)
    assert loss == pytest.approx(float(model(whole)[0].detach()), rel=1e-5)
    without = replace(whole, token_type_ids=None)
    assert loss != pytest.approx(float(model(without)[0].detach()), rel=1e-4), "or it would show nothing"


@pytest.mark.parametrize(("kind", "precision"), taking_turns(tuple(POOLED), ("fp32", "bf16")))
def test_check_head_and_packing_pass_pooled_kind(kind: str, precision: str) -> None:
    training_model = adapted(kind, precision=precision)
    for layout in (in_one_row, in_rows):
        assert check_head(training_model, layout(kind)).passed, layout.__name__
    assert all(proof.passed for proof in check_packing(training_model, in_one_row(kind)))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_check_head_state_that_is_not_pooled_is_refused(kind: str) -> None:
    training_model, batch = of_classes(kind), in_one_row(kind)
    other = replace(batch, label_rows=batch.label_rows + (1 if kind == "bert" else -1))
    with pytest.raises(EnvironmentProblem, match=f"a model of kind {kind} computes its logits in a way"):
        check_head(training_model, other)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "distilbert"])
def test_pooled_head_is_trained_whole_in_fp32(kind: str) -> None:
    training_model = adapted(kind, precision="bf16")
    trained = training_model.trained()
    assert {p.dtype for p in trained.values()} == {torch.float32}
    for module in head_modules(training_model.language_model):
        assert any(f".{module}.modules_to_save.default." in name for name in trained), module
    assert not any("lora_" in name and "pooler" in name for name in trained)


def test_load_base_new_classifier_drawn_from_seed_alone(tmp_path: Path) -> None:
    masked = TaskConfig(kind="masked")
    base = load_base(model_config("bert"), task_of(masked), LoadOptions(torch.float32, CPU, register("sdpa")), 5)
    base.save_pretrained(str(tmp_path))
    config = ModelConfig(path=str(tmp_path), weights="pretrained", architecture={})

    def drawn(seed: int) -> Any:
        torch.manual_seed(torch.seed() % 1000)  # whatever was drawn before
        return load_base(config, task_of(CLASSES), LoadOptions(torch.float32, CPU, register("sdpa")), seed)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first.config.id2label == dict(enumerate(LABELS))
    assert distance(again.state_dict(), first.state_dict()) == 0
    assert not torch.equal(other.classifier.weight, first.classifier.weight)
    body, known = first.bert.encoder.state_dict(), base.bert.encoder.state_dict()
    assert distance(body, known) == 0

    first.save_pretrained(str(tmp_path))
    assert torch.equal(drawn(7).classifier.weight, first.classifier.weight), "one of the same labels goes on"
    with pytest.raises(ConfigError, match=r"it already has a classifier with the labels north, east, south, but the"):
        read_weights(config, task_of(TaskConfig(kind="classification", labels=["a", "b", "c"])), tmp_path)
    two = task_of(TaskConfig(kind="classification", labels=["a", "b"]))
    with drawing_by(0):
        assert read_weights(config, two, tmp_path).classifier.out_features == 2


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta"])
def test_saved_classifier_loads_in_ordinary_tools(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from app.finished.save import save_base

    training_model = adapted(kind)
    for name, parameter in training_model.trained().items():
        if "modules_to_save" in name:
            parameter.data += 0.3
    tokenizer = load_tokenizer(model_config(), needs_template=False)
    save_base(training_model, tokenizer, tmp_path / "base")
    save_model(training_model, tokenizer, tmp_path / "final")
    numbers = AutoConfig.from_pretrained(str(tmp_path / "final"))
    assert numbers.label2id == {name: at for at, name in enumerate(LABELS)}
    lm = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "base"), config=numbers)
    tuned = PeftModel.from_pretrained(lm, str(tmp_path / "final")).eval()
    for row in labeled_rows("llama"):
        ids = torch.from_numpy(row.ids)[None]
        with torch.no_grad():
            expected = training_model.eval().language_model(input_ids=ids, use_cache=False).logits
            assert distance(tuned(input_ids=ids, use_cache=False).logits, expected) < 1e-5


DOCUMENTS = documents_of((12, 5, 9))
BATCH = batch_of(DOCUMENTS, labels_from=3, fill=4)
MORE_THAN_LINEAR = {"gemma2", "granite", "cohere2", "bert", "roberta", "modernbert"}


def plain_loss(model: TrainingModel, batch: Batch) -> Tensor:
    """All logits of the model's own forward, and torch's cross-entropy."""
    with model.autocast(batch.ids.device):
        out = model.language_model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
    logits = out.logits.flatten(0, 1)[batch.label_rows]
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORE, reduction="sum")


def check_against_plain(model: TrainingModel, tolerance: float = 1e-6) -> None:
    expected_loss, expected = outcome(model, lambda: plain_loss(model, BATCH))
    loss, found = outcome(model, BATCH)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert sum(float(g.abs().sum()) for g in expected.values()) > 0
    assert distance(found, expected) <= tolerance


def chunked(model: TrainingModel, rows: int) -> TrainingModel:
    """The model with chunks of that many rows."""
    model.chunk = rows
    return model


def layer_of(hidden: int, vocabulary: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(hidden, vocabulary, bias=bias)


def rows_for(layer: nn.Linear, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(count, layer.in_features, generator=generator)
    targets = torch.randint(layer.out_features, (count,), generator=generator)
    targets[::5] = IGNORE
    return rows.requires_grad_(), targets, 10 ** torch.randn(count, generator=generator)


Way = Callable[[nn.Linear, Tensor, Tensor, int, Tensor | None], Tensor]
WAYS: dict[str, Way] = {
    "any head": lambda layer, rows, targets, chunk, each: token_loss_sum(
        layer, rows, targets, list(layer.parameters()), chunk, each
    ),
    "linear head": lambda layer, rows, targets, chunk, each: LinearHead(layer, chunk=chunk).loss_sum(
        rows, targets, each
    ),
}


@pytest.mark.parametrize(
    ("way", "chunk", "bias", "weighted"), pairwise(tuple(WAYS), [4, 1000], [False, True], [False, True])
)
def test_loss_sum_and_gradients_equal_float64(way: str, chunk: int, *, bias: bool, weighted: bool) -> None:
    layer = layer_of(32, VOCABULARY, bias=bias)
    rows, targets, weights = rows_for(layer, 23)
    leaves = [rows, *layer.parameters()]
    loss = WAYS[way](layer, rows, targets, chunk, weights if weighted else None)
    found = torch.autograd.grad(loss, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    losses = F.cross_entropy(F.linear(*exact), targets, ignore_index=IGNORE, reduction="none")
    wanted = (losses * weights if weighted else losses).sum()
    assert distance(loss.detach(), wanted.detach()) <= 1e-6
    assert distance(found, torch.autograd.grad(wanted, exact)) <= 1e-6


@pytest.mark.parametrize(("adapter", "fill", "linear"), pairwise((None, lora()), (0, 4), (False, True)))
def test_loss_without_labels_is_zero_and_has_gradients(adapter: Any, fill: int, *, linear: bool) -> None:
    """Under data parallelism a rank without labels must still take part in the reduction."""
    model = training_model_of("llama", adapter)
    if linear:
        choose_loss_head(model, BATCH)
    loss, count = model(batch_of(DOCUMENTS, labels_from=99, fill=fill))
    assert (float(loss.detach()), count) == (0.0, 0)
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.trained().values())


@pytest.mark.parametrize(("rows", "vocabulary"), taking_turns((1, 512, 4097, 6528), (1000, 128256)))
def test_rows_of_a_chunk_alike_and_bounded(vocabulary: int, rows: int) -> None:
    size = rows_of_a_chunk(rows, vocabulary, 2)
    chunks = -(-rows // size)
    assert size <= 4096
    assert size * vocabulary * 2 <= 512 << 20
    assert chunks * size - rows < chunks
    assert rows_of_a_chunk(0, vocabulary, 2) == 1
    assert rows_of_a_chunk(9000, 10_000_000, 4) == 500, "512 at most where even those are large"


@pytest.mark.parametrize(("precision", "tolerance", "adapter"), [("bf16", 2e-2, None), ("fp16", 3e-3, lora())])
def test_chunked_loss_half_precision_near_fp32(precision: str, tolerance: float, adapter: Any) -> None:
    in_full = training_model_of("llama", adapter)
    exact = float(in_full(BATCH)[0].detach())
    model = chunked(training_model_of("llama", adapter, precision), 7)  # several chunks share autocast's casts
    model.load_state_dict(in_full.state_dict())  # not every torch draws the same numbers in every dtype
    loss, found = outcome(model, BATCH)
    assert loss == pytest.approx(exact, rel=tolerance)
    expected_loss, expected = outcome(model, lambda: plain_loss(model, BATCH))
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert distance(found, expected) <= 3 * tolerance
    assert {p.dtype for p in model.trained().values()} == {torch.float32}


@pytest.mark.parametrize("way", WAYS)
def test_trained_head_fp16_gradient_does_not_overflow(way: str) -> None:
    """A sum over rows passes 65504 before any scale: in float16 every step would be skipped."""
    head = nn.Linear(4, VOCABULARY, bias=False)
    rows = torch.full((400, 4), 300.0, dtype=torch.float16)
    targets = torch.zeros(400, dtype=torch.long)
    with torch.no_grad():
        head.weight.zero_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = WAYS[way](head, rows, targets, 512, None)
        plain = F.cross_entropy(head(rows).float(), targets, reduction="sum")
        assert not torch.autograd.grad(plain, [head.weight])[0].isfinite().all(), "the danger is real"
    (loss * 65536 / 400).backward()
    assert head.weight.grad is not None
    expected = -300.0 * (1 - 1 / VOCABULARY) * 65536
    assert head.weight.grad[0].tolist() == pytest.approx([expected] * 4, rel=1e-3)


def test_scaled_loss_fp16_rows_do_not_overflow() -> None:
    model = training_model_of("gemma2", lora(), "fp16")  # its backbone does not overflow either
    loss, count = model(BATCH)
    (loss * 65536 / count).backward()
    scaled = gradients(model)
    assert all(g.isfinite().all() for g in scaled.values())
    _, plain = outcome(model, lambda: model(BATCH)[0] / count)
    assert distance({n: g / 65536 for n, g in scaled.items()}, plain) <= 1e-2


def test_own_head_restores_backbone() -> None:
    lm = built("llama")
    backbone = lm.model
    own_head(lm)(torch.zeros(2, WIDTH))
    assert lm.model is backbone
    assert "model" not in lm.__dict__
    with pytest.raises(RuntimeError):
        own_head(lm)(torch.zeros(2, WIDTH + 1))
    assert lm.model is backbone


@pytest.mark.parametrize("kind", ["llama", "mixtral", *sorted(MORE_THAN_LINEAR), "opt"])
def test_check_head_passes_kind(kind: str) -> None:
    model = training_model_of(kind)
    model.train()
    check_head(model, BATCH)
    assert model.training


def test_check_head_differing_logits_are_refused() -> None:
    model = training_model_of("llama")
    lm = model.language_model
    kind = type(lm)

    class Twisted(kind):  # type: ignore[misc, valid-type]
        """Logits that depend on more than the hidden states."""

        def forward(self, *args: Any, **given: Any) -> Any:
            out = super().forward(*args, **given)
            if given.get("position_ids") is not None:
                out.logits = out.logits * 1.01
            return out

    lm.__class__ = Twisted
    with pytest.raises(
        EnvironmentProblem, match=r"kind llama computes its logits in .* \(relative difference 9\.9e-03\)"
    ):
        check_head(model, BATCH)


def test_check_head_nan_weights_are_told() -> None:
    model = training_model_of("llama")
    model.language_model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(
        EnvironmentProblem, match=r"NaN in the model's logits for the first rows: its weights are damaged"
    ):
        check_head(model, BATCH)


@pytest.mark.parametrize(("chunk", "kind"), [(7, "llama"), (10_000, "gemma2")])
def test_scores_equal_all_logits(kind: str, chunk: int) -> None:
    model = chunked(training_model_of(kind), chunk).eval()
    with torch.no_grad():
        lm = model.language_model
        out = lm(input_ids=BATCH.ids, position_ids=BATCH.positions, use_cache=False)
    logits = out.logits.flatten(0, 1)[BATCH.label_rows]
    targets = BATCH.targets.clone()
    targets[::3] = logits.argmax(-1)[::3]  # random weights would hit next to nothing
    targets[BATCH.targets == IGNORE] = IGNORE
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    losses, chosen = model.scores(replace(BATCH, targets=targets))
    hits = chosen == targets
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    assert hits.tolist() == (logits.argmax(-1) == targets).tolist()
    assert hits.any()
    assert not hits[targets == IGNORE].any()
    assert not losses[targets == IGNORE].any()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_choose_loss_head_linear_where_kind_is(kind: str) -> None:
    model = training_model_of(kind, lora() if kind in KINDS else None)
    before = [p.detach().clone() for p in model.parameters()]
    proofs = choose_loss_head(model, BATCH)
    assert (model.linear is None) == (kind in MORE_THAN_LINEAR)
    assert len(proofs) == (model.linear is not None)
    assert all(proof.passed for proof in proofs)
    assert model.remarks() == []
    assert model.training
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    if kind in KINDS:
        check_against_plain(chunked(model, 7))


def test_choose_loss_head_compares_weighted_labels() -> None:
    model = training_model_of("llama")
    each = torch.linspace(0.1, 2.0, len(BATCH.targets))
    batch = replace(BATCH, weights=LossWeights(each, float(each.sum())))
    general = model(batch)[0]
    assert choose_loss_head(model, batch)[0].passed
    assert float(model(batch)[0].detach()) == pytest.approx(float(general.detach()), rel=1e-6)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_choose_loss_head_nearly_linear_head_leaves_own_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-capping leaves small logits nearly as they are, so they are tried large too."""
    model = training_model_of(kind)
    lm = model.language_model
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(1e-3)
    monkeypatch.setattr(build, "linear_head", lambda _lm: LinearHead(lm.get_output_embeddings()))
    assert choose_loss_head(model, BATCH) == []
    assert model.linear is None
    assert "using the model's own head" in model.remarks()[0]


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_choose_loss_head_wrong_kernel_leaves_own_way(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any, **options: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler.\nmore")
        return loss_and_grad_inplace(*given, **options) * 1.01

    monkeypatch.setattr(chunked_loss, "loss_and_grad_inplace", failing)
    model = training_model_of("llama", lora())
    with as_on_gpu():
        assert choose_loss_head(model, BATCH) == []
    assert model.linear is None
    (remark,) = model.remarks()
    assert remark.startswith("loss head: using the model's own head, which takes more memory: ")
    assert ("Failed to find C compiler." if fault == "raises" else "differs by 1.0e-02") in remark
    check_against_plain(model)


def test_choose_loss_head_nan_gradient_leaves_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "scaled_gradient", lambda gradient, *_: gradient * float("nan"))
    model = training_model_of("llama", lora())
    assert choose_loss_head(model, BATCH) == []
    assert "using the model's own head" in model.remarks()[0]


@pytest.mark.parametrize(("precision", "adapter"), taking_turns(("fp32", "bf16", "fp16"), (None, lora())))
def test_linear_head_equals_own_way_in_precision(precision: str, adapter: Any) -> None:
    model = training_model_of("qwen2", adapter, precision)
    own, own_chosen = model.scores(BATCH)
    assert choose_loss_head(model, BATCH)[0].passed
    losses, chosen = model.scores(BATCH)
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    torch.testing.assert_close(losses, own, rtol=tolerance, atol=1e-5)
    assert torch.equal(chosen, own_chosen)
    assert float(model(BATCH)[0].detach()) == pytest.approx(float(losses.double().sum()), rel=1e-6)


def test_linear_head_bf16_weight_gradient_rounded_once() -> None:
    exact = layer_of(32, VOCABULARY)
    layer = layer_of(32, VOCABULARY).bfloat16()
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
    rows, targets, _ = rows_for(exact, 4000)
    rounded = rows.detach().bfloat16().requires_grad_()
    loss = LinearHead(layer, chunk=40).loss_sum(rounded, targets)
    (found,) = torch.autograd.grad(loss, [layer.weight])
    wide = rounded.detach().double()
    wanted = F.cross_entropy(wide @ exact.weight.double().T, targets, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(wanted, [exact.weight])
    assert found.dtype == torch.bfloat16
    assert distance(found.double(), gradient.double()) <= 6e-3


@pytest.mark.parametrize("trained", [False, True])
def test_linear_head_takes_less_memory_than_own_way(*, trained: bool) -> None:
    layer = layer_of(64, 4096).requires_grad_(trained)
    parameters = list(layer.parameters()) if trained else []
    rows, targets, _ = rows_for(layer, 512)

    def peak(work: Callable[[], Any]) -> int:
        counter = StorageCounter()
        counter.ignore([rows, targets, layer.weight])
        with counter:
            work()
        return counter.peak

    linear = LinearHead(layer, chunk=256)
    ours = peak(lambda: torch.autograd.grad(linear.loss_sum(rows, targets), [rows, *parameters]))
    own = peak(lambda: torch.autograd.grad(token_loss_sum(layer, rows, targets, parameters, 256), [rows, *parameters]))
    logits = 4 * 256 * 4096
    results = 4 * (2 * rows.numel() + layer.weight.numel() * trained)
    assert ours <= logits + results + (64 << 10)
    assert own > 2 * logits
    assert peak(lambda: linear.scores(rows, targets)) <= logits + (64 << 10)


def test_logits_of_an_odd_vocabulary_lie_in_rows_of_whole_vectors() -> None:
    layer = layer_of(32, 101)
    rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for _, piece, logits, _ in LinearHead(layer, chunk=4).chunks(rows):
        assert (logits.shape, logits.stride()) == ((len(piece), 101), (128, 1))
        found.append(logits.clone())
    torch.testing.assert_close(torch.cat(found), layer(rows).detach())
