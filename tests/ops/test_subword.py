"""Sub-word embeddings: which sub-words a token has, the sums of their rows, and models that have them."""

from dataclasses import replace

import pytest
import torch
from test_gpt import make_model, random_tokens

from nanochat import UserError
from nanochat.engine import fold_subwords
from nanochat.gpt import GPT
from nanochat.ops.elementwise import norm
from nanochat.ops.subword import MOST, SubwordEmbedding, subword_table, subwords_of
from nanochat.plan import scaling
from nanochat.plan.counts import flops_per_token, parameter_counts


def test_a_token_has_two_to_four_letters_in_a_row_its_word_and_its_shape():
    letters = {b"<s", b"se", b"el", b"lf", b"f>", b"<se", b"sel", b"elf", b"lf>", b"<sel", b"self", b"elf>"}
    assert subwords_of(b" Self") == letters | {b"<self>", b"shape  Aa"}
    assert subwords_of(b"self") == letters | {b"<self>", b"shape a"}
    assert subwords_of(b"a") == {b"<a", b"a>", b"<a>", b"shape a"}
    assert subwords_of(b"\n        ") == {b"shape \n        "}
    shapes = [(b"IDs(", b"aA"), (b" 12", b" 0"), (b"):", b"-"), (b"AB_", b"A"), (b" aB", b" aA")]
    assert all(b"shape " + shape in subwords_of(token) for token, shape in shapes)
    assert b"shape aA" in subwords_of("é".encode())  # bytes of no ASCII letter are letters like any other


def test_only_what_several_tokens_share_gets_a_number_and_the_most_frequent_the_first():
    tokens = [b"self", b" self", b"Self", b"x"]
    table = subword_table(tokens, 6)  # the last two rows are of special tokens
    assert table.shape == (6, MOST) and table.dtype == torch.int32
    # 13 sub-words stand in three tokens each, `shape a` in two; rows of 6 tokens give numbers to five of them
    assert [sorted(set(row.tolist()) - {0}) for row in table] == [[1, 2, 3, 4, 5]] * 3 + [[]] * 3
    assert (table[0, :5] == torch.tensor([5, 4, 3, 2, 1])).all()  # the rarest first
    assert sorted(set(subword_table(tokens, 99)[3].tolist())) == [0, 14]  # `x` has the shape of `self`


def subword_model(**sizes):
    """With sub-words of its own for every token, but the last."""
    model = make_model(spelled=True, **sizes)
    V = model.config.vocab_size
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(V, (V, MOST), generator=generator)
    table[:, 9:], table[-1] = 0, 0
    model.pieces.register(table)
    return model


def test_a_row_is_the_tokens_own_and_those_of_its_subwords_forward_and_backward():
    model = subword_model()
    M = torch.zeros(67, 67, dtype=torch.float64)  # by hand: M[token, sub-word] is what a row is times
    for token, pieces in enumerate(model.pieces.spelling.tolist()):
        found = [piece for piece in pieces if piece]
        for piece in found:
            M[token, piece] += 0.3 / len(found) ** 0.5
    for rows, own, shared in zip(
        model.tables(), (model.embedding, model.head), ("embedding", "head"), strict=True
    ):
        pieces = getattr(model.pieces, shared).weight
        torch.testing.assert_close(rows.double(), own.weight + M @ pieces.double(), rtol=0, atol=1e-6)
        dy = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
        gradients = torch.autograd.grad(rows, (own.weight, pieces), dy)
        torch.testing.assert_close(gradients[0], dy)
        torch.testing.assert_close(gradients[1].double(), M.T @ dy.double(), rtol=0, atol=1e-5)
        assert gradients[1][0].eq(0).all()  # 0 is no sub-word


