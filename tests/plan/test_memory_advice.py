"""What to lower when a run does not fit: the values that are named fit, and no larger ones do."""

from dataclasses import replace

import pytest
from helpers import ROOT, command, make_plan, python_m

from nanochat import UserError
from nanochat.plan import scaling
from nanochat.plan.memory_advice import advice, sentence, smaller_values

GIB = 2**30


def make(**changes):
    settings = {"num_iterations": 10, "depth": 6, "device_batch_size": 12, "total_batch_size": 24 * 512}
    return make_plan(**settings | changes)[0]


def needs(plan, depth=None, **changes) -> int:
    config = plan.config
    if depth:
        sizes = config.head_dim, config.max_seq_len, config.vocab_size, config.window_pattern
        smaller = scaling.model_config(depth, plan.aspect_ratio, *sizes)
        config = replace(smaller, spelled=config.spelled, value_tables=config.value_tables)
    rows = changes.pop("device_batch_size", plan.device_batch_size)
    return replace(plan, config=replace(config, **changes), device_batch_size=rows).expected_bytes


def valid_values(plan) -> dict[str, list[int]]:
    """Of each setting, all values below the plan's that could be given, largest first."""
    T = plan.config.max_seq_len
    return {
        "device_batch_size": [n for n in (8, 6, 4, 3, 2, 1) if n < plan.device_batch_size],
        "max_seq_len": [T // 2**k for k in range(1, 20) if T % 2**k == 0],
        "depth": [*range(plan.config.depth - 1, 0, -1)],
    }


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5, 0.3, 0.2, 0.1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"depth": 16, "device_batch_size": 1}, {"max_seq_len": 1536, "total_batch_size": 24 * 1536}],
)
def test_each_value_that_is_named_is_the_largest_one_that_fits(share, changes):
    plan = make(**changes)
    memory = int(share * plan.expected_bytes)
    largest = {
        name: next((value for value in values if needs(plan, **{name: value}) <= memory), None)
        for name, values in valid_values(plan).items()
    }
    assert dict(smaller_values(plan, memory)) == {name: value for name, value in largest.items() if value}


def test_the_refusal_names_them():
    plan = make(device_batch_size=24, memory=GIB)
    found = dict(smaller_values(plan, GIB))
    assert set(found) == {"device_batch_size", "max_seq_len"} or "depth" in found
    with pytest.raises(UserError, match=r"lower (--\w+ to \d+, or )+--\w+ to \d+; or go on all the same"):
        plan.check("")
    assert all(f"--{name} to {value}" in sentence(plan) for name, value in found.items())
    assert sentence(make()) == ""
    assert "lower --max_seq_len and --depth" in sentence(make(memory=1000))


def test_where_no_setting_alone_helps_one_row_and_a_second_setting_are_named():
    plan = make(max_seq_len=1025, total_batch_size=24 * 1025)
    memory = needs(plan, depth=1) - 1
    assert not dict(smaller_values(plan, memory))
    depth = dict(smaller_values(plan.with_rows(1), memory))["depth"]
    assert advice(plan, memory) == f"lower --device_batch_size to 1 and --depth to {depth}"
    assert needs(plan.with_rows(1), depth=depth) <= memory < needs(plan.with_rows(1), depth=depth + 1)


def test_a_depth_that_is_absurd_is_refused_with_one_that_fits():
    plan = make_plan(depth=200, aspect_ratio=64, memory=22 * GIB, num_iterations=10)[0]
    depth = dict(smaller_values(plan, 22 * GIB))["depth"]
    assert f"--depth to {depth}" in plan.refusal("")
    assert needs(plan, depth=depth) <= 22 * GIB < needs(plan, depth=depth + 1)


def test_a_vocabulary_and_an_aspect_ratio_are_named_only_if_they_are_huge():
    plan = make(aspect_ratio=1024)
    plan = replace(plan, config=replace(plan.config, vocab_size=2**20))
    memory = plan.expected_bytes // 2
    found = dict(smaller_values(plan, memory))
    size, ratio = found["vocab_size"], found["aspect_ratio"]
    assert needs(plan, vocab_size=size) <= memory < needs(plan, vocab_size=2 * size)
    wide, narrow = (needs(replace(plan, aspect_ratio=r), depth=6) for r in (ratio + 64, ratio))
    assert narrow <= memory < wide
    assert {"vocab_size", "aspect_ratio"}.isdisjoint(dict(smaller_values(make(), make().expected_bytes // 3)))


LIMITED = f"""
import resource, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, size + 2**29))
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


def test_a_model_whose_weights_do_not_fit_is_a_sentence_with_what_to_lower(corpus, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    sizes = ["--depth=2", "--aspect_ratio=4096", "--head_dim=256", "--accept=memory"]  # matrices of a GiB
    done = python_m(["limited", *command(corpus, tmp_path / "out", *sizes)[1:]], folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: out of memory before the first step; lower --aspect_ratio to " in done.stderr
