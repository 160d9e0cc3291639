"""The README's table of models by depth and the tables of docs/scale.md: `python -m experiments.scale`.

They are worked out, nothing is trained. The numbers come from nanochat/plan/, as `--plan` prints them, and
with `--world_size=N --device=GPU`, for base_train's defaults on public text.
"""

import bisect
from dataclasses import replace
from pathlib import Path

import configurator
from nanochat import UserError
from nanochat.plan import simulation
from nanochat.terminal import duration, gib

device = "H100"  # the GPU, by a name that --plan --device=GPU of base_train knows

configurator.configure(globals())

MODELS, DEPTHS = (4, 8, 12, 16, 20, 24, 26), (12, 16, 20, 24, 26, 32, 40)
GPUS = (1, 8, 64, 512)
DEFAULTS = configurator.defaults(Path(configurator.__file__).parent / "scripts" / "base_train.py")


def simulate(depth: int, gpus: int, **more) -> simulation.Simulation:
    return simulation.simulate(DEFAULTS | {"depth": depth, "device": device, "world_size": gpus} | more)


def table(head: str, rows: list[list]) -> str:
    """A Markdown table. head: its first line."""
    rule = "|--:" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def models() -> str:
    """The README's table: each depth on one GPU."""
    rows = []
    for depth in MODELS:
        found = simulate(depth, 1)
        plan = found.plan
        one_row = replace(plan, device_batch_size=1)
        sizes = [depth, plan.config.width, f"{plan.parameters['total'] / 1e6:,.0f} M"]
        sizes += [f"{plan.tokens / 1e9:.2f} B", f"{plan.total_batch_size:,}", f"{plan.num_iterations:,}"]
        flops = f"{plan.flops_per_token * plan.tokens:.2g}"
        memory = f"{gib(one_row.expected_bytes)} to {gib(plan.expected_bytes)}"
        rows.append([*sizes, flops, memory, duration(3600 * found.hours), plan.public_shards])
    head = "| depth | width | parameters | tokens | batch | steps | FLOPs | memory of a GPU | time | shards |"
    return table(head, rows)


def row(depth: int, gpus: int) -> list:
    """A line of the table of speeds."""
    try:
        found = simulate(depth, gpus)
    except UserError:  # the rows of the batch do not divide by the GPUs
        rows = simulate(depth, 1).plan.total_batch_size // DEFAULTS["max_seq_len"]
        return [depth, gpus, f"{rows} rows are too few", *[""] * 6]
    plan, memory = found.plan, found.plan.expected_bytes
    fits = "" if memory <= plan.hardware.memory else ", too much"
    return [
        depth,
        gpus,
        f"{plan.device_batch_size} x {plan.grad_accum_steps}",
        f"{gib(memory)}{fits}",
        f"{sum(found.exchange.values()) / 1e9:.1f} GB",
        f"{found.step_seconds:.3g} s",
        f"{100 * found.seconds['exchange'] / found.step_seconds:.0f} %",
        f"{plan.total_batch_size / found.step_seconds / 1e6:.3g} M",
        duration(3600 * found.hours),
    ]


def speeds() -> str:
    """Each depth on each number of GPUs."""
    head = "| depth | GPUs | rows x micro-steps of a GPU | memory of a GPU | sent by a GPU, a step | step "
    head += "| exchange | tokens/s | time |"
    return table(head, [row(depth, gpus) for depth in DEPTHS for gpus in GPUS])


def limits() -> str:
    """For each depth the batch, the memory of one row, and the GPUs that make sense."""
    lines = []
    for depth in DEPTHS:
        plan = simulate(depth, 1).plan
        rows = plan.total_batch_size // plan.config.max_seq_len
        computing = simulate(depth, 1).seconds["forward and backward"]
        gpu, sent = simulation.known_device(device), simulation.exchanged_bytes(plan.config, 512)
        exchange = simulation.exchange_seconds(sum(sent.values()), gpu, 512)
        sizes = [depth, f"{plan.parameters['total'] / 1e6:,.0f} M", f"{plan.tokens / 1e9:.1f} B"]
        most = [f"{plan.total_batch_size:,}", rows, gib(memory_of_one_row(depth))]
        lines.append([*sizes, *most, f"{computing / exchange:.0f} GPUs"])
    head = "| depth | parameters | tokens | batch | rows of it: most GPUs | memory with one row, 512 GPUs "
    return table(head + "| exchange takes as long as computing at |", lines)


def memory_of_one_row(depth: int) -> int:
    """Bytes of a process of 512 with one row of tokens."""
    batch = 512 * DEFAULTS["max_seq_len"]
    found = simulate(depth, 512, device_batch_size=1, total_batch_size=batch)
    return found.plan.expected_bytes


def deepest() -> int:
    """The largest depth whose weights, gradients and one row fit on the GPU, with 512 of them."""
    memory = simulate(1, 1).plan.hardware.memory
    return bisect.bisect_right(range(1, 128), memory, key=memory_of_one_row)


if __name__ == "__main__":
    print(models(), speeds(), limits(), f"One row fits up to depth {deepest()}.", sep="\n\n")
