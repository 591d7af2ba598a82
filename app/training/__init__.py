"""One run from its config to its folder, as a chain of values: rows, start, machine, plan, setup.

`train_in` in `app/training/run.py` has the whole order. `app/training/rows.py` resolves settings that depend on the
rows (formats, labels, packing), `app/training/plan.py` every other `auto` (precision, attention, parallelism, compiled
and recomputed layers: `app/training/auto_settings.py`). `app/training/setup.py` builds and restores,
`app/training/trainer.py` is the loop, `app/training/train_step.py` a step:

1. The loader gives this process its micro-batches of step s.
2. Labels of the step are counted over all micro-batches and processes, each with its weight.
3. Each micro-batch adds the gradient of `loss_sum / label_weight_of_the_step`: that of the weighted mean over all
   trained tokens, independent of their split. Only rows that predict a trained token go through the head.
4. OOM: micro-batches are split between data rows and the pass is repeated (`app/oom_retry.py`). With FSDP, or DDP with
   `overlap`, all processes end, and the launcher restarts them with smaller parts (`app/distributed/launch.py`).
5. Gradients are summed over processes (`app/distributed/gradient_reduction.py`, `app/distributed/fsdp.py`) and clipped.
6. The optimizer steps. A non-finite gradient skips the step, on the device if the optimizer supports it
   (`app/optim/optimizers.py`): the host waits only when a line is written or a checkpoint is saved, and in the
   first two steps.

Before step 1 and at intervals the loop evaluates (`app/training/scores.py`), answers eval prompts
(`app/training/samples.py`), saves (`app/training/checkpoint.py`) and copies what was saved (`app/training/mirror.py`).
`app/training/final_model.py` writes `final/`, through `app/finished/save.py`. `app/training/summary.py` formats the
printed lines, and
`app/training/phase_times.py` times forward, backward, optimizer and waiting for data.
"""
