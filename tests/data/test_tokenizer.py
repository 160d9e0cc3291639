"""The tokenizer against a slow BPE, tiktoken's own paths, and damaged files."""

import base64
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.data.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer, open_tokenizer, train

TEXTS = [Path(json.__file__).read_text(), Path(base64.__file__).read_text(), "über straße 漢字 " * 50]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, 512)


def slow_bpe(tokenizer: Tokenizer, text: str) -> list[int]:
    """Cut by the pattern; then in each cut join, again and again, the pair whose joint has the lowest id."""
    regex = pytest.importorskip("regex")
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    out = []
    for cut in regex.findall(tokenizer.pattern, text):
        parts = [bytes([b]) for b in cut.encode()]
        while True:
            pairs = [(ids[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out += [ids[part] for part in parts]
    return out


any_text = st.text(max_size=200) | st.text("ab \n\t'12<|>é漢😀_", max_size=200)


@given(text=any_text)
@settings(max_examples=200)
def test_encoding_equals_a_slow_bpe_and_decodes_to_the_same_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == slow_bpe(tokenizer, text) == tokenizer._encoding.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


@given(text=st.text(st.characters(categories=["Cs", "Lu", "Zs"]), max_size=50))
@settings(max_examples=100)
def test_lone_surrogates_are_encoded_as_tiktoken_does(tokenizer, text):
    assert tokenizer.encode(text).tolist() == tokenizer._encoding.encode_ordinary(text)


def test_text_that_looks_like_a_special_token_is_never_encoded_as_one(tokenizer):
    text = "".join(SPECIAL_TOKENS) + "a<|bos|>b <|bo"
    ids = tokenizer.encode(text)
    assert ids.max() < len(tokenizer.tokens)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("hi")]) == "<|bos|>hi"


@pytest.mark.parametrize("blank", [" ", " \n"])
def test_a_million_blanks_in_a_row_are_encoded(tokenizer, blank):
    text = "x" + blank * 1_000_000 + "y"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_that_a_pattern_of_somebody_fails_on_is_one_sentence_whatever_its_end(tokenizer):
    slow = Tokenizer("slow", tokenizer.tokens, r"(?=(x+x+)+y)\1|x|\s+")
    for end in ("", " " * 20_000):
        with pytest.raises(UserError, match="tokenizer slow fails on a text"):
            slow.encode("x" * 100 + end)


def test_every_byte_and_special_token_has_its_place_and_bytes_add_up_to_the_size_of_the_text(tokenizer):
    assert {bytes([b]) for b in range(256)} <= set(tokenizer.tokens)
    last = range(512 - len(SPECIAL_TOKENS), 512)
    assert tokenizer.special_tokens == dict(zip(SPECIAL_TOKENS, last, strict=True))
    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int64 and sizes.shape == (tokenizer.vocab_size,) == (512,)
    assert sizes[tokenizer.encode(TEXTS[2])].sum() == len(TEXTS[2].encode())
    assert sizes[list(tokenizer.special_tokens.values())].sum() == 0


def test_numbers_are_cut_into_at_most_two_digits():
    tokenizer = train(["12345678 " * 99], 269)  # room for all the pairs, and one more
    assert [tokenizer.tokens[i] for i in tokenizer.encode("12345678")] == [b"12", b"34", b"56", b"78"]


def test_training_is_the_same_whatever_the_threads(tokenizer, tmp_path):
    script = "import sys, json; from nanochat.data.tokenizer import train\n"
    script += "print(train(json.load(sys.stdin), 512).fingerprint)"
    for parallel in ("true", "false"):
        how = {"env": {**os.environ, "TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": "7"}, "text": True}
        said = subprocess.check_output([sys.executable, "-c", script], input=json.dumps(TEXTS), **how)
        assert said.strip() == tokenizer.fingerprint


def test_training_survives_surrogates():
    assert b"abc" in train(["abc\ud800" * 9], 270).tokens


def test_too_little_text_or_too_small_a_vocabulary_is_refused_with_numbers():
    with pytest.raises(UserError, match=r"vocab_size 1000 .* use at most 26\d"):
        train(["abc"], 1000)
    with pytest.raises(UserError, match="at least 265"):
        train(TEXTS, 264)


def test_the_file_round_trips_and_leaves_nothing_beside_it(tokenizer, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    tokenizer.save(path)
    assert os.listdir(path.parent) == ["tokenizer.json"]
    for again in (Tokenizer.load(path), tokenizer.copy()):
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.name, again.special_tokens) == (tokenizer.name, tokenizer.special_tokens)
        assert again.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()
    swapped = [*tokenizer.tokens[:-2], tokenizer.tokens[-1], tokenizer.tokens[-2]]
    parts = [(swapped,), (tokenizer.tokens, PATTERN + "|x"), (tokenizer.tokens, PATTERN, SPECIAL_TOKENS[:-1])]
    others = {Tokenizer("x", *each).fingerprint for each in parts}
    assert len(others) == 3 and tokenizer.fingerprint not in others


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_file_is_refused_in_one_sentence(tokenizer, tmp_path_factory, data):
    content = bytearray(tokenizer.to_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:start]
    else:
        content[start] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(content)
    try:
        again = Tokenizer.load(path)
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:  # a change of blanks or of the name alone is harmless
        assert again.fingerprint == tokenizer.fingerprint


def test_content_that_is_json_but_no_tokenizer_is_refused(tokenizer, tmp_path):
    good = json.loads(tokenizer.to_bytes())
    changes = [{"format": "other"}, {"special_tokens": {"<|bos|>": 3}}, {"special_tokens": []}]
    changes += [{"pattern": "("}, {"tokens_base64": good["tokens_base64"][1:]}, {"fingerprint": "0" * 64}]
    for content in (*({**good, **change} for change in changes), [], {}, 3):
        (tmp_path / "changed.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="train it again"):
            Tokenizer.load(tmp_path / "changed.json")
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(UserError, match="no tokenizer can be read at"):
            Tokenizer.load(path)


def test_where_the_size_is_not_asked_for_the_text_decides(tmp_path):
    texts = ["abc abd"]
    small = train(texts, 1000, exact=False)
    assert 265 < small.vocab_size < 300 and small.decode(small.encode("abc é")) == "abc é"
    assert train(texts, small.vocab_size).fingerprint == small.fingerprint
    opened = open_tokenizer("auto", 1000, tmp_path, lambda: texts, exact=False)
    assert opened.fingerprint == small.fingerprint
    again = open_tokenizer("auto", 1000, tmp_path, lambda: pytest.fail("trained twice"), exact=False)
    assert again.fingerprint == small.fingerprint
    with pytest.raises(UserError, match=f"use at most {small.vocab_size}"):
        open_tokenizer("auto", 1000, tmp_path, lambda: texts)
    (path,) = tmp_path.iterdir()
    assert open_tokenizer(str(path), 999, tmp_path, lambda: []).fingerprint == small.fingerprint


def test_an_encoding_of_tiktoken_is_taken_by_name_with_our_special_tokens(monkeypatch, tmp_path):
    ranks = {bytes([b]): 255 - b for b in range(256)} | {b"ab": 256, b"abc": 258, b"<|": 257}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = open_tokenizer("gpt2", 4096, tmp_path, lambda: pytest.fail("trained"))
    text = "abcab <|endoftext|> <|bos|> é"
    assert tokenizer.encode(text).tolist() == encoding.encode_ordinary(text)
    assert tokenizer.special_tokens == {name: 259 + i for i, name in enumerate(SPECIAL_TOKENS)}
    tokenizer.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").encode(text).tolist() == encoding.encode_ordinary(text)


def test_an_encoding_that_cannot_be_fetched_is_refused_in_one_sentence(monkeypatch, tmp_path):
    def offline(url):
        raise requests.ConnectionError("no route")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(requests, "get", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"gpt2 is not on this machine .* --plan uses no network"):
        open_tokenizer("gpt2", 4096, tmp_path, lambda: [], network=False)
    monkeypatch.setattr(tiktoken.load, "read_file", offline)
    with pytest.raises(UserError, match=r"encoding cl100k_base is not on this machine .* --tokenizer=auto"):
        open_tokenizer("cl100k_base", 4096, tmp_path, lambda: [])
