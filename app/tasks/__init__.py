"""Training tasks, one file each.

A task is an entry of `TASKS` (`app/config/tasks.py`: facts without torch, such as its row formats) and an
`Implementation` in a file of this package, listed in `IMPLEMENTATIONS` (`table.py`):

- `objective`: the documents and labels of a row, and its highlighted tokens (`app/data/objectives.py`).
- `most_labels`: number of labels in the memory estimate.
- `loss`: one sum over a batch, of cross-entropies or of any function of the log-probabilities of documents
  (`over_documents` in `app/model/losses.py`). Such a loss may read numbers for each document (`LabeledTokens.values`)
  and one mean over the step of all processes, such as a KL term (`of_step`), which `with_step_mean` in
  `app/training/scores.py` computes before the first backward pass.
- `counts`: sums per row, whose ratios are the metrics; `METRICS` (`app/config/kinds.py`) names and formats them.
- `answers`: answers to prompts of the eval set.

The problems of `task=classification` have `PROBLEMS` (`app/config/kinds.py`), `LABELINGS` (`app/data/labels.py`)
and `CLASS_PROBLEMS` (`classification.py`). A loss with a reference model reads the scores that
`app/training/initial_model.py` computes once and stores with the run. A row may have several documents: bins, splits
and retries cut between rows.
"""
