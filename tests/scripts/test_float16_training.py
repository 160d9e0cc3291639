"""Training in 16 bit, as people run it: float16's scaler skips what overflows, comes back with a checkpoint,
and agrees over processes; losses stay close to float32's; everything that lasts is float32."""

import json

import pytest
import torch
from helpers import ROOT, command, losses, needs_bfloat16, records, run

import configurator
from nanochat import checkpoint
from nanochat.checkpoint.files import read_tensors
from nanochat.plan import scaling
from nanochat.plan.memory import training_bytes

STEPS = 10
# One in which the noise of 16-bit gradients is not made much larger by the full size of Muon's first steps
SEED = "--seed=1"
# At width 32 the rule's rate for the head, 24 times the setting, makes rounding large in a few steps
RATES = ["--unembedding_lr=0.0008", "--embedding_lr=0.6", "--matrix_lr=0.02", "--scalar_lr=0.1"]
RATES += ["--weight_decay=0.28", "--grad_clip=1", "--warmdown_ratio=0.8", "--final_lr_frac=0.05"]
SHORT = [SEED, *RATES, f"--num_iterations={STEPS}", "--save_every=1", "--keep_checkpoints=-1"]
SHORT += ["--device_batch_size=4"]  # in fewer micro-steps: 16 bits are emulated on some CPUs


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run in float16."""
    out = tmp_path_factory.mktemp("float16") / "run"
    assert "float16 (as asked for" in run(command(corpus, out, *SHORT, "--dtype=float16"))
    return out


def scale_after(out, step: int) -> float:
    """The scaler's scale, as the checkpoint after so many steps has it."""
    return json.loads((out / f"step_{step:06d}" / "state.json").read_text())["scaler"]["scale"]


def skipped_steps(out) -> list[int]:
    return [r["step"] for r in records(out) if "loss" in r and r["grad_norm"] is None]


def tensors_of(out, step: int) -> dict:
    """The bytes of weights and optimizer state after so many steps, without random numbers' states."""
    folder = out / f"step_{step:06d}"
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= read_tensors(path, lambda name: not name.startswith("random_state"))
    return tensors


def test_losses_in_16_bit_are_near_those_of_float32_and_what_lasts_is_float32(corpus, trained, tmp_path):
    for dtype in ("float32", "bfloat16"):
        run(command(corpus, tmp_path / dtype, *SHORT, "--save_every=-1", f"--dtype={dtype}"))
    exact = losses(tmp_path / "float32")
    assert exact[STEPS - 1] < exact[0] - 0.1, "and it learned"
    # Not in proportion to what they round: AdamW's first steps make the smallest differences full ones
    for out in (trained, tmp_path / "bfloat16"):
        found = losses(out)
        assert found == pytest.approx(exact, rel=2e-3) and found != exact
    assert skipped_steps(trained) == [] and scale_after(trained, STEPS) == 2**16
    lasting = {tensor.dtype for tensor in tensors_of(trained, STEPS).values() if tensor.is_floating_point()}
    assert lasting == {torch.float32}
    longer = [SEED, "--dtype=float16", f"--num_iterations={STEPS + 2}", "--save_every=-1"]
    run(command(corpus, tmp_path / "float32", *longer))  # another precision may go on with a run
    assert len(losses(tmp_path / "float32")) == STEPS + 2
    assert records(tmp_path / "float32")[-2]["loss_scale"] == 2**16


@pytest.fixture(scope="module")
def overflowed(corpus, trained, tmp_path_factory):
    """The same run from its second step on, with a scale of 2^23 in the checkpoint, too much for float16."""
    out = tmp_path_factory.mktemp("overflowed") / "run"
    save_with_scale(trained, out, 2, 2.0**23)
    assert "going on from" in run(command(corpus, out, *SHORT, "--dtype=float16"))
    return out


def save_with_scale(source, out, step, scale):
    """The checkpoint of a run after `step` steps in another folder, with another scale."""
    found = checkpoint.open_checkpoint(source / f"step_{step:06d}")
    state = found.state | {"scaler": found.state["scaler"] | {"scale": scale}}
    files = {name: (found.path / name).read_bytes() for name in ("tokenizer.json", "config.json")}
    tensors = {"model": found.load_model(), "optimizer": found.load_optimizer()}
    checkpoint.save(out, step, state=state, files=files, **tensors)


