"""This program's own step, with the choices that a run would make, or with some of its switches set otherwise."""

from torch import nn

from app.batch import Batch
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.labels import next_tokens
from app.engine.ground import sections_of
from app.engine.step import Stepper
from app.model.build import build_trainee
from app.model.head_proof import settle_head
from app.optim.optimizers import build_optimizer
from scripts.bench.clock import Clock
from scripts.bench.prepared import BASE, BINS, PAD, PADDED, Prepared
from scripts.bench.workload import Bin


class Ours:
    """`app.engine.step` on batches that `app.data.collate` makes."""

    def __init__(self, prepared: Prepared) -> None:
        run = prepared.run
        sections = sections_of(run, prepared.choices)
        trainee = build_trainee(sections, prepared.runtime.device, run.seed, BASE)
        fp16 = prepared.choices.precision == "fp16"
        optimizer = build_optimizer(run.optimizer, trainee)
        self._stepper = Stepper(trainee, optimizer, prepared.runtime, run.training.clip, fp16=fp16)
        self._prepared = prepared
        self._collate = Collator(prepared)
        settle_head(trainee, self._collate(prepared.steps[0][0]).to(prepared.runtime.device))
        self.network: nn.Module = trainee.network
        self.attention = prepared.choices.attention
        self.layout = BINS if run.batching.packing else PADDED

    def train(self, clock: Clock) -> None:
        """As `app.engine.loop` does it, without its record."""
        clock.begin()
        for step in self._prepared.steps:
            batches = [self._collate(packed) for packed in step]
            result = self._stepper.run(batches, self._prepared.run.optimizer.lr)
            clock.mark(result.loss_sum / result.labels)
        clock.end()


class Collator:
    """Documents into our batches: bins of a constant shape, or padded rows."""

    def __init__(self, prepared: Prepared) -> None:
        self._packing = prepared.run.batching.packing
        tokens, longest = prepared.contest.bin_tokens, prepared.run.dataset.max_length
        bins = [packed for step in prepared.steps for packed in step]
        places = max(len(packed) + -(-(tokens - sum(map(len, packed))) // longest) for packed in bins)
        self._shape = BinShape(tokens, longest, places)

    def __call__(self, packed: Bin) -> Batch:
        """One micro-batch."""
        rows = [next_tokens(each.ids, each.trained) for each in packed]
        return collate_packed(rows, PAD, self._shape) if self._packing else collate_padded(rows, PAD)
