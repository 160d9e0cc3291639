"""Conversations from files: the formats in wide use, weights, and every kind of bad row named by its line."""

import gzip
import json
import os

import pyarrow as pa
import pytest
from hub_server import parquet

from nanochat import UserError
from nanochat.data.conversations import open_conversations

GOOD = [("user", "Hi"), ("assistant", "Hello")]
NO_DATE = pa.array([2**31 - 1], pa.date32())  # Python cannot hold it


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_jsonl(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def val(tmp_path):
    return str(write_jsonl(tmp_path / "val.jsonl", [messages(*GOOD)]))


def read(path, val, skip_bad=False, **options):
    return open_conversations(str(path), val, skip_bad, None, **options).train


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
    strange = tmp_path / os.fsdecode(b"\xff.parquet")
    strange.write_bytes(parquet([rows[0]["messages"]] * 2, "messages"))
    assert read(strange, val).messages == [expected] * 2


def test_files_have_weights_and_a_folder_holds_several(tmp_path, val):
    (tmp_path / "more").mkdir()
    a = write_jsonl(tmp_path / "a.jsonl", [messages(*GOOD)] * 2)
    for name in ("b", "c"):
        write_jsonl(tmp_path / "more" / f"{name}.jsonl", [messages(("user", name), ("assistant", "x"))])
    (tmp_path / "more" / "README.MD").write_text("no conversation")
    train = read(f"{a}:3,{tmp_path / 'more'}:0.5", val)
    assert train.weights == [3, 3, 0.5, 0.5]
    assert [m[0][1] for m in train.messages] == ["Hi", "Hi", "b", "c"]
    with pytest.raises(UserError, match=r"weight '-1'.*above 0"):
        read(f"{a}:-1,{a}", val)
    with pytest.raises(UserError, match="weight 'x'"):
        read(f"{a}:x,{a}", val)


def test_a_validation_file_in_the_folder_of_the_data_is_not_trained_on(tmp_path):
    for name in ("a", "val", "more"):
        write_jsonl(tmp_path / f"{name}.jsonl", [messages(("user", name), ("assistant", "x"))])
    val_data = f"{tmp_path / 'val.jsonl'},{tmp_path / 'more.jsonl'}"
    data = open_conversations(f"{tmp_path}:2", val_data, False, None)
    first_questions = [messages[0][1] for messages in data.train.messages]
    assert first_questions == ["a"] and data.train.weights == [2]
    assert [len(some.messages) for some in data.val_sets.values()] == [1, 1]
    named = f"{tmp_path / 'val.jsonl'},{tmp_path}"  # a file that --data names itself is
    data = open_conversations(named, val_data, False, None)
    assert sorted(messages[0][1] for messages in data.train.messages) == ["a", "val"]


BAD = [
    (messages(("robot", "x")), "message 1 has the unknown role 'robot'"),
    ({"messages": [{"role": "user"}]}, "message 1 has no `content`"),
    ({"messages": [{"content": "x"}]}, "message 1 has no `role`"),
    (messages(("user", "  ")), "message 1 is empty"),
    (messages(("user", "a"), ("user", "b")), "two user messages in a row"),
    (messages(("assistant", "a")), "begins with the assistant"),
    (messages(("user", "a")), "ends with the user"),
    (messages(*GOOD, ("system", "b")), "a system message comes after the start"),
    ({"messages": []}, "no message of the user"),
    ({"messages": ["a"]}, "message 1 is str"),
    ({"text": "a"}, "no list `messages` or `conversations`"),
    ([1], "is list"),
    ('{"messages": [', "is not JSON"),
]  # fmt: skip


def test_bad_rows_are_named_with_their_lines_up_to_ten_and_left_out_if_asked(tmp_path, val):
    for bad, reason in BAD:
        path = write_jsonl(tmp_path / "a.jsonl", [messages(*GOOD), bad])
        with pytest.raises(UserError, match=r"have 1 bad conversation;.*--skip_bad") as error:
            read(path, val)
        assert f"{path}:2" in str(error.value) and reason in str(error.value)
    write_jsonl(path, [row for bad, _ in BAD for row in (messages(*GOOD), bad)])
    with pytest.raises(UserError, match=f"{len(BAD)} bad conversations;") as error:
        read(path, val)
    assert str(error.value).count(str(path)) == 10 and f"{len(BAD) - 10} more" in str(error.value)
    told = []
    train = read(path, val, skip_bad=True, say=told.append)
    assert train.messages == [tuple(GOOD)] * len(BAD) and f"{len(BAD)} bad conversations left out" in told[0]


def test_validation_is_drawn_by_the_first_question_and_does_not_move(tmp_path):
    def opened(name, rows):
        return open_conversations(str(write_jsonl(tmp_path / name, rows)), None, False, None)

    rows = [messages(("user", f"question {i // 2}"), ("assistant", str(i))) for i in range(400)]
    data = opened("a.jsonl", rows)
    firsts = [{m[0][1] for m in split.messages} for split in (data.train, data.val)]
    assert not firsts[0] & firsts[1] and 0 < len(data.val.messages) < 40
    assert len(data.train.messages) + len(data.val.messages) == 400
    assert {m[0][1] for m in opened("b.jsonl", rows[:200]).val.messages} <= firsts[1]
    with pytest.raises(UserError, match=r"no validation conversation.*--val_data"):
        opened("c.jsonl", rows[:2])


def test_the_beginning_of_a_long_question_says_what_is_taught_in_a_script_without_spaces_too(tmp_path, val):
    rows = [messages(("user", "漢" * 99), ("assistant", "x"))]
    data = open_conversations(str(write_jsonl(tmp_path / "a.jsonl", rows)), val, False, None)
    assert f"questions like '{'漢' * 57}...'." in data.teaches


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", b"\x1f\x8b broken", r"a\.jsonl\.gz cannot be read"),
        ("a.parquet", b"PAR1 broken", r"a\.parquet cannot be read as a parquet file"),
        ("a.parquet", parquet(["Hi"]), r"^\S+a\.parquet has no column"),
        ("a.parquet", parquet(NO_DATE, "messages"), r"a\.parquet is damaged"),
        ("a.txt", b"Hi", "has no .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path, val, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read(tmp_path / name, val)
    with pytest.raises(UserError, match="does not exist"):
        read("x" * 300 + ":2", val)  # a path that is too long
