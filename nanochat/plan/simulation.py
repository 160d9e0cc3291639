"""A run on GPUs that are not here: its plan, memory, exchange, time and cost, worked out from counts.

    python -m scripts.base_train --depth=24 --plan --world_size=64 --device=H100

The plan is the one that planning.py would make there. Memory, FLOPs and bytes are counted. The efficiencies
below turn counts into seconds: ours where this code was measured, d12 on one H200 (docs/benchmarks.md), else
figures of others or assumptions. docs/scale.md has a table for many sizes, and says where this design stops.
"""

import functools
import re
import types
from dataclasses import dataclass, replace

import numpy
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanochat import UserError, muon
from nanochat.gpt import GPTConfig
from nanochat.machine.hardware import GPU, GPUS, Hardware
from nanochat.machine.precision import name_of
from nanochat.ops.fp8 import FP8_CAPABILITY
from nanochat.plan import counts, memory, planning, wording
from nanochat.terminal import duration, gib
from nanochat.zero import is_shared_out, share_out

PUBLIC_VOCABULARY = 32_768  # tokens; base_train's default for public text
ENOUGH_TEXT = 10**15  # tokens: a simulated run never reads its text twice

# Share of the peak that the forward and backward passes reach, by depth: what karpathy/nanochat measured on
# 8 x H100 (its bfloat16 runs, whole steps). Between these depths it is interpolated. OUR_MFU: whole steps of
# this code on a GPU of that name (2026-11-26); there it replaces the other's figure.
MFU = {8: 0.40, 12: 0.41, 18: 0.46, 24: 0.50}
OUR_MFU = {"H200": {12: 0.448}}
# Times as many tokens a second with fp8, by depth: the same project's log of 2026-02-02 (no gain at d12)
FP8_GAIN = {12: 1.0, 26: 1.17}
LINK_EFFICIENCY = 0.7  # share of a link's rate that a large exchange reaches; assumed
FREE_MEMORY = 0.97  # share of the memory that a process finds free; assumed


def known_device(name: str) -> GPU:
    """The entry of GPUS for a name as people type it: H100, rtx4090, "NVIDIA A100". UserError with the names
    that there are."""
    known = {_shortened(gpu.name): gpu for gpu in GPUS if gpu.memory}
    if device := known.get(_shortened(name)):
        return device
    names = ", ".join(gpu.name for gpu in known.values())
    raise UserError(f"device {name!r} is not in the table of GPUs; give one of {names}")


def _shortened(name: str) -> str:
    return re.sub(r"nvidia|amd|instinct|tesla|geforce|rtx|[\s_-]", "", name.lower()).removesuffix("x")


# ------------------------------------------------------------------------------------------------------
# Counts


def exchanged_bytes(config: GPTConfig, world_size: int, gradient_bytes: int = 4) -> dict[str, float]:
    """Bytes that a process sends, and receives, in a step.

    Each gradient goes to the process that owns its weights (a reduce_scatter), and the new weights come back
    (an all_gather): (N - 1) / N of all of them each. Plain DDP's all_reduce in float32 sends as much.
    """
    share = counts.parameter_counts(counts.on_meta(config))["total"] * (world_size - 1) / world_size
    return {"gradients": gradient_bytes * share, "weights": 4 * share}


def exchange_seconds(size: float, device: GPU, world_size: int) -> float:
    """Seconds for `size` bytes that each process sends in a large exchange, without the latency of messages.

    Between machines the traffic of all GPUs of a machine goes over all its adapters: in a ring each byte
    leaves a machine once, however many GPUs it passes there.
    """
    rate = device.link
    if world_size > device.per_node:
        rate = min(rate, device.network * device.per_node)
    return size / (LINK_EFFICIENCY * rate * 1e9)