def test_an_overflow_skips_the_step_halves_the_scale_and_the_run_recovers(overflowed):
    skipped = skipped_steps(overflowed)
    assert skipped[:2] == [2, 3] and len(skipped) < STEPS - 4  # a later gradient may be larger, and too much
    assert skipped[-1] < STEPS - 3
    for step in range(2, STEPS):
        was_skipped = step in skipped
        scale, before = scale_after(overflowed, step + 1), scale_after(overflowed, step)
        assert scale == (before / 2 if was_skipped else before)
        after, before = tensors_of(overflowed, step + 1), tensors_of(overflowed, step)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in after) == was_skipped, step
    scales = {r["step"]: r["loss_scale"] for r in records(overflowed) if "loss" in r}
    assert scales == {step: scale_after(overflowed, step + 1) for step in range(2, STEPS)}
    counts = {r["step"]: r["skipped"] for r in records(overflowed) if "loss" in r}
    assert counts == {step: sum(s <= step for s in skipped) for step in range(2, STEPS)}
    found = losses(overflowed)
    assert all(loss is not None for loss in found.values()) and found[STEPS - 1] < found[2] - 0.05


def test_a_resumed_float16_run_has_scale_and_losses_of_one_never_stopped(corpus, overflowed, tmp_path):
    out, last = tmp_path / "run", skipped_steps(overflowed)[-1]
    # Continue in the midst of the overflows: one step is still to be skipped, and to be counted
    save_with_scale(overflowed, out, last, scale_after(overflowed, last))
    run(command(corpus, out, *SHORT, "--dtype=float16"))
    assert skipped_steps(out) == [last]
    expected = losses(overflowed)
    assert losses(out) == {step: expected[step] for step in range(last, STEPS)}
    assert scale_after(out, STEPS) == scale_after(overflowed, STEPS)
    assert records(out)[-2]["skipped"] == len(skipped_steps(overflowed))


def test_a_float16_run_that_no_scale_can_save_ends_and_names_the_step(corpus, trained, tmp_path):
    save_with_scale(trained, tmp_path / "run", 2, 4.0)
    lost = ["--matrix_lr=1e6", "--weight_decay=1e6", "--warmup_steps=0", "--grad_clip=-1"]
    longer = [SEED, "--num_iterations=40", "--dtype=float16"]
    printed = run(command(corpus, tmp_path / "run", *lost, *longer), status=2)
    assert "three steps in a row were not finite, the last one step" in printed


@pytest.mark.slow
def test_two_processes_skip_what_one_skips_and_go_on_with_its_scale(corpus, trained, overflowed, tmp_path):
    # Each process has half of the micro-steps, so its losses are divided by half as much: half the scale
    save_with_scale(trained, tmp_path / "run", 2, 2.0**22)
    run(command(corpus, tmp_path / "run", *SHORT, "--dtype=float16"), processes=2)
    skipped = skipped_steps(tmp_path / "run")
    assert skipped == skipped_steps(overflowed)
    assert scale_after(tmp_path / "run", STEPS) == scale_after(overflowed, STEPS) / 2
    assert losses(tmp_path / "run") == pytest.approx(losses(overflowed), rel=0.02)


# ------------------------------------------------------------------------------------------------------
# bfloat16

# The laptop recipe, with a model that costs little where a CPU has to emulate bfloat16
SIZE = ["--depth=2", "--aspect_ratio=32", "--head_dim=32", "--max_seq_len=128"]
SIZE += ["--total_batch_size=512", "--device_batch_size=4"]


@pytest.mark.slow
@needs_bfloat16
def test_200_steps_in_bfloat16_lose_as_much_as_in_float32(tmp_path):
    last = {}
    for dtype in ("bfloat16", "float32"):
        out = tmp_path / dtype
        steps = ["--num_iterations=200", "--eval_every=-1", "--eval_tokens=65536", "--save_every=-1"]
        where = [f"--out_dir={out}", f"--dtype={dtype}"]
        run(["scripts.base_train", "runs/laptop.py", *where, *steps, *SIZE])
        found = losses(out)
        val_bpb = next(r["val_bpb"] for r in records(out) if "val_bpb" in r)
        last[dtype] = sum(found[step] for step in range(150, 200)) / 50, val_bpb
    assert last["bfloat16"] == pytest.approx(last["float32"], rel=0.01)


# ------------------------------------------------------------------------------------------------------
# The recipe for 16 GB


def test_the_recipe_for_old_gpus_fits_their_memory_in_float16():
    script = {"__file__": ROOT / "scripts" / "base_train.py"}
    given = configurator.configure(script, [str(ROOT / "runs" / "old_gpu.py")]).values
    assert given["dtype"] == "float16"
    rows, length = given["device_batch_size"], given["max_seq_len"]
    config = scaling.model_config(given["depth"], 64, 128, length, 32768, "L")
    needed = sum(training_bytes(config, rows * length, torch.float16, compiled=False).values())
    assert 6 * 2**30 < needed < 0.8 * 15 * 2**30  # a T4 has 15 GiB; the context, buffers and gaps need some
