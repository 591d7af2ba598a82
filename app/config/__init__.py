"""Configuration: YAML and command line to one typed, validated object. Nothing here imports torch.

The path of a key such as `optimizer.lr`:

1. Its default is in `conf/`: a choice of a group, a recipe, or `conf/config.yaml`.
2. `app/config/arguments.py` splits the command line. Settings of `from=FILE.yaml` count as typed; a config of another
   program is converted first (`app/config/settings_conversion.py`). `app/config/overrides.py` checks them before Hydra
   parses them; a hub ID or file typed as `model=` or `dataset=` becomes its path.
   Options of commands other than finetune train are parsed by a `Command` (`app/config/command_line.py`), which passes
   run settings to the same checks.
3. Hydra's Compose API composes once (`app/config/load.py`), without a schema, because it would stop at the first
   invalid key. With `from=RUN` the run.yaml of a run replaces `conf/`.
4. `app/config/validate.py` converts the result to the dataclasses of `app/config/schema.py` and reports all unknown
   keys, types, limits and choices at once. `app/config/other_programs.yaml` has the names of other programs.
5. `app/config/rules.py` and `app/config/dataset.py` check combinations and detect unused keys.

`app/training` resolves `auto` later, from the rows, the checkpoint, the machine and the memory estimate.
"""
