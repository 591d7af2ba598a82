"""Configuration: from YAML and command line to one typed, checked object. Nothing here imports torch.

The path of a key such as `optimizer.lr`:

1. Its default is in `conf/`: a choice of a group, a recipe, or `conf/config.yaml`.
2. Words of the command line are checked by `app/config/overrides.py`, before Hydra sees them; a hub id or file typed as
   `model=` or `dataset=` becomes its path. Words of `from=FILE.yaml` count as typed (`app/config/overrides.py`).
   Options of commands other than app.train are read by a `Command` (`app/config/command_line.py`), which passes
   settings of a run to the same checks.
3. Hydra's Compose API composes once (`app/config/load.py`), without a schema, because it stops at the first key that a
   schema refuses. With `from=RUN` the run.yaml of a run replaces `conf/`.
4. `app/config/validate.py` reads the result into the dataclasses of `app/config/schema.py`: unknown keys, types, limits
   and choices, every problem at once. Names of other programs are looked up in `app/config/other_programs.yaml`.
5. `app/config/rules.py` and `app/config/dataset.py` check combinations, and find keys that nothing reads.

What is `auto` is settled later, in `app/training`: by the rows, the checkpoint, the machine and the memory plan.
"""
