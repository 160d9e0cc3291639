"""What really ran in which dtype: a record of every operator that PyTorch executes, with dtypes and FLOPs.

`Recorder` is a mode at the level where PyTorch dispatches an operator to its kernel, below autograd and
autocast: casts that autocast inserts and operators that the backward pass runs are seen like any other. What
happens inside one kernel (the softmax of fused attention, the accumulator of a matrix product) is not seen,
nor is anything inside compiled code. docs/precision.md reads such a record.
"""

import contextlib
import copy
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import nanochat.gpt
import nanochat.loss
from nanochat.engine import cast_weights, generate
from nanochat.precision import autocast

PHASES = ("forward", "loss", "backward", "clip", "optimizer", "generation", "chat")
CASTS = {"_to_copy": 0, "copy_": 1}  # operators that may be nothing but a cast: the place of their source


@dataclass(frozen=True)
class Op:
    """One call of one ATen operator. `inputs` and `outputs` are the dtypes of its tensors, in order."""

    phase: str
    module: str  # the nn.Module it ran in, or, in the backward pass, whose operator it differentiates
    name: str  # as PyTorch calls it, without "aten." and the overload
    inputs: tuple[torch.dtype, ...] = ()
    outputs: tuple[torch.dtype, ...] = ()
    flops: int = 0  # of matrix products and attention, by torch.utils.flop_counter; 0 for everything else
    is_view: bool = False  # another shape or name for the same memory: nothing is computed
    parameter: str = ""  # of a cast: the parameter that is cast
    differentiates: int | None = None  # in the backward pass: index of the forward operator

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its first floating-point tensor: the only one, for a matrix product, q's for attention."""
        return next((d for d in (*self.inputs, *self.outputs) if d.is_floating_point), None)

    @property
    def cast(self) -> tuple[torch.dtype, torch.dtype] | None:
        """(from, to) for an operator that does nothing but change the floating-point dtype."""
        source = CASTS.get(self.name)
        if source is None or len(self.inputs) <= source or not self.outputs:
            return None
        change = self.inputs[source], self.outputs[0]
        return change if change[0] != change[1] and all(d.is_floating_point for d in change) else None


def _flops(func, args, kwargs, out) -> int:
    """FLOPs by PyTorch's own formulas; attention is not halved for causality."""
    packet = func._overloadpacket
    if packet.__name__ == "linear":  # of MPS, where these two are not made of other operators
        return 2 * args[0].numel() * args[1].shape[0]
    if packet.__name__ == "linear_backward":  # its products: of the input, of the weight, or both
        return 2 * args[0].numel() * args[1].shape[-1] * sum(args[3][:2])
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if "scaled_dot_product" in packet.__name__:  # of the CPU and MPS, which PyTorch has no entry for
        backward = packet.__name__.endswith("_backward")
        shapes = [t.shape for t in args[: 4 if backward else 3]]
        return (sdpa_backward_flop_count if backward else sdpa_flop_count)(*shapes)
    return 0


