"""Write a checkpoint as a folder that Hugging Face's transformers loads, and what is built on it.

    python -m scripts.export --source=d12 --out=d12-hf

    model = AutoModelForCausalLM.from_pretrained("d12-hf", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("d12-hf")

The folder has the weights, the model's code in one file, the tokenizer with its chat format, where a text
ends, and a model card to complete. Sub-word embeddings are added to the rows of tokens, so the tables are
plain. docs/ecosystem.md says what else reads it. It needs `pip install -e '.[export]'`.
"""

from dataclasses import asdict
from typing import Literal

import torch
from safetensors import SafetensorError

import configurator
from nanochat import UserError
from nanochat.checkpoint import Checkpoint
from nanochat.checkpoint.folder import METRICS
from nanochat.checkpoint.resume import EXPORTED_TOKENIZER
from nanochat.engine import find_source, load_for_inference, load_tokenizer
from nanochat.files import building, user_path
from nanochat.gpt import GPT
from nanochat.hf.text import generation_config, write_text
from nanochat.run.metrics import read_metrics
from nanochat.terminal import first_line, table

source: str | None = None  # a run's tag, its folder or a checkpoint's (none = the newest, mid before base)
out: str | None = None  # the folder to write; it must be new or empty
dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights in the folder
base_dir = "~/.cache/nanochat"  # where runs live (environment: NANOCHAT_BASE_DIR)

settings = configurator.configure(globals())

# A difference in the equations makes logits differ by 1, not by the rounding of sums
TOLERANCE = 1e-3


def to_transformers(ours: GPT, identity: dict, endings: dict):
    """The model with the same weights as transformers knows it. endings: for its GenerationConfig. Raises
    UserError if it computes something else, as after a change of gpt.py, or without transformers."""
    try:
        from transformers import GenerationConfig
        from transformers.utils import logging

        from nanochat.hf.modeling_nanochat import NanochatConfig, NanochatForCausalLM
    except ImportError as error:
        why = first_line(error)  # such as a name that an old one lacks
        raise UserError(f"transformers is missing or too old ({why}); pip install -e '.[export]'") from error
    logging.disable_progress_bar()
    NanochatConfig.register_for_auto_class()
    NanochatForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    sizes = {name: value for name, value in asdict(ours.config).items() if name != "spelled"}
    with torch.device("meta"):
        theirs = NanochatForCausalLM(NanochatConfig(**sizes, nanochat=identity)).eval()
    change = "gpt.py has changed; make the same change in nanochat/hf/modeling_nanochat.py"
    try:
        theirs.load_state_dict(ours.state_dict(), assign=True)
    except RuntimeError as error:
        raise UserError(f"{change} ({' '.join(str(error).split()):.300})") from error
    shape = 1, min(2048, ours.config.max_seq_len)
    idx = torch.randint(ours.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (ours(idx) - theirs(idx).logits).abs().max().item()
    if not difference <= TOLERANCE:
        raise UserError(f"{change} (logits differ by {difference:.2g})")
    theirs.generation_config = GenerationConfig(**endings)
    return theirs


def card(checkpoint: Checkpoint, chat: bool) -> str:
    """The model card: what it is, how it is used, and what the run says of itself."""
    paths = "folder:", "base:"  # of this machine
    plan = "\n".join(line for line in checkpoint.config.get("plan", ()) if not line.startswith(paths))
    tokens = checkpoint.state.get("loop", {}).get("tokens", 0)
    rows = [["steps", f"{checkpoint.step:,}"], ["tokens trained on", f"{tokens:,}"]]
    # A checkpoint is saved before its evaluation, so that of its state is an earlier one
    records = read_metrics(checkpoint.run_folder / METRICS)
    scores = [r.get("val_bpb") for r in records if r["step"] == checkpoint.step]
    if bits := [score for score in scores if isinstance(score, float)]:
        what = "conversations" if chat else "text"
        rows.append([f"bits per byte of the validation {what}", f"{bits[-1]:.4f}"])
    kind = "answers in turns" if chat else "continues a text"
    beginning = '[{"role": "user", "content": "Hello"}]' if chat else '"Once upon a time"'
    return f"""---
library_name: transformers
pipeline_tag: text-generation
# license: add the one you choose here, as in: mit
---
# {checkpoint.run_folder.name}

A GPT that was trained with nanochat. It {kind}.

```python
from transformers import pipeline

write = pipeline("text-generation", "THIS_FOLDER", trust_remote_code=True)
print(write({beginning}, max_new_tokens=100)[0]["generated_text"])
```

## Figures

{table([["", ""], *rows])}

## Plan

```
{plan}
```
"""


# ------------------------------------------------------------------------------------------------------
# Load

if not out:
    raise UserError("name the folder to write with --out=FOLDER")
folder = user_path("out", out).resolve()  # `.` has no name, and a link to an empty folder is filled there
if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise UserError(f"{folder} exists already; give another folder with --out, or remove it")
checkpoint = find_source(source, user_path("base_dir", base_dir))
ours = load_for_inference(checkpoint, torch.device("cpu"), torch.float32)
tokenizer = load_tokenizer(checkpoint, ours.config)
chat = "loss_on" in checkpoint.state["identity"]  # trained on conversations
identity = {"model": checkpoint.state["identity"]["model"], "tokenizer": tokenizer.fingerprint}
theirs = to_transformers(ours, identity, generation_config(tokenizer, chat)).to(getattr(torch, dtype))

# ------------------------------------------------------------------------------------------------------
# Write, under another name until it is complete

try:
    with building(folder) as temporary:
        theirs.save_pretrained(temporary)  # with the file of its code
        write_text(tokenizer, temporary, chat, ours.config.max_seq_len)
        (temporary / EXPORTED_TOKENIZER).write_bytes(tokenizer.to_bytes())  # for --init_from
        (temporary / "README.md").write_text(card(checkpoint, chat), encoding="utf-8")
        if folder.exists():
            folder.rmdir()  # empty
        temporary.rename(folder)
except (OSError, SafetensorError) as error:
    raise UserError(f"cannot write {folder} ({error}); make room, or give another --out") from error

size = sum(path.stat().st_size for path in folder.iterdir())
print(f"{checkpoint.path}: {theirs.num_parameters():,} parameters in {dtype}, {size / 2**20:,.1f} MiB")
print(f"exported: {folder}; the licence in its README.md is yours to choose")
