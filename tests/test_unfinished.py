"""Files and folders that are complete or absent, whatever ends the process that writes them."""

import os
import signal
import time

import pytest
from helpers import names_in, python

from nanochat.files import building

WRITES = """
import sys, time
from pathlib import Path
from nanochat.files import building, replacing, temporary_folder
from nanochat.machine.signals import StopSignal

folder = Path(sys.argv[1])
stop = StopSignal() if sys.argv[2] == "in a training's set-up" else None
with (
    building(folder / "texts") as temporary,
    replacing(folder / "t.json") as file,
    temporary_folder(folder) as place,
):
    (temporary / "half").touch()
    (place / "run").mkdir()
    print("ready", flush=True)
    time.sleep(300)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("where", ["in a script", "in a training's set-up"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_what_is_written_and_leaves_no_temporary_file(tmp_path, name, where):
    with python(WRITES, tmp_path, where) as child:
        assert child.stdout.readline() == "ready\n"
        assert len(names_in(tmp_path)) == 3
        child.send_signal(getattr(signal, name))
        assert child.wait() == (-getattr(signal, name) if where == "in a script" else 0)
    assert names_in(tmp_path) == []


def test_what_a_kill_has_left_beside_a_folder_goes_after_a_day(tmp_path):
    old, new = (f".nanochat-texts-{digit * 32}" for digit in "ab")
    for name, age_s in (old, 90_000), (new, 10), (".nanochat-mine", 90_000), (".nanochat-20261130", 90_000):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
        for path in tmp_path / name / "half", tmp_path / name:
            os.utime(path, (time.time() - age_s,) * 2)
    with building(tmp_path / "texts") as folder:
        assert folder.name[:-32] == new[:-32]
        folder.rename(tmp_path / "texts")
    assert names_in(tmp_path) == [".nanochat-20261130", ".nanochat-mine", new, "texts"]
