"""Shards that we write: sorted by hash in bounded memory, the same as sorting everything at once."""

import contextlib
import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import is_validation, write_shard

from nanochat import UserError
from nanochat.data import parquet
from nanochat.data.parquet import Documents, write_sorted

documents = st.lists(st.tuples(st.sampled_from(["hash", "train", "val"]), st.text(max_size=6)), max_size=60)


@given(
    documents=documents, pending=st.sampled_from([0, 2000, 1 << 27]), buckets=st.sampled_from([1, 7, 1024])
)
@settings(max_examples=80)
def test_what_is_written_equals_a_plain_sort_however_little_memory(
    tmp_path_factory, documents, pending, buckets
):
    folder = tmp_path_factory.mktemp("sorted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "PENDING_BYTES", pending)
        patch.setattr(parquet, "BUCKETS", buckets)
        patch.setattr(parquet, "ROW_GROUP_DOCUMENTS", 3)
        patch.setattr(parquet, "SHARD_CHARS", 20)
        index = write_sorted(iter(documents), folder)
    expected = {"train": [], "val": []}
    for split, text in documents:
        if split == "hash":
            split = "val" if is_validation(text) else "train"
        if text:
            expected[split].append(text)
    for split, texts in expected.items():
        paths = [folder / name for name in index[split]]
        groups = Documents(paths)
        read = [text for group in range(len(groups.sizes)) for text in groups.read(group)]
        assert read == sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
        assert max(groups.sizes, default=0) <= 3
        assert all(path.stat().st_size == index[split][path.name] for path in paths)
    assert index["documents"] == [len(expected["train"]), len(expected["val"])]
    assert {path.name for path in folder.iterdir()} == {*index["train"], *index["val"]}


def test_the_fingerprint_tells_documents_and_given_splits_apart_but_not_their_order(tmp_path):
    folders = (tmp_path / str(i) for i in itertools.count())

    def fingerprint(*documents):
        folder = next(folders)
        folder.mkdir()
        return write_sorted(documents, folder)["fingerprint"]

    a, b = ("hash", "a"), ("hash", "b")
    assert fingerprint(a, b) == fingerprint(b, a)
    others = [(a, b), (a,), (a, a, b), (("train", "a"), ("val", "b")), (("val", "a"), ("train", "b")), ()]
    assert len({fingerprint(*documents) for documents in others}) == len(others)


def test_lone_surrogates_are_replaced_and_pairs_joined(tmp_path):
    index = write_sorted([("train", "a\ud800b"), ("val", "\ud83d\ude00")], tmp_path)
    texts = [Documents([tmp_path / name]).read(0) for split in ("train", "val") for name in index[split]]
    assert texts == [["a\ufffdb"], ["😀"]]


def test_a_flipped_byte_in_a_shard_is_noticed(tmp_path):
    text = "".join(hashlib.sha256(b"%d" % i).hexdigest() for i in range(2000))
    index = write_sorted([("train", text)], tmp_path)
    shard = tmp_path / next(iter(index["train"]))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="is damaged in row group 0"):
        Documents([shard]).read(0)


def test_a_flipped_bit_in_a_footer_ends_in_nothing_but_a_sentence(tmp_path):  # a footer has no checksum
    content = write_shard(tmp_path / "a.parquet", ["one", "two"]).read_bytes()
    for at in range(content.rindex(b"text"), len(content)):
        (tmp_path / "a.parquet").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with contextlib.suppress(UserError):
            assert len(list(Documents([tmp_path / "a.parquet"]))) <= 2


def test_a_footer_that_says_there_are_no_rows_hides_no_text(tmp_path):
    path, said, none = tmp_path / "a.parquet", b"\xd8\x04", b"\x80\x00"  # 300 and 0 as thrift writes them
    content = write_shard(path, [str(i) for i in range(300)]).read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    places = [at for at in range(footer, len(content)) if content.startswith(said, at)]
    assert len(places) >= 3  # the rows of the file and of its group, the values of the column
    for pair in itertools.combinations(places, 2):
        damaged = bytearray(content)
        for at in pair:
            damaged[at : at + 2] = none
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            assert len(Documents([path])) == 300
