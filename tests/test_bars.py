"""Bars: on a terminal one line, in a log file few; what they count is what was done."""

import pytest
from run.test_console import open_screen

from nanochat.data import bpe
from nanochat.data.sources import open_dataset
from nanochat.data.tokenizer import PATTERN
from nanochat.terminal import bar, short


def test_a_log_file_has_a_line_early_one_each_minute_and_one_at_the_end_but_none_of_quick_work(capsys, clock):
    for seconds, count in (2.9, 10), (150, 150):
        with bar("importing", "B", 1000 * count) as progress:
            for _ in range(count):
                clock.now += seconds / count
                progress.update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "importing: 3kB of 150kB after 3 s",
        "importing: 63kB of 150kB after 63 s",
        "importing: 123kB of 150kB after 2 min",
        "importing: 150kB in 2 min",
    ]


def test_a_count_of_things_is_whole(capsys, clock):
    with bar("reading", "documents", 1718) as progress:
        clock.now += 4
        progress.update(1234)
    assert capsys.readouterr().err.splitlines()[0] == "reading: 1,234 of 1,718 documents after 4 s"


def test_work_that_fails_is_not_said_to_be_done(capsys, clock):
    with pytest.raises(OSError), bar("importing", "B") as progress:
        clock.now += 10
        progress.update(5)
        raise OSError
    assert capsys.readouterr().err.splitlines() == ["importing: 5B after 10 s"]


@pytest.mark.parametrize("number, said", [
    (0, "0"), (7, "7"), (999, "999"), (1000, "1k"), (1234, "1.23k"), (999_499, "999k"), (999_500, "1M"),
    (45_600_000, "45.6M"), (7.5e9, "7.5G"), (123e12, "123T"),
])  # fmt: skip
def test_a_count_is_said_in_three_digits(number, said):
    assert short(number) == said


def test_on_a_terminal_import_and_tokenizer_have_bars_that_fit_its_width(monkeypatch, tmp_path):
    def at_terminal(function):
        screen = open_screen(monkeypatch, 60, ["stderr"])
        function()
        return screen.getvalue()

    for i in range(300):
        (tmp_path / f"{i}.txt").write_text(f"text number {i} " * 9)
    drawn = at_terminal(lambda: open_dataset(tmp_path, base_dir=tmp_path / "base"))
    assert "importing: 100%" in drawn and max(map(len, drawn.splitlines())) <= 60
    drawn = at_terminal(lambda: bpe.train_tokens(["some text"] * 9, 260, PATTERN, 50))
    assert "joining pairs" in drawn and "6/6" in drawn  # of 9 documents, 50 characters are in 6
