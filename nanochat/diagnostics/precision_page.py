"""A recorded step as a page of statements and tables, which depend on the record alone."""

import re
from collections import Counter, defaultdict

from nanochat.diagnostics.recorder import PHASES, Record
from nanochat.machine.precision import name_of
from nanochat.terminal import table

NORMS = {"mean", "rsqrt", "_fused_rms_norm", "native_layer_norm", "native_group_norm", "native_batch_norm"}
CROSS_ENTROPY = {"_log_softmax", "nll_loss_forward", "nll_loss2d_forward"}
SOFTMAX = {"_softmax", "_safe_softmax"}
OUR_CROSS_ENTROPY = {"softmax", "log_"}  # those of loss.py, in the phase "loss"
FUSED_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
_FLASH = (
    "fused attention, which never holds the whole matrix of scores. By its source it sums the products of "
    "its inputs in float32 and keeps scores and softmax in float32. It rounds the probabilities to the "
    "inputs' dtype for the second product, and sums that in float32 too"
)
GLOSSARY = {
    "_foreach_copy_": "copies a list of tensors",
    "_foreach_mul_": "multiplies a list of tensors in place",
    "_foreach_norm": "the norm of each tensor of a list",
    "_fused_adamw_": "AdamW's whole update of a list of parameters in one kernel",
    "_log_softmax": "with nll_loss_forward: the cross-entropy",
    "_scaled_dot_product_cudnn_attention": "fused attention of cuDNN, which does not document its inside",
    "_scaled_dot_product_efficient_attention": "fused attention; we did not read its source",
    "_scaled_dot_product_flash_attention": _FLASH,
    "_scaled_dot_product_flash_attention_for_cpu": _FLASH,
    "_softmax": "softmax",
    "_to_copy": "a cast: a copy in another dtype (or, if the dtypes are equal, on another device)",
    "addmm": "matrix product plus bias",
    "baddbmm": "batched matrix product, added to another matrix",
    "bmm": "batched matrix product",
    "copy_": "writes into existing memory, with a cast if the dtypes differ",
    "embedding": "looks up rows of a table",
    "linalg_vector_norm": "the root of a sum of squares",
    "linear": "matrix product, plus bias if there is one",
    "linear_backward": "the gradients of linear: two matrix products",
    "mm": "matrix product: every `nn.Linear` without bias",
    "pow": "x^n: the squares of RMSNorm and of ReLU²",
}


def names_of(dtypes) -> str:
    """Such as "bfloat16 and float32", each dtype once."""
    return " and ".join(dict.fromkeys(name_of(d) for d in dtypes))


def without_layer(name: str) -> str:
    """blocks.3.mlp -> blocks.*.mlp"""
    return re.sub(r"(?<=\.)\d+\b", "*", name)


