"""Kinds of export: the files they copy and write, how another program reads them, and the allowed difference."""

import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers import BitsAndBytesConfig

from app.adapters.merged_weights import fully_trained_weights, read_updates
from app.base.base_model import read_weights
from app.base.packed_weights import packed_format
from app.base.rope import in_config
from app.base.source import base_path
from app.config.finished_run import ExportConfig
from app.config.kinds import QUANTIZATION_KINDS
from app.config.tasks import task_of
from app.errors import ConfigError
from app.evaluation.run import Evaluation
from app.exports import reload
from app.exports.destination import REPORT, write_json_unflushed
from app.exports.verify import Reference, Reloaded, Verification, by_transformers
from app.files import CHECKSUMS, read_json
from app.finished.save import (
    EXPORTED,
    MAX_FILE_BYTES,
    Merge,
    add_transformers_4_keys,
    merged_config,
    plan_merge,
    with_rope,
    write_config,
)
from app.layers import nf4
from app.layers.quantization import backbone_linear_layers, weight_of
from app.model.build import DTYPES, ModelSections
from app.pages.model_card import CARD, Loading
from app.tracking.vllm import in_vllm

_ADAPTER = "adapter_config.json"
_NOT_COPIED = {CHECKSUMS, CARD, REPORT}
_OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_*")
_WITH_TEXT = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
_WITH_WEIGHTS = ("*processor*_config.json", "processor_config.json", *_WITH_TEXT)
# Relative difference of fp32 logits between kernels that add in a different order.
_FP32_TOLERANCE = 1e-5
# Half the distance between neighboring numbers: the largest relative change of a weight by rounding.
_ROUNDING_ERROR = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}


@dataclass(eq=False)
class Export(ABC):
    """Export of one kind. Reading its size raises for unsupported models, before anything is written."""

    measure: ClassVar[str] = "difference"  # field of `Verification` to compare with the tolerance

    config: ExportConfig
    evaluation: Evaluation  # on the base that users of the export load
    trained: Evaluation | None  # on the training base, if that differs

    @property
    def final(self) -> Path:
        return self.config.folder / "final"

    @property
    def own_files(self) -> dict[str, Path]:
        """Files of final/ with a checksum, except the card."""
        names = read_json(self.final / CHECKSUMS).keys() - _NOT_COPIED
        return {file.name: file for file in sorted(self.final.glob("*")) if file.name in names}

    @cached_property
    def sections(self) -> ModelSections:
        return self.evaluation.sections(tuned=True)

    @property
    @abstractmethod
    def copied(self) -> dict[str, Path]:
        """Files to copy, by their names in the export."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.copied.values())

    @property
    def disk_bytes(self) -> int:
        """Disk space needed while writing."""
        return self.bytes

    def write(self, folder: Path) -> int:
        """Write everything but card and report; return the number of rounded matrices."""
        for name, file in self.copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
        return 0

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        """Return the results of another program with `folder` on the rows of `reference`, or an error as text."""
        return by_transformers(folder, {}, reference, self.evaluation)

    def on_card(self, loading: Loading, verified: Verification) -> Loading:  # noqa: ARG002
        """Return the loading instructions of the model card."""
        return loading

    def remarks(self) -> list[tuple[str, str]]:
        """Return remarks on other programs, by their names."""
        return []

    @property
    def max_loss_difference(self) -> float | None:
        """A second limit, of `Verification.loss_difference`."""
        return None

    @property
    def min_kept_share(self) -> float | None:
        """A limit of `Verification.kept_share`."""
        return None

    def tolerance(self, rounded: int) -> tuple[float, str]:
        """Return the allowed relative difference and its reason.

        A rounded matrix changes its outputs by less than the rounding error of a weight; independent errors grow with
        the square root of their number.
        """
        base = DTYPES[self.evaluation.choices.precision].base
        dtype = self.config.written("dtype") or next(name for name, dtype in EXPORTED.items() if dtype == base)
        if not rounded or dtype == "fp32":
            return _FP32_TOLERANCE, "fp32 arithmetic in a different order"
        return _FP32_TOLERANCE + _ROUNDING_ERROR[dtype] * rounded**0.5, f"{rounded} matrices rounded to {dtype}"


class AdapterExport(Export):
    """Adapter with all of final/, and a randomly initialized base, which exists nowhere else."""

    @cached_property
    def copied(self) -> dict[str, Path]:
        base = [file for file in (self.config.folder / "base").glob("*") if file.is_file() and file.name != CHECKSUMS]
        return self.own_files | {f"base/{file.name}": file for file in base}

    def write(self, folder: Path) -> int:
        """Copy the files and name the base; count fp32 matrices of a head, which loading rounds to the base's dtype."""
        super().write(folder)
        adapter = json.loads((folder / _ADAPTER).read_text())
        path = base_path(self.config.model, self.config.target / "base")
        write_json_unflushed(folder / _ADAPTER, adapter | {"base_model_name_or_path": path})
        return sum(len(weight.shape) > 1 for weight in fully_trained_weights(self.final).values())

    def remarks(self) -> list[tuple[str, str]]:
        if not task_of(self.sections.task).writes_text:
            return []
        remark = in_vllm(read_json(self.final / _ADAPTER), self.sections.model.vocab_size)
        rounds_to = QUANTIZATION_KINDS[self.sections.quantization.kind].rounds_to
        if rounds_to and self.evaluation.base.unpacked_format is None:
            remark += f"\nanswers differ on a base that is not rounded to {rounds_to}: use kind=merged"
        rope = self.evaluation.base.rope
        if rope is not None and not (self.config.folder / "base").is_dir():
            remark += (
                f"\nthe adapter does not store its RoPE, {in_config(rope)}: set it in the base, or use kind=merged"
            )
        return [("vllm", remark)]

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        unpacked, quantizer = self.evaluation.base.unpacked_format, self.sections.quantizer
        form = None if unpacked is None else packed_format(unpacked)
        is_unchanged = form is not None and (quantizer is None or form.numbers == quantizer.kind)
        if quantizer is not None and not is_unchanged:
            stored = None if unpacked is None else unpacked["quant_method"]
            if stored is not None or quantizer.bitsandbytes_arguments([]) is None:
                return f"no other program quantizes its {stored or 'plain'} base to {quantizer.kind}"
        loading = self._loading(folder)
        if form is None or form.by_transformers or not is_unchanged:
            return by_transformers(folder, loading, reference, self.evaluation)
        with tempfile.TemporaryDirectory(dir=folder) as plain:  # transformers reads these formats with other packages
            plan_merge(self.sections, {}, "fp32", self.evaluation.runtime.device).write(Path(plain), MAX_FILE_BYTES)
            config = merged_config(Path(self.sections.model.path), "fp32")
            write_json_unflushed(Path(plain) / "config.json", config)
            loading |= {"base": plain, "unpacked": None, "dtype": "float32"}
            return by_transformers(folder, loading, reference, self.evaluation)

    def _loading(self, folder: Path) -> dict[str, Any]:
        inside, sections = folder / "base", self.sections
        bitsandbytes = sections.bitsandbytes_arguments(self.evaluation.base)
        return {
            "stacks": [] if bitsandbytes is None else self.evaluation.base.stacks_of_experts,
            "unpacked": self.evaluation.base.unpacked_format,
            "config": str(folder) if task_of(sections.task).has_classes else None,
            "base": str(inside if inside.is_dir() else sections.model.path),
            "dtype": str(DTYPES[sections.precision].base).removeprefix("torch."),
            "bitsandbytes": bitsandbytes,
            "vocab_size": sections.model.vocab_size,
            "rope": self.evaluation.base.rope,
        }


