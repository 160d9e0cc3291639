"""The dtype that the forward pass computes in. Parameters, gradients and optimizer state are always
float32."""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from nanochat import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# A CPU's instructions that multiply in a dtype, on x86 and Arm, as torch.cpu.get_capabilities names them
CPU_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16"""
    return str(dtype).removeprefix("torch.")


def is_emulated(name: str) -> bool:
    """Whether a CPU has no instructions that multiply in the dtype of that name: torch is slow then."""
    has = torch.cpu.get_capabilities()
    return name in CPU_INSTRUCTIONS and not any(map(has.get, CPU_INSTRUCTIONS[name]))


def resolve_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype for the setting `dtype` (auto, bfloat16, float16, float32), and the reason.

    The device's capabilities decide, not its name. Raises UserError for a dtype that it cannot compute in.
    """
    can, slow = list(DTYPES), []
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        what, best = f"CUDA compute capability {major}.{minor}", "bfloat16" if major >= 8 else "float16"
        if major < 8:  # torch would emulate it
            can.remove("bfloat16")
            what += ", bfloat16 needs 8.0"
    elif device.type == "cpu":
        slow = [dtype for dtype in CPU_INSTRUCTIONS if is_emulated(dtype)]
        best = "float32" if "bfloat16" in slow else "bfloat16"
        what = f"CPU {'with' if best == 'bfloat16' else 'without'} native bfloat16"
    else:  # MPS: autocast to both 16-bit dtypes since torch 2.6, a GradScaler since 2.8; not tried here
        what, best = device.type.upper(), "float32"
        if not torch.backends.mps.is_macos_or_newer(14, 0):
            can.remove("bfloat16")
            what += ", bfloat16 needs macOS 14"
    if name == "auto":
        return DTYPES[best], what + _rounding(best)
    if name not in can:
        use = " or ".join(f"--dtype={dtype}" for dtype in can)
        raise UserError(f"this device cannot compute in {name} ({what}); use {use}")
    emulated = f", and slow: no {name} instructions found in this CPU" if name in slow else ""
    return DTYPES[name], "as asked for" + emulated + _rounding(name)


def _rounding(name: str) -> str:
    """A warning for the plan if torch is set to round the factors of float32 products."""
    setting = torch.get_float32_matmul_precision()
    if name != "float32" or setting == "highest":
        return ""
    return f", but torch's float32_matmul_precision is {setting}: TF32 or bfloat16 products"


def autocast(device: torch.device, dtype: torch.dtype):
    """The context of the forward pass and the loss. It does nothing in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.amp.autocast(device.type, dtype)


def loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
    """The factor of the next step's loss, 0-dim float32 on the device; 1 in other dtypes than float16."""
    return scaler.scale(torch.ones((), device=device))  # scaler.get_scale() would wait for the device


def make_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """A GradScaler. It works in float16, whose smallest normal number is 6e-5; else it changes nothing.

    Its scale starts at 2^16, doubles after 2000 good steps and halves at each overflow.
    """
    return AgreedGradScaler(device.type, enabled=dtype == torch.float16)


class AgreedGradScaler(torch.amp.GradScaler):
    """A GradScaler for processes that have different gradients: what one finds infinite, all skip.

    torch's ShardedGradScaler adds up what they find. Two processes make 2, but the fused AdamW on a GPU looks
    for 1: AdamW would update what Muon skips.
    """

    def _unscale_grads_(self, *arguments):
        found_inf = super()._unscale_grads_(*arguments)
        for found in found_inf.values() if dist.is_initialized() else ():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found_inf


def check_dtypes(model: nn.Module, dtype: torch.dtype):
    """Raise UserError, with the name of the part, if one in the blocks gets another dtype than autocast's.

    A float32 parameter that meets x without `.to(x.dtype)` turns all that follows into float32: slower, with
    more memory, and without an error. A small model of the same code is run on a CPU to find out, because
    autocast casts only products there.
    """
    if dtype == torch.float32 or not hasattr(model, "blocks"):  # or no model like gpt.py's
        return

    def check(name, *values):
        tensors = [t for t in tree_leaves(values) if torch.is_tensor(t) and not isinstance(t, nn.Parameter)]
        for tensor in tensors:  # a table is a parameter; its rows are cast
            if tensor.is_floating_point() and tensor.dtype != dtype:
                raise UserError(
                    f"{name} computes in {tensor.dtype} in place of {dtype}: in nanochat/gpt.py, a float32 "
                    "parameter or table meets x without .to(x.dtype); add it, or take check_dtypes out of "
                    "the script if that is what you want"
                )

    small = small_model(type(model), model.config)
    for name, module in small.blocks.named_modules(prefix="blocks"):
        module.register_forward_pre_hook(lambda module, args, name=name: check(name, args))
    for i, block in enumerate(small.blocks):
        block.register_forward_hook(lambda module, args, x, i=i: check(f"blocks.{i}", x))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        small(torch.zeros(1, 4, dtype=torch.int64))


def small_model(kind, config) -> nn.Module:
    """A narrow model of the same class, depth and windows on the CPU, with initial weights."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        model = kind(replace(config, width=64, num_heads=2, vocab_size=50, max_seq_len=12)).eval()
        model.init_weights(torch.Generator().manual_seed(0))
    return model
