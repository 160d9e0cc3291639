"""Rows of an embedding table: the operator that compiled code calls on a CPU, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from nanochat.ops.operators import embedding, look_up


def table_and_tokens():
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(20, (4, 512), generator=generator)  # each row of the table is used about 100 times
    table = embedding(50, 24)
    table.weight.data.normal_(generator=generator)
    return table, idx, torch.randn(4, 512, 24, generator=generator)


def test_the_operator_has_the_rows_and_the_gradient_of_an_embedding():
    table, idx, dy = table_and_tokens()
    rows = torch.ops.nanochat.rows_of_table(table.weight, idx)
    assert torch.equal(rows, F.embedding(idx, table.weight))
    (gradient,) = torch.autograd.grad(rows, table.weight, dy)
    expected = torch.zeros(50, 24, dtype=torch.float64).index_add_(
        0, idx.flatten(), dy.flatten(0, 1).double()
    )
    torch.testing.assert_close(gradient, expected.float(), rtol=0, atol=1e-4)
    assert gradient[20:].eq(0).all()
    torch.library.opcheck(torch.ops.nanochat.rows_of_table.default, (table.weight, idx))


@pytest.mark.slow
def test_compiled_code_has_the_gradient_of_eager_code_to_the_last_bit_each_time():
    table, idx, dy = table_and_tokens()
    compiled = torch.compile(lambda idx: 2 * look_up(table.weight, idx), dynamic=False)
    (expected,) = torch.autograd.grad(2 * look_up(table.weight, idx), table.weight, dy)
    for _ in range(20):  # of table(idx), compiled, all 20 differ
        (gradient,) = torch.autograd.grad(compiled(idx), table.weight, dy)
        assert torch.equal(gradient, expected)
