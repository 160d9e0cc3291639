"""Texts from files on the machine: both forms hold the same characters, and no file is in both splits."""

import gzip
import json

import pytest

from experiments import other_texts
from nanochat import UserError

# One in 20 is validation, by the hash of its whole path, and pytest gives each run another folder:
# with 60 files one run in 20 had none
FILES = 400


def read(path):
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def root(tmp_path):
    for i in range(FILES):
        paragraphs = [f"file {i}, paragraph {j}: " + "word " * 40 for j in range(12)]
        (tmp_path / "usr" / str(i)).mkdir(parents=True)
        (tmp_path / "usr" / str(i) / "a.md").write_text("\n\n".join(paragraphs))
    (tmp_path / "usr" / "copy.md").write_text((tmp_path / "usr" / "7" / "a.md").read_text())
    (tmp_path / "usr" / "binary.md").write_bytes(b"\xff" * 5000)
    (tmp_path / "usr" / "broken.1.gz").write_bytes(b"no archive" * 500)
    (tmp_path / "usr" / "page.1.gz").write_bytes(gzip.compress(b"a manual page " * 300))
    return tmp_path / "usr"


def test_both_forms_are_the_same_text_in_the_same_split(root, tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="--folder"):
        other_texts.main()
    monkeypatch.setattr(other_texts, "folder", str(tmp_path / "out"))
    monkeypatch.setattr(other_texts, "root", "/nowhere")
    with pytest.raises(UserError, match="--root=/nowhere"):
        other_texts.main()
    monkeypatch.setattr(other_texts, "root", str(root))
    other_texts.main()
    long, short = ({s: read(tmp_path / "out" / f"prose-{form}" / f"{s}.jsonl") for s in ("train", "val")}
                   for form in ("long", "short"))  # fmt: skip
    assert len(long["train"]) + len(long["val"]) == FILES and long["val"]  # the copy counts once
    assert not set(long["train"]) & set(long["val"])
    for split in long:
        assert "".join(short[split]).replace("\n", "") == "".join(long[split]).replace("\n", "")
        assert len(short[split]) > 3 * len(long[split])
    said = capsys.readouterr().out
    assert "manual: skipped" in said and "headers: skipped" in said  # one page has no validation text
