"""A record of every operator that PyTorch executes in a training step, with its dtypes and FLOPs.

`Recorder` is a TorchDispatchMode, so it works below autograd and autocast: it sees the casts that autocast
inserts and the operators of the backward pass. It does not see inside a kernel (the softmax of fused
attention, the sums of a matrix product) or inside compiled code. docs/precision.md explains such a record.
"""

import contextlib
import copy
import functools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import nanochat.gpt
import nanochat.ops.loss
from nanochat.diagnostics import training_step
from nanochat.engine import cast_weights, generate

PHASES = ("forward", "loss", "backward", "clip", "optimizer", "generation", "chat")
CASTS = {"_to_copy": 0, "copy_": 1}  # operators that may be casts: the index of their source


@dataclass(frozen=True)
class Op:
    """One call of one operator of ATen, PyTorch's core. `inputs` and `outputs` are its tensors' dtypes."""

    phase: str
    module: str  # the nn.Module it ran in; of a gradient, that of the forward operator
    name: str  # PyTorch's name, without "aten." and the overload
    inputs: tuple[torch.dtype, ...] = ()
    outputs: tuple[torch.dtype, ...] = ()
    flops: int = 0  # matrix products and attention, by torch.utils.flop_counter; 0 for everything else
    is_view: bool = False  # it only gives memory another shape or name
    parameter: str = ""  # if it casts a parameter: its name
    differentiates: int | None = None  # of a gradient: index of the forward operator

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype it runs in: that of its first floating-point tensor (for attention that is q)."""
        return next((d for d in (*self.inputs, *self.outputs) if d.is_floating_point), None)

    @property
    def cast(self) -> tuple[torch.dtype, torch.dtype] | None:
        """(from, to) if the operator only changes the floating-point dtype, else None."""
        source = CASTS.get(self.name)
        if source is None or len(self.inputs) <= source or not self.outputs:
            return None
        change = self.inputs[source], self.outputs[0]
        return change if change[0] != change[1] and all(d.is_floating_point for d in change) else None


def _flops(func, args, kwargs, out) -> int:
    """FLOPs by PyTorch's own formulas. Causal attention counts in full, not by half."""
    packet = func._overloadpacket
    if packet.__name__ == "linear":  # on MPS this and linear_backward are operators of their own
        return 2 * args[0].numel() * args[1].shape[0]
    if packet.__name__ == "linear_backward":  # gradients of the input, the weight, or both
        return 2 * args[0].numel() * args[1].shape[-1] * sum(args[3][:2])
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if "scaled_dot_product" in packet.__name__:  # on CPU and MPS, for which PyTorch has no entry
        backward = packet.__name__.endswith("_backward")
        shapes = [t.shape for t in args[: 4 if backward else 3]]
        return (sdpa_backward_flop_count if backward else sdpa_flop_count)(*shapes)
    return 0


