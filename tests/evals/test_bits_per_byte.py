"""Bits per byte and the loss by position against a count by hand, token by token."""

import math

import numpy as np
import pytest
import torch
from evals.as_threads import in_processes
from test_gpt import make_model

from nanochat.data.validation import ValidationBatches
from nanochat.evals.bits_per_byte import bits_per_byte
from nanochat.machine.compiling import compile_parts
from nanochat.machine.runtime import Machine

ALONE = Machine(torch.device("cpu"))
V, T, BOS = 50, 80, 0


@pytest.fixture(scope="module")
def problem():
    """A model, documents as lists of tokens, the array made of them, and a length for each token."""
    model, generator = make_model(2, 32, 2, V, T, stir=0.5), torch.Generator().manual_seed(0)
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, V, n).tolist() for n in (3, 200, 1, 79, 80, 81, 0, 40, 17, 16, 90, 64, 65)]
    tokens = np.concatenate([[BOS, *document] for document in documents]).astype(np.int32)
    return model, documents, tokens, torch.randint(1, 9, (V,), generator=generator)


@torch.no_grad()
def by_hand(model, documents, token_bytes):
    """Bits per byte, and nats per token of each bucket: one window at a time, in float64."""
    nats, scored_bytes, losses = 0.0, 0, {"1-16": [], "17-64": [], "65-80": []}
    for document in documents:
        for first in range(0, len(document), T):
            window = document[first : first + T]
            probabilities = model(torch.tensor([[BOS, *window[:-1]]]))[0].double().softmax(-1)
            for context, target in enumerate(window, start=1):
                loss = -math.log(probabilities[context - 1, target])
                losses["1-16" if context <= 16 else "17-64" if context <= 64 else "65-80"].append(loss)
                nats += loss
                scored_bytes += token_bytes[target].item()
    by_position = {name: sum(of_bucket) / len(of_bucket) for name, of_bucket in losses.items()}
    return nats / math.log(2) / scored_bytes, by_position


@pytest.mark.parametrize("batch_size", [1, 3, 40])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_the_count_by_hand_for_any_batch_size_and_number_of_processes(problem, batch_size, world_size):
    model, documents, tokens, token_bytes = problem

    def one(machine):
        batches = ValidationBatches(tokens, T, batch_size, machine.rank, world_size)
        return bits_per_byte(model, batches, token_bytes, torch.float32, machine)

    found = in_processes(world_size, one)
    bpb, by_position = by_hand(model, documents, token_bytes)
    for evaluation in found:
        assert evaluation.bpb == pytest.approx(bpb, rel=1e-6)
        assert evaluation.loss_by_position == pytest.approx(by_position, rel=1e-6)
        assert list(evaluation.loss_by_position) == list(by_position)


def test_bfloat16_is_evaluated_under_autocast_and_comes_close(problem):
    model, _, tokens, token_bytes = problem
    batches = ValidationBatches(tokens, T, 4)
    exact = bits_per_byte(model, batches, token_bytes, torch.float32, ALONE).bpb
    rough = bits_per_byte(model, batches, token_bytes, torch.bfloat16, ALONE).bpb
    assert rough != exact and rough == pytest.approx(exact, rel=0.02)


def test_where_nothing_is_scored_there_is_no_number(problem):
    model, _, _, token_bytes = problem
    nothing = torch.full((2, T), -1)
    for batches in ([(torch.zeros_like(nothing), nothing)], []):
        found = bits_per_byte(model, batches, token_bytes, torch.float32, ALONE)
        assert math.isnan(found.bpb) and found.loss_by_position == {}


@pytest.mark.slow
def test_compiled_it_is_the_same_number_from_one_code_for_all_shapes(problem):
    from torch._dynamo.utils import counters

    model, _, tokens, token_bytes = problem
    batches = ValidationBatches(tokens, T, 2)
    assert len({inputs.shape for inputs, _ in batches}) >= 3
    eager = bits_per_byte(model, batches, token_bytes, torch.float32, ALONE)
    counters.clear()
    with torch.no_grad():
        compile_parts(model, dynamic=True)(*next(iter(batches)), reduction="none")
    graphs = counters["stats"]["unique_graphs"]
    whole = compile_parts(model, dynamic=True)  # as on a GPU, where it compiles by itself
    compiled = bits_per_byte(whole, batches, token_bytes, torch.float32, ALONE)
    assert compiled.bpb == pytest.approx(eager.bpb, rel=1e-6)
    assert compiled.loss_by_position == pytest.approx(eager.loss_by_position, rel=1e-6)
    assert counters["stats"]["unique_graphs"] <= 2 * graphs  # a batch of one row is compiled again