def percent(part, whole) -> str:
    """A share as text. 100 % and 0 % mean exactly all and none."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"


def dtypes_of(ops) -> str:
    """The names of the dtypes that these operators run in."""
    return names_of(op.dtype for op in ops if op.dtype is not None)


# ------------------------------------------------------------------------------------------------------
# Statements. Each function yields sentences about the record; if there is nothing to say, none.


def _autocast(record):
    said = []
    for phase, seen in record.autocast.items():
        on = [name_of(d) for d in seen if d is not None]
        said.append(f"{'on and off' if len(seen) > len(on) > 0 else 'on' if on else 'off'} in {phase}")
        said[-1] += f" ({' and '.join(on)})" if on else ""
    return [f"Autocast was {', '.join(said)}."] if said else []


def _flops(record):
    for phase in PHASES:
        flops = Counter()
        for op in record.ops:
            if op.phase == phase and op.flops:
                flops[op.dtype] += op.flops
        if flops:
            first, *others = [(percent(n, flops.total()), name_of(d)) for d, n in flops.most_common()]
            rest = "".join(f", {share} in {name}" for share, name in others)
            yield f"{first[0]} of {phase} FLOPs ran in {first[1]}{rest}."


def _attention(record):
    by_name = defaultdict(list)
    for op in record.ops:
        if op.phase != "backward" and any(word in op.name for word in FUSED_ATTENTION):
            by_name[op.name].append(op)
    for name, ops in by_name.items():
        phases = ", ".join(dict.fromkeys(op.phase for op in ops))
        inputs = names_of(d for op in ops for d in op.inputs[:3])
        outputs = names_of(d for op in ops for d in op.outputs[:1])
        kept = names_of(d for op in ops for d in op.outputs[1:2] if d.is_floating_point)
        extra = f" For the backward pass it kept the logarithm of the softmax's sums in {kept}." * bool(kept)
        yield (
            f"Attention ran as one fused operator, `{name}` (in {phases}). It took q, k and v in {inputs} "
            f"and gave its result in {outputs}.{extra} The record does not see the softmax and the two "
            "products inside; the list of names says what is known of them."
        )
    softmaxes = [op for op in record.ops if op.phase == "forward" and op.name in SOFTMAX]
    if softmaxes:
        yield f"Softmax outside of fused operators took and gave {dtypes_of(softmaxes)}."


def _forward_parts(record):
    forward = [op for op in record.ops if op.phase in ("forward", "loss")]
    norms = [op for op in forward if op.name in NORMS]
    residual = [op for op in forward if op.name == "add" and re.fullmatch(r"blocks\.\d+", op.module)]
    ours = [op for op in forward if op.phase == "loss" and op.name in OUR_CROSS_ENTROPY]
    cross_entropy = [op for op in forward if op.name in CROSS_ENTROPY] + ours
    for subject, ops in (
        ("Norms (the mean of squares and its root)", norms),
        ("The residual stream (sums in `blocks.*`)", residual),
        ("Cross-entropy", cross_entropy),
    ):
        if ops:
            yield f"{subject} ran in {dtypes_of(ops)}."
    if record.loss_dtype:
        yield f"The loss came out in {name_of(record.loss_dtype)}."


def _backward_products(record):
    early = [op for op in record.ops if op.phase == "loss" and op.flops]
    products = early + [op for op in record.ops if op.phase == "backward" and op.flops]
    pairs = [(op, record.ops[op.differentiates]) for op in products if op.differentiates is not None]
    pairs = [(op, forward) for op, forward in pairs if forward.flops]
    other = [(op, forward) for op, forward in pairs if op.dtype != forward.dtype]
    count = len(pairs)
    if other:
        op, forward = other[0]
        yield (
            f"{len(other)} of {count} backward matmuls ran in another dtype than their forward matmul, such "
            f"as `{op.module or op.name}`: {name_of(forward.dtype)} forward, {name_of(op.dtype)} backward."
        )
    elif pairs:
        said = "Each backward matmul ran in the dtype of its forward matmul"
        yield f"{said} ({count} of {count}, attention included)."
    if early:
        modules = ", ".join(dict.fromkeys(f"`{op.module}`" for op in early))
        sums = dtypes_of(op for op in record.ops if op.phase == "loss" and op.name == "add_")
        added = f" The parts of the weight's gradient were added in {sums}." if sums else ""
        yield (
            f"{len(early)} of them (of {modules}) ran with the loss, in {dtypes_of(early)}, because the "
            f"logits are at hand there.{added}"
        )
    if count < len(products):
        yield f"{len(products) - count} backward matmuls have no recorded forward matmul."


def _backward(record):
    rest = [op for op in record.ops if op.differentiates is not None and not (op.cast or op.is_view)]
    same = sum(op.dtype == record.ops[op.differentiates].dtype for op in rest)
    if rest:
        yield (
            f"{percent(same, len(rest))} of the backward operators ({same:,} of {len(rest):,}, casts not "
            "counted) ran in the dtype of their forward operator."
        )


def _patterns(names) -> list[str]:
    """Names with `*` for the number of the layer, each once."""
    return list(dict.fromkeys(f"`{without_layer(name)}`" for name in names))


def _weight_casts(record):
    for phase in ("forward", "generation", "chat"):
        ops = [op for op in record.ops if op.phase == phase]
        if not ops or not record.parameters:
            continue
        when = "the forward pass" if phase == "forward" else f"{phase} of {record.generated} tokens"
        casts = Counter(op.parameter for op in ops if op.parameter)
        if not casts:
            yield f"No parameter was cast in {when}."
            continue
        to = names_of(op.cast[1] for op in ops if op.parameter)
        named, never = _patterns(casts), _patterns(name for name in record.parameters if name not in casts)
        named = f" ({', '.join(named)})" if len(named) <= 3 else ""
        never = f"; not cast: {', '.join(never)}" if 0 < len(never) <= 3 else ""
        low, high = min(casts.values()), max(casts.values())
        times = {1: "once", 2: "twice"}.get(low, f"{low} times") if low == high else f"{low} to {high} times"
        yield (
            f"{len(casts)} of {len(record.parameters)} parameters{named} were cast to {to} in {when}, each "
            f"{times}{never}."
        )
    back = [op for op in record.ops if op.cast and op.differentiates is not None]
    back = [op.cast for op in back if record.ops[op.differentiates].parameter]
    if back:
        yield (
            f"{len(back)} gradients of cast parameters were computed in {names_of(a for a, _ in back)} and "
            f"cast to {names_of(b for _, b in back)} on their way to `.grad`."
        )


def _lasting(record):
    lasting = {"Parameters": record.parameters, "`.grad`": record.gradients, "optimizer state": record.state}
    dtypes = {what: names_of(named.values()) for what, named in lasting.items() if named}
    if len(dtypes) == 3 and len(set(dtypes.values())) == 1:
        yield f"Parameters, `.grad` and optimizer state: {dtypes['Parameters']}."
    elif dtypes:
        yield "; ".join(f"{what}: {dtype}" for what, dtype in dtypes.items()) + "."


def _update(record):
    norm = [op for op in record.ops if op.phase == "clip" and "norm" in op.name]
    adamw = [op for op in record.ops if op.phase == "optimizer" and "adam" in op.name]
    if norm:
        yield f"The gradient's norm, for clipping, was computed in {dtypes_of(norm)}."
    if adamw:
        yield f"AdamW's update (`{adamw[0].name}`) ran in {dtypes_of(adamw)}."
    if any(op.phase == "backward" for op in record.ops):
        scale = record.loss_scale
        yield (
            "No GradScaler was used." if scale is None else f"GradScaler multiplied the loss by {scale:,.0f}."
        )


PARTS = (
    _autocast, _flops, _attention, _forward_parts, _backward_products, _backward, _weight_casts, _lasting,
    _update,
)  # fmt: skip


def statements(record: Record) -> list[str]:
    """What the record shows, as sentences."""
    return [sentence for part in PARTS for sentence in part(record)]


# ------------------------------------------------------------------------------------------------------
# Tables


def rows(record: Record, phase: str) -> list[list]:
    """[operation, module, inputs, output, calls, FLOPs], one row for each kind of call in a phase, in the
    order of first calls. Layers share rows. Views are left out: they compute nothing."""
    found = {}
    for op in record.ops:
        if op.phase == phase and not op.is_view:
            dtypes = (", ".join(dict.fromkeys(map(name_of, d))) for d in (op.inputs, op.outputs))
            row = found.setdefault((op.name, without_layer(op.module), *dtypes), [0, 0])
            row[0] += 1
            row[1] += op.flops
    return [[*key, *row] for key, row in found.items()]


def phase_table(record: Record, phase: str) -> str:
    """`rows` as Markdown; FLOPs are shares of the phase's."""
    found, shown = rows(record, phase), [["operation", "module", "inputs", "output", "calls", "FLOPs"]]
    total = sum(flops for *_, flops in found)
    for name, module, *dtypes, calls, flops in found:
        share = percent(flops, total) if flops else ""
        shown.append([f"`{name}`", f"`{module}`" if module else "", *dtypes, str(calls), share])
    return table(shown, left=4)