class MergedExport(Export):
    """Base and adapter merged, or a fully fine-tuned model, with tokenizer, licenses and other files."""

    merged_dtype: ClassVar[str | None] = None  # overrides `dtype`

    @cached_property
    def merge(self) -> Merge:
        text_alone = self.config.names == "text"
        adapter = self.final if (self.final / _ADAPTER).is_file() else None
        updates = {} if adapter is None else read_updates(adapter, self.evaluation.base.on_meta())
        dtype = self.merged_dtype or self.config.dtype
        return plan_merge(self.sections, updates, dtype, self.evaluation.runtime.device, adapter, text_alone=text_alone)

    @cached_property
    def copied(self) -> dict[str, Path]:
        base = Path(self.sections.model.path)
        with_weights = _WITH_WEIGHTS if self.config.names == "whole" else _WITH_TEXT
        patterns = (*with_weights, *(("*.py",) if self.config.model.trust_remote_code else ()))
        of_base = {file.name: file for pattern in patterns for file in base.glob(pattern)}
        left_out = {"config.json", *(file.name for pattern in _OF_WEIGHTS for file in self.final.glob(pattern))}
        return {name: file for name, file in (of_base | self.own_files).items() if name not in left_out}

    @property
    def bytes(self) -> int:
        return super().bytes + self.merge.bytes

    def write(self, folder: Path) -> int:
        super().write(folder)
        if self.config.names == "text":
            write_config(self.evaluation.base.on_meta(), EXPORTED[self.config.dtype], folder)
        else:
            rows = self.sections.model.vocab_size
            resized = {} if rows is None else {"vocab_size": rows}
            # final/ has one if it is a full model, or a classifier's adapter, with its classes
            place = self.final if (self.final / "config.json").is_file() else Path(self.sections.model.path)
            config = with_rope(merged_config(place, self.config.dtype), self.evaluation.base.rope)
            write_json_unflushed(folder / "config.json", config | resized)
        add_transformers_4_keys(folder, type(self.evaluation.base.on_meta().config))
        return self.write_weights(folder)

    def write_weights(self, folder: Path) -> int:
        """Write the weight files; return the number of rounded matrices."""
        return self.merge.write(folder, self.config.shard_gb * 1e9)

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        loading = {} if self.config.names == "whole" else {"auto_class": task_of(self.sections.task).auto_class}
        return by_transformers(folder, loading, reference, self.evaluation)

    def on_card(self, loading: Loading, verified: Verification) -> Loading:  # noqa: ARG002
        if self.config.names == "whole":
            return loading
        return replace(loading, auto_class=task_of(self.sections.task).auto_class)


