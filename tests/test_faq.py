"""docs/faq.md and docs/faq.zh.md: the same 46 questions, figures and links, and the figures come out."""

import re
import zlib
from pathlib import Path

import pytest
import torch

from experiments import faq_precision as asked
from experiments.measurements import TEXT
from nanochat.data.loader import STEPS_AHEAD
from nanochat.data.sources import PUBLIC
from nanochat.plan import scaling

DOCS = Path(__file__).parent.parent / "docs"
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


def answers(name: str) -> dict[int, str]:
    """Question and answer by number; spaces and line ends do not count."""
    text = (DOCS / name).read_text(encoding="utf-8")
    parts = re.split(r"^### (\d+)\. ", text, flags=re.MULTILINE)[1:]
    assert parts[::2] == [str(n) for n in range(1, 47)], f"{name}: the questions are not 1 to 46, in order"
    bodies = (re.sub(r"\s+", " ", part.partition("\n## ")[0]) for part in parts[1::2])
    return dict(enumerate(bodies, 1))


ENGLISH, CHINESE = answers("faq.md"), answers("faq.zh.md")


def without_targets(text: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", text)


def numbers(text: str) -> set[str]:
    return set(NUMBER.findall(without_targets(text)))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def says(question: int, *words: str):
    for word in words:
        assert word in ENGLISH[question], f"question {question} does not say: {word}"


def says_about(question: int, value: float, rel=0.02):
    """The answer has a number close to this one: other kernels round a little differently."""
    found = [float(number.replace(",", "")) for number in numbers(ENGLISH[question])]
    assert any(number == pytest.approx(value, rel=rel) for number in found), (question, value)


def says_for_its_text(question: int, *values: float):
    """says_about, where this Python has the text that the figures are of: argparse.py of Python 3.11.7."""
    if zlib.crc32(bytes(TEXT.tolist())) == 1992563251:
        for value in values:
            says_about(question, value)


# ------------------------------------------------------------------------------------------------------
# The two pages


@pytest.mark.parametrize("question", ENGLISH)
def test_both_languages_have_the_same_figures_code_and_links(question):
    english, chinese = ENGLISH[question], CHINESE[question]
    assert numbers(english) == numbers(chinese)
    assert code(english) == code(chinese)
    assert sorted(links(english)) == sorted(links(chinese))


@pytest.mark.parametrize("question", ENGLISH)
def test_every_answer_has_a_figure_and_a_link_into_the_project(question):
    answer = ENGLISH[question].partition("? ")[2]
    assert numbers(answer), "no figure"
    assert any("://" not in link for link in links(answer)), "no link"


def test_the_chinese_page_is_chinese():
    for question, text in CHINESE.items():
        prose = re.sub(r"`[^`]*`|\"[^\"]*\"|\|.*", "", without_targets(text))
        assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > 30, question
        assert not re.search(r"[\u4e00-\u9fff][,;?!]", prose), f"{question}: western punctuation"


def is_measured(number: str) -> bool:
    """Whether it looks like a figure: with a decimal point, an exponent, or groups of thousands."""
    return bool(re.search(r"[.,e]", number))


# Those that no page has: recomputed below, or timings of experiments/faq_measurements.py
OWN = {
    28: {"1,024", "727.4", "0.7103"},
    29: {"2.6400"},
    31: {"1,024", "0.0028", "2.5e-07"},
    32: {"90,000", "90,112", "1e-8", "1.001e-08", "0.0001"},
    33: {"0.0430", "0.0003"},  # the question's
    34: {"2.7764", "2.4726", "2.4727", "2.5136"},
    37: {"19.7", "32.3", "132.6", "74.8"},
    38: {"32,768", "1,152"},
    39: {"30,115", "0.4595"},
    41: {"0.6", "1.8", "0.005", "0.2", "0.16", "0.46", "2,048", "524,288"},
}


@pytest.mark.parametrize("question", ENGLISH)
def test_every_other_figure_stands_on_a_page_that_the_answer_links_to(question):
    pages = {link.partition("#")[0] for link in links(ENGLISH[question])}
    text = " ".join((DOCS / page).read_text(encoding="utf-8") for page in pages if page.endswith(".md"))
    ours = {n for n in numbers(ENGLISH[question]) if is_measured(n)} - OWN.get(question, set())
    missing = ours - set(NUMBER.findall(text))
    assert not missing, f"{sorted(missing)} is on none of {sorted(pages)}"


# ------------------------------------------------------------------------------------------------------
# The figures come out again


@pytest.mark.parametrize(
    ("question", "answer", "record"),
    [
        (13, r"(\d+) of the (\d+) calls", "| forward | {1} | {0} |"),
        (15, r"(\d+) of (\d+) backward operations", "backward operators ({0} of {1}, casts not counted)"),
        (18, r"(\d+) of (\d+) parameters", "{0} of {1} parameters were cast to bfloat16 in the forward pass"),
    ],
)
def test_the_counts_are_those_of_the_record_that_precision_md_shows(question, answer, record):
    """tests/diagnostics compares that record with one of today."""
    page = (DOCS / "precision.md").read_text(encoding="utf-8").partition("## 16. ")[2]
    assert record.format(*re.search(answer, ENGLISH[question]).groups()) in page


def test_scaler_step_divides_for_torchs_optimizers_and_for_ours():
    figures = asked.without_unscale()
    for figure in figures.values():
        assert figure["before"] == pytest.approx(1024 * figure["after"], rel=1e-3)
        assert figure["update apart"] == 0
    says_for_its_text(28, figures["SGD"]["before"], figures["SGD"]["after"])


def test_who_names_the_operator_that_overflows():
    figures = asked.first_bad_operator()
    low = figures["float16"]
    assert low["first operator"] == "mul, inf in float16" and low["loss"] != low["loss"]
    assert low["first module by a hook"] == "blocks.1.mlp.down"
    assert "'HeadAndLossBackward' returned nan" in low["detect_anomaly"]
    says(29, "`mul`, inf in float16", "`blocks.1.mlp.down`", "`HeadAndLossBackward`")
    assert figures["bfloat16"]["first operator"] == "none"
    says_for_its_text(29, figures["bfloat16"]["loss"])
    assert "nan" in figures["a square root at 0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page describes a machine without CUDA")
def test_the_old_names_warn_and_switch_themselves_off():
    figures = asked.old_names()
    for name, off in (("autocast", torch.float32), ("GradScaler", False)):
        result, *warned = figures[f"torch.cuda.amp.{name}()"]
        assert result == off and len(warned) == 2 and warned[0].startswith("FutureWarning: ")
        says(30, re.sub(r"\s+", " ", warned[1].partition(": ")[2]))
    says(30, figures["torch.cuda.amp.autocast()"][1].partition(": ")[2])
    assert figures["torch.autocast('cpu')"] == [torch.bfloat16]
    assert figures["torch.amp.GradScaler('cpu')"] == [True]
    assert asked.message_of(torch.cuda.get_device_capability) in ENGLISH[36]


def test_a_region_without_autocast_needs_its_inputs_lifted():
    figures = asked.float32_region()
    low, lifted = figures["under autocast"], figures["enabled=False"]
    assert low[0] == torch.bfloat16 and lifted[0] == torch.float32
    says_about(31, low[1])
    says_about(31, lifted[1], rel=0.3)
    says(31, figures["enabled=False, input left in bfloat16"])


def test_overflow_underflow_and_a_lost_addition():
    figures = asked.ranges()
    assert figures["float16"] == {"300 * 300": float("inf"), "1e-8": 0, "1 + 1e-4": 1}
    assert figures["bfloat16"]["300 * 300"] == 90112 and figures["bfloat16"]["1 + 1e-4"] == 1
    assert figures["float32"]["300 * 300"] == 90000 and figures["float32"]["1 + 1e-4"] > 1
    says(32, "90,112", f"{figures['bfloat16']['1e-8']:.4g}")


@pytest.mark.slow  # 300 steps
def test_mixed_precision_learns_like_float32_and_bfloat16_weights_learn_less():
    figures = asked.default_dtype()
    assert figures["under autocast, the default and a new tensor"] == (torch.float32, torch.float32)
    start, full, mixed, low = list(figures.values())[1:]
    assert abs(mixed - full) < 0.02 * (start - full) and low - full > 0.05 * (start - full)
    for value in (start, full, mixed, low):
        says_about(34, value, rel=0.005)


def test_the_instructions_that_the_page_names_are_names_of_torch():
    words = ("avx512_bf16", "amx_bf16", "avx512_fp16")
    says(36, *(f"`{word}`" for word in words))
    if torch.cpu.get_capabilities().get("architecture") == "x86_64":
        assert set(words) <= set(torch.cpu.get_capabilities())


def test_what_lasts_is_float32_and_what_is_kept_for_the_backward_pass_shrinks():
    figures = asked.dtypes_and_bytes()
    for name in ("parameters", "gradients", "optimizer state"):
        count, dtypes, size = figures[name]
        assert dtypes == {torch.float32}
        says(37, str(count), f"{size / 1e6:.1f}")
    for dtype in ("float32", "bfloat16"):
        says_about(37, figures[f"kept for the backward pass, {dtype}"] / 1e6)


def test_token_ids_do_not_survive_16_bits():
    figures = asked.integer_targets()
    says(38, f"{figures['ids of 32,768 unchanged in bfloat16']:,}", figures["int32 targets"])
    says(38, str(figures["first id that changes in bfloat16"]))
    assert figures["an int64 tensor under autocast"] == torch.int64


def test_a_scaler_changes_no_bit_of_a_bfloat16_gradient():
    figures = asked.scaler_with_bfloat16()
    assert figures["equal in every bit"] == 1
    assert figures["scaled norm"] == pytest.approx(65536 * figures["norm"], rel=1e-5)
    says_for_its_text(39, figures["scaled norm"], figures["norm"])


def test_the_operations_on_each_devices_lists_are_counted_right():
    figures = asked.lists()
    cuda, cpu, mps = (figures[device] for device in ("cuda", "cpu", "mps"))
    assert {device["asked"] for device in figures.values()} == {27}
    says(16, f"CUDA's autocast lifts {cuda['float32']}, MPS's {mps['float32']}")
    says(16, f"the CPU's {cpu['float32']}")
    says(35, f"{mps['float32']} of 27")
    words = "{low} white, {float32} black and {as its input} on no list".format(**cuda)
    says(40, words, "the CPU has {low}, {float32} and {as its input}".format(**cpu))


def test_the_default_of_autocast_on_mps_is_the_one_on_the_page():
    assert torch.get_autocast_dtype("mps") == torch.float16
    says(35, "its default dtype is float16")


def test_the_figures_of_the_prefetch_belong_together():
    says(41, f"{STEPS_AHEAD} steps ahead")
    for milliseconds in (0.64, 1.8):  # for 2,048 tokens
        says_about(41, milliseconds * 524_288 / 2_048 / 1_000, rel=0.05)


def test_epochs_and_shards_follow_from_the_depth():
    def tokens(depth, vocab_size):
        return 12 * scaling.scaling_parameters(scaling.model_config(depth, 64, 128, 2048, vocab_size, "L"))

    for depth, there in ((4, "5.6"), (12, "119"), (20, "536")):
        times = tokens(depth, 4096) / 8_970_398
        assert there == (f"{times:.1f}" if times < 10 else f"{times:.0f}")
        says(42, there)
    says(42, f"{tokens(12, 32768) / 1e9:.2f} billion")
    says(42, f"{PUBLIC['climbmix'].shards_for(tokens(12, 32768))} shards")


def test_a_mean_of_means_counts_the_targets_of_a_short_micro_batch_more():
    targets, means = [6, 2], [1.0, 5.0]
    sums = [n * mean for n, mean in zip(targets, means, strict=True)]
    says(44, f"the mean is {sum(sums) / sum(targets):g}", f"is {sum(means) / 2:g}; it counts each")
    says(44, f"{(1 / 2 / targets[1]) / (1 / 2 / targets[0]):g} times as much")
    two_processes = [2 * part / sum(targets) for part in sums]  # times world_size
    assert sum(two_processes) / 2 == sum(sums) / sum(targets)  # after DDP's average


def test_float16_weights_are_refused_by_unscale():
    layer = torch.nn.Linear(2, 2).half()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler.scale(layer(torch.ones(1, 2, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
