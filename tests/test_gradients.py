"""Real processes exchange gradients: each gets the average of its share, and the norm of all."""

import re

import pytest
from helpers import command, losses, run, run_stages

# Each process makes its own gradients twice: through DDP with the exchange, and through a copy of the model
# that knows of no other process. The average of the copies' gradients, in float64, is what has to come.
PROCESSES = """
import contextlib, copy
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from nanochat import gradients, optim
from nanochat.machine import precision, runtime
from nanochat.gpt import GPT, GPTConfig

LIMIT = 0.5  # of the norm; the gradients are larger

def train(machine, kind, backend, dtype):
    model = GPT(GPTConfig(depth=3, width=48, num_heads=3, vocab_size=61, max_seq_len=16))
    model.init_weights(torch.Generator().manual_seed(0))
    for p in model.parameters():  # what starts at zero would leave most gradients at zero
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    alone = copy.deepcopy(model)
    optimizer, reference = make(model, kind, machine.rank, machine.world_size), make(alone, kind)
    gradients.dist.get_backend = lambda: backend  # NCCL's way, over gloo
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, **runtime.DDP_OPTIONS)
    buckets = record_buckets(ddp)
    gradients.exchange_gradients(ddp, optimizer, dtype)
    for step in range(2):
        batches = torch.Generator().manual_seed(100 * step + machine.rank)
        for micro_step in range(2):
            idx = torch.randint(61, (4, 16), generator=batches)
            with contextlib.nullcontext() if micro_step else ddp.no_sync():
                ddp(idx, idx.roll(-1, 1)).backward()
            alone(idx, idx.roll(-1, 1)).backward()
            if step > 0:
                check_that_gradients_exist_once(model, buckets)
        buckets.clear()
        for p in alone.parameters():
            total = p.grad.double()
            dist.all_reduce(total)
            p.grad.copy_(total / machine.world_size)
        expected = {name: p.grad for name, p in alone.named_parameters()}
        pairs = [(p.grad[mine], expected[name][mine]) for name, p, mine in shares(model, optimizer)]
        held = sum(grad.numel() for grad, _ in pairs)
        size = sum(p.numel() for p in model.parameters())
        assert machine.all_sum([held])[0] >= size and (held < size or kind == "AdamW")
        check_close(pairs, dtype)
        norm = gradients.clip_grad_norm_(model, optimizer, LIMIT)
        expected_norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6 if dtype == "float32" else 1e-2, atol=0)
        assert norm > LIMIT and len(set(machine.all_gather(norm.item()))) == 1
        check_close(pairs, dtype)
        optimizer.step()
        reference.step()
        optimizer.zero_grad(set_to_none=False)
        reference.zero_grad()
        for name, p in alone.named_parameters() if dtype == "float32" else ():
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-4, atol=1e-4)
        sums = machine.all_gather([p.detach().double().sum().item() for p in model.parameters()])
        assert all(other == sums[0] for other in sums), "processes have different weights"
        model.load_state_dict(alone.state_dict())

def check_close(pairs, dtype):
    if dtype == "float32":
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    found, expected = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs))
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 1e-2 if dtype == "bfloat16" else error < 1e-6, error

def make(model, kind, rank=0, world_size=1):
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}
    groups = optim.parameter_groups(model, rates, weight_decay=0.1)
    return optim.MuonAdamW(groups, rank=rank, world_size=world_size)

def shares(model, optimizer):
    for name, p in model.named_parameters():
        if isinstance(optimizer, torch.optim.AdamW):
            yield name, p, ...
        elif p in optimizer.state:  # it keeps the state of what it updates, and the whole of a matrix
            yield name, p, optimizer.rows(p)

def record_buckets(ddp):
    buckets, register = {}, ddp.register_comm_hook
    def recording(state, hook):
        def recorded(state, bucket):
            buckets[bucket.buffer().data_ptr()] = bucket.buffer().nbytes
            return hook(state, bucket)
        register(state, recorded)
    ddp.register_comm_hook = recording
    return buckets

def check_that_gradients_exist_once(model, buckets):
    storages = [p.grad.untyped_storage() for p in model.parameters()]
    held = {s.data_ptr(): s.nbytes() for s in storages} | buckets
    assert sum(held.values()) == sum(p.nbytes for p in model.parameters()), held

def check_that_all_skip_what_overflows_in_one(machine):
    model = GPT(GPTConfig(depth=2, width=48, num_heads=3, vocab_size=61, max_seq_len=16))
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = make(model, "MuonAdamW", machine.rank, machine.world_size)
    scaler = precision.make_scaler(machine.device, torch.float16)
    scaler.scale(torch.zeros(()))  # gives it a scale
    for finite in (True, False, True):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if machine.rank == 1 and not finite:  # in a gradient that process 0 never gets
            mine = next(p for p in model.parameters() if (1, slice(None)) in optimizer.owners(p))
            mine.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        lasting = [*model.parameters(), *optimizer.named_state().values()]
        before, scale = [t.detach().clone() for t in lasting], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, lasting, before)) != finite
        assert scaler.get_scale() == (scale if finite else scale / 2)

def check_that_a_process_may_own_nothing(machine):
    model = GPT(GPTConfig(depth=1, width=48, num_heads=3, vocab_size=61, max_seq_len=16))
    model.requires_grad_(False)
    p = model.blocks[0].attention.out.weight.requires_grad_()
    optimizer = make(model, "MuonAdamW", machine.rank, machine.world_size)
    p.grad = torch.ones_like(p)
    assert gradients.clip_grad_norm_(model, optimizer, LIMIT) == 48
    assert (p.grad.norm() - LIMIT).abs() < 1e-5 or p not in optimizer.state

torch.set_num_threads(1)

def main(variants):
    machine = runtime.start("cpu", seed=0, timeout_s=600)
    for variant in variants:
        train(machine, *variant)
    check_that_all_skip_what_overflows_in_one(machine)
    check_that_a_process_may_own_nothing(machine)
    machine.close()
"""