class _Quant(NamedTuple):
    """Quantization of bitsandbytes that transformers writes and reads."""

    arguments: Mapping[str, Any]  # of BitsAndBytesConfig
    bytes_per_weight: float  # with scales; int8 has one per row
    max_kl: float  # nats per position, at least ten times those of the small model
    block: int = 1  # weights that share a scale; the row length must be a multiple


_FOUR_BITS = 0.5 + 4 / nf4.BLOCK  # bytes per weight, with scales in fp32
_QUANTS = {
    "nf4": _Quant({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _FOUR_BITS, 0.5, nf4.BLOCK),
    "fp4": _Quant({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, _FOUR_BITS, 1.0, nf4.BLOCK),
    "int8": _Quant({"load_in_8bit": True}, 1, 0.05),
}


def on_improvement(verified: Verification) -> str:
    """Return a sentence for the model card on the share of the loss improvement, empty if it is not stated."""
    return f" On these rows, it {verified.improvement}." if verified.improvement else ""


class QuantizedExport(MergedExport):
    """Merged model with the linear layers of its backbone quantized by bitsandbytes, for transformers."""

    measure = "kl"
    digest: str  # of the written model

    @cached_property
    def merge(self) -> Merge:
        """Merge with the stored, unquantized linear layers of the base if training quantized them as the export does:
        rounding quantized numbers again would undo every update below half the distance between neighbors. LoftQ's
        initial adapter fits the quantized base only.
        """
        merge, trained = super().merge, self.sections
        if trained.quantization.kind != self.config.quant or trained.adapter.init == "loftq":
            return merge
        stacks = frozenset(name for name in merge.quantized if not name.endswith(".weight"))  # they stay in dtype
        return replace(merge, quantized=stacks)

    @property
    def quant(self) -> _Quant:
        return _QUANTS[self.config.quant]

    @property
    def bytes(self) -> int:
        lm, of_a_weight = self.evaluation.base.on_meta(), EXPORTED[self.config.dtype].itemsize
        weights = {name: weight_of(lm.get_submodule(name)) for name in backbone_linear_layers(lm)}
        odd = [name for name, weight in weights.items() if weight.shape[1] % self.quant.block]
        if odd:
            raise ConfigError(
                f"quant={self.config.quant}: {odd[0]} has {weights[odd[0]].shape[1]} inputs, not a multiple of "
                f"{self.quant.block}. Set quant=int8, or kind=merged."
            )
        saved = sum(map(Tensor.numel, weights.values())) * (of_a_weight - self.quant.bytes_per_weight)
        return super().bytes - int(saved)

    @property
    def disk_bytes(self) -> int:
        return super().bytes + self.bytes

    def write(self, folder: Path) -> int:
        """Quantize the merged files and replace them."""
        rounded = super().write(folder)
        task, dtype = task_of(self.sections.task), EXPORTED[self.config.dtype]
        outside = self.evaluation.base.linear_outside
        arguments = {**self.quant.arguments, "bnb_4bit_compute_dtype": dtype, "llm_int8_skip_modules": outside}
        lm = read_weights(
            self.sections.model,
            task,
            folder,
            dtype=dtype,
            device_map={"": self.evaluation.runtime.device},
            quantization_config=BitsAndBytesConfig(**arguments),
        )
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        lm.save_pretrained(str(folder), max_shard_size=int(self.config.shard_gb * 1e9))
        add_transformers_4_keys(folder, type(lm.config))
        self.digest = reload.digest(lm)
        return rounded

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        reloaded = by_transformers(folder, {"digest": True, "dtype": "auto"}, reference, self.evaluation)
        if isinstance(reloaded, Reloaded) and reloaded.digest != self.digest:
            return "its tensors differ from those written"
        return reloaded

    def on_card(self, loading: Loading, verified: Verification) -> Loading:
        quantized = (
            f"Quantized to {self.config.quant} with bitsandbytes, which is required to load it. KL from the model of "
            f"the run: {verified.kl:.2g} nats, the mean of {verified.positions} positions of {verified.rows} rows "
            f"({verified.rows_are.replace('_', ' ')}).{on_improvement(verified)}"
        )
        return replace(loading, quantized=quantized)

    def tolerance(self, rounded: int) -> tuple[float, str]:  # noqa: ARG002
        return self.quant.max_kl, f"of {self.config.quant}"