class Recorder(TorchDispatchMode):
    """Inside `with recorder.recording():` it adds every operator to `ops`. `at()` names the phase.

    Autograd's sequence numbers connect a backward operator with its forward operator: each node of the graph
    gets the next number when its forward operator runs. Numbers are unique, so one recorder can see several
    steps.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.ops, self.phase, self.module = model, [], "forward", ""
        self.gradients_of = None  # index of the forward product whose gradients are made in the forward pass
        self.autocast = defaultdict(set)  # phase -> dtypes of autocast when modules are called, None = off
        self._device_type = next(model.parameters()).device.type
        self._by_number = defaultdict(list)  # autograd's sequence number -> indices of forward operators

    @contextlib.contextmanager
    def at(self, phase: str | None = None, module: str | None = None):
        before = self.phase, self.module
        self.phase, self.module = phase or self.phase, module or self.module
        try:
            yield
        finally:
            self.phase, self.module = before

    @contextlib.contextmanager
    def recording(self):
        # By address in memory and size: several parameters may share one storage
        self._parameters = {(p.data_ptr(), p.numel()): name for name, p in self.model.named_parameters()}
        self._first_number, self._stack = torch.autograd._get_sequence_nr(), []
        with contextlib.ExitStack() as stack:
            for name, module in self.model.named_modules():
                push, pop = functools.partial(self._push, name), self._pop
                stack.enter_context(module.register_forward_pre_hook(push))
                stack.enter_context(module.register_forward_hook(pop, always_call=True))
            stack.enter_context(self)
            yield

    def _push(self, name, *_):
        self.note_autocast()
        self._stack.append(self.module)
        self.module = name

    def _pop(self, *_):
        self.module = self._stack.pop()

    def note_autocast(self, *_):
        """Remember whether autocast is on in this phase. It can serve as a hook of a gradient."""
        on = torch.is_autocast_enabled(self._device_type)
        self.autocast[self.phase].add(torch.get_autocast_dtype(self._device_type) if on else None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Inference mode does not decompose composite operators, so do it here
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), self._device_type.upper()):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if func.namespace != "profiler":
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func, args, kwargs, out):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._overloadpacket.__name__
        flops = _flops(func, args, kwargs, out)
        module, differentiates = self.module, self._differentiated(flops)
        if differentiates is not None:
            module = self.ops[differentiates].module
        op = Op(
            self.phase,
            module,
            name,
            tuple(t.dtype for t in tensors),
            tuple(t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)),
            flops,
            func.is_view or name == "_unsafe_view",
            differentiates=differentiates,
        )
        if op.cast:
            source = tensors[CASTS[name]]
            op = replace(op, parameter=self._parameters.get((source.data_ptr(), source.numel()), ""))
        if differentiates is None and (number := torch.autograd._get_sequence_nr() - 1) >= self._first_number:
            self._by_number[number].append(len(self.ops))
        self.ops.append(op)

    def _differentiated(self, flops) -> int | None:
        """Index of the forward operator whose gradient is computed now; None outside of a backward pass.

        Several operators may have the same number: the one that made the node, and later ones that made none.
        The gradient of a matrix product belongs to the matrix product among them.
        """
        if self.gradients_of is not None:
            return self.gradients_of if flops else None
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():  # enabled: checkpointing repeats a forward pass
            return None
        found = self._by_number.get(node._sequence_nr(), [])
        return next((i for i in found if self.ops[i].flops and flops), found[0] if found else None)


@dataclass
class Record:
    """A recorded step: its operators, and the dtypes of weights, gradients and optimizer state."""

    ops: list[Op]
    parameters: dict[str, torch.dtype] = field(default_factory=dict)
    gradients: dict[str, torch.dtype] = field(default_factory=dict)
    state: dict[str, torch.dtype] = field(default_factory=dict)  # the optimizer's
    autocast: dict[str, set] = field(default_factory=dict)
    loss_dtype: torch.dtype | None = None
    loss_scale: float | None = None  # None: no GradScaler is used
    generated: int = 0  # tokens


@contextlib.contextmanager
def _loss_apart(recorder):
    """Put what follows the head's product in a chunk into the phase "loss": the loss, and the gradients of
    that product, which loss.py computes at once."""
    loss = nanochat.ops.loss
    whole, losses, gradients = loss.softcapped_cross_entropy, loss.chunk_losses, loss.head_gradients

    def at_head(*args, **kwargs):
        with recorder.at(module="head"):
            return whole(*args, **kwargs)

    def at_loss(*args, **kwargs):
        if recorder.phase != "forward":
            return losses(*args, **kwargs)
        with recorder.at("loss", "loss"):
            recorder.note_autocast()
            return losses(*args, **kwargs)

    def at_gradients(*args, **kwargs):
        products = (i for i, op in enumerate(recorder.ops) if op.module == "head" and op.flops)
        *_, recorder.gradients_of = (i for i in products if recorder.ops[i].differentiates is None)
        try:
            with recorder.at("loss"):
                return gradients(*args, **kwargs)
        finally:
            recorder.gradients_of = None

    with (
        mock.patch.object(nanochat.gpt, "softcapped_cross_entropy", at_head),
        mock.patch.multiple(loss, chunk_losses=at_loss, head_gradients=at_gradients),
    ):
        yield


def record_step(model, optimizer, scaler, dtype, inputs, targets, prompt=(), max_tokens=2, grad_clip=1.0):
    """The Record of one training step of base_train.py, and of the generation of `max_tokens` tokens.

    inputs, targets (B, T) int64. prompt: ids before the generated ones; if it is empty, nothing is generated.
    The step changes the model. Tokens are generated twice: under autocast, like base_train.py's samples, and
    by a copy whose weights are cast once, as in chat.py.
    """
    recorder, generated = Recorder(model), 0
    scale = scaler.get_scale() if scaler.is_enabled() else None

    def note_at_backward(module, arguments, loss):
        loss.register_hook(recorder.note_autocast)

    with recorder.recording(), _loss_apart(recorder):
        with model.register_forward_hook(note_at_backward):
            loss = training_step(model, optimizer, scaler, dtype, inputs, targets, grad_clip, at=recorder.at)
        if prompt:
            with recorder.at("generation"):
                generated = len(list(generate(model, list(prompt), max_tokens, dtype)))
    if prompt:
        chat = Recorder(cast_weights(copy.deepcopy(model), dtype))
        with chat.recording(), chat.at("chat"):
            list(generate(chat.model, list(prompt), max_tokens))
        recorder.ops += chat.ops
        recorder.autocast |= chat.autocast
    kept = {f"{i}/{key}": t for i, state in enumerate(optimizer.state.values()) for key, t in state.items()}
    return Record(
        recorder.ops,
        {name: p.dtype for name, p in model.named_parameters()},
        {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        {name: t.dtype for name, t in kept.items() if isinstance(t, torch.Tensor)},
        dict(recorder.autocast),
        loss.dtype,
        scale,
        generated,
    )
