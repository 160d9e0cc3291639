"""What a precision costs: measured by processes that end with a sentence when something goes wrong."""

import json
import os
import signal

import pytest
import torch
import torch.nn as nn
from helpers import python
from safetensors.torch import save_file
from small_model import BF16, CPU, DEFAULTS, F32, gpt

from nanochat import UserError
from nanochat.diagnostics import precision_cost, scaled_rates
from nanochat.machine import runtime

RATES, _ = scaled_rates(DEFAULTS, gpt().config, batch_tokens=32, steps=100)


@pytest.fixture
def tokens(tmp_path) -> str:
    """A file with three batches of two rows."""
    save_file({"tokens": torch.randint(64, (3, 2, 17))}, tmp_path / "tokens")
    return str(tmp_path / "tokens")


@pytest.fixture
def job(tokens) -> dict:
    """Training on them."""
    how = {"kind": "training", "config": vars(gpt().config), "device_type": "cpu"}
    return how | {"dtype": "float32", "seed": 0, "rates": RATES, "tokens": tokens}


def test_a_measuring_process_that_is_killed_between_turns_ends_the_measurement_with_a_sentence(job):
    with (
        pytest.raises(UserError, match="the process that measures one ended with status -9"),
        precision_cost.working([("one", job)]) as (worker,),
    ):
        worker.process.kill()
        worker.process.wait()
        worker.turn(steps=1, seconds=1)


STOPPED = """
import json, sys, time
import configurator
from nanochat.diagnostics import precision_cost
configurator.handle_errors()
with precision_cost.working([("one", json.loads(sys.argv[1]))]):
    print("ready", flush=True)
    time.sleep(300)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_ends_the_measurement_without_a_traceback_of_any_process(job):
    with python(STOPPED, json.dumps(job), start_new_session=True) as child:
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        assert child.wait() == -signal.SIGINT
        assert child.stderr.read() == ""


def test_inference_with_cast_weights_holds_them_in_that_dtype_and_gives_float32_logits(tmp_path, tokens):
    model, machine = gpt(), runtime.Machine(CPU)
    nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), tmp_path / "weights")
    job = {"dtype": "bfloat16", "tokens": tokens, "weights": str(tmp_path / "weights")}
    for cast in (False, True):
        worker = precision_cost.Inference(machine, model.config, job | {"cast": cast})
        assert {p.dtype for p in worker.model.parameters() if p.ndim == 2} == {BF16 if cast else F32}
        logits, exact = worker.read(worker.rows), model(worker.rows)
        assert logits.dtype == F32 and 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("seconds, made", [(1000, 3), (0, 2)])
def test_a_turn_stops_at_its_time_but_makes_two_steps(job, seconds, made):
    worker = precision_cost.Training(runtime.Machine(CPU), gpt().config, job)
    answer = worker.turn(steps=3, seconds=seconds)
    assert len(answer["losses"]) == made and len(answer["seconds"]) == made - 1
