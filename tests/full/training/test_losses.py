"""Losses over documents by DDP, FSDP and TRL's trainers, and rehearsals of every optimizer."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from app.base.tokenizer import load_tokenizer
from app.data.collate import Packed
from app.data.loader import eval_batches
from app.data.prepare import prepare
from app.data.token_dataset import MismatchedRows, TokenRows
from app.distributed.gradient_reduction import AllReduce
from app.distributed.process_group import Runtime, start
from app.model.training_model import TrainingModel
from app.tasks.preference import Compared, compared_rows
from app.tasks.table import build_objective
from app.training.initial_model import comparing
from app.training.scores import score_documents
from app.training.train_step import Stepper
from tests.data.small import write_jsonl
from tests.full.distributed.test_fsdp import shard, whole_gradients
from tests.harness.marks import requires_trl
from tests.harness.processes import ProcessesByCount
from tests.model.small import distance, gradients, lora, outcome
from tests.optim.small import KINDS
from tests.training.conftest import MakeLoop, small_run, trainee_of
from tests.training.test_losses import batch_of, formula, kto_batch, kto_formula, kto_model, model_of, step
from tests.training.test_train_step import LITTLE, check_rehearsal

ROWS = (((0,), ()), ((1,), (2,)))  # of the micro-batches of each process
KTO_ROWS = (((3,), ()), ((0, 2), (1,)))


def reduction_of(runtime: Runtime, parallel: str, model: TrainingModel) -> Any:
    if parallel == "fsdp":
        return shard(runtime, model)[1]
    return AllReduce(list(model.trained().values()))


def distances_to_formula(
    runtime: Runtime, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> tuple[float, float]:
    """Of the loss and of the gradient."""
    plain = model_of(adapter)
    loss, expected = outcome(plain, lambda: formula(plain).mean())
    model = model_of(adapter, linear=linear, recompute=recompute)
    reduction = reduction_of(runtime, parallel, model)
    found, _ = step(model, [batch_of(layout, rows) for rows in ROWS[runtime.rank]], runtime, reduction)
    return abs(found / loss - 1), distance(whole_gradients(model), expected)


@pytest.mark.parametrize(
    ("parallel", "layout", "adapter", "linear", "recompute"),
    [  # each two values of any two meet
        ("ddp", "packed", None, True, False),
        ("ddp", "padded", lora(), False, False),
        ("ddp", "packed", lora(), True, True),
        ("fsdp", "padded", lora(), True, False),
        ("fsdp", "packed", None, False, False),
        ("fsdp", "padded", None, True, True),
    ],
)
def test_loss_over_documents_of_two_processes_equals_its_formula(
    processes: ProcessesByCount, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> None:
    for loss, gradient in processes(2).run(distances_to_formula, parallel, layout, adapter, linear, recompute):
        assert loss <= 1e-6
        assert gradient <= 2e-6


def distances_of_kto(runtime: Runtime, parallel: str, layout: str, adapter: Any) -> tuple[float, float]:
    """The same, of a loss whose mean is over other documents of all processes."""
    plain, model = kto_model(adapter), kto_model(adapter)
    loss, expected = outcome(plain, lambda: kto_formula(plain))
    reduction = reduction_of(runtime, parallel, model)
    optimizer = torch.optim.SGD(reduction.stepped, lr=0.0)
    stepper = Stepper(model, optimizer, runtime, clip=0.0, fp16=False, reduction=reduction)
    result = stepper.run([kto_batch(layout, rows) for rows in KTO_ROWS[runtime.rank]], 0.0)
    found = result.mean(runtime.host_group.totals([float(result.loss_sum)])[0])
    return abs(found / loss - 1), distance(whole_gradients(model), expected)


@pytest.mark.parametrize(("parallel", "layout", "adapter"), [("ddp", "packed", lora()), ("fsdp", "padded", None)])
def test_kto_of_two_processes_equals_its_formula(
    processes: ProcessesByCount, parallel: str, layout: str, adapter: Any
) -> None:
    for loss, gradient in processes(2).run(distances_of_kto, parallel, layout, adapter):
        assert loss <= 1e-6
        assert gradient <= 2e-6


Row = dict[str, Any]
TRIPLES = (
    ("Who is the king of the seven bells?", "Nobody is, as far as anyone knows.", "One bell, two bells."),
    ("What is 2 + 2?", "4", "5 or 6"),
    ("Give the plural of bell.", "bells", "One bell."),
)
CHATS: list[Row] = [
    {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": wanted}],
        "rejected": [{"role": "assistant", "content": unwanted}],
    }
    for prompt, wanted, unwanted in TRIPLES
]
LABELED: list[Row] = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row, side in zip(CHATS, ("chosen", "rejected", "chosen"), strict=True)
]
# TRL's SFT term of ORPO is the mean over the tokens of prompts and wanted answers. It is the mean over pairs of the
# mean over the wanted answer where prompts have one token, which none predicts, and the answers are equally long.
TEXTS: list[Row] = [
    {"prompt": "A", "chosen": " ten", "rejected": " blue cat"},
    {"prompt": "The", "chosen": " king", "rejected": " red"},
]
PREFERENCE_ROWS = {"preference": CHATS, "preference_label": LABELED, "preference_text": TEXTS}


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer of TRL, and its words for a loss."""

    module: str
    name: str
    words: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A loss by our words and by TRL's."""

    ours: tuple[str, ...]
    peer: Trainer
    dataset: str = "preference"


