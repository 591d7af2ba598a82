"""An NF4 adapter used by transformers and PEFT alone, on the same base."""

import json
from pathlib import Path

import torch

from app.model.build import build_training_model, random_base
from app.model.load_run import load_tuned
from app.model.save import save_base, save_model
from app.model.tokenizer import load_tokenizer
from tests.harness.python import printed_by
from tests.model.small import CAUSAL, distance, three_steps
from tests.model.test_quantization import CPU, IDS, NF4, parts_of, wide

# nothing of this program is imported
ELSEWHERE = """
import json, sys, warnings
warnings.simplefilter("ignore", FutureWarning)
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
ids, out, final = torch.tensor(json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
base = json.load(open(final + "/adapter_config.json"))["base_model_name_or_path"]
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
lm = AutoModelForCausalLM.from_pretrained(base, dtype="float32", quantization_config=nf4, device_map={"": "cpu"})
for layer in lm.modules():  # or CPUs with avx512_bf16 evaluate in bf16
    if hasattr(layer, "support_avx512bf16_for_cpu"):
        layer.support_avx512bf16_for_cpu = False
with torch.no_grad():
    torch.save(PeftModel.from_pretrained(lm, final).train(False)(ids).logits, out)
assert not [name for name in sys.modules if name.split(".")[0] == "app"]
"""


def test_nf4_adapter_same_logits_elsewhere(tmp_path: Path, app_env: dict[str, str]) -> None:
    parts = parts_of()
    training_model = three_steps(build_training_model(parts, CPU, 0, str(tmp_path / "base")))
    tokenizer = load_tokenizer(wide(), needs_template=True)
    save_base(training_model, tokenizer, tmp_path / "base", random_base(parts, CPU, 0))
    save_model(training_model, tokenizer, tmp_path / "final")
    with torch.no_grad():
        ours = training_model.language_model.eval()(IDS).logits
        here, without = (
            load_tuned(tmp_path, wide(), CAUSAL, adapter=adapter, quantization=NF4)(IDS).logits
            for adapter in (True, False)
        )
        unquantised = load_tuned(tmp_path, wide(), CAUSAL, adapter=True)(IDS).logits
    assert distance(here, ours) <= 1e-6
    assert distance(without, ours) > 1e-2
    assert distance(unquantised, ours) > 1e-2, "so the base must be quantised again"
    env = {k: v for k, v in app_env.items() if k != "PYTHONPATH"}
    printed_by("-c", ELSEWHERE, json.dumps(IDS.tolist()), "o.pt", str(tmp_path / "final"), env=env, cwd=tmp_path)
    assert distance(torch.load(tmp_path / "o.pt", weights_only=True), ours) <= 1e-6
