"""From a checkpoint to text: the right one is loaded, the KV cache equals a full pass, tokens follow
temperature, top_k and top_p, and characters come out whole."""

import itertools
import os
import types
from dataclasses import asdict

import pytest
import test_gpt
import torch
from exporting import TOKENIZER, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat import UserError, checkpoint
from nanochat.decode import KVCache, decode_step, examine
from nanochat.engine import (
    Stream,
    cast_weights,
    continuations,
    find_source,
    generate,
    generate_batch,
    load_for_inference,
    load_tokenizer,
    sample_token,
    text_pieces,
    uniform_draws,
)
from nanochat.gpt import GPT, MLP, GPTConfig
from nanochat.machine.precision import autocast

T = 32
CPU = torch.device("cpu")


def make_model(window_pattern="L"):
    return test_gpt.make_model(3, 48, 3, 67, T, window_pattern)


@pytest.mark.parametrize("window_pattern", ["L", "SL", "SSL"])
@pytest.mark.parametrize("split", [[T], [1] * T, [5] + [1] * (T - 5), [8, 16, 8], [9, 1, 3, 1, 18], [31, 1]])
@torch.inference_mode()
def test_logits_through_the_cache_are_those_of_one_full_pass(window_pattern, split):
    model = make_model(window_pattern)
    idx = test_gpt.random_tokens(model)
    cache = KVCache(model.config)
    pieces = []
    for piece in idx.split(split, dim=1):
        pieces.append(model(piece, cache=cache))
        assert cache.length == sum(p.size(1) for p in pieces)
    torch.testing.assert_close(torch.cat(pieces, 1), model(idx), rtol=1e-4, atol=1e-4)


def test_generation_ends_after_max_tokens_at_a_stop_token_or_when_the_row_is_full():
    model = make_model()
    assert len(list(generate(model, [1, 2], 7))) == 7
    assert list(generate(model, [1, 2], 0)) == []
    assert len(list(generate(model, [1, 2], 10_000))) == T - 2
    tokens = list(generate(model, [1, 2], 20, seed=3))
    stop = tokens[10]
    assert list(generate(model, [1, 2], 20, seed=3, stop_ids={stop})) == tokens[: tokens.index(stop)]


def test_a_prompt_longer_than_the_row_keeps_its_end():
    model, long_prompt = make_model(), [i % 67 for i in range(100)]
    (token,) = generate(model, long_prompt, 50, seed=1)
    assert [token] == list(generate(model, long_prompt[-(T - 1) :], 50, seed=1))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_whose_logits_are_not_numbers_is_refused(temperature):
    model = make_model()
    for block in model.blocks:
        for p in block.mlp.parameters():
            p.data *= 2000  # what is inside passes 65504
    assert len(list(generate(model, [1, 2, 3], 5))) == 5
    with pytest.raises(UserError, match="--dtype=float32"):
        list(generate(cast_weights(model, torch.float16), [1, 2, 3], 5, temperature=temperature))


# ------------------------------------------------------------------------------------------------------
# Several texts at once


PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [1, 2, 3], [4] * 20]


def full_logits(model, text):
    """The logits after a text, of a forward pass over all of it."""
    with torch.inference_mode():
        return model(torch.tensor([text]))[0, -1]


def check_likeliest(model, columns, texts):
    """Each token of the columns is the likeliest one after its text, which gets it."""
    for column in columns:
        for text, token in zip(texts, column, strict=True):
            assert token == full_logits(model, text).argmax()
            text.append(token)


