"""Rows of an embedding table: the operator that compiled code calls on a CPU, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from nanochat.ops.tables import embedding, look_up


def table_and_tokens():
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(20, (4, 512), generator=generator)  # each row of the table is used about 100 times
    table = embedding(50, 24)
    table.weight.data.normal_(generator=generator)
    return table, idx, torch.randn(4, 512, 24, generator=generator)


def gradient_in_float64(idx, dy):
    return torch.zeros(50, 24, dtype=torch.float64).index_add_(0, idx.flatten(), dy.flatten(0, 1).double())


def test_rows_and_gradient_are_those_of_an_embedding():
    table, idx, dy = table_and_tokens()
    rows = look_up(table.weight, idx)
    assert torch.equal(rows, F.embedding(idx, table.weight))
    (gradient,) = torch.autograd.grad(rows, table.weight, dy)
    torch.testing.assert_close(gradient.double(), gradient_in_float64(idx, dy), rtol=0, atol=1e-4)
    assert gradient[20:].eq(0).all()
    torch.library.opcheck(torch.ops.nanochat.add_rows_.default, (torch.zeros(50, 24), idx, dy))


def test_a_gradient_that_is_there_is_added_to_in_place():
    table, idx, dy = table_and_tokens()
    table.weight.grad = kept = torch.ones(50, 24)
    once, again = look_up(table.weight, idx), look_up(table.weight, idx)  # as two losses whose sum is taken
    torch.autograd.backward([once, again], [dy, dy])
    assert table.weight.grad is kept
    torch.testing.assert_close(kept.double(), 1 + 2 * gradient_in_float64(idx, dy), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_compiled_code_has_the_gradient_of_eager_code_to_the_last_bit_each_time(kept):
    table, idx, dy = table_and_tokens()
    compiled = torch.compile(lambda idx: 2 * look_up(table.weight, idx), dynamic=False)

    def gradient(function):
        table.weight.grad = torch.zeros(50, 24) if kept else None
        function(idx).backward(dy)
        return table.weight.grad

    expected = gradient(lambda idx: 2 * look_up(table.weight, idx))
    for _ in range(20):  # of table(idx), compiled, all 20 differ
        assert torch.equal(gradient(compiled), expected)
