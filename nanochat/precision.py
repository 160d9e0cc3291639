"""In which dtype the forward pass computes. Parameters, gradients and optimizer state are float32 whatever
it is."""

import contextlib
from pathlib import Path

import torch

from nanochat import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def cpu_has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (x86: AVX512_BF16 or AMX; Arm: the bf16 extension).

    Read from /proc/cpuinfo; where there is none (macOS, Windows) the answer is no.
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype for the setting `dtype` (auto, bfloat16, float16, float32) and the reason, for the
    log.

    Raises UserError for a dtype the device cannot compute in.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        what = f"CUDA compute capability {major}.{minor}"
        best = "bfloat16" if major >= 8 else "float16"
        if name == "bfloat16" and major < 8:
            raise UserError(
                f"dtype bfloat16 needs CUDA compute capability 8.0, this GPU has {major}.{minor}; "
                "use --dtype=float16 or --dtype=float32"
            )
    elif device.type == "cpu":
        native = cpu_has_native_bfloat16()
        what, best = (
            f"CPU {'with' if native else 'without'} native bfloat16",
            "bfloat16" if native else "float32",
        )
    else:
        what, best = device.type, "float32"
    if name == "auto":
        return DTYPES[best], what
    return DTYPES[name], "as asked for"


def autocast(device: torch.device, dtype: torch.dtype):
    """The context of the forward pass and the loss; does nothing for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.amp.autocast(device.type, dtype)


def make_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """A GradScaler: at work in float16, whose smallest normal number is 6e-5; passing everything through
    otherwise."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
