"""bench --what=traffic: what a GPU's micro-step moves, against counts by hand."""

from unittest.mock import Mock

import fake_peer
import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep

from experiments import kernel_bytes, traffic_speed
from experiments.kernel_bytes import Calls
from nanochat import UserError
from nanochat.ops import mlp  # noqa: F401  it registers the operators

B, T, V, C = 4, 2048, 16384, 256
SETTINGS = {"aspect_ratio": 64, "head_dim": 128, "max_seq_len": T, "vocab_size": V, "window_pattern": "L"}
SETTINGS |= {"device_batch_size": B, "peer": None, "folder": None, "parts": ""}
# One MLP of width C, whose every kernel is counted below
PEER = """
import torch, torch.nn as nn, torch.nn.functional as F
from types import SimpleNamespace as GPTConfig
from nanochat.flash_attention import flash_attn

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False, dtype=torch.bfloat16)
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd, dtype=torch.bfloat16)

    def init_weights(self):
        pass

    def forward(self, idx, targets):
        x = self.embedding(idx)
        q = x.unsqueeze(2)
        x = flash_attn.flash_attn_func(q, q, q, causal=True).squeeze(2)
        return self.down(F.relu(self.up(x)).square()).sum()
"""


@pytest.mark.slow
def test_both_models_are_counted(tmp_path):
    pytest.importorskip("triton")
    for name, text in {
        "nanochat/gpt.py": PEER,
        "nanochat/__init__.py": "",
        "scripts/base_train.py": "",
    }.items():
        (tmp_path / "peer" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "peer" / name).write_text(text)
    places = {"peer": str(tmp_path / "peer"), "folder": str(tmp_path)}
    found = traffic_speed.bench(SETTINGS | {"depth": 1, "aspect_ratio": C} | places)
    # relu(u)^2 reads u and writes its result, 4 C numbers of 2 bytes a token; backward it reads u and the
    # result's gradient, and writes u's
    assert found["peer_kinds"]["activation"] == {"bytes": (2 + 3) * 4 * C * 2, "launches": 2}
    # A look-up reads an int64, a row and writes the row
    rows = (tmp_path / "peer_kernels.tsv").read_text().splitlines()[1:]
    (look_up,) = [row.split("\t") for row in rows if "\tforward\tlook-ups\t" in row]
    assert int(look_up[0]) == 8 + 2 * C * 2
    # Two products with a weight each way, two more backward, attention both ways
    assert found["peer_kinds"]["products and attention"] == {"bytes": 0, "launches": 2 + 4 + 2}
    assert "triton" in (tmp_path / "ours_block_0_backward.py").read_text()
    ours, peer = found["ours"], found["peer"]
    assert found["bytes_over_peer"] == ours["bytes"] / peer["bytes"]
    assert found["launches_over_peer"] == ours["launches"] / peer["launches"]
    # The loss moves at least the logits, written by a product, read and their gradient written
    assert ours["loss_bytes"] >= 2 * V * 2
    assert ours["bytes"] == ours["forward_bytes"] + ours["backward_bytes"]
    deeper = {"depth": 4, "aspect_ratio": C // 4, "folder": str(tmp_path)}  # as wide
    deeper = traffic_speed.bench(SETTINGS | deeper)
    one, four = found["ours_kinds"], deeper["ours_kinds"]
    # A block has five products, for q, k and the gates, for v, out, up and down; and backward two for each,
    # of which that by down is counted with the activation's gradient. With attention these are 6 and 10.
    # Its norms are of the stream, q, k and the MLP's input, and backward those of q and k together
    for kind, of_a_block in {"products and attention": 16, "norms": 5}.items():
        assert four[kind]["launches"] - one[kind]["launches"] == 3 * of_a_block
    # What stands before and after the blocks stays
    assert 1.9 < four["norms"]["bytes"] / one["norms"]["bytes"] < 4.1
    # No kernel of a block reads a row, of 128 numbers, in loops: only down the columns
    _, *kernels = (tmp_path / "ours_block_0_backward.py").read_text().split("@triton_heuristics.")
    loops = [kernel for kernel in kernels if kernel.startswith("reduction(")]
    assert kernels and all("ReductionHint.OUTER" in kernel for kernel in loops)


def test_a_peer_that_cannot_be_counted_is_one_sentence(tmp_path):
    pytest.importorskip("triton")
    peer = fake_peer.checkout(tmp_path)
    (peer / "nanochat" / "gpt.py").write_text("raise ValueError('another commit')")
    with pytest.raises(UserError, match=r"the model of peer could not be counted: .*another commit"):
        traffic_speed.count("peer", peer, SETTINGS | {"depth": 1, "kernels": []})


def test_a_kernel_that_does_not_exist_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(UserError, match=r"--parts=los: .* loss, head"):
        traffic_speed.bench(SETTINGS | {"parts": "loss, los"})


def test_without_triton_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(traffic_speed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install triton"):
        traffic_speed.bench(SETTINGS)


def moved(function, *args) -> list[tuple[int, int]]:
    """Bytes read and written by each call that the function makes."""
    with Calls() as calls:
        function(*args)
    return [(sum(k["reads"].values()), sum(k["writes"].values())) for k in calls.kernels]


def test_a_call_reads_its_inputs_and_writes_its_outputs_once():
    x, y, rows = torch.ones(8, 4), torch.ones(8, 4), torch.tensor([1, 2, 2])
    assert moved(torch.add, x, y) == [(256, 128)]
    assert moved(x.add_, y) == [(256, 128)]  # in place: read and written
    assert moved(x.copy_, y) == [(128, 128)]
    assert moved(lambda: torch.add(x, y, out=x)) == [(256, 128)]
    assert moved(torch.embedding, x, rows) == [(3 * 8 + 48, 48)]  # three rows
    assert moved(torch.mm, x, y.T) == [(0, 0)]  # a product, and a view
    assert moved(lambda: x.new_empty(3)[1:].view(1, 2)) == []


def test_an_operator_of_ours_with_a_product_reads_what_the_table_says():
    shapes = (8, 4), (4, 16), (8, 16), (8,)
    dy, weight, z, r = (torch.ones(*shape, dtype=torch.bfloat16) for shape in shapes)
    reads_and_writes = moved(torch.ops.nanochat.down_activated_backward, dy, weight, z, r)[0]
    assert reads_and_writes == (8 * 16 * 2, 0)


def test_a_kernel_writes_what_one_loop_of_it_leaves_for_the_next_and_not_what_stays_in_registers():
    i = sympy.Symbol("i")
    given, kept, in_place, left = (MemoryDep(name, i, (i,), (64,)) for name in ("x", "buf0", "buf1", "buf2"))
    node = Mock(read_writes=Mock(reads={given, kept, in_place, left}, writes={kept, in_place, left}))
    node.get_nodes.return_value = [node]
    graph = Mock(removed_buffers={"buf0"}, inplaced_to_remove={"buf1"})
    graph.get_numel.return_value, graph.get_dtype.return_value = 64, torch.float32
    graph.scheduler.name_to_buf = {
        f"buf{n}": Mock(defining_op=node, users=[Mock(node=node)]) for n in range(3)
    }
    graph.scheduler.mutation_real_name = {}
    assert kernel_bytes._moved_by_kernel(graph, node) == ({"x": 256}, {"buf2": 256})