@functools.cache
def polar_factor_flops(rows: int, columns: int) -> int:
    """FLOPs of the orthogonalization of one matrix, counted while muon.py computes it on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        muon.polar_factor(torch.empty(1, rows, columns))
    return counter.get_total_flops()


def optimizer_flops(config: GPTConfig, world_size: int) -> int:
    """FLOPs of Muon in the process that has the most of them; AdamW has next to none."""
    # More processes than matrices change nothing, and make share_out slow
    model = counts.on_meta(config)
    matrices = [p.shape for p in model.blocks.parameters() if p.ndim == 2 and is_shared_out(p.shape)]
    world_size = max(1, min(world_size, len(matrices)))
    owners, _ = share_out(matrices, [], world_size)
    work = [0] * world_size
    for owner, shape in zip(owners, matrices, strict=True):
        work[owner] += polar_factor_flops(*shape)
    return max(work)


def at(points: dict[int, float], depth: int) -> float:
    """The value at a depth: linear between the points, constant outside of them."""
    return float(numpy.interp(depth, *zip(*sorted(points.items()), strict=True)))


def mfu(device: GPU, depth: int) -> float:
    """Share of the GPU's peak that the forward and backward passes reach: ours if it is known."""
    return at(MFU | OUR_MFU.get(device.name, {}), depth)


# ------------------------------------------------------------------------------------------------------
# The run


@dataclass(frozen=True)
class Simulation:
    """What a run is expected to need; made by `simulate`."""

    device: GPU
    plan: planning.Plan
    exchange: dict[str, float]  # bytes of a process and step, by kind
    seconds: dict[str, float]  # seconds of a step, by kind; nothing overlaps

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def hours(self) -> float:
        """Of all steps; evaluations, saves and compiling come on top. In a run by minutes, of all."""
        if minutes := self.plan.horizon.minutes:
            return minutes / 60
        return self.step_seconds * self.plan.num_iterations / 3600

    @property
    def mfu(self) -> float:
        """Share of the 16-bit peak, over the whole step."""
        flops = self.plan.flops_per_token * self.plan.total_batch_size
        return flops / self.step_seconds / self.plan.hardware.peak_flops


def simulate(settings: dict) -> Simulation:
    """The run that the settings of base_train, {name: value}, would be on `world_size` GPUs of kind `device`.

    Raises UserError for a GPU that the table lacks, for settings that cannot be there, and what
    planning.derive raises.
    """
    device, world_size = known_device(settings["device"]), max(1, settings["world_size"])
    check(settings, device)
    hardware = Hardware(
        "cuda",
        world_size,
        device.dtype,
        f"as {device.name} has it",
        int(FREE_MEMORY * device.memory * 2**30),
        world_size * device.peak_flops,
        f"data sheet of {device.name}",
    )
    vocab_size = settings["vocab_size"] if settings["vocab_size"] != -1 else PUBLIC_VOCABULARY
    tokenizer = types.SimpleNamespace(vocab_size=vocab_size)
    text = types.SimpleNamespace(estimated_tokens=lambda tokenizer: ENOUGH_TEXT, text_bytes=0, more_text="")
    plan = planning.derive(settings, tokenizer, text, hardware, {})
    plan = replace(plan, compiled=True, compile_reason="assumed").with_largest_micro_batch()
    gradient_bytes = 2 if settings["gradient_dtype"] == "bfloat16" else 4
    exchange = exchanged_bytes(plan.config, world_size, gradient_bytes)
    gain = at(FP8_GAIN, plan.config.depth) if plan.fp8 else 1.0
    rate = mfu(device, plan.config.depth) * device.peak_flops  # FLOP/s of a GPU
    seconds = {
        "forward and backward": plan.flops_per_token * plan.total_batch_size / world_size / rate / gain,
        "optimizer": optimizer_flops(plan.config, world_size) / rate,
        "exchange": exchange_seconds(sum(exchange.values()), device, world_size),
    }
    return Simulation(device, plan, exchange, seconds)


