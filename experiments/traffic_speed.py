"""What one micro-step moves and launches on a GPU, counted on a machine without one:
`python -m scripts.bench --what=traffic --depth=12 --peer=FOLDER --json`.

PyTorch's compiler writes its code for an H100 (`gpu_codegen.py`), for our model and for karpathy/nanochat's
of the same shape, and its kernels are counted. On a GPU all but the products waits for memory, so these bytes
are milliseconds. With --folder=FOLDER the code of both stays there (ours_block_0_forward.py and so on), and
a table of all kernels: their operations, and the bytes a token of each tensor that they read and write.

On a GPU a run times our kernels by hand and uses those that are faster (`kernels.choose`). Here all are in
use, or those that --parts names: --parts=loss,head; --parts=none.
"""

from importlib.util import find_spec
from pathlib import Path

from experiments.sides import ROOT, Side, peer_folder, threads
from nanochat import UserError
from nanochat.ops.kernels import PROBES

# What was timed on a GPU (docs/benchmarks.md)
SETTINGS = {
    "depth": 12, "head_dim": 128, "max_seq_len": 2048, "vocab_size": 32768, "device_batch_size": 32
}  # fmt: skip
JOB = (*SETTINGS, "aspect_ratio", "window_pattern", "kernels", "folder")
# A kernel is of the first kind that one of its operations names
KINDS = {
    "loss": {"tanh", "log", "exp", "scatter"},
    "activation": {"relu", "leaky_relu", "gt", "le"},
    "look-ups": {"embedding", "index", "_unsafe_masked_index_put_accumulate", "index_put", "sort"},
    "norms": {"rsqrt", "pow", "div"},  # div: in their backward passes
    "gates": {"sigmoid"},
}
CASTS = {"permute", "prims.convert_element_type", "clone", "reshape"}  # kernels of nothing else


def bench(settings: dict) -> dict:
    """For each side its figures (see `figures`) and its kinds of kernels {kind: bytes a token, launches};
    with a peer ours over the peer's."""
    if find_spec("triton") is None:
        raise UserError("--what=traffic needs Triton, which writes the code: pip install triton (Linux only)")
    names = [name.strip() for name in settings["parts"].split(",")]
    used = {"": list(PROBES), "none": []}.get(settings["parts"], names)
    if unknown := set(used) - set(PROBES):
        raise UserError(f"--parts={unknown.pop()}: the kernels by hand are {', '.join(PROBES)} (or none)")
    folders = {"ours": ROOT} | ({"peer": peer_folder(settings["peer"])} if settings["peer"] else {})
    settings = settings | {"kernels": used}
    with threads() as pool:
        counted = list(pool.map(lambda side: count(*side, settings), folders.items()))
    tokens, found = settings["device_batch_size"] * settings["max_seq_len"], {}
    for side, answer in zip(folders, counted, strict=True):
        of_side, gradients = answer["kernels"], answer["gradients"]
        for kernel in of_side:
            kernel["kind"] = kind_of(kernel)
            kernel["bytes"] = sum([*kernel["reads"].values(), *kernel["writes"].values()]) / tokens
        found |= {side: figures(of_side), f"{side}_kinds": kinds(of_side)}
        # autograd adds each gradient to those of earlier micro-steps: outside of the code, so not in the sums
        found[side] |= {"adding_bytes": 3 * sum(gradients) / tokens, "adding_launches": len(gradients)}
        if settings["folder"]:
            Path(settings["folder"], f"{side}_kernels.tsv").write_text(table(of_side, tokens))
    if "peer" in found:
        for name in ("bytes", "launches"):
            found[f"{name}_over_peer"] = found["ours"][name] / found["peer"][name]
    return found


def count(side: str, folder: Path, settings: dict) -> dict:
    """gpu_codegen.count in a process of its own: the kernels of a micro-step, and the bytes of each gradient.
    Raises UserError if it fails."""
    job = {name: settings[name] for name in JOB} | {"whose": side, "dtype": "bfloat16"}
    try:
        with Side("experiments.gpu_codegen.count", job, folder) as process:
            return process.facts
    except RuntimeError as error:
        raise UserError(f"the model of {side} could not be counted: {error}") from None


def kind_of(kernel: dict) -> str:
    operations = set(kernel["operations"])
    if kernel["library"] and not kernel["reads"] and not kernel["writes"]:
        return "products and attention"
    if "inside" in kernel:
        return "loss"
    if kernel["library"] and len(own := [name for name in operations if name.startswith("nanochat.")]):
        return own[0]
    kinds = (kind for kind, words in KINDS.items() if words & operations)
    return next(kinds, "casts" if operations <= CASTS else "other")


def figures(kernels: list[dict]) -> dict[str, float]:
    """Bytes a token: in all, forward, backward, and those of the loss. How many launches of each sort."""
    parts = {"": kernels}
    parts |= {f"{phase}_": [k for k in kernels if k["phase"] == phase] for phase in ("forward", "backward")}
    parts["loss_"] = [k for k in kernels if k["kind"] == "loss"]
    found = {f"{name}bytes": sum(k["bytes"] for k in part) for name, part in parts.items()}
    found |= {f"{name}launches": len(part) for name, part in parts.items()}
    library = sum(kernel["library"] for kernel in kernels)
    return found | {"triton_launches": len(kernels) - library, "library_calls": library}


def kinds(kernels: list[dict]) -> dict[str, dict]:
    """{kind of kernel: its bytes a token, how many}, most bytes first."""
    names = sorted({kernel["kind"] for kernel in kernels})
    sizes = {kind: [kernel["bytes"] for kernel in kernels if kernel["kind"] == kind] for kind in names}
    found = {kind: {"bytes": sum(some), "launches": len(some)} for kind, some in sizes.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def table(kernels: list[dict], tokens: int) -> str:
    """All kernels, those with most bytes first: a line each, tensors by their names in the code."""
    lines = ["bytes a token\tphase\tkind\toperations\treads\twrites"]
    for kernel in sorted(kernels, key=lambda k: -k["bytes"]):
        tensors = [
            " ".join(f"{name}:{size / tokens:.0f}" for name, size in kernel[part].items())
            for part in ("reads", "writes")
        ]
        words = kernel["phase"], kernel["kind"], " ".join(kernel["operations"]), *tensors
        lines.append("\t".join((f"{kernel['bytes']:.0f}", *words)))
    return "\n".join(lines) + "\n"
