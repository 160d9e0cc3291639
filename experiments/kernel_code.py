"""What the Triton kernels take of an SM, compiled for GPUs that need not be there: a table for benchmarks.md.

    python -m experiments.kernel_code

Triton brings the assembler (ptxas), which says how many registers a thread has, how many bytes of them were
spilled to the stack, and how much shared memory a program takes.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanochat.ops import triton_kernels
from nanochat.ops.elementwise import SLOPE
from nanochat.ops.loss import SOFTCAP

TARGETS = (80, 90, 100)  # compute capability: A100, H100 and H200, B200
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(kernel, types: dict, constants: dict, target: int, warps: int, stages: int = 3) -> dict:
    """Registers of a thread, bytes of its stack, bytes of shared memory. types: of the kernel's arguments."""
    kernel = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    values = {(position[name],): value for name, value in constants.items()}
    aligned = {(position[n],): [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] in "*i"}
    source = ASTSource(kernel, signature, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    code = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code.asm["cubin"])
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return {"registers": registers, "stack": stack, "shared": code.metadata.shared}


def losses(V: int, dtype: str, target: int) -> dict:
    types = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32", "scale": "fp32"}
    block = min(triton_kernels.ON_CHIP, triton.next_power_of_2(V))
    constants = dict(V=V, CAP=SOFTCAP, GRADIENT=True, BLOCK=block, REST=triton_kernels.ON_CHIP // 4)
    return compiled(triton_kernels.softcapped_losses_kernel, types, constants, target, max(4, block // 1024))


def product(forward: bool, tile: tuple, target: int, K: int = 768) -> dict:
    n, f, warps, stages = tile
    shapes = {"a": (n, 64), "b": (f, 64) if forward else (64, f), "z": (n, f), "out": (n, f)}
    types = {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in shapes.items()}
    types |= {"r": "*fp32", "N": "i32", "F": "i32"}
    constants = dict(K=K, SLOPE=SLOPE, FORWARD=forward, BLOCK_N=n, BLOCK_F=f, BLOCK_K=64, GROUP=8)
    return compiled(triton_kernels.product_kernel, types, constants, target, warps, stages)


def rows():
    """(kernel, target, what it takes) of every kernel, one after another. Those of the MLP need sm_90."""
    for target in TARGETS:
        for V, dtype in ((32768, "bf16"), (32768, "fp32"), (50304, "bf16")):
            yield f"losses of {V:,} logits, {dtype}", target, losses(V, dtype, target)
        for tile in triton_kernels.TILES if target >= 90 else ():
            for forward, name in ((True, "up"), (False, "gradient of up")):
                n, f, warps, stages = tile
                kernel = f"{name}, {n} x {f}, {warps} warps, {stages} stages"
                yield kernel, target, product(forward, tile, target)


def main():
    print(f"Triton {triton.__version__}\n\n| kernel | GPU | registers | stack, bytes | shared memory, KiB |")
    print("|:--|:--|--:|--:|--:|")
    for kernel, target, took in rows():
        shared = took["shared"] / 1024
        print(
            f"| {kernel} | sm_{target} | {took['registers']} | {took['stack']} | {shared:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
