"""How soon a run begins: what an eager run does not load."""

import subprocess
import sys

from helpers import ROOT

# The imports of the training script, then a first step as it takes it, without compiled code
FIRST_STEP = """
import ast, pathlib, sys

imports = ast.parse(pathlib.Path("scripts/base_train.py").read_text())
imports.body = [node for node in imports.body if isinstance(node, ast.Import | ast.ImportFrom)]
exec(compile(imports, "imports", "exec"))

with torch.device("meta"):
    model = GPT(planning.GPTConfig(2, 32, 2, 300, 32, "SL"))
materialize(model, torch.device("cpu"), 0)
rates = dict.fromkeys(("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr"), 0.1)
optimizer = optim.MuonAdamW(optim.parameter_groups(model, rates, 0.1))
scaler = precision.make_scaler(torch.device("cpu"), torch.float32)
tokens = torch.arange(64).view(2, 32)
scaler.scale(model(tokens, tokens)).backward()
scaler.unscale_(optimizer)
optim.skip_if_not_finite(optimizer, clip_grad_norm_(model, optimizer, 1.0))
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad(set_to_none=True)
print(sys.modules.keys() & {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "wandb"})
"""


def test_the_first_step_of_an_eager_run_loads_no_compiler():
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
