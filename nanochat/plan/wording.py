"""The plan of a run in words, each number with its reason."""

from nanochat.machine.precision import name_of
from nanochat.plan import memory, scaling
from nanochat.plan.planning import Plan
from nanochat.terminal import counted, duration, gib, wrapped

# What a run shows at its start. --plan shows all, and config.json keeps all
BRIEF = {"device", "precision", "folder", "data", "targets", "base", "size", "horizon", "batch", "time"}
NOT_COUNTED = "starting, compiling, evaluations and saves come on top"


def sections(plan: Plan, dataset, tokenizer, run_path) -> dict[str, dict[str, str]]:
    """The plan in words, {section: {name: text}}. `text` shows it."""
    config, counts, hardware = plan.config, plan.parameters, plan.hardware
    heads = counted(config.num_heads, "head", "heads")
    products = ", the large products of the blocks in fp8" if plan.fp8 else ""
    return {
        "machine": {
            "device": f"{hardware.device_type} x {hardware.world_size} ({hardware.name}), "
            f"{hardware.peak_flops / 1e12:.3g} TFLOP/s in all ({hardware.peak_source})",
            "precision": f"compute in {name_of(hardware.dtype)} ({hardware.dtype_reason}){products}; "
            "weights, gradients and optimizer state in float32",
            "compiled": f"{'yes' if plan.compiled else 'no'} ({plan.compile_reason})",
            "folder": str(run_path),
            **({"attention": plan.attention.reason} if plan.attention else {}),
            **({"kernels": plan.kernels.reason} if hardware.device_type == "cuda" and plan.kernels else {}),
        },
        "text": {
            "data": f"{dataset.name}, {dataset.note}, fingerprint {dataset.fingerprint[:12]}",
            "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens, fingerprint "
            f"{tokenizer.fingerprint[:12]}",
        },
        "model": {
            "size": f"depth {config.depth}, width {config.width} ({heads} of {config.head_dim}"
            f"{plan.width_reason}), rows of {config.max_seq_len} tokens",
            "parameters": f"{counts['total']:,}, of which {counts['matrices']:,} in matrices and "
            f"{counts['head']:,} in the head; {plan.flops_per_token:,} FLOPs a token",
            "spelling": "tokens spelled alike share a part of their rows in embedding and head"
            if config.spelled
            else "each token has rows of its own alone",
            "bigrams": f"pairs of tokens share {config.bigrams * config.vocab_size:,} rows, triples as many"
            f"{', and pairs as many for values' if config.value_tables == 2 else ''}"
            if config.bigrams
            else "pairs and triples of tokens have no rows",
            "copying": "the rows of what followed the same tokens before are added"
            if config.copying
            else "what followed the same tokens before is not added",
        },
        "training": training(plan),
        "cost": cost(plan),
    }


def training(plan: Plan) -> dict[str, str]:
    """How long a run trains, in which batches and with which rates."""
    multiplied, scaled = plan.parameters["matrices"] + plan.parameters["head"], plan.scaled
    micro_batch = f"{counted(plan.device_batch_size, 'row', 'rows')} x {plan.config.max_seq_len} tokens"
    processes = counted(plan.hardware.world_size, "process", "processes")
    micro_steps = counted(plan.grad_accum_steps, "micro-step", "micro-steps")
    about = "about " if plan.horizon.minutes else ""
    tables = f"table_decay {plan.table_share:.3g}, constant" if plan.table_share else "none"
    return {
        "horizon": f"{about}{counted(plan.num_iterations, 'step', 'steps')}, {plan.tokens:,} tokens "
        f"({plan.horizon.reason})",
        "tokens": f"{plan.tokens / multiplied:.3g} a parameter",
        "epochs": f"{plan.epochs:.3g}; the text has about {plan.data_tokens:,} tokens"
        + (f" of {plan.bytes_per_token:.2f} bytes" if plan.bytes_per_token else ""),
        "batch": f"{plan.total_batch_size:,} tokens ({plan.horizon.batch_reason}) = {micro_batch} x "
        f"{processes} x {micro_steps}",
        "rates": ", ".join(f"{name} {rate:.3g}" for name, rate in plan.rates.items()),
        "rate factors": scaled.reason,
        "weight decay": f"{plan.weight_decay:.4g} ({scaled.decay_reason}); embeddings and head: {tables}",
        "warm-up": counted(plan.warmup_steps, "step", "steps"),
    }


def cost(plan: Plan) -> dict[str, str]:
    """The memory and the time that a run takes."""
    hardware = plan.hardware
    held = f"{gib(hardware.held)} of it held already, " if hardware.held else ""
    time = f"{duration(plan.expected_seconds)} of steps at an assumed {scaling.ASSUMED_MFU:.0%} of the peak"
    time += f"; {NOT_COUNTED}"
    if plan.horizon.minutes:
        time = f"{plan.horizon.minutes:g} min from the command to its end"
    return {
        "memory": f"{gib(hardware.held + plan.expected_bytes)} a process, {held}"
        f"{gib(hardware.memory)} are free; {memory.in_words(plan.expected_memory)}",
        "time": time,
    }


def text(sections: dict[str, dict[str, str]], warnings: list[str], whole: bool = True) -> str:
    """The sections as aligned lines for a terminal, and the warnings below them. whole=False: few lines."""
    if not whole:
        named = [item for section in sections.values() for item in section.items() if item[0] in BRIEF]
        sections = {"plan (--plan prints all of it)": dict(named)}
    width = max(len(name) for section in sections.values() for name in section)
    lines = []
    for title, section in sections.items():
        lines.append(title)
        lines += [wrapped(f"  {name:{width}}  {said}", width + 4) for name, said in section.items()]
    return "\n".join([*lines, *(wrapped(f"warning: {warning}", 2) for warning in warnings)])


def lines(sections: dict[str, dict[str, str]]) -> list[str]:
    """The same for a file: `name: text`."""
    return [f"{name}: {said}" for section in sections.values() for name, said in section.items()]
