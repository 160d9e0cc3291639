"""Conversations from files: the formats in wide use, weights, and every kind of bad row named by its line."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import UserError
from nanochat.data.conversations import open_files

GOOD = [("user", "Hi"), ("assistant", "Hello")]


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_jsonl(path, rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", "utf-8"
    )
    return path


@pytest.fixture
def val(tmp_path):
    return str(write_jsonl(tmp_path / "val.jsonl", [messages(*GOOD)]))


def read(path, val, **options):
    return open_files(str(path), val, options.pop("skip_bad", False), **options).train


def test_the_formats_in_wide_use_give_the_same_messages(tmp_path, val):
    """OpenAI's messages, ShareGPT's conversations, and minimind's own file with its further fields."""
    rows = [
        messages(("system", "Be kind."), *GOOD),
        {"conversations": [{"from": f, "value": v} for f, v in
                           [("system", "Be kind."), ("human", "Hi"), ("gpt", "Hello")]]},
        {"conversations": [{"role": r, "content": c, "reasoning_content": "", "tools": "", "tool_calls": ""}
                           for r, c in [("system", "Be kind."), *GOOD]]},
    ]  # fmt: skip
    expected = (("system", "Be kind."), *GOOD)
    assert read(write_jsonl(tmp_path / "a.jsonl", rows), val).messages == [expected] * 3
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1), "utf-8")
    assert read(tmp_path / "a.json", val).messages == [expected] * 3
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read(tmp_path / "b.jsonl.gz", val).messages == [expected] * 3
    pq.write_table(pa.Table.from_pylist([rows[0]] * 2), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet", val).messages == [expected] * 2


def test_files_have_weights_and_a_folder_holds_several(tmp_path, val):
    (tmp_path / "more").mkdir()
    a = write_jsonl(tmp_path / "a.jsonl", [messages(*GOOD)] * 2)
    for name in ("b", "c"):
        write_jsonl(tmp_path / "more" / f"{name}.jsonl", [messages(("user", name), ("assistant", "x"))])
    train = read(f"{a}:3,{tmp_path / 'more'}:0.5", val)
    assert train.weights == [3, 3, 0.5, 0.5]
    assert [m[0][1] for m in train.messages] == ["Hi", "Hi", "b", "c"]
    with pytest.raises(UserError, match=r"weight '-1'.*above 0"):
        read(f"{a}:-1,{a}", val)
    with pytest.raises(UserError, match="weight 'x'"):
        read(f"{a}:x,{a}", val)


BAD = [
    (messages(("robot", "x")), "message 1 has the unknown role 'robot'"),
    ({"messages": [{"role": "user"}]}, "message 1 has no `content` that is text"),
    ({"messages": [{"content": "x"}]}, "message 1 has no `role`"),
    (messages(("user", "  ")), "message 1 is empty"),
    (messages(("user", "a"), ("user", "b")), "two user messages in a row"),
    (messages(("assistant", "a")), "it begins with the assistant"),
    (messages(("user", "a")), "it ends with the user"),
    (messages(*GOOD, ("system", "b")), "a system message comes after the start"),
    (messages(("system", "b")), "it has no message of the user"),
    (messages(("user", "a" * (2**22 + 1)), ("assistant", "b")), "message 1 is too long: 4,194,305"),
    ({"messages": []}, "it has no message of the user"),
    ({"messages": ["a"]}, "message 1 is str"),
    ({"text": "a"}, "it has no list `messages` or `conversations`"),
    ([1], "it is list, not an object"),
    ('{"messages": [', "is not JSON"),
    ("\ufeffx" * 3, "is not JSON"),
]  # fmt: skip


def test_every_bad_row_is_found_and_the_first_ten_are_named_with_their_lines(tmp_path, val):
    rows = [row for bad, _ in BAD for row in (messages(*GOOD), bad)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=f"{len(BAD)} conversations cannot be used") as error:
        read(path, val)
    said = str(error.value).split("\n")[1:]
    assert len(said) == 11 and said[10] == f"  and {len(BAD) - 10} more"
    for line, (number, (_, reason)) in zip(said[:10], enumerate(BAD), strict=False):
        assert line.startswith(f"  {path}:{2 * number + 2}") and reason in line
    told = []
    train = read(path, val, skip_bad=True, say=told.append)
    assert (
        train.messages == [tuple(GOOD)] * len(BAD) and f"{len(BAD)} bad conversations are left out" in told[0]
    )


@pytest.mark.parametrize(("bad", "reason"), BAD[10:])
def test_other_bad_rows_are_named_too(tmp_path, val, bad, reason):
    with pytest.raises(UserError) as error:
        read(write_jsonl(tmp_path / "a.jsonl", [bad]), val)
    assert reason in str(error.value)


def test_validation_is_drawn_by_the_first_question_and_does_not_move(tmp_path):
    rows = [messages(("user", f"question {i // 2}"), ("assistant", str(i))) for i in range(400)]
    data = open_files(str(write_jsonl(tmp_path / "a.jsonl", rows)), None, False)
    firsts = [{m[0][1] for m in split.messages} for split in (data.train, data.val)]
    assert not firsts[0] & firsts[1] and 0 < len(data.val.messages) < 40
    assert len(data.train.messages) + len(data.val.messages) == 400
    fewer = open_files(str(write_jsonl(tmp_path / "b.jsonl", rows[:200])), None, False)
    assert {m[0][1] for m in fewer.val.messages} <= firsts[1]
    with pytest.raises(UserError, match=r"no validation conversation.*--val_data"):
        open_files(str(write_jsonl(tmp_path / "c.jsonl", rows[:2])), None, False)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", b"\x1f\x8b broken", "damaged"),
        ("a.parquet", b"PAR1 broken", "damaged"),
        ("a.json", b"[{", "does not begin a complete JSON value"),
        ("a.txt", b"Hi", "has no .jsonl"),
        ("a.jsonl", b"\xff\xfe\n", "not UTF-8"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path, val, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read(tmp_path / name, val)