def test_a_model_with_its_subwords_folded_in_gives_the_same_logits():
    model = subword_model()
    config, tensors = fold_subwords(model.config, model.state_dict())
    plain = GPT(config)
    plain.init_rotary()
    plain.load_state_dict(tensors)
    idx = random_tokens(model)
    assert torch.equal(plain(idx), model(idx))
    assert parameter_counts(model)["total"] - parameter_counts(plain)["total"] == 4 * 67 * 48 // 2
    assert flops_per_token(model) == flops_per_token(plain)


def test_fresh_subwords_leave_the_head_as_it_is_and_tell_tokens_apart():
    pieces = SubwordEmbedding(50, 16)
    pieces.init_weights(torch.Generator().manual_seed(0))
    table = torch.zeros(50, MOST)
    table[1:3, 0] = 7
    pieces.register(table)
    embedding, head = pieces(torch.zeros(50, 16), torch.ones(50, 16))
    assert head.eq(1).all() and embedding[0].eq(0).all()
    assert torch.equal(embedding[1], embedding[2]) and embedding[1].std() > 0.3


@pytest.mark.parametrize("number", [-1, 50])
def test_a_table_with_numbers_that_no_subword_has_is_refused(number):
    pieces = SubwordEmbedding(50, 16)
    pieces.init_weights()
    damaged = pieces.state_dict() | {"spelling": torch.full((50, MOST), number)}
    with pytest.raises(UserError, match=f"from {number} to {number}.* 50 rows"):
        pieces.load_state_dict(damaged)


@pytest.mark.parametrize(
    ("spelling", "tokens", "before", "found"),
    [
        ("auto", 10, {}, (True, 0)),
        ("auto", scaling.TABLE_TOKENS, {}, (True, 2)),
        ("auto", scaling.SPELLED_TOKENS, {}, (False, 2)),
        # A resumed run that is made longer stays what it was
        ("auto", scaling.SPELLED_TOKENS, {"spelled": True, "value_tables": 0}, (True, 0)),
        ("auto", scaling.SPELLED_TOKENS, {"value_tables": True}, (False, 1)),  # as before pairs had values
        ("on", 10**9, {}, (True, 2)),
        ("off", 10, {}, (False, 0)),
        ("off", 10, {"spelled": True}, (False, 0)),  # another model, which checkpoints refuse
    ],
)
def test_the_length_of_a_run_decides_which_rows_tokens_have(spelling, tokens, before, found):
    horizon = scaling.Horizon(300 * tokens, 1, 1e9, "", "")
    config = scaling.model_config(4, 64, 64, 128, 300, "L")
    given = {"spelling": spelling, "bigrams": -1, "copying": "auto"}
    tables = scaling.tables_for(given, config, horizon, 10**9, before)
    assert (tables["spelled"], tables["value_tables"]) == found
    assert tables["copying"] == (not before)  # a run from before copying goes on without


def test_without_tables_all_value_embeddings_are_the_rows_of_the_head():
    with_tables = make_model(depth=6, value_tables=1)
    config = replace(with_tables.config, value_tables=0)
    model = GPT(config)
    model.init_rotary()
    weights = {n: t for n, t in with_tables.state_dict().items() if not n.startswith("value_embeddings.")}
    model.load_state_dict(weights)  # strict: nothing else is missing
    idx = random_tokens(model)
    logits = model(idx)
    assert not torch.allclose(logits, with_tables(idx))
    for table in with_tables.value_embeddings.values():
        table.weight.data = norm(model.head.weight.data)
    torch.testing.assert_close(logits, with_tables(idx))


@pytest.mark.slow
def test_compiled_code_has_the_subword_gradients_of_eager_code_each_time():
    model = subword_model()
    idx = random_tokens(model)

    def gradients(forward):
        model.zero_grad()
        forward(idx, idx).backward()
        return [p.grad.clone() for p in model.pieces.parameters()]

    expected, compiled = gradients(model), torch.compile(model, dynamic=False)
    first = gradients(compiled)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b)
    for _ in range(5):
        assert all(map(torch.equal, gradients(compiled), first))
