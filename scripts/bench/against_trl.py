"""Training speed on a CPU: our step against TRL's SFTTrainer, packed and padded, on the same rows and weights.

python -m scripts.bench.against_trl --mix chat --tokens 2048     (needs the extra `bench`)
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from app.batch import IGNORE
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.data.layout import Packed
from app.data.loader import Loader, Share
from app.data.prepare import prepare
from app.data.rows import TokenRows
from app.engine.runtime import Runtime, start
from app.engine.step import Stepper
from app.model.adapter import attach
from app.model.build import ModelSections, build_trainee
from app.model.dtypes import DTYPES
from app.model.tasks import TASKS
from app.model.tokenizer import load_tokenizer
from app.model.weights import load_base
from app.optim.optimizers import build_optimizer
from scripts.bench.length_mixes import MIXES, mix

_WARM_UP = 2  # steps before the clock starts
_AGREE = 1e-3  # of first losses that must be equal


@dataclass(frozen=True, slots=True)
class Contest:
    """What all contenders share."""

    run: RunConfig
    runtime: Runtime
    tokenizer: Any
    rows: TokenRows
    tokens: int  # of one step
    steps: int  # measured
    turn: int = 0  # of each turn TRL draws other rows

    @property
    def sections(self) -> ModelSections:
        """The model as we would build it on a CPU."""
        run = self.run
        return ModelSections(
            run.model, run.task, run.adapter, run.quantization, "sdpa", "fp32", recompute=False
        )

    @property
    def rows_per_step(self) -> int:
        """Padded rows whose tokens are as many as a bin's, on the average."""
        return max(1, round(self.tokens / float(self.rows.lengths.mean())))


def our_loader(contest: Contest) -> Loader:
    """Bins of `tokens`, one for each step."""
    longest = int(contest.rows.lengths.max())
    return Loader(
        contest.rows,
        Packed(contest.tokens, contest.tokenizer.pad_token_id, longest),
        Share(1),
        contest.run.seed,
    )


def ours(contest: Contest) -> list[float]:
    """Tokens per second of each step, without padding; reading of the rows included."""
    run, loader = contest.run, our_loader(contest)
    trainee = build_trainee(contest.sections, contest.runtime.device, run.seed, "base")
    stepper = Stepper(
        trainee, build_optimizer(run.optimizer, trainee), contest.runtime, run.training.clip, fp16=False
    )
    marks = [(time.perf_counter(), 0)]
    for step in range(_WARM_UP + contest.steps):
        result = stepper.run(loader.batches(step), run.optimizer.lr)
        marks.append((time.perf_counter(), marks[-1][1] + result.tokens))
    return _rates(marks)


def _rates(marks: list[tuple[float, int]]) -> list[float]:
    """From the time and the tokens so far, at the start and after each step."""
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks[_WARM_UP:])]


def trl_packed(contest: Contest) -> list[float]:
    """The same of TRL's bins (`packing=True`, best fit decreasing)."""
    return _trained(contest, packing=True)


def trl_padded(contest: Contest) -> list[float]:
    """The same of TRL's default: rows in random order, padded to the longest of their batch."""
    return _trained(contest, packing=False)


CONTENDERS: dict[str, Callable[[Contest], list[float]]] = {
    "ours": ours,
    "TRL packed": trl_packed,
    "TRL padded": trl_padded,
}


def _trained(contest: Contest, *, packing: bool) -> list[float]:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            self.marks = [(time.perf_counter(), 0)]

        def on_step_end(self, *_state: Any, **_options: Any) -> None:
            self.marks.append((time.perf_counter(), int(trainer._total_train_tokens)))

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        chosen = np.arange(len(contest.rows))
        trainer = trl_trainer(contest, chosen, folder, packing=packing)
        trainer.add_callback(clock)
        trainer.train()
    return _rates(clock.marks)


