"""What is proven of a model before its first step, on the data it will see."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from app.batch import Batch
from app.data.loader import Loader
from app.model import fp8_linear
from app.model.chunked_loss import settle_head
from app.model.probe import check_packing
from app.model.proof import Proof
from app.model.settling import settle
from app.model.trainee import Trainee


def prove(trainee: Trainee, loader: Loader, device: torch.device) -> list[Proof]:
    """The head gives the model's own logits, and packed documents those of separate ones; else the run is refused."""
    # where the model is divided, all processes make the same passes
    batches = loader.batches(0) if trainee.sharding is None else loader.batches_of_first(0)
    fullest = max(batches, key=lambda batch: batch.num_tokens).to(device)  # some may be empty
    if trainee.sharding is None:
        return prove_on(trainee, fullest)
    with trainee.sharding.checking():
        return trainee.within(lambda: prove_on(trainee, fullest))


def prove_on(trainee: Trainee, batch: Batch) -> list[Proof]:
    """The same on one batch. Fused layers were compared as they were put in: what did not hold is not there."""
    fused = [proof for proof in trainee.fused.proofs if proof.holds]
    present = nullcontext if trainee.sharding is None else trainee.sharding.gathered
    rounding = fp8_linear.prove(trainee.network, present)
    with fp8_linear.rows_as_they_are(trainee.network), _uncompiled(trainee):
        head = [trainee.check_head(batch), *settle_head(trainee, batch)]
        found = [*head, *check_packing(trainee, batch), *fused, *rounding]
    compiled = None if trainee.blocks is None else settle(trainee, trainee.blocks, batch)
    return found if compiled is None else [*found, compiled]


def _uncompiled(trainee: Trainee) -> AbstractContextManager[None]:
    """Proofs look at shapes of their own."""
    return nullcontext() if trainee.blocks is None else trainee.blocks.paused()


def remarks_on(trainee: Trainee, proofs: Sequence[Proof]) -> list[str]:
    """What is computed in another way than it could be, because it did not hold."""
    failed = [proof for proof in proofs if not proof.holds]
    return [
        *trainee.remarks(),
        *(
            f"{proof.what}, differs by {proof.difference:.1e} (allowed {proof.allowed:.1e}) and is not used"
            for proof in failed
        ),
    ]
