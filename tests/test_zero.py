"""The optimizer shared out over processes: even, whole, and with the numbers of one process."""

from pathlib import Path

import pytest
import torch
from helpers import run_stages
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW, parameter_groups
from nanochat.plan.scaling import model_config
from nanochat.zero import share_out

RATES = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}
SHAPES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=12)


@given(SHAPES, SHAPES, st.integers(1, 9))
def test_every_row_has_one_owner_whatever_the_shapes_and_the_number_of_processes(
    matrices, tables, world_size
):
    owners, cuts = share_out(matrices, tables, world_size)
    assert len(owners) == len(matrices) and all(0 <= owner < world_size for owner in owners)
    assert len(cuts) == len(tables)
    for (rows, _), cut in zip(tables, cuts, strict=True):
        assert len(cut) == world_size + 1 and cut[0] == 0 and cut[-1] == rows
        assert cut == sorted(cut)


def state_bytes(config: GPTConfig, world_size: int) -> list[int]:
    """Bytes of optimizer state of each process of a run, counted tensor by tensor."""
    held = []
    for rank in range(world_size):
        with torch.device("meta"):
            model = GPT(config)
        groups = parameter_groups(model, RATES, weight_decay=0.1)
        optimizer = MuonAdamW(groups, rank=rank, world_size=world_size)
        held.append(sum(t.nbytes for state in optimizer.state.values() for t in state.values()))
    return held


@pytest.mark.parametrize("world_size", [2, 7, 8])
@pytest.mark.parametrize("name", ["laptop", "d20"])
def test_state_per_process_falls_as_the_number_of_processes_grows(name, world_size):
    sizes = {"laptop": (4, 48, 64, 512, 4096, "L"), "d20": (20, 64, 128, 2048, 32768, "SSSL")}
    config = model_config(*sizes[name])
    (alone,) = state_bytes(config, 1)
    held = state_bytes(config, world_size)
    even = alone / world_size
    assert max(held) < 1.15 * even and min(held) > 0.85 * even
    assert sum(held) == pytest.approx(alone, rel=0.01)  # nothing is kept twice but what is tiny


@pytest.mark.parametrize("world_size", [3, 8])
def test_muons_work_is_shared_out_as_evenly_as_whole_matrices_allow(world_size):
    shapes = [(768, 768)] * 48 + [(3072, 768)] * 12 + [(768, 3072)] * 12
    owners, _ = share_out(shapes, [(32768, 768)] * 8, world_size)
    work = [0] * world_size
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        work[owner] += rows * columns * min(rows, columns)
    assert max(work) <= 1.1 * sum(work) / world_size


# ------------------------------------------------------------------------------------------------------
# Real processes

STEPS = """
import torch
from nanochat.machine import runtime
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW, parameter_groups
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)

def main(argument):
    folder, before, first, last = argument
    machine = runtime.start("cpu", seed=0, timeout_s=600)
    model = GPT(GPTConfig(depth=3, width=48, num_heads=3, vocab_size=61, max_seq_len=16))
    model.init_weights(torch.Generator().manual_seed(0))
    rates = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}
    groups = parameter_groups(model, rates, weight_decay=0.1)
    optimizer = MuonAdamW(groups, rank=machine.rank, world_size=machine.world_size)
    if before:
        model.load_state_dict(load_file(f"{folder}/model"))
        shards = [load_file(f"{folder}/shard-{r}-of-{before}") for r in range(before)]
        optimizer.load_named_state({k: v for s in shards for k, v in s.items() if optimizer.needs(k)})
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for _, p in sorted(model.named_parameters()):
            p.grad = torch.randn(p.shape, generator=generator)
        if step == 3:  # not finite: every process skips it
            model.head.weight.grad[0, 0] = torch.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.found_inf = 1 - norm.isfinite().float()
        optimizer.step()
    sums = machine.all_gather([p.detach().double().sum().item() for p in model.parameters()])
    assert all(other == sums[0] for other in sums), "processes have different weights"
    mine = f"shard-{machine.rank}-of-{machine.world_size}"
    save_file({k: v.contiguous() for k, v in optimizer.named_state().items()}, f"{folder}/{mine}")
    if machine.is_main:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, f"{folder}/model")
    machine.close()
"""


def weights_after(folder: Path, *stages: tuple[int, int, int]) -> dict:
    """The weights after stages of (processes, first step, last step). Each goes on from the files of the one
    before."""
    folder.mkdir()
    sizes = [0, *(world_size for world_size, *_ in stages)]
    run_stages(STEPS, folder, *((n, [str(folder), sizes[i], *steps]) for i, (n, *steps) in enumerate(stages)))
    return load_file(folder / "model")


def test_one_three_five_seven_and_two_processes_make_the_same_weights_and_take_over_each_others_state(
    tmp_path,
):
    calm = weights_after(tmp_path / "calm", (1, 0, 10))
    moved = weights_after(tmp_path / "moved", (1, 0, 2), (3, 2, 5), (5, 5, 7), (7, 7, 8), (2, 8, 10))
    assert calm.keys() == moved.keys()
    for name, weight in calm.items():
        torch.testing.assert_close(moved[name], weight, rtol=1e-5, atol=1e-5)
