"""An exported model in transformers computes, writes and refuses what ours does."""

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("transformers")

from exporting import TOKENIZER, export, make_model, save
from transformers import AutoModelForCausalLM

from nanochat import checkpoint
from nanochat.engine import generate_batch

BOS = TOKENIZER.bos_id
KINDS = {
    "windows and tables": dict(depth=5, window_pattern="SSL", copying=True),
    "tables with pairs": dict(depth=5, value_tables=2, bigrams=3, copying=True),
    "sub-words and pairs": dict(depth=2, spelled=True, value_tables=0, bigrams=3),
}


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """Our model, and its export as transformers loads it."""
    folder = tmp_path_factory.mktemp("export")
    ours = make_model(**KINDS[request.param])
    return ours, load(export(save(folder / "run", ours), folder / "out"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Our model of one kind and the folder of its export."""
    folder = tmp_path_factory.mktemp("export")
    ours = make_model(2, max_seq_len=64, window_pattern="SL", bigrams=3)
    return ours, export(save(folder / "run", ours), folder / "out")


def tokens(rows, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TOKENIZER.vocab_size, (rows, length), generator=generator)


def padded(texts):
    """Texts of different lengths as one batch, with padding on the left: ids and mask."""
    longest = max(map(len, texts))
    ids = torch.tensor([[5] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_logits_are_ours_for_full_rows_of_several_documents(pair):
    ours, theirs = pair
    idx = tokens(3, 256)
    idx[:, [0, 90, 91, 200]] = BOS
    idx[:, 110:140] = idx[:, 40:70]  # to copy
    assert (theirs(idx).logits - ours(idx)).abs().max() < 1e-5


@torch.no_grad()
def test_padding_on_the_left_or_right_changes_no_logit(pair):
    ours, theirs = pair
    texts = [tokens(1, n, seed=n)[0].tolist() for n in (1, 9, 30)]
    batch = padded(texts)
    logits_of_batch = theirs(**batch).logits
    for text, logits in zip(texts, logits_of_batch, strict=True):
        assert (logits[-len(text) :] - ours(torch.tensor([text]))[0]).abs().max() < 1e-5
    for dtype in (torch.bool, torch.float32):  # as a comparison, or a sum of masks, gives it
        mask = batch["attention_mask"].to(dtype)
        assert torch.equal(theirs(batch["input_ids"], mask).logits, logits_of_batch)
    flipped = {name: rows.flip(1) for name, rows in batch.items()}  # padding at the right, where it is unseen
    for row, logits in enumerate(theirs(**flipped).logits):
        n, alone = len(texts[row]), ours(torch.tensor([texts[row][::-1]]))[0]
        assert (logits[:n] - alone).abs().max() < 1e-5


def test_generate_writes_our_200_tokens_for_a_batch(pair):
    ours, theirs = pair
    prompts = [[BOS, *tokens(1, n, seed=n)[0].tolist()] for n in (40, 7)]
    columns = list(generate_batch(ours, prompts, 200, temperature=0))
    written = theirs.generate(**padded(prompts), max_new_tokens=200, do_sample=False, eos_token_id=[])
    expected = torch.tensor(columns).T
    assert expected.shape == (2, 200) and len(expected.unique()) > 20
    assert torch.equal(written[:, 41:], expected)


@torch.no_grad()
def test_a_text_goes_on_from_its_cache_as_in_one_pass(pair):
    ours, theirs = pair
    idx, cache = tokens(2, 40), None
    parts = []
    for part in idx.split([7, 1, 1, 20, 11], 1):
        found = theirs(part, past_key_values=cache, use_cache=True)
        cache = found[1]
        parts.append(found.logits)
    assert (torch.cat(parts, 1) - ours(idx)).abs().max() < 1e-5


def test_beams_and_guessed_tokens_reorder_and_cut_the_cache(one):
    theirs = load(one[1])
    prompt = {"input_ids": tokens(1, 12), "max_new_tokens": 30, "do_sample": False}
    beams = [theirs.generate(**prompt, num_beams=4, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)
    plain, guessed = theirs.generate(**prompt), theirs.generate(**prompt, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, guessed) and not torch.equal(plain, beams[0])
    with pytest.raises(ValueError, match="in a DynamicCache, not in a StaticCache"):
        theirs.generate(**prompt, cache_implementation="static")


def test_a_row_that_is_too_long_is_refused_and_generate_ends_at_the_last_position(one):
    ours, folder = one
    theirs = load(folder)
    with pytest.raises(ValueError, match="a row of 65 tokens is too long: this model has positions for 64"):
        theirs(tokens(1, 65))
    assert theirs(**padded([tokens(1, 64)[0].tolist(), [BOS]])).logits.shape[:2] == (2, 64)
    prompt = [BOS, *tokens(1, 20)[0].tolist()]
    written = theirs.generate(**padded([prompt]), max_new_tokens=100, do_sample=False, eos_token_id=[])
    expected = [token for (token,) in generate_batch(ours, [prompt], 100, temperature=0)]
    assert written[0, 21:].tolist() == expected and len(expected) == 64 - 21


def test_labels_give_our_loss_and_gradients_of_every_parameter(one):
    ours, folder = one
    theirs = load(folder).train()
    idx = tokens(2, 64)
    labels = idx.clone()
    labels[:, 20:30] = -100
    targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1)
    loss = theirs(idx, labels=labels).loss
    assert loss.item() == pytest.approx(ours(idx[:, :-1], targets).item(), abs=1e-5)
    loss.backward()
    assert [name for name, p in theirs.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_16_bits_compute_nearly_the_same(one, dtype):
    ours, folder = one
    dtype, idx = getattr(torch, dtype), tokens(2, 32)
    for theirs in (load(folder).to(dtype), load(folder, dtype=dtype)):
        assert theirs.dtype == dtype
        difference = (theirs(idx).logits - ours(idx)).std()
        assert 0 < difference < (0.02 if dtype == torch.float16 else 0.2)
        theirs.generate(idx, None, None, None, max_new_tokens=3)


@pytest.mark.slow
@torch.no_grad()
def test_it_compiles_as_one_graph(one):
    theirs, idx = load(one[1]), tokens(2, 32)
    compiled = torch.compile(theirs, fullgraph=True)
    assert (compiled(idx).logits - theirs(idx).logits).abs().max() < 1e-4


@torch.no_grad()
def test_a_device_map_places_it(one):
    pytest.importorskip("accelerate")
    assert load(one[1], device_map="cpu")(tokens(1, 8)).logits.isfinite().all()


@torch.no_grad()
def test_saved_again_it_loads_again_there_and_here(one, tmp_path):
    ours, folder = one
    load(folder).save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "again")
    idx = tokens(2, 32)
    assert (load(tmp_path / "again")(idx).logits - ours(idx)).abs().max() < 1e-5
    identity = {"model": asdict(ours.config), "tokenizer": TOKENIZER.fingerprint}
    other = make_model(2, max_seq_len=64, window_pattern="SL", stir=0.1, bigrams=3)
    checkpoint.start_from(checkpoint.find_weights(tmp_path / "again"), identity, other)
    assert torch.equal(other(idx), ours(idx))
