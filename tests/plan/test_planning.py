"""The plan of a run: what is refused, what is warned of, and how it reads."""

from dataclasses import replace

import pytest
from helpers import DATASET, make_plan

from nanochat import UserError
from nanochat.plan import scaling
from nanochat.terminal import duration


def test_a_text_that_would_be_read_very_often_is_refused_with_the_command_for_more():
    plan, text = make_plan(data_tokens=10**6)
    assert plan.epochs == plan.tokens / 10**6 > 20
    with pytest.raises(UserError, match=r"scripts.download --name=climbmix --num_shards=[1-9]") as refusal:
        plan.check(accept="")
    assert "--accept=epochs" in str(refusal.value) and str(refusal.value) in text
    plan.check(accept="epochs")
    plan.check(accept="seed,epochs")


def test_a_run_of_few_flops_is_narrower_says_so_and_stays_so_when_it_is_resumed():
    given = {"aspect_ratio": -1, "target_flops": 2.2e13}
    plan, text = make_plan(**given)
    assert plan.config.width == 128 and plan.aspect_ratio == 32 and "too wide for so few FLOPs" in text
    assert make_plan(resolved=plan.resolved, **given | {"target_flops": 1e15})[0].config.width == 128
    assert make_plan(aspect_ratio=-1, target_flops=1e15)[0].config.width == 256
    in_minutes = make_plan(aspect_ratio=-1, target_minutes=1.0, peak_flops=1e12)[0]
    assert in_minutes.config.width == 128 and in_minutes.horizon.minutes == 1


def test_given_iterations_may_read_a_text_as_often_as_they_like_with_a_warning():
    plan, text = make_plan(data_tokens=10**5, num_iterations=1000, total_batch_size=4096)
    plan.check(accept="")
    assert plan.epochs == 40.96 and "read 41.0 times; above 4 more text is better" in text
    assert "epochs" in text and "warning" not in make_plan(num_iterations=10, total_batch_size=4096)[1]


@pytest.mark.parametrize(
    ("given", "epochs", "before", "share"),
    [
        ({}, 0.5, None, 0.0),
        ({}, 1.5, None, 0.5),
        ({}, 9.0, None, 1.0),
        ({}, 9.0, {"table_share": 0.25}, 0.25),  # a resumed run that is made longer
        ({"table_decay": 0.3}, 0.5, {"table_share": 0.25}, 0.3),
        ({"table_decay": 0.0}, 9.0, None, 0.0),
    ],
)
def test_embeddings_and_head_decay_where_a_text_is_read_again(given, epochs, before, share):
    tokens, resolved = 1000 * 256, before and before | {"device_batch_size": 1}
    size = {"max_seq_len": 256, "num_iterations": 1000, "total_batch_size": 256}
    plan = make_plan(data_tokens=int(tokens / epochs), resolved=resolved, **size, **given)[0]
    assert plan.table_share == plan.resolved["table_share"] == pytest.approx(share, abs=1e-4)
    assert plan.table_decay == plan.table_share * plan.weight_decay > -1


def test_public_shards_that_the_horizon_lacks_are_named_in_the_plan_and_in_a_refusal(monkeypatch):
    monkeypatch.setitem(DATASET, "more_text", "get the others with the command")
    warning = "warning: the text is read 0.10 times; get the others with the command"  # also far below 1
    assert warning in make_plan(data_tokens=10 * 4096 * 10, num_iterations=10, total_batch_size=4096)[1]
    plan, text = make_plan(data_tokens=10**6)
    refusal = "learn little from most of them; get the others with the command, or go on all the same"
    assert refusal in plan.refusal(accept="") and refusal in text and "--data=climbmix" not in text
    monkeypatch.setitem(DATASET, "more_text", "")
    assert "the command" not in make_plan(data_tokens=10**6)[1]


