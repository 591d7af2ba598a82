"""TRL's SFTTrainer on the same documents: with default settings, with packing, with our attention and Liger kernels.

Logging, saving and progress bars are off, because they take time without training; its entropy and accuracy metrics
cannot be turned off. It gets the documents of each step, so that steps are equal for all; its collator builds batches.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from app.base.tokenizer import load_tokenizer
from app.batch import PackedSequences
from app.config.schema import OptimizerConfig
from app.layers.attention import register
from scripts.bench.loops import PACKED, PADDED, Prepared, ids_of, labels_of, network_of
from scripts.bench.machine import Clock
from scripts.bench.workload import Bin

_THEIRS = "sdpa"  # the default of transformers without flash-attn
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}  # other names are the same in TRL


class Trl:
    """Variant of SFTTrainer."""

    def __init__(self, prepared: Prepared, network: Any, attention: str, layout: str, **config: Any) -> None:
        self._prepared = prepared
        self.attention = attention
        self.layout = layout
        self.network: nn.Module = network
        self._config = config

    def train(self, clock: Clock) -> None:
        """Run the loop of TRL; a callback marks the end of each step."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(folder)
            losses: list[Any] = []
            micro_step = trainer.training_step

            def timed_step(*args: Any, **options: Any) -> Any:
                losses.append(micro_step(*args, **options))
                return losses[-1]

            def mark() -> None:
                clock.mark(torch.stack(losses).sum())
                losses.clear()

            trainer.training_step = timed_step
            trainer.add_callback(_marking(clock.begin, mark))
            trainer.train()

    def _trainer(self, folder: str) -> Any:
        from datasets import Dataset, disable_progress_bars
        from transformers import PrinterCallback
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        contest, run = self._prepared.contest, self._prepared.run
        bins = [packed for step in self._prepared.steps for packed in step]
        rows, plan = _packed_rows(bins) if self.layout == PACKED else _separate_rows(bins)
        settings = {
            "output_dir": folder,
            "packing": self.layout == PACKED,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "max_length": contest.bin_tokens,
            "gradient_accumulation_steps": contest.accumulation,
            "max_steps": len(self._prepared.steps),
            "gradient_checkpointing": contest.recompute,
            "bf16": self._prepared.choices.precision == "bf16",
            "use_cpu": contest.device == "cpu",
            "max_grad_norm": run.training.clip,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": run.seed,
            **_optimizer(run.optimizer),
            **self._config,
        }
        trainer = SFTTrainer(
            model=self.network,
            args=SFTConfig(**settings),
            train_dataset=Dataset.from_list(rows),
            # the bundled one: only its padding token is used
            processing_class=load_tokenizer(run.model, needs_template=False),
        )
        trainer.remove_callback(PrinterCallback)
        _set_batches(trainer, plan)
        return trainer


def _optimizer(settings: OptimizerConfig) -> dict[str, Any]:
    return {
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_epsilon": settings.eps,
        "optim": _OPTIMIZERS.get(settings.kind, settings.kind),
    }


def _packed_rows(bins: list[Bin]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return a row per bin, as TRL packs them, and the rows of each micro-batch."""
    rows = [
        {
            "input_ids": torch.cat(ids_of(packed)).tolist(),
            "labels": torch.cat(labels_of(packed)).tolist(),
            "seq_lengths": [len(document) for document in packed],
        }
        for packed in bins
    ]
    return rows, [[i] for i in range(len(bins))]


def _separate_rows(bins: list[Bin]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return a row per document, and the rows of each micro-batch."""
    rows: list[dict[str, Any]] = []
    plan: list[list[int]] = []
    for packed in bins:
        plan.append(list(range(len(rows), len(rows) + len(packed))))
        pairs = zip(ids_of(packed), labels_of(packed), strict=True)
        rows += [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in pairs]
    return rows, plan


class _FixedBatches(BatchSampler):
    """Sampler of fixed batches instead of the random ones of the trainer."""

    def __init__(self, plan: list[list[int]]) -> None:
        super().__init__(SequentialSampler(range(sum(map(len, plan)))), max(map(len, plan)), drop_last=False)
        self._plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._plan

    def __len__(self) -> int:
        return len(self._plan)


def _set_batches(trainer: Any, plan: list[list[int]]) -> None:
    def loader() -> Any:
        rows = trainer._remove_unused_columns(trainer.train_dataset, description="Training")
        pinned = trainer.args.dataloader_pin_memory and trainer.args.device.type == "cuda"
        return trainer.accelerator.prepare(
            DataLoader(rows, batch_sampler=_FixedBatches(plan), collate_fn=trainer.data_collator, pin_memory=pinned)
        )

    trainer.get_train_dataloader = loader


def _marking(begin: Any, mark: Any) -> Any:
    from transformers import TrainerCallback

    class Marking(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def on_train_begin(self, *_state: Any, **_options: Any) -> None:
            begin()

        def on_step_end(self, *_state: Any, **_options: Any) -> None:
            mark()

    return Marking()


class _Fair(Trl):
    """SFTTrainer with packing and our attention, which needs document boundaries."""

    def _trainer(self, folder: str) -> Any:
        trainer = super()._trainer(folder)
        collate = trainer.data_collator

        def with_documents(rows: list[dict[str, Any]]) -> dict[str, Any]:
            lengths = [length for row in rows for length in row["seq_lengths"]]
            return {**collate(rows), "documents": PackedSequences.from_lengths(lengths)}

        trainer.data_collator = with_documents
        return trainer


def packed(prepared: Prepared) -> Trl:
    """Return SFTTrainer with packing; gradient checkpointing as for all contenders."""
    return Trl(prepared, network_of(prepared, _THEIRS), _THEIRS, PACKED)


def default(prepared: Prepared) -> Trl:
    """Return SFTTrainer with default settings: padded rows, and gradient checkpointing in all layers."""
    return Trl(prepared, network_of(prepared, _THEIRS), _THEIRS, PADDED, gradient_checkpointing=True)


def fair(prepared: Prepared, **config: Any) -> Trl:
    """Return SFTTrainer with packing and our attention, to exclude the effect of missing flash-attn."""
    name = register(prepared.choices.attention)
    return _Fair(prepared, network_of(prepared, name), prepared.choices.attention, PACKED, **config)


def fair_liger(prepared: Prepared) -> Trl:
    """Return SFTTrainer with our attention and Liger kernels."""
    return fair(prepared, use_liger_kernel=True)
