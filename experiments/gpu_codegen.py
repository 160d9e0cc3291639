"""PyTorch's compiler writes its code for an H100 on a machine without a GPU, and its kernels are counted.

`traffic_speed.py` calls `count` once for our model and once for karpathy/nanochat's, each in a process of its
own, because what stands under "A GPU that is not there" changes torch for the whole process.

The forward and the backward graph of one micro-step are traced on tensors without data (fake tensors). With
torch's build for CPUs these are CPU tensors, so while the model runs, it reads "cuda" where it asks a tensor
for its device. The graphs are then moved to fake CUDA tensors and given to Inductor, which believes that it
has an H100 and is stopped before Triton compiles. Its schedule says what each kernel reads and writes, by the
rules of `kernel_bytes.py`. An operator of ours that is written in PyTorch (PYTHON) is run on tensors without
data, and its calls are counted.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.fx_passes.reinplace
from functorch.compile import make_boxed_func
from torch._decomp import decompositions
from torch._functorch.aot_autograd import aot_function
from torch._inductor.compile_fx import compile_fx_inner, partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from experiments.kernel_bytes import Calls, scheduled, tensors_in
from experiments.sides import SHAPE, peer_config

CUDA = torch.device("cuda", 0)
PYTHON: dict = {}  # our operators that are written in PyTorch: {name: its function}


# ------------------------------------------------------------------------------------------------------
# A GPU that is not there


def pretend():
    """Change torch so that Inductor writes code for an H100. Nothing can run any more."""
    import torch._dynamo.device_interface
    import torch._dynamo.utils
    import torch._functorch.aot_autograd
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    h100 = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
        shared_memory_per_multiprocessor=233472, is_integrated=False, is_multi_gpu_board=False,
        gcnArchName="", uuid="0", pci_bus_id=0,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": h100,
        "get_device_capability": (9, 0), "is_initialized": True, "is_bf16_supported": True,
        "get_compute_capability": 90, "raise_if_triton_unavailable": None, "is_triton_capable": True,
        "_lazy_init": None, "synchronize": None, "set_device": None, "set_rng_state": None,
        "get_rng_state": None, "_exchange_device": None, "_maybe_exchange_device": None,
    }  # fmt: skip
    interface = torch._dynamo.device_interface.CudaInterface
    for name, value in answers.items():
        answer = lambda *_, value=value, **__: value  # noqa: E731
        for place in (torch.cuda, interface, interface.Worker):
            if hasattr(place, name):
                setattr(place, name, answer if place is torch.cuda else staticmethod(answer))
    driver._active = SimpleNamespace(  # what Triton asks for
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CUDA,
    )
    for module in (torch._dynamo.utils, torch._functorch.aot_autograd):
        module.preserve_rng_state = contextlib.nullcontext
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.fx_passes.reinplace._inplace_generalized_scatter = lambda x, source, views: x  # asks CUDA
    torch.Tensor.__invert__ = lambda x: x.bitwise_not()  # ~ asks CUDA
    torch.compiler.is_compiling = lambda: True
    torch.compile = lambda function=None, **_: function or (lambda function: function)
    GraphLowering._compile_to_module = stop
    # Its own code asks for devices outside of any function that ReadsCuda sees; a forward pass asks for none
    apply = torch.autograd.Function.apply.__func__

    def apply_alone(cls, *args):
        with torch._C.DisableTorchFunction():
            return apply(cls, *args)

    torch.autograd.Function.apply = classmethod(apply_alone)


class ReadsCuda(TorchFunctionMode):
    """While it is active, tensors say that they are on CUDA, and what is made there is made on `device`."""

    def __init__(self, device: str):
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.device.__get__:
            return CUDA
        if function == torch.Tensor.is_leaf.__get__:  # a parameter's stand-in is none
            return True
        if function is torch.nn.functional.rms_norm and len(args) == 2:
            return CudasNorm.apply(*args)
        args, kwargs = tree_map(self._in_its_place, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _in_its_place(self, value):
        return self.device if isinstance(value, torch.device) and value.type == "cuda" else value


class CudasNorm(torch.autograd.Function):
    """F.rms_norm without weights. On CUDA it is one operator with a backward pass of its own, on a CPU it is
    several."""

    @staticmethod
    def forward(ctx, x, shape):
        y, r = decompositions._fused_rms_norm(x, shape, None, None)
        ctx.save_for_backward(x, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        dx, _ = decompositions._fused_rms_norm_backward(dy, x, x.shape[-1:], r, None, [True, False])
        return dx, None


@torch.library.custom_op("counted::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of attention, whose kernel is the same for both: y, and the logarithms of its sums."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("counted::attention_backward", mutates_args=())
def attention_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


for operator in (attention, attention_backward):
    operator.register_fake(operator._init_fn)
attention.register_autograd(
    lambda ctx, dy, _: attention_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


# ------------------------------------------------------------------------------------------------------
# From a function to kernels

written: list = []  # what the last `stop` has found: (kernels, code)


def stop(graph):
    """In place of GraphLowering._compile_to_module, which would run Triton's compiler."""
    code, _ = graph.codegen()
    kernels = [scheduled(graph, node) for node in graph.scheduler.nodes]
    written.append(([k for k in kernels if k], getattr(code, "value", code)))
    raise RuntimeError("Inductor has written its code")


