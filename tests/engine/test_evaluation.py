"""The eval loss is one number, whatever way the rows are batched."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.data.layout import Layout, Packed, Padded
from app.data.loader import eval_batches
from app.data.prepare import Data
from app.engine.evaluation import mean_loss
from app.engine.runtime import Runtime
from tests.engine.conftest import small_run, trainee_of


def test_any_batch_size_gives_the_same_loss_and_it_is_the_plain_mean(data: Data, runtime: Runtime) -> None:
    assert data.eval is not None
    rows = data.eval
    trainee = trainee_of(small_run("recipe=lora", "adapter.dropout=0.5"))
    layouts: list[Layout] = [
        *(Padded(size, pad_id=0) for size in (1, 3, 16, 1000)),
        *(Packed(t, pad_id=0, longest=t) for t in (64, 256)),
    ]
    losses = [mean_loss(trainee, eval_batches(rows, layout), runtime) for layout in layouts]
    assert losses == pytest.approx([losses[0]] * len(layouts), rel=1e-6)
    assert trainee.training, "training goes on with dropout"

    trainee.eval()
    parts = []
    for i in range(len(rows)):
        ids = torch.tensor(rows.ids(i).tolist())
        with torch.no_grad():
            logits = trainee.language_model(ids[None]).logits[0, :-1].double()
        parts.append(
            F.cross_entropy(logits, ids[1:], reduction="none")[torch.from_numpy(rows.trained(i)[1:].copy())]
        )
    assert losses[0] == pytest.approx(float(torch.cat(parts).mean()), rel=1e-6)


def test_two_processes_see_every_row_once(data: Data) -> None:
    assert data.eval is not None
    shares = [list(eval_batches(data.eval, Padded(3, pad_id=0), processes=2, rank=rank)) for rank in range(2)]
    assert sum(b.num_labels for share in shares for b in share) == data.eval.num_trained
    assert sum(len(b.lengths) for share in shares for b in share) == len(data.eval)
