"""Generation: the KV cache gives what a full forward pass gives, and samples follow temperature and top_k."""

import pytest
import torch

from nanochat.engine import KVCache, generate, sample_token
from nanochat.gpt import GPT, GPTConfig

T = 32


def make_model(window_pattern="L"):
    model = GPT(GPTConfig(3, 48, 3, 67, T, window_pattern))
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for p in model.parameters():  # the zero projections of a fresh model would hide the cache
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("window_pattern", ["L", "SL", "SSL"])
@pytest.mark.parametrize("split", [[T], [1] * T, [5] + [1] * (T - 5), [8, 16, 8], [9, 1, 3, 1, 18], [31, 1]])
@torch.inference_mode()
def test_logits_through_the_cache_are_those_of_one_full_pass(window_pattern, split):
    model = make_model(window_pattern)
    idx = torch.randint(67, (2, T), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model.config)
    pieces = []
    for piece in idx.split(split, dim=1):
        pieces.append(model(piece, cache=cache))
        assert cache.length == sum(p.size(1) for p in pieces)
    torch.testing.assert_close(torch.cat(pieces, 1), model(idx), rtol=1e-4, atol=1e-4)


def test_the_cache_of_one_text_knows_nothing_of_another():
    model = make_model()
    first = list(generate(model, [1, 2, 3], 8, seed=5))
    list(generate(model, [9, 9, 9, 9], 20, seed=6))
    assert list(generate(model, [1, 2, 3], 8, seed=5)) == first


@pytest.mark.parametrize("window_pattern", ["L", "SL"])
def test_greedy_generation_takes_the_likeliest_token_of_a_full_pass_each_time(window_pattern):
    model = make_model(window_pattern)
    prompt = [3, 14, 15, 9]
    expected = list(prompt)
    with torch.inference_mode():
        for _ in range(T - len(prompt)):
            expected.append(model(torch.tensor([expected]))[0, -1].argmax().item())
    assert list(generate(model, prompt, 1000, temperature=0)) == expected[4:]


def test_generation_ends_after_max_tokens_at_a_stop_token_or_where_the_row_is_full():
    model = make_model()
    assert len(list(generate(model, [1, 2], 7))) == 7
    assert list(generate(model, [1, 2], 0)) == []
    assert len(list(generate(model, [1, 2], 10_000))) == T - 2
    tokens = list(generate(model, [1, 2], 20, seed=3))
    stop = tokens[10]
    assert list(generate(model, [1, 2], 20, seed=3, stop_ids={stop})) == tokens[: tokens.index(stop)]


def test_a_prompt_longer_than_the_row_keeps_its_end():
    model = make_model()
    long_prompt = [i % 67 for i in range(100)]
    tokens = list(generate(model, long_prompt, 50, seed=1))
    assert len(tokens) == 1
    assert tokens == list(generate(model, long_prompt[-(T - 1) :], 50, seed=1))


def test_a_seed_decides_the_text_whatever_was_drawn_before():
    model = make_model()
    first = list(generate(model, [1], 20, seed=1))
    torch.rand(100)
    assert list(generate(model, [1], 20, seed=1)) == first
    assert list(generate(model, [1], 20, seed=2)) != first


def test_generation_in_bfloat16_goes_through_autocast():
    model = make_model()
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    tokens = list(generate(model, [1, 2, 3], 5, dtype=torch.bfloat16))
    assert len(tokens) == 5 and set(seen) == {torch.bfloat16}


# ------------------------------------------------------------------------------------------------------
# Sampling


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])


def frequencies(temperature, top_k, draws=20_000):
    generator = torch.Generator().manual_seed(0)
    drawn = sample_token(LOGITS.expand(draws, -1), temperature, top_k, generator)
    assert drawn.shape == (draws, 1)
    return drawn.flatten().bincount(minlength=5) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_the_softmax_of_logits_over_temperature(temperature):
    expected = (LOGITS[0] / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(temperature, -1), expected, rtol=0, atol=0.015)


def test_top_k_draws_from_the_k_likeliest_in_their_proportion():
    expected = torch.tensor([2.0, 1.0, -torch.inf, -torch.inf, 1.0]).softmax(-1)
    torch.testing.assert_close(frequencies(1.0, 3), expected, rtol=0, atol=0.015)
    assert frequencies(1.0, 1).tolist() == [1, 0, 0, 0, 0]
    everything = LOGITS[0].softmax(-1)
    for keeps_all in (0, -1, 5, 50):
        torch.testing.assert_close(frequencies(1.0, keeps_all), everything, rtol=0, atol=0.015)


def test_temperature_zero_takes_the_likeliest():
    assert frequencies(0, -1).tolist() == [1, 0, 0, 0, 0]
