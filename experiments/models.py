"""The README's table of models by depth: `python -m experiments.models`. It is computed, nothing is trained.

The numbers come from nanochat/plan/planning.py, as `--plan` prints them, for base_train's defaults on public
text.
"""

import types
from dataclasses import replace
from pathlib import Path

import torch

import configurator
from nanochat.plan import planning

gpus = 1  # GPUs that train together [1..1e6]
gpu_tflops = 989.0  # peak of one of them in bfloat16 (989 = H100) [1e-3..1e6]
gpu_gib = 80.0  # memory of one of them [1..1e6]
mfu = 0.4  # share of the peak that training reaches [1e-3..1]

settings = configurator.configure(globals())

DEPTHS = (4, 6, 8, 10, 12, 16, 20, 24, 26)
DEFAULTS = configurator.defaults(Path(configurator.__file__).parent / "scripts" / "base_train.py")


def plan_of(depth: int) -> planning.Plan:
    """The plan for a depth, on unlimited text with a vocabulary of 32,768."""
    tokenizer = types.SimpleNamespace(vocab_size=32768)
    dataset = types.SimpleNamespace(estimated_tokens=lambda tokenizer: 10**12, more_text="")
    peak, memory = gpus * gpu_tflops * 1e12, int(gpu_gib * 2**30)
    hardware = planning.Hardware("cuda", gpus, torch.bfloat16, "", memory, peak, "")
    return planning.derive(DEFAULTS | {"depth": depth}, tokenizer, dataset, hardware).fitted(compiled=True)


def table() -> str:
    lines = [
        "| depth | width | parameters | tokens | batch | steps | FLOPs | memory of a GPU | time | shards |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for depth in DEPTHS:
        plan = plan_of(depth)
        flops = plan.flops_per_token * plan.tokens
        seconds = flops / (mfu * plan.hardware.peak_flops)
        one_row = replace(plan, device_batch_size=1)
        lines.append(
            f"| {depth} | {plan.config.width} | {plan.parameters['total'] / 1e6:,.0f} M | "
            f"{plan.tokens / 1e9:.2f} B | {plan.total_batch_size:,} | {plan.num_iterations:,} | "
            f"{flops:.2g} | {planning.gib(one_row.expected_bytes)} to {planning.gib(plan.expected_bytes)} | "
            f"{planning.duration(seconds)} | {plan.public_shards} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
