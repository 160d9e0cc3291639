"""What a training step keeps in memory, counted on tensors without memory, against the plan's estimate.

    python -m experiments.memory_count    # d12, d20 and d26: a table like results/memory-estimate.tsv
    python -m experiments.memory_count --depths=4 --rows=2

"fake" tensors have a shape and a dtype but no memory. Eager: each storage is counted from its first to its
last use, in the second of two micro-steps. Compiled: the graphs are those that AOTAutograd and inductor's
partitioner make. A result of a graph counts as memory if a matrix product, attention, a sum or the end of the
graph reads it; what is left is fused into its readers. Both run with the lists of CUDA's autocast.
"""

import contextlib
from unittest import mock

import torch
from torch._functorch.aot_autograd import aot_function
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode

import configurator
from experiments import equal_tokens
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision
from nanochat.ops import elementwise, loss
from nanochat.plan import memory, scaling
from nanochat.plan.counts import on_meta, parameter_counts

depths = "12,20,26"  # of the models, separated by commas
rows = 8  # of a micro-batch [1..2**20]
max_seq_len = 2048  # tokens of a row [1..2**20]
vocab_size = 32768  # tokens [1..2**20]

# Calls of a library, which read their inputs from memory and write their outputs to it; all else is fused
CALLS = (
    "head_and_loss", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product", "embedding_dense_backward",
    "index_put",
)  # fmt: skip


class CudaLists(TorchFunctionMode):
    """Autocast of the CPU with CUDA's list: of what our model calls, it differs in rms_norm and pow, which
    CUDA computes in float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        in_float32 = function in (torch.rms_norm, torch.Tensor.square, torch.Tensor.pow)
        if in_float32 and torch.is_autocast_enabled("cpu"):
            args = args[0].float(), *args[1:]
        return function(*args, **(kwargs or {}))


def plain_formulas():
    """Norms and all that as a GPU computes them, and not by hand as a CPU does."""
    return mock.patch.object(elementwise, "_by_hand", lambda x: False)


def eager(config: GPTConfig, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of an eager step beyond weights and gradients: `kept` from the forward to the backward pass, and
    the `peak`."""
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        stack.enter_context(plain_formulas())
        model = GPT(config)
        model.init_rotary()
        idx = torch.zeros(rows, config.max_seq_len, dtype=torch.int64)
        for p in model.parameters():
            p.grad = torch.empty_like(p)  # of the first micro-step
        lasting = 2 * sum(p.nbytes for p in model.parameters()) + model.cos.nbytes + model.sin.nbytes
        tracker = MemTracker()
        tracker.track_external(model)
        stack.enter_context(tracker)
        with CudaLists(), precision.autocast(idx.device, dtype):
            loss = model(idx, idx)
        torch.clear_autocast_cache()
        kept = _total(tracker, "current") - lasting
        loss.backward()
        return {"kept": kept, "peak": _total(tracker, "peak") - lasting}


def _total(tracker: MemTracker, what: str) -> int:
    return sum(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot(what).values())