def trl_trainer(contest: Contest, chosen: Sequence[int] | Any, folder: str, *, packing: bool) -> Any:
    """Our weights and rows in TRL's trainer; what costs time and is not training is off."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    run, rows = contest.run, contest.rows
    content = [
        {
            "input_ids": rows.ids(int(i)).tolist(),
            "labels": np.where(rows.trained(int(i)), rows.ids(int(i)), IGNORE).tolist(),
        }
        for i in chosen
    ]
    settings = SFTConfig(
        output_dir=folder,
        packing=packing,
        max_length=contest.tokens,
        per_device_train_batch_size=1 if packing else contest.rows_per_step,
        max_steps=_WARM_UP + contest.steps,
        learning_rate=run.optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=run.optimizer.weight_decay,
        max_grad_norm=run.training.clip,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=run.seed + contest.turn,
    )
    trainer = SFTTrainer(
        model=_network(contest),
        args=settings,
        train_dataset=Dataset.from_list(content),
        processing_class=contest.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _network(contest: Contest) -> Any:
    """The model of `build_trainee`, with the attention and the loss of transformers and TRL."""
    run = contest.run
    lm = load_base(
        run.model, TASKS[run.task.kind], DTYPES["fp32"].base, contest.runtime.device, "sdpa", run.seed
    )
    torch.manual_seed(run.seed)
    return attach(run.adapter, TASKS[run.task.kind], lm, "base")


def first_losses(contest: Contest) -> dict[str, float]:
    """Of the same documents: our first bin, TRL's bin of just these, and the same as padded rows."""
    loader = our_loader(contest)
    batch = loader.batches(0)[0]
    trainee = build_trainee(contest.sections, contest.runtime.device, contest.run.seed, "base")
    loss, labels = trainee(batch)
    chosen = loader._chosen(0)[1][0]
    with tempfile.TemporaryDirectory() as folder:
        return {"ours": float(loss.detach()) / labels} | {
            f"TRL {'packed' if packing else 'padded'}": _loss(
                trl_trainer(contest, chosen, folder, packing=packing)
            )
            for packing in (True, False)
        }


def _loss(trainer: Any) -> float:
    rows = list(trainer.train_dataset)
    assert "seq_lengths" not in rows[0] or len(rows) == 1, "the documents of one bin of ours fit one of TRL's"
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, trainer.data_collator(rows)))


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """The speeds of all steps; the contenders take turns, so that a busy machine is busy for all of them."""
    speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name, contender in CONTENDERS.items():
            speeds[name] += contender(replace(contest, turn=turn))
    return speeds


def lines(name: str, contest: Contest, speeds: dict[str, list[float]]) -> list[str]:
    """Rows of a Markdown table, of medians."""
    found = []
    print(name, {who: [round(v) for v in values] for who, values in speeds.items()}, file=sys.stderr)
    for contender, values in speeds.items():
        ratio = median(speeds["ours"]) / median(values)
        found.append(f"| {name} | {contest.tokens:,} | {contender} | {median(values):,.0f} | {ratio:.2f} |")
    return found


def model_numbers(hidden: int) -> list[str]:
    """A Llama of four layers with heads of 64 numbers, as overrides."""
    numbers = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 4096,
    }
    return [f"model.architecture.{name}={value}" for name, value in numbers.items()]


def main() -> None:
    """Check the losses, then measure and print the table."""
    from datasets import disable_progress_bars

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bars()
    run = compose_run(
        ["recipe=lora", "adapter=lora", f"launch.threads={told.threads}", *model_numbers(told.hidden)]
    )
    runtime = start(run.launch, "fp32", run.seed)
    tokenizer = load_tokenizer(run.model, needs_template=True)
    sample = prepare(run.dataset, tokenizer, run.cache_dir).train
    print(
        "| lengths | tokens a step | program | tokens/s without padding | ours is faster by |\n|---|---|---|---|---|"
    )
    for name in told.mix:
        for tokens in told.tokens:
            rows = mix(name, sample, run.seed)
            contest = Contest(run, runtime, tokenizer, rows, tokens, told.steps)
            losses = first_losses(contest)
            assert max(losses.values()) - min(losses.values()) < _AGREE, losses
            print("\n".join(lines(name, contest, measure(contest, told.rounds))), flush=True)


if __name__ == "__main__":
    main()
