"""The texts that samples begin with suit the data."""

import dataclasses

import pytest

from nanochat.data.dataset import beginning, build, sample_prompts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat on the mat today.\nAnd then", "The cat sat on"),
        ("\ufeff\n\n  # A   title \n\nThe text", "# A title"),  # spaces as in running text
        ("---\n* * *\nOnce", "Once"),
        ("Internationalisation considered harmful by many", "Internationalisation"),
        ("東京は日本の首都であり、世界でも最大級の都市の一つである。", "東京は日本の首都"),
        ("नमस्ते दुनिया यह एक परीक्षण", "नमस्ते दुनिया यह एक"),
        ("สวัสดีชาวโลกทุกคนที่อยู่ที่นี่วันนี้", "สวัสดีชาวโ"[:8]),
        ("a\x00b\x1b[31mc", "ab[31mc"),
        ("🙂 ... !!!", ""),
    ],
)
def test_a_prompt_is_the_first_words_of_a_text(text, expected):
    assert beginning(text.replace("\ufeff", "")) == expected


def dataset_of(folder, *val_texts):
    documents = [("train", "a text to train on"), *(("val", text) for text in val_texts)]
    return build(folder / "data", "own", documents, "{} and {} documents")


def test_prompts_of_ones_own_text_begin_like_validation_documents(tmp_path):
    texts = ["", "The red fox ran away", "\n\n", "The red fox ran home", "A cow ate grass", "東京", "No"]
    found = sample_prompts("auto", dataset_of(tmp_path, *texts))
    expected = {"The red fox ran", "A cow ate grass", "東京", "No"}
    assert len(found) == len(set(found)) == 3 and set(found) <= expected
    assert sample_prompts("auto", dataset_of(tmp_path / "no words", "...", "\n\n?")) == [""]


def test_the_embedded_text_is_code_and_a_setting_of_prompts_is_taken_as_it_is(tmp_path):
    dataset = dataset_of(tmp_path, "The red fox")
    embedded = dataclasses.replace(dataset, name="embedded-py3.11.2-0123abcd")
    assert sample_prompts("auto", embedded) == ["def", "class", "import"]
    for name in (dataset, embedded):
        assert sample_prompts("One day, |def|", name) == ["One day, ", "def", ""]
        assert sample_prompts("", name) == [""]
