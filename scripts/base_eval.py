"""What a checkpoint can do: bits per byte, its scores in tasks, and samples.

    python -m scripts.base_eval                                  # the newest checkpoint
    python -m scripts.base_eval --source=d12 --step=5000 --eval=bpb,core
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval --source=d20

Text and settings are those of the checkpoint's run, so bits per byte is the same number as in the run. The
tasks are made from the validation text; CORE's are added if its bundle is here
(python -m scripts.download --name=core). The results are printed, and written to the run's folder as
base_eval_NNNNNN.md and .json for the checkpoint of step NNNNNN.
"""

import functools
import os
import time
from pathlib import Path
from typing import Literal

import torch

import configurator
from nanochat import UserError, checkpoint
from nanochat.checkpoint.files import to_json
from nanochat.data.dataset import sample_prompts as prompts_for
from nanochat.data.sources import open_dataset
from nanochat.data.validation import open_validation
from nanochat.engine import continuations, find_source, load_for_inference, load_tokenizer
from nanochat.evals.bits_per_byte import validate
from nanochat.evals.bundle import Task, open_bundle
from nanochat.evals.tasks import cloze_tasks, score_tasks
from nanochat.files import user_path, write_whole
from nanochat.machine import compiling, precision, runtime
from nanochat.terminal import bar, fenced, printable, table

# Model
source: str | None = None  # a run's tag, its folder or a checkpoint's (none = the newest, mid before base)
step = -1  # of the checkpoint in that run (-1 = the newest) [-1, 0..1e12]
base_dir = "~/.cache/nanochat"  # where data, tokenizers and runs live (environment: NANOCHAT_BASE_DIR)
out_dir: str | None = None  # folder of the results (none = the run's)

# What to evaluate
eval = "bpb,core,sample"  # any of bpb, core (all tasks) and sample, with commas between them
core_metric_max_per_task = -1  # examples of each of CORE's tasks (-1 = all) [-1, 1..1e9]
bundle: str | None = None  # zip file or folder of CORE's bundle (none = <base_dir>/eval_bundle.zip)

# Text (none = as in the run)
data: str | None = None  # embedded, a file or folder of text, climbmix, fineweb-edu, hf:OWNER/NAME
val_data: str | None = None  # score these; a.txt,b.txt have a result each
text_field: str | None = None  # the field of JSON objects or column of parquet files that holds the text
eval_tokens: int | None = None  # validation tokens to score (-1 = all) [-1, 1..1e12]
sample_prompts: str | None = None  # to continue, separated by |; auto: what suits the text; may be empty

# Machine
device_type: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # auto = cuda, else mps, else cpu
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto = as in the run

settings = configurator.configure(globals())

parts = [part.strip() for part in eval.split(",")]
if unknown := [part for part in parts if part not in ("bpb", "core", "sample")]:
    raise UserError(f"eval has {unknown[0]!r}; give any of bpb, core and sample, with commas between them")

# Settings that are the run's by default, and their values for a checkpoint without a config.json
OF_RUN = {
    "data": "embedded", "val_data": None, "text_field": "text", "eval_tokens": -1, "sample_prompts": "auto",
    "dtype": "auto", "seed": 42,
}  # fmt: skip


def settings_of_run(found: checkpoint.Checkpoint) -> dict:
    """The values of OF_RUN in the run that wrote a checkpoint. A run of mid_train has no text: it trains on
    conversations, so it gets the default text."""
    names = ("dtype", "seed") if "loss_on" in found.state["identity"] else OF_RUN
    saved = found.config.get("settings", {})
    return OF_RUN | {name: saved[name]["value"] for name in names if name in saved}


# ------------------------------------------------------------------------------------------------------
# Load: the checkpoint, the settings of its run, the model

machine = runtime.start(device_type, seed=0)
say, device, share = machine.print, machine.device, (machine.rank, machine.world_size)
machine.check_same_settings(settings.values)
base_path = user_path("base_dir", base_dir)
found = find_source(source, base_path, say)
if step not in (-1, found.step):
    found = checkpoint.find(found.run_folder, step, say)
model = load_for_inference(found, device, torch.float32)  # as in training, autocast casts what it needs
machine.check_same({"the checkpoint": found.path.name, "its identity": found.state["identity"]})
folder = found.run_folder if out_dir is None else user_path("out_dir", out_dir)

run = settings_of_run(found)
if data is not None:  # the run's validation files belong to the run's data
    run |= {"data": data, "val_data": None, "text_field": "text"}
for name in ("val_data", "text_field", "eval_tokens", "sample_prompts"):
    run[name] = run[name] if settings.values[name] is None else settings.values[name]
compute_dtype, dtype_reason = precision.resolve_dtype(run["dtype"] if dtype == "auto" else dtype, device)
tokenizer = load_tokenizer(found, model.config)

# The text, and the tasks made from it
dataset, own, problem = None, [], ""
needs_text = "bpb" in parts or "core" in parts or ("sample" in parts and run["sample_prompts"] == "auto")
with machine.main_first("data"):  # the first process builds what is missing; then the others find it
    try:
        if needs_text:
            where = {"base_dir": base_path, "text_field": run["text_field"]}
            dataset = open_dataset(run["data"], run["val_data"], **where)
        if "core" in parts:
            own = cloze_tasks(dataset, dataset.tokenizer_folder(base_path))
    except UserError as error:
        problem = str(error) + (
            " (as in the run; name other text with --data)" if data is val_data is None else ""
        )
