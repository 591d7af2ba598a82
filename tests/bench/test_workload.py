"""The documents of a benchmark: what every contender is given."""

from dataclasses import replace

import numpy as np
import pytest

from scripts.bench.contest import Contest
from scripts.bench.loops import BINS, PACKED, PADDED, positions_in
from scripts.bench.workload import FIRST_ID, MIXES, digest, documents, sizes_of, workload

VOCABULARY = 1536
CONTEST = Contest(
    framework="ours",
    model="tiny",
    method="lora",
    device="cpu",
    precision="fp32",
    mix="chat",
    length=512,
    tokens_per_step=4096,
    accumulation=2,
    steps=5,
    warm_up=1,
    seed=3,
    threads=1,
    recompute=False,
    rank=16,
    peak_tflops=None,
    settings=("a=b",),
)


@pytest.mark.parametrize("mix", MIXES)
def test_workload_bins_are_nearly_full(mix: str) -> None:
    contest = replace(CONTEST, mix=mix)
    steps = workload(contest, VOCABULARY)
    assert [len(step) for step in steps] == [2] * 6
    filled = [sum(map(len, packed)) for step in steps for packed in step]
    assert max(filled) <= contest.bin_tokens
    assert np.mean(filled) > 0.98 * contest.bin_tokens
    assert max(map(len, documents(steps))) <= contest.length


def test_workload_depends_on_seed_alone() -> None:
    steps = workload(CONTEST, VOCABULARY)
    assert digest(steps) == digest(workload(CONTEST, VOCABULARY))
    assert digest(steps) != digest(workload(replace(CONTEST, seed=4), VOCABULARY))
    more = workload(replace(CONTEST, steps=9), VOCABULARY)
    assert digest(more[:6]) == digest(steps), "more steps would change the first ones"


def test_workload_has_known_ids_and_untrained_prompts() -> None:
    steps = workload(CONTEST, VOCABULARY)
    ids = np.concatenate([each.ids for each in documents(steps)])
    assert ids.min() >= FIRST_ID
    assert ids.max() < VOCABULARY
    assert not any(each.trained[0] for each in documents(steps))
    sizes = sizes_of(steps)
    assert sizes.tokens == len(ids)
    assert sizes.trained / sizes.tokens == pytest.approx(0.4, abs=0.01)
    counts = np.sort(np.bincount(ids))[::-1]
    assert counts[0] > 5 * counts[100], "all tokens are alike: there is nothing to learn"


def test_positions_in_counts_padding_of_layout() -> None:
    step = workload(CONTEST, VOCABULARY)[0]
    tokens = sizes_of([step]).tokens
    assert positions_in(step, BINS, CONTEST.bin_tokens) == 4096
    assert positions_in(step, PACKED, CONTEST.bin_tokens) == tokens
    assert positions_in(step, PADDED, CONTEST.bin_tokens) == sum(len(b) * max(map(len, b)) for b in step)
