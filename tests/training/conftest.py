"""A small real run in memory: the shipped tokenizer and data, a Llama of two layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer
from app.config.schema import RunConfig
from app.config.tasks import TASKS, task_of
from app.data.collate import Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.prepare import Data, prepare
from app.distributed.process_group import Runtime, start
from app.layers.attention.requirements import Needs, needs_of
from app.model.build import DTYPES, ModelSections, build_training_model
from app.model.training_model import TrainingModel
from app.tasks.table import loss_of
from app.tracking.recorder import Recorder
from app.training import setup
from app.training.auto_settings import recomputed_layers
from app.training.checkpoint import Checkpoints, Progress
from app.training.gpu_usage import GpuMonitor
from app.training.plan import Plan, find_start, join, make_plan
from app.training.rows import StepPlan, read_rows
from app.training.train_step import Stepper
from app.training.trainer import Parts, Trainer
from tests.harness.composed import composed

SMALL = (
    "model.weights=random",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "dataset.max_rows=64",
    "dataset.eval_max_rows=20",
    "precision=fp32",
    "attention=sdpa",
    "launch.threads=1",
    "optimizer.lr=1e-3",
    "adapter.r=4",
)


def small_run(*overrides: str, folder: Path | None = None) -> RunConfig:
    if "recipe=qlora" in overrides:  # blocks of 64 weights must fill rows
        overrides = ("model.architecture.hidden_size=64", *overrides)
    trains_all = {"recipe=full", "adapter=none"} & {*overrides}
    names = {text.partition("=")[0] for text in overrides} | ({"adapter.r"} if trains_all else set())
    return composed(*(text for text in SMALL if text.partition("=")[0] not in names), *overrides, folder=folder)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(small_run().model, needs_template=True)


@pytest.fixture(scope="session")
def data(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return prepare(small_run().dataset, tokenizer, str(tmp_path_factory.mktemp("tokens")))


@pytest.fixture
def runtime() -> Runtime:
    return start(small_run().launch, "fp32", seed=0)


def sections_of(run: RunConfig, attention: str = "sdpa") -> ModelSections:
    return ModelSections(
        model=run.model,
        task=run.task,
        adapter=run.adapter,
        quantization=run.quantization,
        attention=attention,
        precision=run.precision.kind,
        recompute=recomputed_layers(run.training),
        trained=run.precision.trained,
    )


def needs_for(run: RunConfig) -> Needs:
    lm = BaseModel(run.model, TASKS[run.task.kind]).on_meta()
    return needs_of(lm, DTYPES[run.precision.kind].compute, packed=True)


def trainee_of(run: RunConfig) -> TrainingModel:
    return build_training_model(
        sections_of(run, run.attention.kind), loss_of(run), torch.device("cpu"), run.seed, "nowhere"
    )


def stepper_of(run: RunConfig, runtime: Runtime) -> Stepper:
    model = trainee_of(run)
    return setup.stepper_of(model, run, runtime, run.precision.kind)


@pytest.fixture
def loader_of(data: Data) -> Callable[..., Loader]:
    def build(rows: int, micro_batches: int, processes: int = 1, rank: int = 0) -> Loader:
        return Loader(data.train, Padded(rows, pad_id=0), StepSplit(micro_batches, processes, rank), seed=0)

    return build


@pytest.fixture
def packed_loader_of(data: Data) -> Callable[..., Loader]:
    def build(tokens: int, micro_batches: int, processes: int = 1, rank: int = 0) -> Loader:
        layout = Packed(tokens, pad_id=0, max_length=tokens)
        return Loader(data.train, layout, StepSplit(micro_batches, processes, rank), seed=0)

    return build


def plan_of(run: RunConfig, checkpoints: Path, planner: Any = None) -> Plan:
    """The plan of a run on this machine, as training makes it."""
    rows = read_rows(run, BaseModel(run.model, task_of(run.task)), lambda _text: None)
    start = find_start(checkpoints, run.resume)
    return make_plan(rows, join(rows, start, lambda _text: None), start, planner, lambda _text: None)


@pytest.fixture
def stepper(runtime: Runtime, loader_of: Callable[..., Loader]) -> Stepper:
    """A stepper that has made one step."""
    stepper = stepper_of(small_run("recipe=lora"), runtime)
    stepper.run(loader_of(4, 1).batches(0), 1e-2)
    return stepper


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@dataclass
class Notebook(Recorder):
    """Keeps in memory what a recorder would write."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    left: list[float | None] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    synced: int = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, values: Any, seconds_left: float | None = None) -> None:
        self.steps.append(dict(values))
        self.left.append(seconds_left)

    def sync(self) -> None:
        self.synced += 1

    def evaluation(self, values: Any) -> None:
        self.evaluations.append(dict(values))


MakeLoop = Callable[..., tuple[Trainer, Notebook]]


@pytest.fixture
def make_loop(runtime: Runtime, loader_of: Callable[..., Loader], data: Data, folder: Path) -> MakeLoop:
    def make(run: RunConfig, steps: int, lr: float = 1e-3) -> tuple[Trainer, Notebook]:
        loader, notebook = loader_of(8, 1), Notebook()
        rows = data.eval
        assert rows is not None
        parts = Parts(
            config=run,
            runtime=runtime,
            gpu=GpuMonitor(),
            plan=StepPlan(steps=steps, steps_per_epoch=loader.steps_per_epoch),
            loader=loader,
            eval_batches=lambda: eval_batches(rows, Padded(16, pad_id=0)),
            stepper=stepper_of(run, runtime),
            learning_rate=lambda _step: lr,
            checkpoints=Checkpoints(folder, run.checkpoint, {}, {}),
            recorder=notebook,
            show_samples=notebook.sampled.append,
        )
        return Trainer(parts, Progress()), notebook

    return make