def check_rows(model, stream, texts):
    """The stream's logits are those of full passes over its texts."""
    for row, text in enumerate(texts):
        torch.testing.assert_close(stream.logits[row], full_logits(model, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window_pattern", ["L", "SL", "SSL"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_texts_of_different_lengths_get_the_logits_that_each_gets_alone(window_pattern, fast, rows):
    model = make_model(window_pattern)
    stream, texts = Stream(model, fast=fast), [list(prompt) for prompt in PROMPTS[:rows]]
    stream.read(texts)
    check_rows(model, stream, texts)
    for column in stream.write(12, temperature=0):
        check_rows(model, stream, texts)  # those that the tokens of this column were taken from
        check_likeliest(model, [column], texts)
    assert [len(text) for text in texts] == [len(prompt) + 12 for prompt in PROMPTS[:rows]]


@pytest.mark.parametrize("fast", [True, False])
def test_a_stream_reads_and_writes_in_turns_and_texts_may_end_at_different_tokens(fast):
    model, texts = make_model("SL"), [[5, 6], [7, 8, 9, 1, 2, 3]]
    stream = Stream(model, fast=fast)
    for part in (texts[0][:1], texts[1]), (texts[0][1:], []):
        stream.read(list(part))
    check_rows(model, stream, texts)
    first = list(generate(model, texts[0], 6, seed=1))
    stop = next(t for n, t in enumerate(first) if n > 1 and t not in first[:n])  # ends the first text early
    for turn, added in enumerate(([[], []], [[stop, 11], [12]], [[13, 14, 15], []], [[], [16, 17]])):
        stream.read(added)
        texts = [text + new for text, new in zip(texts, added, strict=True)]
        for number, column in enumerate(stream.write(4, seeds=[1 + turn, 7], stop_ids={stop})):
            live = [row for row in (0, 1) if column[row] is not None]
            for row in live:
                expected = full_logits(model, texts[row])
                torch.testing.assert_close(stream.logits[row], expected, rtol=1e-4, atol=1e-4)
                texts[row].append(column[row])
            if turn == 2 and number == 1:
                break  # a reader may leave in the middle
    assert all(len(text) > 10 for text in texts)


def test_a_seed_and_a_prompt_decide_a_text_whatever_is_drawn_before_or_beside_it():
    model, seeds = make_model("SL"), [13, 17, 11, 18]
    options = {"temperature": 0.9, "top_k": 20}
    options["stop_ids"] = set(generate(model, PROMPTS[2], 1, seed=11, **options))
    together = [[], [], [], []]
    for column in generate_batch(model, PROMPTS, 40, seeds=seeds, **options):
        for text, token in zip(together, column, strict=True):
            text.extend([] if token is None else [token])
    alone = [list(generate(model, p, 40, seed=s, **options)) for p, s in zip(PROMPTS, seeds, strict=True)]
    assert together == alone
    assert list(generate(model, PROMPTS[0], 40, seed=1, **options)) != alone[0]
    assert together[2] == [] and len(together[3]) <= T - 20 < max(map(len, together))


def test_a_text_that_has_ended_yields_none_and_the_last_one_ends_the_stream():
    columns = list(generate_batch(make_model(), [[3] * 28, [5] * 30], 40, seeds=[0, 1]))
    ended = [[token is None for token in column] for column in columns]
    assert ended == [[False] * 2] * 2 + [[False, True]] * 2
    assert list(generate_batch(make_model(), [[], []], 5)) == []


def test_samples_are_the_prompts_with_what_the_model_adds():
    prompts, model = ["", "é", "naïve café"], test_gpt.make_model(2, 32, 2, TOKENIZER.vocab_size, T, stir=0)
    options = {"temperature": 0.8, "top_k": 50, "stop_ids": {TOKENIZER.bos_id}, "seed": 3}
    expected = [p + TOKENIZER.decode(list(generate(model, ids_of(p), 9, **options))) for p in prompts]
    assert continuations(model, TOKENIZER, prompts, torch.float32, 3, max_tokens=9) == expected


# ------------------------------------------------------------------------------------------------------
# The fast step, and models that it does not fit


class Edited(GPT):
    """A model as somebody may edit it: `edit` changes what it computes."""

    edit: str

    def __init__(self, config):
        super().__init__(config)
        if self.edit == "parameter":
            self.extra = torch.nn.Parameter(torch.zeros(()))
        if self.edit == "window":
            self.blocks[0].attention.window = 2

    def forward(self, idx, *arguments, **keywords):
        result = super().forward(idx, *arguments, **keywords)
        return 1.01 * result if self.edit == "logits" else result


@pytest.mark.parametrize("edit", ["parameter", "window", "logits", "module", "hook"])
def test_an_edited_model_writes_with_its_own_forward_pass_and_a_note_says_so(edit, capsys):
    kind = type("Kind", (Edited,), {"edit": edit})
    model = kind(GPTConfig(3, 48, 3, 67, T, "SL"))
    model.init_weights(torch.Generator().manual_seed(0))
    if edit == "module":  # this model alone, so no note about its class
        model.blocks[0].mlp.__class__ = type("MyMLP", (MLP,), {})
    if edit == "hook":
        model.blocks[0].mlp.register_forward_hook(lambda module, arguments, output: output + 1)
    assert decode_step(model, torch.float32) is None
    if edit in ("parameter", "window", "logits"):
        assert "with the model's own forward pass" in capsys.readouterr().err
    texts = [[1, 2], [3, 4, 5]]
    check_likeliest(model, generate_batch(model, texts, 4, temperature=0), texts)


def test_the_fast_step_is_made_once_and_follows_the_weights():
    model = make_model().requires_grad_(False)
    assert decode_step(model, torch.float32) is decode_step(model, torch.float32)
    for _ in range(2):
        check_likeliest(model, generate_batch(model, [[1, 2, 3]], 8, temperature=0), [[1, 2, 3]])
        with torch.no_grad():
            model.blocks[0].attention.query.weight.mul_(-1.5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["autocast", "cast"])
@pytest.mark.parametrize("fast", [True, False])
def test_in_16_bit_the_cache_is_as_close_to_float32_as_a_full_pass_is(dtype, way, fast):
    model = make_model("SL")
    idx = test_gpt.random_tokens(model)
    exact = model(idx)
    with autocast(CPU, dtype):
        full = model(idx)
    if way == "cast":
        cast_weights(model, dtype)
    step = decode_step(model, dtype) if fast else None
    cache = KVCache(model.config, dtype=torch.float32 if step else None)
    with autocast(CPU, dtype if way == "autocast" else torch.float32):
        found = [model(idx[:, :7], cache=cache)]
        for column in idx[:, 7:].split(1, 1):
            found.append(step(column, cache)[:, None] if step else model(column, cache=cache))
    found = torch.cat(found, 1)
    assert found.dtype == torch.float32
    limit = {torch.bfloat16: 0.1, torch.float16: 0.012}[dtype]
    assert 0 < (found - exact).norm() < 1.5 * (full - exact).norm() < limit * exact.norm()


def test_the_fast_decoding_equals_the_model_that_stands_in_gpt_py():
    for depth, width, pattern in ((1, 64, "L"), (4, 192, "SSSL"), (7, 64, "SL")):
        _, reason = examine(GPT, GPTConfig(depth, width, width // 64, 300, 512, pattern))
        assert reason == "", "until decode.py has the same equations, text is written more slowly"


# ------------------------------------------------------------------------------------------------------
# Sampling


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])
MOST_LIKELY = torch.tensor([[0.0, *[-torch.inf] * 4]])


def frequencies(temperature=1.0, top_k=-1, top_p=1.0, logits=LOGITS, draws=20_000):
    chance = torch.rand(draws, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = sample_token(logits.expand(draws, -1), temperature, top_k, top_p, chance)
    assert drawn.shape == (draws, 1)
    return drawn.flatten().bincount(minlength=logits.size(-1)) / draws


@pytest.mark.parametrize(
    ("options", "logits"),
    [
        ({"temperature": 0.5}, 2 * LOGITS),
        ({"temperature": 2.0}, LOGITS / 2),
        ({"top_k": 3}, torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf, 1.0]])),
        *(({"top_k": k}, LOGITS) for k in (0, -1, 5, 50)),  # all of them
        ({"top_k": 1}, MOST_LIKELY),
        *(({"temperature": t}, MOST_LIKELY) for t in (0, 1e-300, 1e-38, 1e-3)),
    ],
)
def test_tokens_are_drawn_by_the_softmax_of_the_likeliest_logits_over_temperature(options, logits):
    torch.testing.assert_close(frequencies(**options), logits[0].softmax(-1), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("top_p", "top_k", "left"),
    [(0.4, -1, [3]), (0.41, -1, [3, 0]), (0.69, -1, [3, 0]), (0.71, -1, [3, 0, 1]), (0.95, -1, [3, 0, 1, 2]),
     (0.56, 2, [3]), (0.58, 2, [3, 0])],  # 0.4 of 0.7 is 0.571
)  # fmt: skip
def test_top_p_draws_from_the_fewest_likeliest_that_reach_that_probability_after_top_k(top_p, top_k, left):
    p = torch.tensor([0.3, 0.2, 0.1, 0.4])
    expected = torch.zeros(4)
    expected[left] = p[left] / p[left].sum()
    found = frequencies(top_p=top_p, top_k=top_k, logits=p.log()[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)
    assert set(found.nonzero().flatten().tolist()) == set(left)


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(found)):
            raise TypeError(f"MPS has no float64, which {operation} gives")
        return found