def check(settings: dict, device: GPU):
    """Raise UserError for settings that contradict the device."""
    if settings["dtype"] not in ("auto", name_of(device.dtype)):
        raise UserError(
            f"the simulation of {device.name} computes in {name_of(device.dtype)}; leave out --dtype"
        )
    if settings["fp8"] and device.capability < FP8_CAPABILITY:
        able = ", ".join(d.name for d in GPUS if d.capability >= FP8_CAPABILITY)
        raise UserError(
            f"{device.name} cannot multiply in fp8; leave out --fp8, or give --device one of {able}"
        )


# ------------------------------------------------------------------------------------------------------
# In words


def page(settings: dict) -> str:
    """The plan of `--plan --world_size=N --device=GPU`, as lines for a terminal. Raises UserError without
    `plan`, and as `simulate` does."""
    if not settings["plan"]:
        raise UserError(
            "--device and --world_size plan for GPUs that are not here; add --plan. To choose the device "
            "that trains give --device_type, and start several processes with torchrun"
        )
    if settings["device"] is None:
        raise UserError("--world_size plans for a cluster of GPUs; name the GPU with --device, such as H100")
    found = simulate(settings)
    plan, hardware, device = found.plan, found.plan.hardware, found.device
    text = types.SimpleNamespace(name="public text", note="as much as it needs", fingerprint="")
    tokenizer = types.SimpleNamespace(name="", vocab_size=plan.config.vocab_size, fingerprint="")
    sections = wording.sections(plan, text, tokenizer, "none: nothing is trained here")
    sections["machine"]["device"] = (
        f"{device.name} x {hardware.world_size}, imagined; {hardware.peak_flops / 1e12:,.0f} TFLOP/s in all "
        f"({hardware.peak_source})"
    )
    vocabulary = f"with a vocabulary of {plan.config.vocab_size:,} tokens"
    sections["text"] = {"data": f"imagined: as much as is read once, {vocabulary}"}
    time = sections.pop("cost")["time"]
    if not plan.horizon.minutes:  # the efficiencies are others than on this machine
        time = f"{duration(3600 * found.hours)} of steps; {wording.NOT_COUNTED}"
    del sections["training"]["epochs"], sections["machine"]["folder"]
    needed = {kind: gib(size) for kind, size in plan.expected_memory.items() if size}
    needed["together"] = f"{gib(plan.expected_bytes)} of {gib(hardware.memory)} that are free"
    sections["memory of a process"] = needed
    sent = ", ".join(f"{size / 1e9:.2f} GB of {kind}" for kind, size in found.exchange.items())
    parts = ", ".join(f"{1000 * seconds:.1f} ms {kind}" for kind, seconds in found.seconds.items() if seconds)
    sections["a step"] = {
        **({"exchange": f"each process sends {sent}"} if hardware.world_size > 1 else {}),
        "time": f"{1000 * found.step_seconds:.1f} ms: {parts}",
        "speed": f"{plan.total_batch_size / found.step_seconds:,.0f} tokens/s, MFU {100 * found.mfu:.0f} %",
    }
    sections["the run"] = {"time": time}
    if settings["price_per_hour"] >= 0:
        price = settings["price_per_hour"]
        sections["the run"]["cost"] = (
            f"{price * found.hours:,.2f} at {price:g} an hour for all {hardware.world_size} GPUs together"
        )
    assumed = f"{100 * mfu(device, plan.config.depth):.0f} % of the peak in forward, backward and optimizer"
    if plan.fp8:
        assumed += f", x {at(FP8_GAIN, plan.config.depth):.2f} with fp8"
    sections["the run"]["assumed"] = (
        f"{assumed}; {100 * LINK_EFFICIENCY:.0f} % of the links' rate, nothing of it hidden behind the "
        "backward pass; measured by us: nothing but d12 on one H200 (docs/scale.md)"
    )
    # Not plan.warnings: they are of a run on this machine, and tell its time by another assumption
    refusal = memory.refusal(plan)
    return wording.text(sections, [refusal] if refusal else [])
