"""What is proven of a model before its first step, on the data it will see."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from app.batch import Batch
from app.data.loader import Loader
from app.model import fp8_linear
from app.model.checks import check_head, check_packing, choose_loss_head
from app.model.comparison import Comparison
from app.model.compile import verify_compiled
from app.model.training_model import TrainingModel


def prove(trainee: TrainingModel, loader: Loader, device: torch.device) -> list[Comparison]:
    """The head gives the model's own logits, and packed documents those of separate ones; else the run is refused."""
    # where the model is divided, all processes make the same passes
    batches = loader.batches(0) if trainee.sharding is None else loader.batches_of_first(0)
    fullest = max(batches, key=lambda batch: batch.num_tokens).to(device)  # some may be empty
    if trainee.sharding is None:
        return prove_on(trainee, fullest)
    with trainee.sharding.checking():
        return trainee.within(lambda: prove_on(trainee, fullest))


def prove_on(trainee: TrainingModel, batch: Batch) -> list[Comparison]:
    """The same on one batch. Fused layers were compared as they were put in: what did not hold is not there."""
    fused = [proof for proof in trainee.fused.comparisons if proof.passed]
    present = nullcontext if trainee.sharding is None else trainee.sharding.gathered
    rounding = fp8_linear.compare_products(trainee.network, present)
    with fp8_linear.without_row_rounding(trainee.network), _uncompiled(trainee):
        head = [check_head(trainee, batch), *choose_loss_head(trainee, batch)]
        found = [*head, *check_packing(trainee, batch), *fused, *rounding]
    compiled = (
        None
        if trainee.compiled_layers is None
        else verify_compiled(trainee, trainee.trained(), trainee.compiled_layers, batch, trainee.compute)
    )
    return found if compiled is None else [*found, compiled]


def _uncompiled(trainee: TrainingModel) -> AbstractContextManager[None]:
    """Proofs look at shapes of their own."""
    return nullcontext() if trainee.compiled_layers is None else trainee.compiled_layers.paused()


def remarks_on(trainee: TrainingModel, proofs: Sequence[Comparison]) -> list[str]:
    """What is computed in another way than it could be, because it did not hold."""
    failed = [proof for proof in proofs if not proof.passed]
    return [
        *trainee.remarks(),
        *(
            f"{proof.what}, differs by {proof.difference:.1e} (allowed {proof.allowed:.1e}) and is not used"
            for proof in failed
        ),
    ]
