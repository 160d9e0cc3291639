"""Every numeric setting of every script has a range, and nothing that a person gives ends in a traceback."""

import contextlib
import io
import sys

import pytest
from helpers import ROOT

import configurator

SCRIPTS = [path for path in ROOT.glob("*/*.py") if "configurator.configure(" in path.read_text("utf-8")]
SCRIPTS = {str(path.relative_to(ROOT)): path for path in sorted(SCRIPTS) if path.parent.name != "tests"}
NUMBERS = {  # script -> its numeric settings
    script: {name: s for name, s in configurator._declared_settings(path).items() if {int, float} & {*s.kind}}
    for script, path in SCRIPTS.items()
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a script sets its own
    for name in ("NANOCHAT_BASE_DIR", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)


def refusal(script, *argv):
    """What the configurator prints for a command line of the script; empty if it accepts it."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        configurator.configure({"__file__": str(SCRIPTS[script])}, argv)
    return err.getvalue()


def test_every_numeric_setting_of_every_script_has_a_range():
    assert {f"scripts/{name}.py" for name in ("base_train", "ablate", "bench", "chat", "download")} < {
        *SCRIPTS
    }
    assert len(NUMBERS["scripts/base_train.py"]) > 25
    missing = [f"{script}: {name}" for script, of in NUMBERS.items() for name in of if not of[name].range]
    assert not missing


@pytest.mark.parametrize(
    ("script", "argument", "sentence"),
    [
        ("base_train", "matrix_lr=-1", "give a number from 0 to 1e6"),
        ("base_train", "scalar_lr=1e300", "give a number from 0 to 1e6"),
        ("base_train", "final_lr_frac=-5", "give a number from 0 to 1"),
        ("base_train", "warmdown_ratio=2", "give a number from 0 to 1"),
        ("base_train", "weight_decay=-5", "give a number from 0 to 1e6"),
        ("base_train", "process_timeout=0", "give a number from 1 to 1e6"),
        ("base_train", "vocab_size=10**9", "give a whole number from 256 to 2**20, or -1 (4096 for the"),
        ("base_train", "num_iterations=0", "give a whole number from 1 to 1e9, or -1 (off)"),
        ("base_train", "device_batch_size=0", "give a whole number from 1 to 2**20, or -1 (as many as fit)"),
        ("base_train", "eval_tokens=0", "give a whole number from 1 to 1e12, or -1 (all)"),
        ("base_train", "seed=-1", "give a whole number from 0 to 2**62"),
        ("tok_train", "vocab_size=10**18", "give a whole number from 256 to 2**20, or -1"),
        ("tok_train", "sample_chars=0", "give a whole number from 1 to 1e9"),
        ("tok_train", "max_chars=0", "or -1 (all of the training split)"),
        ("ablate", "seeds=0", "give a whole number from 1 to 1000"),
        ("bench", "rounds=0", "give a whole number from 1 to 1e4"),
        ("chat", "temperature=1e300", "give a number from 0 to 100"),
        ("chat", "top_p=1e-300", "give a number from 1e-6 to 1"),
        ("chat", "top_k=0", "or -1 (off)"),
        ("download", "workers=0", "give a whole number from 1 to 256"),
        ("download", "num_shards=0", "or -1 (all)"),
        ("precision_report", "depth=0", "give a whole number from 1 to 512"),
    ],
)
def test_an_absurd_number_gets_a_sentence_with_the_numbers_that_are_not(script, argument, sentence):
    said = refusal(f"scripts/{script}.py", f"--{argument}")
    assert said.startswith(f"error: --{argument}: give ") and sentence in said and said.count("\n") == 2
