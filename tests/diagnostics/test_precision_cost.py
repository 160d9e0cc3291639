"""What a precision costs: measured by processes that end with a sentence when something goes wrong."""

import pytest
import torch
from safetensors.torch import save_file
from small_model import CPU, DEFAULTS, gpt

from nanochat import UserError
from nanochat.diagnostics import precision_cost, scaled_rates
from nanochat.machine import runtime

RATES, _ = scaled_rates(DEFAULTS, gpt().config, batch_tokens=32, steps=100)


@pytest.fixture
def tokens(tmp_path) -> str:
    """A file with one batch of two rows."""
    save_file({"tokens": torch.randint(64, (1, 2, 17))}, tmp_path / "tokens")
    return str(tmp_path / "tokens")


def test_a_measuring_process_that_is_killed_between_turns_ends_the_measurement_with_a_sentence(tokens):
    job = {"kind": "training", "config": vars(gpt().config), "device_type": "cpu", "seed": 0}
    job |= {"dtype": "float32", "tokens": tokens, "rates": RATES}
    with (
        pytest.raises(UserError, match="the process that measures one ended with status -9"),
        precision_cost.working([("one", job)]) as (worker,),
    ):
        worker.process.kill()
        worker.process.wait()
        worker.turn(steps=1, seconds=1)


@pytest.mark.parametrize("seconds, made", [(1000, 3), (0, 2)])
def test_a_turn_stops_at_its_time_but_makes_two_steps(tmp_path, seconds, made):
    save_file({"tokens": torch.randint(64, (3, 2, 17))}, tmp_path / "tokens")
    job = {"dtype": "float32", "seed": 0, "rates": RATES, "tokens": str(tmp_path / "tokens")}
    worker = precision_cost.Training(runtime.Machine(CPU), gpt().config, job)
    answer = worker.turn(steps=3, seconds=seconds)
    assert len(answer["losses"]) == made and len(answer["seconds"]) == made - 1
