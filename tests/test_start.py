"""How soon a run begins: what an eager run does not load, and what a compiled one need not compile again."""

import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, command, insert, losses, needs_compiler, python_m

from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import precision, runtime
from nanochat.machine.compiling import compile_parts
from nanochat.ops import attention

AFTER_STEP_1 = """
import sys
slow = {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "wandb", "tensorboard", "trackio"}
print("loaded", sys.modules.keys() & slow)
raise SystemExit
"""


def test_an_eager_run_takes_its_first_step_without_compiler_plots_and_loggers(tree, corpus, tmp_path):
    insert(tree, at_step_end=AFTER_STEP_1)
    first_step = [sys.executable, "-m", *command(corpus, tmp_path / "run", "--dtype=bfloat16")]
    done = subprocess.run(first_step, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0 and "loaded set()" in done.stdout, done.stdout + done.stderr


WITHOUT = """
import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"pyarrow", "wandb", "matplotlib", "huggingface_hub", "triton"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
PLAN = """
sys.argv = ["base_train", "--plan", "--depth=4", "--device=H100", "--world_size=2"]
runpy.run_module("scripts.base_train", run_name="__main__")
"""
CHECK = """
from experiments import gpu_ceilings, gpu_correctness, gpu_parts, gpu_speed, part_speed, sides
from nanochat.data import conversations, loader
job = {"device": "cpu", "small": True, "peer": None}
step_job = gpu_parts.model_job(job, 12)
side = sides.Ours(step_job)
print(gpu_parts.machine(job), side.step(sides.Batches(step_job, side.rows, side.micro_steps, side.device)))
"""


@pytest.mark.parametrize("program", [PLAN, CHECK], ids=["plan", "check"])
def test_a_checkout_plans_and_measures_steps_without_packages_that_these_do_not_need(program):
    command = [sys.executable, "-c", WITHOUT + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_can_keep_the_compiled_model_for_the_next_start():
    """torch keeps no graph with a higher-order operator in it, other than those of autograd.Functions, which
    compile_parts allows."""
    machine = runtime.start("cpu", seed=0)
    model = runtime.materialize(GPT(GPTConfig(2, 32, 2, 300, 32, "SL")), machine.device, 0)
    attention.use(model, attention.choose(model.config, machine, torch.bfloat16, True, False, {}))
    found = []

    def backend(graph, inputs):
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    tokens = torch.arange(64).view(2, 32)
    with precision.autocast(machine.device, torch.bfloat16):
        compile_parts(model, backend=backend)(tokens, tokens.clone()).backward()
    names = [str(target) for target in found]
    assert "nanochat.attention_in_blocks" in " ".join(names)
    higher = {str(target) for target in found if isinstance(target, torch._ops.HigherOrderOperator)}
    assert higher <= {"autograd_function_apply"}


# ------------------------------------------------------------------------------------------------------
# A run that is compiled begins with eager steps

AUTO = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from nanochat.machine import compiling

def compile(*args, torch_compile=torch.compile, **options):
    print("compiling: ", flush=True)
    return torch_compile(*args, **options)

torch.compile = compile
compiling.decide = lambda setting, *_, **__: (setting != "off", "a test")
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@needs_compiler
def test_a_compiled_run_begins_with_ten_eager_steps_and_goes_on_from_any_of_them(corpus, tmp_path):
    (tmp_path / "auto.py").write_text(AUTO)

    def run(out, setting="auto"):
        _, *arguments = command(corpus, tmp_path / out, "--num_iterations=13")
        arguments += ["--save_every=4", "--keep_checkpoints=-1", f"--compile={setting}"]
        done = python_m(["auto", *arguments], folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("step ")]
        steps = [step for step in steps if "/" in step]  # not those of evaluations and saves
        before, *_ = done.stdout.partition("compiling: ")
        return losses(tmp_path / out), steps, before

    eager, _, said = run("eager", "off")
    whole, steps, before = run("whole")
    assert (
        "step 13/13" in said and steps[9] == "10/13" and "step 10/13" in before and "step 11/" not in before
    )
    assert [whole[step] for step in range(10)] == [eager[step] for step in range(10)]
    assert [whole[step] for step in range(13)] == pytest.approx([eager[step] for step in range(13)], rel=1e-4)
    shutil.rmtree(tmp_path / "whole" / "step_000013")
    again, steps, before = run("whole")  # from step 12, compiled at once
    assert again == whole and steps[0] == "13/13" and "step " not in before
    for later in (12, 13):
        shutil.rmtree(tmp_path / "whole" / f"step_{later:06}")
    again, steps, before = run("whole")  # from step 8, still eager
    assert again == whole and steps[0] == "9/13" and "step 10/13" in before and "step 11/" not in before
    _, _, before = run("at once", "on")
    assert "step " not in before