def test_public_shards_are_counted_for_the_vocabulary_of_public_text():
    few, many = (make_plan(data_tokens=1, target_param_data_ratio=ratio)[0] for ratio in (12, 120))
    tokens = few.tokens * (few.parameters["matrices"] + 192 * 32768) / (
        few.parameters["matrices"] + few.parameters["head"]
    )  # fmt: skip
    assert few.public_shards == -(-tokens // 46_700_000)
    assert many.public_shards == -(-10 * tokens // 46_700_000)


def test_a_run_that_does_not_fit_in_a_cpus_memory_is_refused_with_what_to_lower():
    needs = r"this run needs about .* GiB a process .* lower --\w+"
    for given in ({}, {"device_batch_size": 8, "total_batch_size": 8 * 512}):
        plan, text = make_plan(memory=10**7, num_iterations=10, **given)
        with pytest.raises(UserError, match=needs):
            plan.check(accept="epochs")
        assert "this run is refused" in text
        plan.check(accept="epochs,memory")


def test_on_a_gpu_a_size_that_the_user_gives_is_tried_with_a_warning():
    given = {"device_batch_size": 8, "total_batch_size": 8 * 512, "num_iterations": 10}
    plan, text = make_plan(memory=10**7, device_type="cuda", **given)
    plan.check(accept="")
    assert "warning: this run needs about" in text and "refused" not in text
    plan, text = make_plan(memory=10**7, device_type="cuda", num_iterations=10)
    with pytest.raises(UserError, match="this run needs about"):  # one row does not fit
        plan.check(accept="")
    kept = make_plan(memory=10**7, device_type="cuda", resolved={"device_batch_size": 1}, **given)[0]
    kept.check(accept="")


def test_compiled_code_gets_more_rows_where_their_number_is_not_given():
    settings = {"num_iterations": 10, "total_batch_size": 2**17, "device_type": "cuda"}
    plan, _ = make_plan(memory=7 * 2**29, **settings)
    eager, compiled = (replace(plan, compiled=c).with_largest_micro_batch() for c in (False, True))
    assert plan == eager and eager.device_batch_size < compiled.device_batch_size
    given = make_plan(device_batch_size=8, **settings)[0]
    assert replace(given, compiled=True).with_largest_micro_batch().device_batch_size == 8


def test_a_resumed_run_keeps_its_micro_batch_while_it_divides_the_rows():
    settings = {"num_iterations": 10, "total_batch_size": 8 * 512}
    assert make_plan(**settings)[0].device_batch_size == 8
    assert make_plan(**settings, resolved={"device_batch_size": 2})[0].device_batch_size == 2
    assert make_plan(**settings, resolved={"device_batch_size": 3})[0].device_batch_size == 8
    plan, text = make_plan(**settings, resolved={"device_batch_size": 2}, world_size=2)
    assert plan.grad_accum_steps == 2 and "2 rows x 512 tokens x 2 processes x 2 micro-steps" in text


def test_the_rates_are_the_settings_times_the_factors_of_the_rules():
    plan, _ = make_plan(num_iterations=100, total_batch_size=4096, matrix_lr=1.0, embedding_lr=2.0)
    horizon = scaling.derive_horizon(plan.config, 100, -1, 12.0, 4096)
    scale = scaling.rate_scale(4096, 100 * 4096, horizon.d12_tokens)
    assert plan.rates["matrix_lr"] == scale
    assert plan.rates["embedding_lr"] == pytest.approx(2 * scale)
    assert plan.rates["unembedding_lr"] == pytest.approx(0.004 * scale * 768 / 192)
    assert plan.warmup_steps == 10  # a tenth of the run at most
    assert make_plan(num_iterations=1000, total_batch_size=4096)[0].warmup_steps == 40


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (45, "45 s"), (720, "12 min"), (12_600, "3.5 h"), (241_226 * 60, "168 days")],
)
def test_durations_are_said_as_a_person_says_them(seconds, said):
    assert duration(seconds) == said


def test_a_run_that_is_hopeless_on_this_machine_is_warned_of():
    assert "days on this machine; stop it" in make_plan(peak_flops=1e6, num_iterations=1000)[1]
    assert "stop it" not in make_plan(num_iterations=1000)[1]


def test_a_plan_breaks_its_lines_at_words(monkeypatch):
    _, long_lines = make_plan(data_tokens=10**6)
    monkeypatch.setenv("COLUMNS", "80")
    _, text = make_plan(data_tokens=10**6)
    assert text.split() == long_lines.split() and max(map(len, text.splitlines())) <= 80


def test_a_resumed_run_keeps_its_measured_peak_on_such_a_machine():
    first = make_plan(peak_flops=1e12)[0]
    again = make_plan(peak_flops=5e11, resolved=first.resolved)[0]
    assert again.hardware.peak_flops == 1e12 and again.resolved == first.resolved
    elsewhere = make_plan(peak_flops=5e11, world_size=2, resolved=first.resolved)[0]
    assert elsewhere.hardware.peak_flops == 5e11


# -- A horizon in minutes


def test_minutes_become_steps_by_an_assumed_share_of_the_peak_and_decide_before_the_ratio():
    given = {"target_minutes": 2.0, "total_batch_size": 4096, "peak_flops": 1e12}
    plan, text = make_plan(**given)
    flops = 120 * scaling.ASSUMED_MFU * 1e12
    assert plan.num_iterations == round(flops / plan.flops_per_token / 4096)
    assert plan.horizon.minutes == plan.resolved["target_minutes"] == 2
    assert plan.expected_seconds == 120 and "about" in text
    assert make_plan(num_iterations=7, **given)[0].horizon.minutes == 0
    # It is an estimate: no reason to refuse a text that may be read often
    assert make_plan(**given, data_tokens=10)[0].refusal("") == ""


def test_a_resumed_run_in_minutes_keeps_its_batch_and_its_estimate_on_any_machine():
    before = {"num_iterations": 500, "total_batch_size": 2048, "target_minutes": 2.0}
    plan = make_plan(target_minutes=2.0, resolved=before, peak_flops=1e15)[0]
    assert (plan.num_iterations, plan.total_batch_size) == (500, 2048)
    assert make_plan(target_minutes=5.0, resolved=before)[0].num_iterations == 1250
    of_steps = {"num_iterations": 500, "total_batch_size": 2048}
    assert make_plan(target_minutes=5.0, resolved=of_steps)[0].num_iterations == 500


def test_rates_and_decay_follow_the_number_of_steps_that_the_minutes_give():
    given = {"total_batch_size": 4096, "aspect_ratio": 48}
    plan = make_plan(target_minutes=2.0, peak_flops=1e12, **given)[0]
    for share in (0.5, 1.0, 3.0):
        steps = round(share * plan.num_iterations)
        rate, decay = plan.factors_for(steps)
        as_planned = make_plan(num_iterations=steps, **given)[0]
        assert plan.rates["matrix_lr"] * rate == pytest.approx(as_planned.rates["matrix_lr"])
        assert plan.weight_decay * decay == pytest.approx(as_planned.weight_decay)
    assert make_plan(num_iterations=50)[0].factors_for(7) == (1.0, 1.0)