def empty_like(value, device):
    """A tensor of the same form without its data, on another device. Other values stay as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.requires_grad_(value.requires_grad)


def trace(function, args, parameters: Sequence[int] = ()) -> dict:
    """{"forward": (graph, its inputs), "backward": ...} of function(*args); only tensors' forms matter. The
    args with these indices are `parameters`: they are there in the backward pass, so their casts need not be.
    """
    graphs = {}

    def keep(phase, graph, inputs):
        graphs[phase] = copy.deepcopy(graph), inputs
        return make_boxed_func(graph)

    def as_on_cuda(*args):
        with ReadsCuda("cpu"):
            return function(*args)

    def partition(graph, inputs, **options):
        options["static_lifetime_input_indices"] = list(parameters)
        return partition_fn(graph, inputs, **options)

    traced = aot_function(
        as_on_cuda,
        partial(keep, "forward"),
        partial(keep, "backward"),
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with FakeTensorMode():
        args = [empty_like(a, "cpu") for a in args]
        results = [result for result in tensors_in(traced(*args)) if result.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    return graphs


def on_gpu(graph, inputs, backward: bool) -> tuple[list[dict], str]:
    """The kernels that Inductor makes of a graph, and its code."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
        for kept in ("val", "tensor_meta", "eager_input_vals"):
            node.meta.pop(kept, None)
    graph.recompile()
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        inputs = [empty_like(value, CUDA) for value in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    with torch._guards.tracing(torch._guards.TracingContext(mode)), torch.no_grad():
        try:
            compile_fx_inner(graph, inputs, is_backward=backward)
        except Exception:
            if not written:
                raise
    kernels, code = written.pop()
    found = []
    for launch in kernels:
        name, args = launch.pop("operator", None), launch.pop("arguments", None)
        inside = calls_inside(PYTHON[name], args) if name in PYTHON else []
        found += [call | {"inside": name} for call in inside] or [launch]
    return found, code


def of_tensors(function, args):
    """The function with its tensors as its only arguments, and these. Its other arguments are constants."""

    def called(*tensors):
        rest = iter(tensors)
        return function(*[next(rest) if isinstance(a, torch.Tensor) else a for a in args])

    return called, [a for a in args if isinstance(a, torch.Tensor)]


def calls_inside(function, args) -> list[dict]:
    """The kernels of an operator that is written in PyTorch and is called with args."""
    calls = Calls()
    torch.compile = calls.compile
    with ReadsCuda("meta"), calls:
        function(*[empty_like(a, "meta") for a in args])
    kernels, of_form = calls.kernels, {}
    for inner, args in calls.compiled:
        form = str([(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args])
        if form not in of_form:
            of_form[form], _ = on_gpu(*trace(*of_tensors(inner, args))["forward"], backward=False)
        kernels += of_form[form]
    return kernels


# ------------------------------------------------------------------------------------------------------
# The two models


@dataclass
class Part:
    """What is compiled by itself: a function that reads a module's parameters, and what it is called with."""

    name: str
    function: Callable
    module: torch.nn.Module
    args: tuple
    times: int = 1  # in a micro-step


def ours(job: dict) -> tuple[torch.nn.Module, list[Part]]:
    """Our model and its parts, as compiling.compile_parts compiles them. A forward pass calls them, and so
    says what their arguments are; blocks with arguments and windows of one kind are one part."""
    from nanochat.gpt import GPT
    from nanochat.machine.compiling import keep_rows_in_registers
    from nanochat.ops import kernels, loss
    from nanochat.plan import scaling

    keep_rows_in_registers()
    kernels.use(job["kernels"])
    PYTHON["nanochat::head_and_loss"] = loss.gradients_in_chunks
    mode, parts = FakeTensorMode(), {}
    with mode:
        model = GPT(scaling.model_config(*(job[name] for name in SHAPE)))
        model.init_rotary()
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = lambda q, k, v, *_: attention(q, k, v)[0]

    def record(name: str, module: torch.nn.Module, method: str, kind: object):
        function = getattr(module, method)

        def recorded(*args):
            key = kind, str(tree_map(type, args))
            part = parts.setdefault(key, Part(name, in_bfloat16(function), module, args, times=0))
            part.times += 1
            return function(*args)

        setattr(module, method, recorded)

    for i, block in enumerate(model.blocks):
        record(f"block_{i}", block, "forward", block.attention.window)
    for method in ("begin", "end"):
        record(method, model, method, method)
    with mode, ReadsCuda("cpu"):
        in_bfloat16(model)(*tokens_of(job))
    return model, list(parts.values())


def in_bfloat16(function):
    def called(*args):
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
            return function(*args)

    return called


def tokens_of(job: dict) -> list[torch.Tensor]:
    """Inputs and targets of a micro-batch."""
    return [torch.empty(job["device_batch_size"], job["max_seq_len"], dtype=torch.int64) for _ in range(2)]


def peer(job: dict) -> tuple[torch.nn.Module, list[Part]]:
    """The peer's model, which is compiled as a whole; its attention has FlashAttention 3's interface."""
    flash = SimpleNamespace(flash_attn_func=lambda q, k, v, **_: attention(q, k, v)[0])
    sys.modules["nanochat.flash_attention"] = SimpleNamespace(flash_attn=flash)  # it would download a kernel
    from nanochat.gpt import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(**peer_config(job)))
        model.init_weights()  # it casts the embeddings
        return model, [Part("model", model, model, tokens_of(job))]


def graphs_of(part: Part) -> dict:
    """The result of `trace` for a part, in a micro-step that is not the first."""
    own = dict(part.module.named_parameters()) | dict(part.module.named_buffers())
    leaves, structure = tree_flatten(part.args)
    function, tensors = of_tensors(lambda *leaves: part.function(*tree_unflatten(leaves, structure)), leaves)
    tensors = [*own.values(), *tensors]
    trained = [i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.nn.Parameter)]

    def run(*args):
        args, gradients = args[: len(tensors)], args[len(tensors) :]
        for i, gradient in zip(trained, gradients, strict=True):
            args[i].grad = gradient  # of the micro-steps before
        with _reparametrize_module(part.module, dict(zip(own, args, strict=False))):
            return function(*args[len(own) :])

    gradients = [torch.empty_like(tensors[i], requires_grad=False) for i in trained]
    return trace(run, [*tensors, *gradients], sorted({*range(len(own)), *trained}))


def count(job: dict) -> dict:
    """The kernels of a micro-step, and the bytes of each gradient that autograd adds up by itself."""
    pretend()
    model, parts = {"ours": ours, "peer": peer}[job["whose"]](job)
    kernels: list[dict] = []
    for part in parts:
        for phase, graph in graphs_of(part).items():
            found, code = on_gpu(*graph, phase == "backward")
            kernels += [{"phase": phase, "part": part.name, **launch} for launch in found] * part.times
            if job["folder"]:
                Path(job["folder"], f"{job['whose']}_{part.name}_{phase}.py").write_text(code)
    # Not those of our tables: to them the backward graph adds rows
    added_to = torch.nn.Embedding if job["whose"] == "ours" else ()
    others = [module for module in model.modules() if not isinstance(module, added_to)]
    gradients = [p.nbytes for module in others for p in module.parameters(recurse=False)]
    return {"kernels": kernels, "gradients": gradients}
