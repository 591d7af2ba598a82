"""Tasks: what a model learns, one file each.

A task is an entry of `TASKS` (`app/config/tasks.py`: facts that need no torch, such as its row formats) and an
`Implementation` in a file of this package, listed in `IMPLEMENTATIONS` (`table.py`):

- `objective`: the documents and labels of a row, and the tokens that people see highlighted (`app/data/objectives.py`).
- `most_labels`: how many labels the memory plan counts.
- `loss`: one sum of a batch, of cross-entropies or of any function of the documents' log-probabilities
  (`over_documents` in `app/model/losses.py`). Such a loss may read numbers next to each document
  (`LabeledTokens.values`) and ask for one mean over the step of all processes, such as a KL term (`of_step`), which
  `with_step_mean` in `app/training/scores.py` computes before the first backward pass.
- `counts`: the sums per row that metrics are ratios of; `METRICS` (`app/config/kinds.py`) names and formats them.
- `answers`: answers to prompts of the eval set.

The problems of `task=classification` have `PROBLEMS` (`app/config/kinds.py`), `LABELINGS` (`app/data/labels.py`)
and `CLASS_PROBLEMS` (`classification.py`). A loss with a reference model reads what `app/training/initial_model.py` has
scored once and keeps with the run. A row may have several documents: bins, splits and retries cut between rows.
"""
