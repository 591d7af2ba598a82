"""What check.json has, made by hand."""

from typing import Any

GB = 10**9
ANATOMY = {
    "frozen_weights": 15 * GB,
    "quantization_constants": 0,
    "trained_weights": 300_000_000,
    "gradients": 200_000_000,
    "optimizer_states": 600_000_000,
    "saved_activations": 2 * GB,
    "temporary": 1_500_000_000,
    "loss_head": 400_000_000,
}
MEMORY: dict[str, Any] = {
    "hardware": "rtx4090",
    "label": "RTX 4090",
    "device": "gpu",
    "subject": "some/model-8B: LoRA of rank 32, adamw",
    "worst_case": "4,096 tokens, rows of up to 2,048, 4,096 tokens trained; 1 micro-batch a step",
    "phases": {"forward": 18 * GB, "backward": 20 * GB, "optimizer": 17 * GB},
    "peak_bytes": 20 * GB,
    "peak_where": "backward",
    "anatomy": ANATOMY,
    "kept_bytes": 16 * GB,
    "host_bytes": 0,
    "lost_bytes": 500_000_000,
    "context_bytes": 800_000_000,
    "margin_bytes": 757_000_000,
    "reserved_bytes": 20_500_000_000,
    "needed_bytes": 22_057_000_000,
    "memory_bytes": 25_233_000_000,
    "fits": True,
    "flops_per_token": 4.8e10,
    "forward_flops": 1.6e10,
    "recomputed_flops": 8e9,
    "flops": 2.0e14,
    "bound": {"step_seconds": 1.2, "tokens_per_second": 3412.0},
    "knobs": [
        {
            "override": "training.recompute=true",
            "saves_bytes": 1_900_000_000,
            "slower_by": 0.31,
            "fits": True,
            "costs": "speed",
            "why": "more arithmetic",
        },
        {
            "override": "recipe=qlora",
            "saves_bytes": 10_900_000_000,
            "slower_by": 0.0,
            "fits": True,
            "costs": "numeric precision",
            "why": "4 bits a weight",
        },
    ],
    "together": None,
    "faster": [
        {"override": "recipe=lora", "needed_bytes": 23_400_000_000, "bound": 1.2983, "why": "nothing to dequantize"},
        {"override": "batching.tokens=8192", "needed_bytes": 9e9, "bound": 1.1, "why": "larger steps"},
    ],
    "exact": False,
    "traced_layers": 3,
    "notes": ["the context of this GPU was not measured yet"],
    "stops": [],
    "seconds": 3.21,
}
TOO_LARGE: dict[str, Any] = {
    **MEMORY,
    "needed_bytes": 30_057_000_000,
    "lost_bytes": 8_500_000_000,
    "reserved_bytes": 28_500_000_000,
    "fits": False,
    "knobs": [{**MEMORY["knobs"][0], "fits": False}, MEMORY["knobs"][1]],
    "stops": ["it needs 30.1 GB"],
}


DATA: dict[str, Any] = {
    "source": "/data/chat.jsonl",
    "format": "messages",
    "max_length": 64,
    "lines": [
        "train: 1,200 rows -> 1,185 samples, 40,000 tokens, 10,000 trained (25%)",
        "train: 3 bad rows skipped: chat.jsonl:7",
        "the chat template writes the current date",
    ],
    "bad": [{"reason": "no role", "rows": 3, "first": "chat.jsonl:7"}],
    "dropped": 12,
    "packing": True,
    "bin_tokens": 64,
    "bins": 640,
    "fill": 0.9766,
    "lower_bound_bins": 638,
    "padded_fill": 0.55,
    "steps": 640,
    "epochs": 1.0,
    "units_per_step": 1,
    "unit_name": "bins",
    "processes": 1,
    "tokens_per_step": 62.5,
    "trained_tokens_per_step": 15.6,
    "length_percentiles": {"p5": 11, "p50": 30, "max": 900},
    "lengths": {"edges": [1, 33, 65], "samples": [700, 485]},
    "eval": {"bad": [{"reason": "no answer", "rows": 1, "first": "held.jsonl:2"}]},
    "preview": {
        "marked": "tokens in the loss",
        "rows": [
            {
                "place": "chat.jsonl:1",
                "tokens": 9,
                "trained_tokens": 4,
                "pieces": [{"text": "Hi ", "trained": False}, {"text": "Hello", "trained": True}],
            }
        ],
    },
    "stops": [],
    "advice": [{"set": "dataset.max_length=128", "why": "keeps 99.2% of the samples whole"}],
}

CLUSTER: dict[str, Any] = {
    "processes": 2,
    "machines": 2,
    "backend": "nccl",
    "ranks": [
        {
            "rank": rank,
            "host": f"gpu{rank + 1}",
            "device": {"name": "H100", "id": f"uuid-{rank}", "cores": 16},
            "versions": {"torch": "2.13.0", "nccl": "2.28.9"},
            "clock_offset_seconds": 2.5 * rank,
            "matmul_flops": 700e12,
        }
        for rank in range(2)
    ],
    "collectives": [
        {
            "name": "all-reduce",
            "bytes": size,
            "seconds": size / 20e9,
            "algorithm_bytes_per_second": 20e9,
            "bus_bytes_per_second": 30e9,
        }
        for size in (1 << 20, 1 << 24)
    ],
    "notes": ["the clock of process 1 (gpu2) is +2.5 s off that of process 0"],
    "seconds": 21.25,
    "stops": [],
}