def dpo(kind: str, **words: Any) -> Trainer:
    return Trainer("trl", "DPO", {"loss_type": [kind], "beta": 0.3, **words})


CASES = {
    "dpo": Case(("recipe=dpo", "preference.beta=0.3"), dpo("sigmoid")),
    "robust": Case(
        ("recipe=dpo", "preference=robust", "preference.beta=0.3", "preference.label_smoothing=0.2"),
        dpo("robust", label_smoothing=0.2),
    ),
    "ipo": Case(("recipe=dpo", "preference=ipo", "preference.beta=0.3"), dpo("ipo")),
    "kto": Case(
        ("recipe=kto", "preference.beta=0.3", "preference.desirable=0.8", "preference.undesirable=1.5"),
        Trainer("trl", "KTO", {"beta": 0.3, "desirable_weight": 0.8, "undesirable_weight": 1.5}),
        "preference_label",
    ),
    "simpo": Case(
        ("recipe=simpo", "preference.gamma=0.7"),
        Trainer(
            "trl.experimental.cpo", "CPO", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}
        ),
    ),
    "orpo": Case(
        ("recipe=orpo", "preference.beta=0.4"),
        Trainer("trl.experimental.orpo", "ORPO", {"beta": 0.4}),
        "preference_text",
    ),
}


def by_trl(peer: Trainer, rows: list[Row], models: list[Any], tokenizer: Any, folder: Path) -> tuple[float, Any]:
    """The loss of all rows in one batch, and its gradient."""
    module = importlib.import_module(peer.module)
    arguments = getattr(module, f"{peer.name}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **peer.words,
    )
    model, *reference = models
    trainer = getattr(module, f"{peer.name}Trainer")(
        model, *reference, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters()}


def ours(
    rows: TokenRows, objective: Any, model: TrainingModel, reference: TrainingModel, runtime: Runtime
) -> tuple[float, Any]:
    """The same, by one step that changes no weight."""
    if isinstance(objective, Compared) and reference is not model:
        known: dict[int, tuple[float, ...]] = {}
        for part in compared_rows(objective, rows):
            parts = eval_batches(part, Packed(128, 0, 64, objective))
            sums = score_documents(reference, parts, runtime, len(part), objective.documents_per_row)
            known |= dict(zip(part.content_hashes.tolist(), map(tuple, sums.tolist()), strict=True))
        objective = comparing(objective, known, rows)
    batches = [*eval_batches(rows, Packed(128, 0, 64, objective))]
    stepper = Stepper(model, torch.optim.SGD([*model.trained().values()], lr=0.0), runtime, clip=0.0, fp16=False)
    result = stepper.run(batches, 0.0)
    return result.mean(float(result.loss_sum)), gradients(model)


def plain(model: TrainingModel) -> Any:
    """The same weights in a model of transformers that nothing of ours has touched."""
    lm = model.language_model
    config = LlamaConfig.from_dict(lm.config.to_dict())
    copy = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    copy.load_state_dict(lm.state_dict())
    return copy


@requires_trl
@pytest.mark.filterwarnings("ignore")  # those of TRL
@pytest.mark.parametrize("kind", CASES)
def test_loss_and_gradient_equal_those_of_trl(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    chosen = PREFERENCE_ROWS[case.dataset]
    words = (f"dataset={case.dataset}", f"dataset.path={write_jsonl(tmp_path / 'rows.jsonl', chosen)}")
    run = small_run(*case.ours, *words, "dataset.eval_fraction=0", "dataset.max_length=64", "adapter=none")
    tokenizer = load_tokenizer(run.model, needs_template=True)
    runtime = start(run.launch, "fp32", seed=0)
    rows = prepare(run.dataset, tokenizer, str(tmp_path)).train
    model = trainee_of(run)
    torch.manual_seed(1)
    reference = trainee_of(run) if run.preference.has_reference else model
    with torch.no_grad():
        for weight in model.trained().values():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    order = [*range(len(rows))]
    if kind == "kto":  # TRL takes the answer of the row before for its KL term, we that of the next by content
        order = np.argsort(rows.content_hashes)[::-1].tolist()
        assert max(len(MismatchedRows(rows).ids(i)) for i in order) < max(rows.lengths), "one would be cut"
    objective = build_objective(run.task, tokenizer, 0, bidirectional=False)
    models = [plain(each) for each in ((model, reference) if run.preference.has_reference else (model,))]
    loss, gradient = by_trl(case.peer, [chosen[i] for i in order], models, tokenizer, tmp_path)
    found, own = ours(rows, objective, model, reference, runtime)
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(own, gradient) <= 1e-5


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_rehearsal_changes_no_number_and_no_checkpoint(at: int, make_loop: MakeLoop, folder: Path) -> None:
    check_rehearsal(make_loop, folder, f"optimizer={KINDS[at]}", "recipe=full", *(LITTLE if at % 2 else ()))
