"""Memory of answering: weights, key-value cache and logits, counted on tensors without memory."""

from dataclasses import asdict, replace
from inspect import signature
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from app.config.commands import AnswersConfig
from app.config.tasks import task_of
from app.memory.estimate import planned_choices
from app.memory.fake_tensors import FakeTensorFallbacks, materialise
from app.memory.fit import Machine, check_fit
from app.memory.meta_model import MetaModel
from app.memory.planner import Planned
from app.model.attention import own_attention
from app.model.quantization import quantization_after_training
from app.model.structure import BaseModel
from app.training.choices import sections_of
from app.training.storage_counter import StorageCounter, rounded


def plan_answers(planned: Planned, answers: AnswersConfig, machine: Machine) -> dict[str, Any]:
    """Facts about `app.generate` of the model that the run makes; `anatomy` adds up to the peak.

    All tokens are read at once, by transformers' own attention and cache: writing them one by one takes less beside the
    cache. Beams are rows, and several prompts need a mask, because they differ in length.
    """
    run = replace(planned.run, quantization=quantization_after_training(planned.run.quantization))
    length = BaseModel(run.model, task_of(run.task)).longest_row(answers.length or run.dataset.max_length)
    sections = sections_of(run, planned_choices(run, machine.device))
    meta_model, counter = MetaModel(sections, "eager"), StorageCounter("cpu", as_on_gpu=machine.device == "gpu")
    network: Any = meta_model.network(meta_model.depth).eval()
    lm = getattr(network, "get_base_model", lambda: network)()
    lm.set_attn_implementation(own_attention(lm))
    with FakeTensorMode(allow_non_fake_inputs=True), FakeTensorFallbacks(), torch.no_grad():  # type: ignore[no-untyped-call]
        materialise(network, sections)
        constants = [] if sections.quantizer is None else sections.quantizer.constants(network)
        counter.hold("weights", [*network.parameters(), *network.buffers(), *constants])
        weights = counter.current
        inputs = {"input_ids": torch.zeros(answers.rows * answers.beams, length, dtype=torch.int64)}
        if answers.rows > 1:
            inputs |= {name: torch.ones_like(inputs["input_ids"]) for name in ("attention_mask", "position_ids")}
        counter.hold("inputs", inputs.values())
        before, known = counter.current, signature(lm.forward).parameters
        given = {**inputs, "use_cache": True, "logits_to_keep": 1}  # where the model knows them, as in its `generate`
        with counter:
            out = lm(**{name: value for name, value in given.items() if name in known})
        logits = rounded(out.logits.nbytes)
        _cache = [value for name, value in out.items() if name != "logits"]
        del out
        cache = counter.current - before
    temporary = counter.peak - weights - cache - logits
    verdict = check_fit(replace(planned.plan, peak_bytes=counter.peak, kept_bytes=weights), machine)
    return {
        **(asdict(answers) | {"length": length}),
        "anatomy": {"weights": weights, "cache": cache, "logits": logits, "temporary": temporary},
        "needed_bytes": verdict.needed_bytes,
        "fits": verdict.fits,
    }
