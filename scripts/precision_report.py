"""Record which operator runs in which dtype, in a real training step and in generation.

    python -m scripts.precision_report                       # print the page and write it to a file
    python -m scripts.precision_report --dtype=float16       # the same for another precision

docs/precision.md answers the usual questions about precision with this output. `bench --what=train` and
`--what=generate` measure what each precision costs.
"""

import sys
from pathlib import Path
from typing import Literal

import torch

import configurator
from nanochat import UserError, optim
from nanochat.diagnostics import scaled_rates
from nanochat.diagnostics.precision_page import page
from nanochat.diagnostics.recorder import record_step
from nanochat.files import user_path
from nanochat.gpt import GPT
from nanochat.machine import precision, runtime
from nanochat.machine.precision import name_of
from nanochat.plan import scaling
from nanochat.plan.memory import training_bytes
from nanochat.terminal import gib

# Model
depth = 4  # Transformer layers [1..512]
aspect_ratio = 64  # width = depth * aspect_ratio [1..4096]
head_dim = 64  # channels of an attention head [2..1024]
max_seq_len = 512  # positions a row [2..2**20]
window_pattern = "L"  # as in base_train
vocab_size = 4096  # tokens [1..2**20]

# The step
device_batch_size = 4  # rows [1..2**20]
grad_clip = 1.0  # the most the gradient's norm may be (-1 = off) [-1, 1e-6..1e6]
max_tokens = 2  # tokens to generate after a prompt of 8 (0 = none) [0..1e9]
seed = 42  # of weights and tokens [0..2**62]

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # compute dtype of the recorded step
base_dir = "~/.cache/nanochat"  # where the page is (environment: NANOCHAT_BASE_DIR)
out: str | None = None  # file of the page (none = <base_dir>/precision_report.md)

configurator.configure(globals())

DEFAULTS = configurator.defaults(Path(__file__).with_name("base_train.py"))
base_path = user_path("base_dir", base_dir)
out_path = user_path("out", out) if out else base_path / "precision_report.md"
machine = runtime.start(device_type, seed)
device = machine.device
compute_dtype, reason = precision.resolve_dtype(dtype, device)
config = scaling.model_config(depth, aspect_ratio, head_dim, max_seq_len, vocab_size, window_pattern)

memory, tokens = machine.free_memory(), device_batch_size * max_seq_len
needed = sum(training_bytes(config, tokens, torch.float32, compiled=False).values())
if needed > memory:
    raise UserError(
        f"this report needs about {gib(needed)} and {gib(memory)} are free; lower --device_batch_size, "
        "--max_seq_len or --depth"
    )

# One training step and some generation, with random tokens: dtypes do not depend on the text
model = GPT(config).to(device)
model.init_weights(torch.Generator(device).manual_seed(seed))
rates = scaled_rates(DEFAULTS, config, tokens, steps=1)
optimizer = optim.MuonAdamW(optim.parameter_groups(model, *rates), compute_dtype)
scaler = precision.make_scaler(device, compute_dtype)
rows = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), device=device)
inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
prompt = rows[0, : min(8, max_seq_len - 1)].tolist() if max_tokens > 0 else []
record = record_step(model, optimizer, scaler, compute_dtype, inputs, targets, prompt, max_tokens, grad_clip)

command = " ".join(["python -m scripts.precision_report", *sys.argv[1:]])
facts = [
    f"{runtime.device_name(device)}, {torch.get_num_threads()} threads; torch {torch.__version__}",
    f"compute dtype {name_of(compute_dtype)} ({reason})",
    f"model: depth {depth}, width {config.width}, {config.num_heads} heads, vocabulary of {vocab_size:,}",
    f"step: {device_batch_size} x {max_seq_len} tokens",
    f"`{command}`",
]
text = page(record, "Precision report", facts)
print(text)
try:
    out_path.parent.mkdir(parents=True, exist_ok=True)
    out_path.write_text(text, encoding="utf-8", errors="replace")
except OSError as error:
    raise UserError(f"cannot write {out_path} ({error.strerror}); choose another file with --out") from None
print(f"written: {out_path}")
machine.close()