def test_on_mps_which_has_no_float64_a_seed_draws_the_same_tokens(monkeypatch):
    mps, to = types.SimpleNamespace(type="mps"), torch.Tensor.to

    def moved(tensor, target):
        if target is not mps:
            return to(tensor, target)
        assert tensor.dtype != torch.float64
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", moved)
    here, there = uniform_draws([3, 4], torch.device("cpu")), uniform_draws([3, 4], mps)
    for options in [(0.8, -1, 1.0), (0.8, 4, 1.0), (0.8, -1, 0.9), (0.0, -1, 1.0)] * 20:
        expected, draw = sample_token(LOGITS.expand(2, -1), *options, next(here)), next(there)
        with NoFloat64():
            assert torch.equal(sample_token(LOGITS.expand(2, -1), *options, draw), expected)


# ------------------------------------------------------------------------------------------------------
# Text


def ids_of(text):
    return [TOKENIZER.bos_id, *TOKENIZER.encode(text).tolist()]


def test_a_character_appears_when_its_last_byte_has_come():
    ids = list("é🙂".encode())  # ids below 256 are the bytes themselves
    assert [TOKENIZER.tokens[i] for i in ids] == [bytes([i]) for i in ids]
    came = []
    pieces = text_pieces((came.append(i) or i for i in ids), TOKENIZER)
    assert [(piece, len(came)) for piece in pieces] == [("é", 2), ("🙂", 6)]


