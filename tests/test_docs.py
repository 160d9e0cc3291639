"""What the documentation tells people to do works: links, commands and their options, edits, measurements."""

import re
import shutil

import pytest
from helpers import ROOT, command, losses, run, run_tree
from safetensors.torch import load_file

import configurator
from experiments import measurements as measured

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# ------------------------------------------------------------------------------------------------------
# Links, commands and their options


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_file_names_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        where = page.parent / path if path else page
        assert where.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", where.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, target
    folders = "docs|nanochat|scripts|runs|tests|experiments|\\.ci"
    for name in re.findall(rf"(?<![\w/~.-])((?:{folders})/[\w./-]*\w)", text):
        assert (ROOT / name).exists(), name


def commands(text: str) -> list[tuple[str, str]]:
    """(module, its arguments) of the commands on a page: between backticks, or a line of a block."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.search(r"-m ((?:scripts|experiments)\.\w+)(.*)", c, re.DOTALL) for c in lines + spans]
    return [match.groups() for match in found if match]


def mistakes(text: str) -> list[str]:
    """Modules that do not exist, and options that they do not take."""
    wrong = []
    for module, arguments in commands(text):
        path = ROOT / f"{module.replace('.', '/')}.py"
        if not path.exists():
            wrong.append(module)
            continue
        takes_settings = "configurator.configure(" in path.read_text(encoding="utf-8")
        known = {"help", *(configurator.defaults(path) if takes_settings else ())}
        for name in re.findall(r"--([\w-]+)", arguments):
            plain = name.replace("-", "_")
            if not {plain, plain.removeprefix("no_")} & known:
                wrong.append(f"{module} --{name}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_on_a_page_exists_with_its_options(page):
    assert mistakes(page.read_text(encoding="utf-8")) == []


def test_the_smallest_two_loop_script_runs_and_learns():
    printed = run([str(ROOT / "docs" / "two_loops.py")])
    first, *_, last = (float(x) for x in re.findall(r"loss (\d\.\d+)", printed))
    assert last < first / 2


# ------------------------------------------------------------------------------------------------------
# The edits that the walkthrough shows


def applied(diff: str, source: str) -> str:
    """The source with a diff of the page in it, unless it has the new lines already; a line of dots separates
    the places that it changes."""
    for hunk in re.split(r"^\.\.\.\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ "))
        if new not in source:
            assert source.count(old) == 1, f"the page changes lines that are no longer there:\n{old}"
            source = source.replace(old, new)
    return source


def test_the_edits_that_the_walkthrough_shows_train_together_and_resume(tree, corpus, tmp_path):
    page = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    for path, diff in re.findall(r"<!-- edit (\S+) -->\n```diff\n(.*?)```", page, re.DOTALL):
        source = (tree / path).read_text(encoding="utf-8")
        (tree / path).write_text(applied(diff, source), encoding="utf-8")
    out = tmp_path / "run"
    assert "ahoy" in run_tree(tree, command(corpus, out, "--greeting=ahoy"))
    trained = load_file(out / "step_000008" / "model.safetensors")
    assert (trained["blocks.1.norm_weight"] != 1).any()
    expected = losses(out)
    assert len(expected) == 8
    shutil.rmtree(out / "step_000008")
    assert "step_000006" in run_tree(tree, command(corpus, out))
    assert losses(out) == expected


# ------------------------------------------------------------------------------------------------------
# Measurements: what the walkthrough concludes from them has to hold on any machine


def test_accumulation_equals_the_big_batch_but_for_rounding():
    results = measured.accumulation()
    between = {"float64": (0, 1e-13), "float32": (1e-9, 2e-6), "bfloat16": (1e-5, 1e-2)}
    for dtype, (low, high) in between.items():
        for steps in (4, 64):
            assert low < results[f"{dtype}, {steps} micro-steps"][1] < high
        assert results[f"{dtype}, again"] == (1, 0)
    ratio = results["float32, 4 micro-steps"][1] / results["float32, rows in another order"][1]
    assert 0.2 < ratio < 5
    one, many = (results[f"bfloat16, {what} against float64"][1] for what in ("one batch", "64 micro-steps"))
    assert many < 1.2 * one < 0.02
    assert results["float64, 64 other rows"][1] > 0.1


def test_only_the_last_micro_step_completes_the_gradient():
    distances = measured.on_the_way()
    assert distances == sorted(distances, reverse=True) and distances[2] > 0.1 and distances[3] < 1e-6


def test_without_the_division_our_optimizer_makes_the_same_update_and_sgd_four_times_it():
    results = measured.undivided()
    for name, (size, norm, loss, apart) in results.items():
        assert norm == pytest.approx(4, rel=1e-4) and loss == pytest.approx(4, rel=1e-4), name
        assert "SGD" in name or (size == pytest.approx(1, abs=0.01) and apart < 0.05), name
    assert results["SGD, clip inf"][0] == pytest.approx(4, rel=1e-4)
    assert 1.1 < results["SGD, clip 1.0"][0] < 3.9  # the wrong norm is clipped, the right one is not


def test_a_leaked_target_gives_a_fine_loss_and_a_useless_sample():
    (leaked_loss, leaked_text), (loss, text) = measured.leak()
    assert leaked_loss < 0.2 < 1 < loss and len(set(leaked_text)) == 1 and len(set(text)) > 3


def test_a_call_in_the_outer_loop_keeps_the_memory_of_all_micro_steps():
    big, inside, after = (measured.saved_bytes(*how) for how in ((64, True), (16, True), (16, False)))
    assert inside < 0.26 * big and after > 0.99 * big


def test_a_short_last_micro_batch_counts_too_much_unless_sums_are_divided_by_all_targets():
    inputs, targets = measured.byte_rows(64, 99)
    targets[48:, 8:] = -1  # the last of four micro-batches has a quarter of its targets
    big, mean_of_means, by_targets = (measured.our_model() for _ in range(3))
    big(inputs, targets).backward()
    measured.accumulate(mean_of_means, inputs, targets, 16)
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        (by_targets(x, y, reduction="sum") / (targets != -1).sum()).backward()
    right = measured.flat_grad(big)
    assert measured.compare(measured.flat_grad(mean_of_means), right)[1] > 0.02
    assert measured.compare(measured.flat_grad(by_targets), right)[1] < 1e-6
