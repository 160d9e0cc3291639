"""Files that people have: what becomes a document, and errors that say where they are."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import UserError
from nanochat.data import textfiles
from nanochat.data.textfiles import SECTION, find_files, read_documents, set_names


def read(path: Path, field: str = "text") -> list[str]:
    return list(read_documents(path, field, lambda n: None))


def file(tmp_path: Path, name: str, content: str | bytes) -> Path:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / name


def test_a_text_file_is_one_document_without_mark_and_with_plain_line_ends(tmp_path):
    assert read(file(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")) == ["one\ntwo\nthree\n"]
    assert read(file(tmp_path, "a.txt", "x" * 65536)) == ["x" * 65536]
    assert read(file(tmp_path, "a.txt", "")) == [""]


@given(
    paragraphs=st.lists(st.tuples(st.integers(1, 40_000), st.sampled_from(["\n\n", "\n", " ", "\r\n"]))),
    letter=st.sampled_from("aé漢😀"),
    chunk=st.sampled_from([1000, 65_537, 1 << 20]),
)
@settings(max_examples=60)
def test_a_long_text_file_is_cut_at_blank_lines_and_nothing_is_lost(
    tmp_path_factory, paragraphs, letter, chunk
):
    text = "".join(letter * n + end for n, end in paragraphs)
    path = file(tmp_path_factory.mktemp("cut"), "a.md", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textfiles, "CHUNK", chunk)
        pieces = read(path)
    text = text.replace("\r\n", "\n")
    assert "".join(pieces) == text
    if len(text) <= 65536:
        assert pieces == [text]
        return
    for piece in pieces[:-1]:
        assert SECTION <= len(piece) <= 2 * SECTION
        ends = [i + 2 for i in range(len(piece) - 1) if piece[i : i + 2] == "\n\n" and i + 2 >= SECTION]
        if not ends:
            ends = [i + 1 for i, c in enumerate(piece) if c == "\n" and i + 1 >= SECTION]
        assert len(piece) == (ends[0] if ends else 2 * SECTION)


@pytest.mark.parametrize("lines", [0, 1, 200_000])
def test_bytes_that_are_not_utf8_are_told_with_their_line(tmp_path, lines):
    for content in (b"caf\xe9 and more\n", b"cut off\xe6\xbc"):
        path = file(tmp_path, "a.txt", b"a line\n" * lines + content)
        with pytest.raises(UserError, match=rf"a\.txt:{lines + 1} is not UTF-8") as error:
            read(path)
        assert "\n" not in str(error.value)


def test_json_files_and_lines_are_objects_or_texts_and_empty_lines_are_passed_over(tmp_path):
    for content, texts in (' {"text": "one", "n": [1, {"b": 2}]}\n', ["one"]), ('"one"', ["one"]), ("[]", []):
        assert read(file(tmp_path, "a.json", content)) == texts
    assert read(file(tmp_path, "a.json", '[{"body": "b", "text": 3}]'), "body") == ["b"]
    lines = '\ufeff{"text": "one"}\r\n\n  "two"  \n{"text": null}\n{"text": "\\ud83d\\ude00"}'
    for name, content in ("a.jsonl", lines), ("A.JSONL.GZ", gzip.compress(lines.encode())):
        assert read(file(tmp_path, name, content)) == ["one", "two", "", "😀"]


LINE = '{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINE * 2 + '{"text": "broken', r"a\.jsonl:3 is not JSON \(Unterminated string"),
        ("a.jsonl", LINE + '{"body": 1, "id": 2}\n', r"a\.jsonl:2 has no field `text` .it has body, id.;"),
        ("a.jsonl", LINE + '{"text": 3}\n', r"a\.jsonl:2 has int, not text, in the field `text`"),
        ("a.jsonl", LINE.encode() + b'"\xe9"\n', r"a\.jsonl:2 is not UTF-8"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1 is not JSON"),
        ("a.jsonl.gz", gzip.compress(LINE.encode() * 9999)[:-9], r"a\.jsonl\.gz cannot be read"),
        ("a.json", '["one",\n\n "two" "three"]', r"a\.json is not JSON \(.*line 3"),
        ("a.json", LINE * 2, r"a\.json is not JSON \(Extra data.*name it \.jsonl"),
        ("a.json", '["one",\n3]', r"a\.json, item 2 holds int"),
        ("a.json", b'["one",\n"\xe9"]', r"a\.json is not UTF-8 in line 2"),
    ],
)
def test_an_error_is_one_sentence_with_file_and_place(tmp_path, name, content, message):
    path = file(tmp_path, name, content)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value) and ";" in str(error.value)


def test_files_are_found_in_nested_folders_without_hidden_ones(tmp_path):
    for name in ("b/c.txt", "b/.git/d.txt", "a.MD", ".x.txt", "picture.png", "e.tar.gz", "b/f.jsonl.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files, others = find_files("data", tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["a.MD", "b/c.txt", "b/f.jsonl.gz"]
    assert others == 2
    twice = find_files("data", f"{tmp_path / 'b'},{tmp_path / 'b/c.txt'}")[0]
    assert [path.name for path in twice] == ["c.txt", "f.jsonl.gz"]
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_files("data", f"{tmp_path},{tmp_path / 'nowhere'}")


def test_a_folder_behind_a_link_is_read_once_even_if_it_leads_back(tmp_path):
    for name in ("data/a.txt", "far/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for link, target in ("data/far", "../far"), ("data/twice", "../far"), ("far/back", "../data"):
        (tmp_path / link).symlink_to(target)
    files, _ = find_files("data", tmp_path / "data")
    assert [path.relative_to(tmp_path / "data").as_posix() for path in files] == ["a.txt", "far/b.txt"]


def test_each_validation_set_has_a_name_of_its_own():
    names = set_names(["x.txt", "a_2.txt", "q/a.txt", "r/a.txt", "s/a.txt"])
    assert names[:3] == ["", "a_2", "a"] and len(set(names)) == 5


def test_a_compressed_stream_is_never_unpacked_as_a_whole(tmp_path):
    line = json.dumps("x" * 1000).encode() + b"\n"
    path = file(tmp_path, "a.jsonl.gz", gzip.compress(line * 100_000, 1))  # 100 MB of lines in half a MB
    reads = []
    for text in itertools.islice(read_documents(path, "text", reads.append), 5):
        assert len(text) == 1000
    assert sum(reads) < path.stat().st_size