OURS, NCCL = ("MuonAdamW", "gloo", "float32"), ("MuonAdamW", "nccl", "float32")
ROUNDED = ("MuonAdamW", "gloo", "bfloat16"), ("MuonAdamW", "nccl", "bfloat16")


def test_each_process_gets_the_average_of_its_share_and_the_norm_of_all(tmp_path):
    run_stages(PROCESSES, tmp_path, (3, [OURS]))


@pytest.mark.slow
def test_each_process_gets_the_same_with_nccl_s_calls_in_bfloat16_and_with_an_optimizer_of_torch(
    tmp_path,
):
    torch_s = ("AdamW", "gloo", "float32"), ("AdamW", "gloo", "bfloat16")
    all_ways = [OURS, NCCL, *ROUNDED]
    run_stages(PROCESSES, tmp_path, (2, [*all_ways, *torch_s]), (4, all_ways), (3, [NCCL]))


# base_train, with a compiler that counts the graphs it is given and runs them as they are
COUNT_GRAPHS = """
import os, runpy
import torch
from torch._dynamo.backends.debugging import aot_eager

count, compile = 0, torch.compile

def counting(graph, inputs, **options):
    global count
    count += 1
    return aot_eager(graph, inputs, **options)

def compile_the_parts(function, **options):
    return compile(function, **(options | {"backend": counting})) if "backend" in options else function

torch.compile = compile_the_parts
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
print("graphs:", count, flush=True)
"""


@pytest.mark.slow
def test_a_compiled_model_in_two_processes_has_the_graphs_and_the_losses_of_one_process(corpus, tmp_path):
    code = tmp_path / "count_graphs.py"
    code.write_text(COUNT_GRAPHS)
    graphs = set()
    for name, processes in (("one", 1), ("two", 2)):
        # Large enough for Dynamo to cut it at Muon's matrices, if it were let
        size = "--depth=4", "--aspect_ratio=32", "--num_iterations=3"
        arguments = command(corpus, tmp_path / name, *size, "--compile=on")
        printed = run([str(code), *arguments[1:]], processes=processes)
        found = re.findall(r"^graphs: (\d+)$", printed, re.MULTILINE)
        assert len(found) == processes, printed
        graphs.update(found)
    assert len(graphs) == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