def summary(record: Record) -> str:
    """A Markdown row a phase: calls that compute, casts among them, FLOPs, and the dtypes of these."""
    found = [["phase", "calls", "of these casts", "GFLOPs", "FLOPs run in"]]
    for phase in PHASES:
        ops = [op for op in record.ops if op.phase == phase and not op.is_view]
        if ops:
            flops, casts = sum(op.flops for op in ops), sum(op.cast is not None for op in ops)
            dtypes = dtypes_of(op for op in ops if op.flops) or "-"
            found.append([phase, f"{len(ops)}", f"{casts}", f"{flops / 1e9:.3g}", dtypes])
    return table(found)


HOW_TO_READ = """\
- **A row** is an operator of ATen, PyTorch's core. Rows are in the order of the first call. Equal calls of
  all layers share a row, and `*` stands for the number of the layer.
- **Inputs and output** are the dtypes of its tensors. Inside it may compute in a wider dtype and round at the
  end. A cast is an operator of its own, `_to_copy`.
- **FLOPs** is its share of the phase's FLOPs. Matrix products and attention are counted (attention in full,
  not half for causality); everything else has very few.
- **Module**: for a gradient it is the module of the forward operator. It is empty for code of the model
  outside of its submodules, and for code outside of the model.
- **Phases**: *loss* is what follows the head's product, and it is part of the forward pass: softcap and
  cross-entropy, and the gradients of the head's product, which loss.py makes while the logits are at hand. It
  does so for one chunk of tokens after another. *Clip* includes the division by GradScaler's scale.
  *Generation* makes tokens under autocast, as base_train.py makes its samples; *chat* makes them with weights
  cast once, as scripts/chat.py does.
- **Left out**: `view`, `transpose` and others that only give memory another shape.
- **Not seen**: what happens inside one kernel. A fused operator (attention, AdamW) is one row. A product, a
  sum or a softmax of bfloat16 numbers may add up in float32 (docs/precision.md).
- **Eager**: code made by `torch.compile` has no operators to record. It may keep in float32 what eager code
  rounds to bfloat16 between two operators."""


def page(record: Record, title: str, facts: list[str]) -> str:
    """The whole report as Markdown. facts: lines about the machine and the settings."""
    used = {op.name for op in record.ops}
    parts = [f"# {title}", "\n".join(f"- {fact}" for fact in facts), "## What ran in which precision"]
    parts += ["\n".join(f"- {sentence}" for sentence in statements(record)), summary(record)]
    parts += ["## How to read the tables", HOW_TO_READ]
    words = [f"- `{name}`: {meaning}" for name, meaning in GLOSSARY.items() if name in used]
    parts += ["Names:", "\n".join(words)] if words else []
    for phase in PHASES:
        if any(op.phase == phase for op in record.ops):
            parts += [f"## {phase.capitalize()}", phase_table(record, phase)]
    return "\n\n".join(parts) + "\n"
