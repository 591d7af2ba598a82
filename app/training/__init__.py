"""One run from its config to its folder, as a chain of values: rows, start, machine, plan, and what begins from them.

`train_in` in `app/training/run.py` is the only function that knows the whole order. `app/training/rows.py` settles what
the rows decide (formats, labels, packing), `app/training/plan.py` everything else that is `auto` (precision, attention,
parallelism, compiled and recomputed layers: `app/training/auto_settings.py`). `app/training/setup.py` builds and
restores, `app/training/trainer.py` is the loop, `app/training/train_step.py` a step:

1. The loader gives this process its micro-batches of step s.
2. Labels of the step are counted over all micro-batches and processes, each with its weight.
3. Each micro-batch adds the gradient of `loss_sum / label_weight_of_the_step`: that of the weighted mean over all
   trained tokens, however they are split. Only rows that predict a trained token go through the head.
4. Out of memory: micro-batches are split between data rows and the pass is repeated (`app/oom_retry.py`). With FSDP, or
   DDP with `overlap`, all processes end, and the launcher starts them with smaller parts (`app/distributed/launch.py`).
5. Gradients are summed over processes (`app/distributed/gradient_reduction.py`, `app/distributed/fsdp.py`) and clipped.
6. The optimizer steps. A gradient that is not finite skips the step, on the device where the optimizer can
   (`app/optim/optimizers.py`): the host waits only where a line is written or a checkpoint is saved, and in the
   first two steps.

Before step 1 and at its times the loop evaluates (`app/training/scores.py`), answers held-out prompts
(`app/training/samples.py`) and saves (`app/training/checkpoint.py`). `app/training/final_model.py` writes `final/`,
through `app/finished/save.py`. `app/training/summary.py` says what people read.
"""
