"""What check.json has under `memory`, made by hand."""

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
    "worst_case": "4,096 tokens, rows of up to 2,048, 4,096 tokens predicted; 1 micro-batch a step",
    "phases": {"forward": 18 * GB, "backward": 20 * GB, "optimizer": 17 * GB},
    "peak_bytes": 20 * GB,
    "peak_where": "backward",
    "anatomy": ANATOMY,
    "kept_bytes": 16 * GB,
    "host_bytes": 0,
    "buckets_bytes": 0,
    "lost_bytes": 500_000_000,
    "context_bytes": 800_000_000,
    "margin_bytes": 757_000_000,
    "reserved_bytes": 20_500_000_000,
    "needed_bytes": 22_057_000_000,
    "memory_bytes": 25_233_000_000,
    "fits": True,
    "flops_per_token": 4.8e10,
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
            "costs": "precision of the numbers",
            "why": "4 bits a weight",
        },
    ],
    "together": None,
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