if problem and "bpb" in parts:
    raise UserError(problem)
if problem:
    if run["sample_prompts"] == "auto":
        run["sample_prompts"] = ""  # the model begins a text by itself
    say(f"the validation text is left out, with the tasks and prompts made from it: {problem}")
opened = open_bundle(bundle, base_path, core_metric_max_per_task, say) if "core" in parts else None
public = opened.tasks if opened else []

# ------------------------------------------------------------------------------------------------------
# Evaluate

results = {
    "checkpoint": str(found.path),
    "step": found.step,
    "device": runtime.device_name(device),
    "world_size": machine.world_size,
    "dtype": precision.name_of(compute_dtype),
}
facts = {
    "checkpoint": str(found.path),
    "model": f"{sum(p.numel() for p in model.parameters()):,} parameters, depth {model.config.depth}",
    "computed": f"on {results['device']} x {machine.world_size}, in {results['dtype']} ({dtype_reason})",
}
if dataset:
    same = dataset.fingerprint == found.state["identity"].get("data")
    results["data"] = {"name": dataset.name, "fingerprint": dataset.fingerprint, "same_as_in_training": same}
    facts["text"] = f"{dataset.name}, {dataset.note}" + (
        "" if same else "; not the run's, so these numbers are not comparable with the run's"
    )
if opened:
    results |= {"bundle_fingerprint": opened.fingerprint, "max_per_task": core_metric_max_per_task}
    cut = f", at most {core_metric_max_per_task} questions a task" if core_metric_max_per_task != -1 else ""
    facts["CORE's bundle"] = f"{opened.path}, fingerprint {opened.fingerprint[:12]}{cut}"
began = time.monotonic()
if "bpb" in parts:
    resolved = found.state.get("resolved", {})
    rows = max(1, min(resolved.get("device_batch_size", 8), 2**16 // model.config.max_seq_len))
    with machine.main_first("validation"):  # the first process tokenizes; the others find its file
        place = dataset.tokenizer_folder(base_path)
        in_batches = model.config.max_seq_len, rows, *share, device
        validation = open_validation(dataset, tokenizer, run["eval_tokens"], place, *in_batches)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)
    # As in training, but this machine may have no compiler
    compiled, _ = compiling.decide("auto", device, 0, resolved.get("compiled", False))
    more = compute_dtype, machine, compiled, lambda batches, text: batches
    results |= validate(model, validation, token_bytes, *more)
if "core" in parts:
    shown = functools.partial(bar, hidden=not machine.is_main)
    results |= score_tasks(model, tokenizer, own, public, compute_dtype, machine, shown)
if "sample" in parts and machine.is_main:
    prompts = prompts_for(run["sample_prompts"], dataset)
    results["samples"] = continuations(model, tokenizer, prompts, compute_dtype, run["seed"])
facts["time"] = f"{time.monotonic() - began:.1f} s"

# ------------------------------------------------------------------------------------------------------
# Print and write the results


def tasks_table(tasks: list[Task], accuracies: dict[str, float]) -> str:
    rows = [["task", "accuracy", "by guessing", "centred", "questions"]]
    for task in tasks:
        accuracy = accuracies[task.label]
        numbers = accuracy, task.baseline / 100, task.centred(accuracy)
        rows.append([task.label, *(f"{number:.3f}" for number in numbers), f"{len(task.examples):,}"])
    return table(rows)


def page() -> str:
    shown = [f"# {found.run_folder.name}, step {found.step:,}", table([["", ""], *facts.items()], left=2)]
    if "val_bpb" in results:
        shown += [f"## Bits per byte: {results['val_bpb']:.6f}"]
        more = [[name[8:], f"{bits:.6f}"] for name, bits in results.items() if name.startswith("val_bpb_")]
        shown += [table([["further validation set", "bits per byte"], *more])] if more else []
        rows = [[tokens, f"{nats:.4f}"] for tokens, nats in results["loss_by_position"].items()]
        shown += [table([["tokens of context", "nats per token"], *rows])]
    if "own_score" in results:
        shown += [f"## Tasks from the validation text: {results['own_score']:.4f}"]
        shown += [tasks_table(own, results["own_tasks"])]
    if "core" in results:
        accuracies = {}
        for task in public:
            guessing = task.baseline / 100
            accuracies[task.label] = guessing + (1 - guessing) * results["core_tasks"][task.label]
        shown += [f"## CORE: {results['core']:.4f}", tasks_table(public, accuracies)]
    if samples := results.get("samples"):
        shown += ["## Samples", *map(fenced, samples)]
    return "\n\n".join(shown) + "\n"


if machine.is_main:
    text = printable(page())
    stem = folder / f"base_eval_{found.step:06d}"
    try:  # before anything is printed: nobody may read it
        os.makedirs(folder, exist_ok=True)
        write_whole(Path(f"{stem}.json"), to_json(results))
        write_whole(Path(f"{stem}.md"), text.encode(errors="backslashreplace"))
        place = f"results: {stem}.md and .json"
    except (OSError, UserError) as error:
        place = f"the results are not written: {error}"
    say(f"{text}\n{place}")
machine.close()