def test_joined_pieces_are_the_decoded_text_even_with_broken_bytes():
    draw = torch.Generator().manual_seed(0)
    streams = [torch.randint(TOKENIZER.vocab_size, (60,), generator=draw).tolist() for _ in range(50)]
    streams += [ids_of("東京 🙂 naïve"), list("🙂".encode()[:3]), [0xFF, *"é".encode(), 0xE6, 0x9D], []]
    for ids in streams:
        assert "".join(text_pieces(iter(ids), TOKENIZER)) == TOKENIZER.decode(ids)


# ------------------------------------------------------------------------------------------------------
# Loading


def test_a_loaded_model_computes_what_the_saved_one_did(tmp_path):
    model = make_model("SL")
    found = checkpoint.find(save(tmp_path / "exact", model))
    idx = test_gpt.random_tokens(model)
    assert torch.equal(load_for_inference(found, CPU, torch.float32)(idx), model(idx))
    half = load_for_inference(found, CPU, torch.bfloat16)
    assert torch.equal(half(idx), cast_weights(model, torch.bfloat16)(idx))
    assert not any(p.requires_grad for p in half.parameters())


def test_a_checkpoint_of_another_model_is_refused_in_a_sentence(tmp_path):
    model = make_model()
    for name, wrong in {"some": {"depth": 2}, "other": asdict(model.config) | {"depth": 4}}.items():
        found = checkpoint.find(save(tmp_path / name, model, model=wrong))
        with pytest.raises(UserError, match="holds no model that this nanochat knows"):
            load_for_inference(found, CPU, torch.float32)


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    found = checkpoint.find(save(tmp_path, make_model()))
    fitting = GPTConfig(3, 48, 3, TOKENIZER.vocab_size, T)
    assert load_tokenizer(found, fitting).fingerprint == TOKENIZER.fingerprint
    with pytest.raises(UserError, match="the tokenizer of another model"):
        load_tokenizer(found, make_model().config)


@pytest.fixture
def base(tmp_path):
    """Three runs of two checkpoints each, oldest first: talk (mid training), small and large."""
    model, ages = make_model(), itertools.count(1)
    for run in ("mid_checkpoints/talk", "base_checkpoints/small", "base_checkpoints/large"):
        for step in (1, 2):
            save(tmp_path / run, model, step)
            os.utime(tmp_path / run / f"step_{step:06d}", (1000 * next(ages),) * 2)
    return tmp_path


def test_the_default_source_is_the_mid_training_run_else_the_base_run_saved_last(base):
    said = []
    assert find_source(None, base, said.append).path == base / "mid_checkpoints" / "talk" / "step_000002"
    assert all(word in said[0] for word in ("talk", "small", "large", "step 2"))
    (base / "mid_checkpoints").rename(base / "elsewhere")
    assert find_source(None, base).path == base / "base_checkpoints" / "large" / "step_000002"
    os.utime(base / "base_checkpoints" / "small" / "step_000001", (9e6, 9e6))
    assert find_source(None, base).path == base / "base_checkpoints" / "small" / "step_000002"


def test_a_source_is_a_tag_a_run_or_a_checkpoint(base, monkeypatch):
    small = base / "base_checkpoints" / "small"
    assert find_source("small", base).path == find_source(str(small), base).path == small / "step_000002"
    assert find_source("talk", base).step == 2
    assert find_source("small/step_000001", base).path == small / "step_000001"
    monkeypatch.chdir(small / "step_000002")
    assert find_source(".", base).run_folder == find_source("..", base).run_folder == small
    copied = (small / "step_000001").rename(base / "copied-elsewhere")
    assert find_source(str(copied), base / "nothing-here").step == 1
    with pytest.raises(UserError, match=r"d99; .* talk, large, small\)"):
        find_source("d99", base)
    with pytest.raises(UserError, match=r"python -m scripts\.base_train"):
        find_source(None, base / "nothing-here")


def test_a_run_with_a_damaged_checkpoint_gives_the_one_before_but_not_if_that_one_is_named(base):
    small, said = base / "base_checkpoints" / "small", []

    def damage(step):
        with open(small / step / "model.safetensors", "r+b") as file:
            file.seek(2000)
            file.write(b"\xff" * 8)

    damage("step_000002")
    assert find_source("small", base, said.append).step == 1
    assert len(said) == 1 and "step_000002" in said[0] and "checksum" in said[0]
    with pytest.raises(UserError, match="is damaged: model"):
        find_source(str(small / "step_000002"), base)
    damage("step_000001")
    with pytest.raises(UserError, match="small is intact; name another run"):
        find_source("small", base)
