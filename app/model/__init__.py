"""The model of a run: a network with adapters, as a module that takes a Batch and returns its loss.

The path of a model:

1. `app/base/base_model.py` describes the base from its config.json: sizes, positions, vocabulary, the model on meta.
2. `app/model/build.py` builds the structure on meta, with quantized layers and adapters; a method with `on_meta=False`
   is attached to the filled base instead. `assemble` makes a `TrainingModel` from it: norms
   (`app/layers/layer_norm.py`), compiled and recomputed layers, recurrent mixers on padded rows
   (`app/layers/recurrent.py`), adapters initialized from training rows (`app/adapters/lora_inits.py`), shards.
3. `app/base/base_weights.py` fills it tensor by tensor. `app/base/conversion.py` reads the folder by the rules of
   transformers, one parameter at a time; `app/base/weight_files.py` translates names. For a multimodal model only the
   text part is built.
4. `app/model/checks.py` compares head, packing, kernels and experts with the model's own computation;
   `app/model/verification.py` compares each compiled layer with a float32 reference. Checks return a `Comparison`
   (`app/layers/comparison.py`): `or_refuse` ends the run, `or_leave` disables the compared feature.

A memory plan builds the network without values in the same way (`app/memory/fake_tensors.py`, `app/memory/trace.py`).
It partitions the graphs of compiled layers like the compiler (`app/memory/compiled_layers.py`,
`app/layers/compile.py`).

Settings that depend on filled weights are made by methods of `TrainingModel`: `divide`, `use_linear_head`,
`add_remark`. Methods other than `forward` that start a pass are marked `@gathers`.
"""
