"""The exported tokenizer against ours, loaded as people load it."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.data.chat_format import prompt_ids, render
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer, train
from nanochat.hf.text import _fast_tokenizer, generation_config, write_text

SAMPLE = json.__doc__ + " über straße 漢字 12345678 \n\n\n        return it's 😀" * 20
any_text = st.text(max_size=200) | st.text("abAB'/ \n\r\t\u00a0'12sS\u017f<|>é漢😀_", max_size=200)


def exported(tokenizer, folder, chat=True):
    transformers = pytest.importorskip("transformers")
    write_text(tokenizer, folder, chat, max_seq_len=512)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([SAMPLE], 400)


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    return exported(tokenizer, tmp_path_factory.mktemp("exported"))


@given(text=any_text)
@settings(max_examples=300)
def test_any_text_gets_our_ids_after_bos_and_is_decoded_to_itself(tokenizer, theirs, text):
    ids = theirs(text, split_special_tokens=True)["input_ids"]
    assert ids == [tokenizer.bos_id, *tokenizer.encode(text).tolist()]
    assert theirs.decode(ids, skip_special_tokens=True) == text
    assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids[1:]


@pytest.mark.parametrize(
    "text", [" " * 50_000 + "x", "a" * 50_000, "\n \r\n" * 9_999, "\uff11\uff12\uff13" * 9_999]
)
def test_long_runs_get_our_ids(tokenizer, theirs, text):
    assert theirs(text)["input_ids"][1:] == tokenizer.encode(text).tolist()


def test_text_that_looks_like_a_special_token_is_one_unless_the_call_says_otherwise(tokenizer, theirs):
    text = "a<|user_end|>b"
    a, b = tokenizer.encode("a").tolist(), tokenizer.encode("b").tolist()
    assert theirs(text)["input_ids"] == [tokenizer.bos_id, *a, tokenizer.special_tokens["<|user_end|>"], *b]
    kept = theirs(text, split_special_tokens=True)["input_ids"]
    assert kept == [tokenizer.bos_id, *tokenizer.encode(text).tolist()]


def test_the_settings_are_those_of_the_model(tokenizer, theirs, tmp_path):
    special = tokenizer.special_tokens
    assert len(theirs) == tokenizer.vocab_size and theirs.model_max_length == 512
    assert all(theirs.convert_tokens_to_ids(name) == i for name, i in special.items())
    assert theirs.decode(list(special.values()), skip_special_tokens=True) == ""
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, special["<|assistant_end|>"])
    rows = theirs(["a", "a b a b"], padding=True)
    assert rows["attention_mask"][0][0] == 0 and rows["input_ids"][0][-1] == tokenizer.encode("a")[0]
    config = generation_config(tokenizer, chat=True)
    assert {theirs.eos_token_id, theirs.bos_token_id} == set(config["eos_token_id"])
    assert theirs.pad_token_id == config["pad_token_id"] not in config["eos_token_id"]
    base = exported(tokenizer, tmp_path, chat=False)
    assert base.chat_template is None
    assert (
        [base.eos_token_id] == generation_config(tokenizer, chat=False)["eos_token_id"] == [tokenizer.bos_id]
    )


# -- other vocabularies and patterns: the file without the detour over a folder


def fast_ids(fast, text: str) -> list[int]:
    fast.encode_special_tokens = True
    return fast.encode(text, add_special_tokens=False).ids


@given(
    merges=st.lists(st.text("ab", min_size=2, max_size=5), unique=True, max_size=12),
    texts=st.lists(st.text("ab ", max_size=30), min_size=1, max_size=20),
)
@settings(max_examples=100)
def test_any_list_of_tokens_has_the_same_merges(merges, texts):
    tokenizer = Tokenizer("t", [bytes([b]) for b in range(256)] + [text.encode() for text in merges])
    fast = _fast_tokenizer(tokenizer)
    for text in texts:
        assert fast_ids(fast, text) == tokenizer.encode(text).tolist()


@pytest.fixture(scope="module", params=["gpt2", "cl100k_base", "o200k_base"])
def another(request, tokenizer):
    """(a tokenizer with a pattern of tiktoken, its copy for `transformers`)"""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    with pytest.MonkeyPatch.context() as patch:  # the vocabularies would be downloaded
        for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(public, name, lambda *args, **options: {})
        pattern = public.ENCODING_CONSTRUCTORS[request.param]()["pat_str"]
    ours = Tokenizer(request.param, tokenizer.tokens, pattern)
    return ours, _fast_tokenizer(ours)


@given(text=any_text)
@settings(max_examples=200)
def test_patterns_of_tiktoken_cut_in_the_same_places(another, text):
    ours, fast = another
    assert fast_ids(fast, text) == ours.encode(text).tolist()


# -- the chat template

content = st.text(min_size=1, max_size=40).filter(lambda text: not any(s in text for s in SPECIAL_TOKENS))
conversations = st.tuples(st.none() | content, st.lists(st.tuples(content, content), min_size=1, max_size=3))


@given(conversation=conversations)
@settings(max_examples=150)
def test_a_conversation_is_rendered_as_mid_train_trains_on_it(tokenizer, theirs, conversation):
    system, turns = conversation
    messages = [("system", system)] if system is not None else []
    for question, answer in turns:
        messages += [("user", question), ("assistant", answer)]
    listed = [{"role": role, "content": text} for role, text in messages]
    ids, is_target = render(tokenizer, messages, "assistant")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    got = theirs.apply_chat_template(listed, **options)
    assert got["input_ids"] == ids.tolist()
    assert np.array(got["assistant_masks"], bool).tolist() == is_target.tolist()
    asked = theirs.apply_chat_template(listed[:-1], add_generation_prompt=True, return_dict=True)
    assert asked["input_ids"] == prompt_ids(tokenizer, messages[:-1])


def test_turns_that_no_training_has_are_refused(theirs):
    for roles in (["assistant"], ["user", "user"], ["user", "system"], ["tool"]):
        with pytest.raises(Exception, match="take turns"):
            theirs.apply_chat_template([{"role": role, "content": "a"} for role in roles])