def compiled(config: GPTConfig, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The same for a compiled step."""
    graphs = []

    def partition(joint, inputs, **options):
        graphs.extend(partition_fn(joint, inputs, **options))
        return graphs

    with FakeTensorMode(allow_non_fake_inputs=True), plain_formulas():
        model = GPT(config)
        model.init_rotary()
        idx = torch.zeros(rows, config.max_seq_len, dtype=torch.int64)
        tensors = {**dict(model.named_parameters()), "cos": model.cos, "sin": model.sin}

        def loss_of(idx, *values):
            return torch.func.functional_call(model, dict(zip(tensors, values, strict=True)), (idx, idx))

        function = aot_function(
            loss_of,
            fw_compiler=lambda graph, inputs: graph,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        with (
            mock.patch("torch.compiler.is_compiling", lambda: True),  # loss.py then calls its operator
            CudaLists(),
            precision.autocast(idx.device, dtype),
        ):
            function(idx, *tensors.values())
    results, forward = _walk(graphs[0], set())
    _, backward = _walk(graphs[1], set(results))
    return {"kept": sum(results.values()), "peak": max(forward, backward)}


def _walk(graph: torch.fx.GraphModule, given: set[str]) -> tuple[dict[str, int], int]:
    """({name: bytes} of what the graph leaves in memory, the most bytes at any time), without its inputs.

    given: names of the inputs that count all the same, since the forward graph has kept them for the backward
    graph. They are freed after their last use. Views of one result count once.
    """
    nodes = list(graph.graph.nodes)
    base = {}  # node -> the node whose memory it shows
    for node in nodes:
        base[node] = base[node.args[0]] if _is_view(node) else node
    in_memory = {node for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if _is_call(node):
            in_memory |= {node, *(base[source] for source in node.all_input_nodes)}
    reads = {}  # of what is fused: the memory that it reads
    for node in nodes:
        sources = [base[source] for source in node.all_input_nodes]
        reads[node] = set().union(*({s} if s in in_memory else reads[s] for s in sources))
        if _is_sum(node) or (len(node.users) > 1 and len(reads[node]) > 4):  # inductor writes it to memory
            in_memory.add(base[node])
    in_memory = {node for node in in_memory if node.op != "placeholder" or node.name in given}
    last_read = {}  # of what is in memory: the last node that reads it, itself or through what is fused
    for i in reversed(range(len(nodes))):
        reader = base[nodes[i]]
        when = i if reader in in_memory or reader.op == "output" else last_read.get(reader, i)
        for source in nodes[i].all_input_nodes:
            last_read[base[source]] = max(last_read.get(base[source], 0), when)
    live = sum(map(_size, (node for node in nodes if node.op == "placeholder" and node in in_memory)))
    most, freed = live, {}
    for node in in_memory:
        freed.setdefault(last_read.get(node), []).append(node)
    for i, node in enumerate(nodes):
        if node in in_memory and node.op != "placeholder":
            live += _size(node)
            most = max(most, live)
        live -= sum(map(_size, freed.get(i, ())))
    results = {base[node]: node.name for node in nodes[-1].all_input_nodes}
    return {name: _size(node) for node, name in results.items() if node in in_memory}, most


def _is_view(node: torch.fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or node.target == torch.ops.aten._unsafe_view.default


def _is_call(node: torch.fx.Node) -> bool:
    """Whether a node reads its inputs from memory and writes its results there."""
    if node.op == "output":
        return True
    return node.op == "call_function" and any(name in str(node.target) for name in CALLS)


def _is_sum(node: torch.fx.Node) -> bool:
    return any(name in str(node.target) for name in ("aten.sum", "aten.mean", "aten.amax"))


def _size(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if "head_and_loss" in str(node.target):  # what it needs inside, until its results are read
        x, weight = (source.meta["val"] for source in node.args[:2])
        rows = loss.chunk_rows(x.size(0), weight.size(0), "cpu", x.dtype, in_one_pass=True)
        return (rows * weight.size(0) + weight.numel()) * x.element_size() + 4 * weight.numel()
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def compare(config: GPTConfig, rows: int, dtype: torch.dtype, is_compiled: bool) -> dict[str, float]:
    """GiB of a step of several micro-steps in one process: counted, as estimated, and their ratio.

    The optimizer's state and its update are not counted, only estimated, so both sides leave them out.
    """
    with mock.patch.dict(loss.CHUNK_LOGITS, cpu=loss.CHUNK_LOGITS["cuda"]):
        beyond = (compiled if is_compiled else eager)(config, rows, dtype)
    model = 8 * parameter_counts(on_meta(config))["total"]  # weights and gradients
    needed = memory.training_bytes(config, rows * config.max_seq_len, dtype, is_compiled)
    estimate = sum(needed.values()) - needed["optimizer state"]
    counted = model + beyond["peak"]
    return {"counted": counted / 2**30, "estimate": estimate / 2**30, "ratio": estimate / counted}


def main():
    configurator.configure(globals())
    wanted = equal_tokens.numbers("depths", depths)
    print("| depth | dtype | code | counted, GiB | estimate, GiB | estimate / counted |")
    print("| --: | :-- | :-- | --: | --: | --: |")
    for depth in wanted:
        config = scaling.model_config(depth, 64, 128, max_seq_len, vocab_size, "L")
        for dtype in ("bfloat16", "float32"):  # float16 needs as much as bfloat16
            for is_compiled in (True, False):
                found = compare(config, rows, precision.DTYPES[dtype], is_compiled)
                code = "compiled" if is_compiled else "eager"
                numbers = f"{found['counted']:.2f} | {found['estimate']:.2f} | {found['ratio']:.3f}"
                print(f"| {depth} | {dtype} | {code} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