class Recorder(TorchDispatchMode):
    """Records into `ops` inside `with recorder.recording():`; `at()` names the phase and the module.

    Operators of the backward pass are matched with those of the forward pass by autograd's sequence numbers:
    each node of the graph gets the next number when its forward operator runs. The same numbers do not come
    up again, so one recorder can see several steps.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.ops, self.phase, self.module = model, [], "forward", ""
        self.autocast = defaultdict(set)  # phase -> autocast's dtypes at the modules' calls, None = off
        self._device_type = next(model.parameters()).device.type
        self._by_number = defaultdict(list)  # autograd's sequence number -> indices of forward operators

    @contextlib.contextmanager
    def at(self, phase: str | None = None, module: str | None = None):
        before = self.phase, self.module
        self.phase, self.module = phase or self.phase, self.module if module is None else module
        try:
            yield
        finally:
            self.phase, self.module = before

    @contextlib.contextmanager
    def recording(self):
        # By its place in memory: several parameters may lie in one storage
        self._parameters = {(p.data_ptr(), p.numel()): name for name, p in self.model.named_parameters()}
        self._first_number, self._stack, hooks = torch.autograd._get_sequence_nr(), [], []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._push(name)))
            hooks.append(module.register_forward_hook(lambda *_: self._pop(), always_call=True))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _push(self, name):
        self.note_autocast()
        self._stack.append(self.module)
        self.module = name

    def _pop(self):
        self.module = self._stack.pop()

    def note_autocast(self, *_):
        """Remember whether autocast is on here, in this phase; also a hook for a tensor's gradient."""
        on = torch.is_autocast_enabled(self._device_type)
        self.autocast[self.phase].add(torch.get_autocast_dtype(self._device_type) if on else None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # In inference mode operators made of others arrive whole; those with a kernel of their own stay so
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
        """Index of the forward operator whose gradient is being computed, None outside of a backward pass.

        A number belongs to the operator that made the node and to those after it that needed none; a matrix
        product goes back to the matrix product among them.
        """
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():  # with gradients on: checkpointing repeats a forward pass
            return None
        found = self._by_number.get(node._sequence_nr(), [])
        return next((i for i in found if self.ops[i].flops and flops), found[0] if found else None)


@dataclass
class Record:
    """A recorded step: its operators, and the dtypes of what lasts."""

    ops: list[Op]
    parameters: dict[str, torch.dtype] = field(default_factory=dict)
    gradients: dict[str, torch.dtype] = field(default_factory=dict)
    state: dict[str, torch.dtype] = field(default_factory=dict)  # of the optimizer
    autocast: dict[str, set] = field(default_factory=dict)
    loss_dtype: torch.dtype | None = None
    loss_scale: float | None = None  # None: no GradScaler at work
    generated: int = 0  # tokens


@contextlib.contextmanager
def _loss_apart(recorder):
    """While this is active the loss phase begins where the head's matrix product is done (the only one: with
    `loss_chunk_rows` those of later chunks would count as loss)."""
    softcapped_cross_entropy, softcap = nanochat.gpt.softcapped_cross_entropy, nanochat.loss.softcap

    def at_head(*args, **kwargs):
        with recorder.at(module="head"):
            return softcapped_cross_entropy(*args, **kwargs)

    def at_loss(logits):
        if recorder.phase == "forward":
            recorder.phase, recorder.module = "loss", "loss"  # until at_head is left
            recorder.note_autocast()
        return softcap(logits)

    nanochat.gpt.softcapped_cross_entropy, nanochat.loss.softcap = at_head, at_loss
    try:
        yield
    finally:
        nanochat.gpt.softcapped_cross_entropy, nanochat.loss.softcap = softcapped_cross_entropy, softcap


def record_step(model, optimizer, scaler, dtype, inputs, targets, prompt=(), max_tokens=2, grad_clip=1.0):
    """One training step as base_train.py makes it, then `max_tokens` tokens after `prompt` -> Record.

    inputs, targets (B, T) int64; prompt a list of ids, empty: nothing is generated. The step is a real one:
    it changes the model. Tokens are generated twice: under autocast, as base_train.py's samples are, and by
    a copy whose weights are cast once, as chat.py does it.
    """
    recorder, device = Recorder(model), inputs.device
    with recorder.recording(), _loss_apart(recorder):
        with recorder.at("forward"), autocast(device, dtype):
            loss = model(inputs, targets)
        loss.register_hook(recorder.note_autocast)
        with recorder.at("backward"):
            scaler.scale(loss).backward()
        with recorder.at("clip"):
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), grad_clip if grad_clip > 0 else math.inf
            )
            optimizer.found_inf = 1 - grad_norm.isfinite().float()
        scale = scaler.get_scale() if scaler.is_enabled() else None
        with recorder.at("optimizer"):
            scaler.step(optimizer)
            scaler.update()
        if prompt:
            with recorder.at("generation"):
                generated = list(generate(model, list(prompt), max_tokens, dtype))
    if prompt:
        _record_chat(recorder, prompt, max_tokens, dtype)
    return Record(
        recorder.ops,
        {name: p.dtype for name, p in model.named_parameters()},
        {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        _state_dtypes(optimizer),
        dict(recorder.autocast),
        loss.dtype,
        scale,
        len(generated) if prompt else 0,
    )


def _record_chat(recorder, prompt, max_tokens, dtype):
    """Add what a copy of the model with cast weights does to generate."""
    cast = Recorder(cast_weights(copy.deepcopy(recorder.model), dtype))
    with cast.recording(), cast.at("chat"):
        list(generate(cast.model, list(prompt), max_tokens))
    recorder.ops += cast.ops
    recorder.autocast |= cast.autocast


def _state_dtypes(optimizer) -> dict[str, torch.dtype]:
    return {
        f"{i}/{key}": value.dtype
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
