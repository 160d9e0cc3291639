"""The documentation is true: excerpts stand in the code, links lead somewhere, figures come out."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import command, losses, schedules
from safetensors.torch import load_file

from experiments import measurements as measured
from nanochat.data.packing import Lane
from nanochat.data.sources import PUBLIC
from nanochat.machine import precision
from nanochat.plan import scaling

ROOT = Path(__file__).parent.parent
SCRIPT = (ROOT / "scripts" / "base_train.py").read_text(encoding="utf-8")
WALKTHROUGH = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def says(*words: str):
    """The walkthrough has these words; spaces and line ends do not count."""
    page = re.sub(r"\s+", " ", WALKTHROUGH)
    for word in words:
        assert word in page, f"docs/walkthrough.md does not say: {word}"


# ------------------------------------------------------------------------------------------------------
# The worked example: one parameter w, a row's loss is (w - y)**2 / 2, so a row's gradient is w - y


TARGETS = [8.0, 6.0, 4.0, 2.0]  # y of each row of micro-batches 1 to 4


def parameter(value=10.0):
    return torch.tensor(value, requires_grad=True)


def worked_step(w, rows=(256, 256, 256, 256), divide=True, clear=False, update=False):
    """The inner loop once; returns .grad after each micro-step, and the sum of the losses."""
    seen, total = [], 0.0
    for y, n in zip(TARGETS, rows, strict=True):
        if clear:
            w.grad = None
        loss = ((w - torch.full((n,), y)) ** 2 / 2).mean() / (len(rows) if divide else 1)
        loss.backward()
        total += loss.item()
        seen.append(w.grad.item())
        if update:
            w.data -= w.grad
    return seen, total


def test_gradients_after_each_micro_step_are_the_ones_in_the_table():
    grads, loss = worked_step(w := parameter())
    for i, (y, grad) in enumerate(zip(TARGETS, grads, strict=True)):
        says(f"| {i + 1} | {y:g} | {10 - y:g} | {(10 - y) / 4:g} | **{grad:g}** |")
    big, rows = parameter(), torch.tensor(TARGETS).repeat_interleave(256)
    big_loss = ((big - rows) ** 2 / 2).mean()
    big_loss.backward()
    assert w.grad == big.grad == 5 and loss == big_loss.item() == 15
    assert 10 - w.grad == rows.mean()  # a rate of 1 lands on the minimum
    assert worked_step(parameter(), divide=False)[0] == [2, 6, 12, 20]
    says("2, 6, 12, 20", "10 - 20 = -10")


def test_settings_of_the_worked_example_give_four_micro_steps():
    says("--max_seq_len=512 --total_batch_size=524288 --device_batch_size=256")
    rows = scaling.rows_per_process(524288, 512, 256, 1)
    assert rows == 1024 and rows // 256 == 4


def test_each_call_in_the_wrong_loop_gives_what_the_page_says():
    assert worked_step(parameter(), clear=True)[0][-1] == 2
    worked_step(w := parameter(), update=True)
    says(f"{w.item():.3f}")
    w = parameter()
    for _ in range(2):  # two steps of rate 1, never cleared
        worked_step(w)
        w.data -= w.grad
    assert w == 0
    big, inside, after = (measured.saved_bytes(*how) for how in ((64, True), (16, True), (16, False)))
    assert inside < 0.26 * big and after > 0.99 * big
    quoted = [float(x) * 1e6 for x in re.findall(r"([\d.]+) MB", WALKTHROUGH)]
    assert quoted == pytest.approx([big, inside, after], rel=0.1)  # kernels of other versions keep a bit more


def test_a_short_last_micro_batch_counts_too_much_unless_sums_are_divided_by_all_targets():
    short = (256, 256, 256, 64)
    assert worked_step(parameter(), rows=short)[0][-1] == 5
    says("3584 / 832", f"{10 - sum(n * y for n, y in zip(short, TARGETS, strict=True)) / sum(short):.4f}")
    inputs, targets = measured.byte_rows(64, 99)
    targets[48:, 8:] = -1  # the last of four micro-batches has a quarter of its targets
    big, mean_of_means, by_targets = (measured.our_model() for _ in range(3))
    big(inputs, targets).backward()
    measured.accumulate(mean_of_means, inputs, targets, 16)
    micro_batches = list(zip(inputs.split(16), targets.split(16), strict=True))
    measured.add_gradients_by_targets(by_targets, micro_batches)
    right = measured.flat_grad(big)
    assert measured.compare(measured.flat_grad(mean_of_means), right)[1] > 0.02
    assert measured.compare(measured.flat_grad(by_targets), right)[1] < 1e-6


# ------------------------------------------------------------------------------------------------------
# Measurements: what the page concludes has to hold on any machine; the digits are of ours


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


def test_two_processes_add_up_like_twice_the_micro_steps():
    results = measured.two_processes()
    assert len(results) == 6
    for name, (equal, apart) in results.items():
        assert apart < 1e-6, name
        assert equal == 1 or "2 x 1 against" not in name, name  # a + b = b + a


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


def test_backward_inside_autocast_gives_the_same_bits_here():
    grads = []
    for inside in (False, True):
        model = measured.our_model()
        with precision.autocast(torch.device("cpu"), torch.bfloat16):
            loss = model(*measured.byte_rows(64, 99))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append(measured.flat_grad(model))
    assert torch.equal(*grads)


def test_muon_makes_the_singular_values_alike():
    figures = measured.directions()
    assert figures["largest over median before"] > 20 and figures["largest over median after"] < 1.5
    assert figures["four largest in the squared norm"] > 0.6 and figures["embedding rows touched"] < 0.5


def test_a_leaked_target_gives_a_fine_loss_and_a_useless_sample():
    (leaked_loss, leaked_text), (loss, text) = measured.leak()
    assert leaked_loss < 0.2 < 1 < loss and leaked_text == "e" * 20 and len(set(text)) > 3
    says(f"`{leaked_text}`")


def test_figures_from_formulas_come_out():
    flops = scaling.on_meta(scaling.model_config(4, 64, 128, 512, 4096, "L")).flops_per_token()
    says(f"{flops:,} FLOPs", f"{1e4 * flops / 1e12:.3f} TFLOP/s", f"{1e6 * flops / 0.96e12:.0f} %")
    for micro_batches in (4, 32):  # the idle share of a pipeline of 4 stages
        says(f"{100 * (4 - 1) / (micro_batches + 4 - 1):.0f} % with {micro_batches}")


def test_the_rules_of_scaling_are_the_ones_in_the_table():
    says(f"^{scaling.BATCH_EXPONENT} tokens, with {scaling.SHORT_BATCH_EXPONENT} in place")
    says(f"^-{scaling.HORIZON_EXPONENT}, at most twice")
    d12 = 1e9
    assert scaling.rate_scale(2**19, d12, d12) == 1 and scaling.rate_scale(2**40, d12, d12) == 2
    assert scaling.rate_scale(2**17, d12, d12) == pytest.approx(0.5)
    longer = scaling.rate_scale(2**19, 10 * d12, d12)
    assert longer == pytest.approx(10**-scaling.HORIZON_EXPONENT)
    momentum = schedules(num_iterations=2000, warmdown_ratio=0.8)[1]
    assert [round(momentum(step), 9) for step in (0, 300, 400, 2000)] == [0.85, 0.95, 0.95, 0.855]


def test_the_smallest_two_loop_script_runs_and_checks_itself():
    path = ROOT / "docs" / "two_loops.py"
    source = path.read_text(encoding="utf-8")
    says(f"in {len(source.splitlines())} lines")
    assert set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) == {
        "argparse",
        "inspect",
        "math",
        "torch",
    }
    one = os.environ | {"OMP_NUM_THREADS": "1"}  # two threads on busy cores wait for each other
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(x) for x in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 7 and losses[0] > 5.5 and losses[-1] < 2.7


# ------------------------------------------------------------------------------------------------------
# The page on data


def test_every_function_of_the_map_is_in_the_file_that_the_map_names():
    rows = re.findall(r"^\| .+? \| `([\w.]+)` \| `(nanochat/\S+)\.py` \| .+ \| .+ \|$", DATA, re.MULTILINE)
    assert len(rows) == 16
    for name, path in rows:
        found = importlib.import_module(path.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert found.__module__ == path.replace("/", "."), name
    map_text = DATA.partition("```mermaid")[2].partition("```")[0]
    drawn = set(re.findall(r"[\w.]{7,}", " ".join(re.findall(r'-- "([^"]+)"', map_text))))
    assert drawn - {name for name, _ in rows} == {"Lane.add", "scripts.download"}


def test_a_document_longer_than_a_row_is_cut_as_in_the_example():
    documents = {"d": 20, "e": 3}
    tokens = [f"{name}{i}" for name, size in documents.items() for i in range(size)]

    class Feed:
        waiting = enumerate(documents)

        def next(self, lane):
            return next(self.waiting, None)

    class Words:
        bos_id = len(tokens)

        def encode(self, name):
            return np.array([i for i, token in enumerate(tokens) if token[0] == name], dtype=np.uint32)

    example = re.findall(r"^row \d   (.+)$", DATA, re.MULTILINE)
    lane = Lane(0, Feed(), Words(), 9, {"epoch": 0, "taken": 0})
    row, targets = np.zeros(9, dtype=np.int32), []
    for line in example:
        lane.fill(row)
        assert re.sub(r"  .*", "", line).split() == [[*tokens, "<|bos|>"][token] for token in row]
        targets += [token for token in row[1:].tolist() if token < len(tokens)]
    assert sorted(targets) == list(range(23)) and not lane.pieces and len(example) == 3


def test_epochs_and_shards_of_the_table_come_out():
    row = r"^\| (\d+) \| ([\d.]+) billion \| ([\d.,]+) \| ([\d.]+) billion \| (\d+) \|$"
    rows = re.findall(row, DATA, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [4, 8, 12, 20, 26]
    embedded = 1e6 * float(re.search(r"embedded text has ([\d.]+) million training tokens", DATA)[1])
    for depth, small, epochs, large, shards in rows:
        configs = (scaling.model_config(int(depth), 64, 128, 2048, V, "L") for V in (4096, 32768))
        tokens = [12 * scaling.scaling_parameters(config) for config in configs]
        assert (small, large) == tuple(f"{n / 1e9:.2f}" for n in tokens)
        digits = 1 if tokens[0] / embedded < 10 else 0
        assert epochs == f"{tokens[0] / embedded:,.{digits}f}"
        assert int(shards) == PUBLIC["climbmix"].shards_for(tokens[1])
    recipe = dict(re.findall(r"^(\w+) = (\d+)", (ROOT / "runs" / "laptop.py").read_text(), re.MULTILINE))
    steps, batch = 400, int(recipe["total_batch_size"])
    said = f"{steps:,} x {batch:,} = {steps * batch / 1e6:.2f} million"
    said += f", so it reads {100 * steps * batch / embedded:.0f} % of it"
    assert said in re.sub(r"\s+", " ", DATA)


# ------------------------------------------------------------------------------------------------------
# Excerpts, names, links


def stands_in(excerpt: str, source: str) -> bool:
    """Whether the excerpt's lines follow each other in the source, all indented alike."""
    wanted = textwrap.dedent(excerpt).rstrip().splitlines()
    lines = source.splitlines()
    for first in range(len(lines) - len(wanted) + 1):
        here = "\n".join(lines[first : first + len(wanted)])
        if textwrap.dedent(here).splitlines() == wanted:
            return True
    return False


def test_an_excerpt_with_a_changed_line_is_noticed():
    source = "if a:\n    b = 1\n    c = 2\n"
    assert stands_in("b = 1\nc = 2\n", source) and stands_in("  if a:\n      b = 1\n", source)
    assert not stands_in("b = 1\nc = 3\n", source) and not stands_in("if a:\nb = 1\n", source)


@pytest.mark.parametrize("name, at_least", [("walkthrough", 7), ("precision", 2)])
def test_every_excerpt_stands_in_the_file_it_is_said_to_be_from(name, at_least):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:<!-- from (.+?) -->\n)?```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= at_least
    for path, code in blocks:
        assert path, f"say in a comment above it where this is from:\n{code}"
        source = (ROOT / path).read_text(encoding="utf-8")
        for piece in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):  # a line of dots: left out
            assert stands_in(piece, source), f"{path} has no longer:\n{piece}"


def settings_of(module: str) -> set[str]:
    """The names that the command line of `python -m module` takes."""
    names = {"help"}
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")).body
    if isinstance(body[-1], ast.If):  # if __name__ == "__main__":
        body = [*body[:-1], *body[-1].body]
    for node in body:
        if "configure(" in ast.unparse(node):
            return names
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names.add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return set()  # it takes none


def commands(text: str) -> list[tuple[str, str]]:
    """(module, its arguments) of the commands on a page: between backticks, or a line of a block."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.search(r"-m ((?:scripts|experiments)\.\w+)(.*)", c, re.DOTALL) for c in lines + spans]
    return [match.groups() for match in found if match]


def unknown_options(text: str) -> list[str]:
    return [
        f"{module} --{name}"
        for module, arguments in commands(text)
        for name in re.findall(r"--([\w-]+)", arguments)
        if not {name.replace("-", "_"), name.replace("-", "_").removeprefix("no_")} & settings_of(module)
    ]


def test_an_option_that_no_script_has_is_noticed_wherever_the_command_stands():
    good = "`python -m scripts.base_train --depth=4\n--no-plan`\n"
    good += "```sh\npython -m scripts.chat \\\n  --seed=1\n```\n"
    assert len(commands(good)) == 2 and unknown_options(good) == []
    for old in ("depth", "plan", "seed"):
        assert len(unknown_options(good.replace(old, "dept"))) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_option_of_a_command_on_a_page_exists(page):
    assert unknown_options(page.read_text(encoding="utf-8")) == []


def test_every_option_that_the_walkthrough_names_exists():
    known = set().union(*(settings_of(module) for module, _ in commands(WALKTHROUGH)))
    assert "depth" in known and not set(re.findall(r"--([a-z]\w*)", WALKTHROUGH)) - known


def test_every_name_in_the_walkthrough_stands_in_the_code():
    files = [*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "nanochat").rglob("*.py")]
    words = set(re.findall(r"\w+", " ".join(p.read_text(encoding="utf-8") for p in files)))
    words |= {"train_step", "accumulate", "scale_grads"}  # of other projects
    prose = re.sub(r"```.*?```", "", WALKTHROUGH, flags=re.DOTALL)
    spans = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", prose)
    assert len(spans) > 50
    for path in re.findall(r"`((?:data|checkpoint)/\S+)`", prose):
        assert (ROOT / "nanochat" / path).exists(), path
    for span in spans:
        *path, name = span.split(".")
        if name == "py":
            assert (ROOT / span).exists() or any(ROOT.glob(f"*/**/{span}"))
        elif (
            path
            and name != "jsonl"
            and (path[0] == "torch" or (ROOT / "nanochat" / f"{path[0]}.py").exists())
        ):
            module = ".".join(path) if path[0] == "torch" else f"nanochat.{path[0]}"
            assert hasattr(importlib.import_module(module), name), span
        elif not path:
            assert name in words or span == "e" * 20, span


def test_the_walkthrough_says_what_is_not_there_yet_only_while_it_is_not():
    assert ("not in the script yet" in re.sub(r"\s+", " ", WALKTHROUGH)) == ("not there yet" in SCRIPT)


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
    for name in re.findall(
        r"(?<![\w/~.-])((?:docs|nanochat|scripts|runs|tests|experiments|\.ci)/[\w./-]*\w)", text
    ):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"-m ((?:scripts|nanochat|experiments)\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


@pytest.mark.parametrize("name, first, last", [("walkthrough", 1, 12), ("precision", 13, 27)])
def test_all_questions_have_their_place(name, first, last):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| (\d+) \| .+ \| \[.+\]\(#.+\) \|$", text, re.MULTILINE)
    assert [int(n) for n in numbers] == list(range(first, last + 1))


def test_the_sections_of_the_precision_page_are_numbered_and_the_table_leads_to_each_answer():
    text = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\d+)\. .+$", text, re.MULTILINE)
    assert sections == [str(i + 1) for i in range(len(re.findall(r"^## ", text, re.MULTILINE)))]
    rows = re.findall(r"^\| (\d+) \| .+ \| \[(\d+)\. .+\]\(#(\d+)-.+\) \|$", text, re.MULTILINE)
    assert len(rows) == 15 and all(shown == linked for _, shown, linked in rows)
    assert len({linked for _, _, linked in rows}) == 15  # each question has a section of its own


def test_the_lines_of_the_script_on_the_precision_page_stand_in_the_script():
    text = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    table = text.partition("| in `base_train.py` | precision |")[2].partition("\n\n")[0]
    spans = [span for row in table.splitlines()[2:] for span in re.findall(r"`(.+?)`", row.split(" | ")[0])]
    source = SCRIPT + (ROOT / "nanochat" / "gpt.py").read_text(encoding="utf-8")
    assert len(spans) >= 10
    for span in spans:
        assert all(part in source for part in span.split("...")), span


@pytest.mark.parametrize("name", ["walkthrough", "precision", "data"])
def test_the_three_pages_link_each_other_at_the_top(name):
    top = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition("\n## ")[0]
    for other in {"walkthrough", "precision", "data"} - {name}:
        assert f"({other}.md)" in top.partition("See also: ")[2].partition("\n\n")[0]


# ------------------------------------------------------------------------------------------------------
# The edits that the walkthrough shows


def applied(diff: str, source: str) -> str:
    """The source with a diff of the page in it; a line of dots separates the places that it changes."""
    for hunk in re.split(r"^\.\.\.\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ "))
        assert source.count(old) == 1, f"not once in the file:\n{old}"
        source = source.replace(old, new)
    return source


def test_the_edits_that_the_walkthrough_shows_train_together(tmp_path, corpus):
    edits = re.findall(r"<!-- edit (\S+) -->\n```diff\n(.*?)```", WALKTHROUGH, re.DOTALL)
    assert len(edits) == WALKTHROUGH.count("```diff") == 5
    for name in ("nanochat", "scripts", "configurator.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for path, diff in edits:
        source = (tmp_path / path).read_text(encoding="utf-8")
        (tmp_path / path).write_text(applied(diff, source), encoding="utf-8")
    arguments = command(corpus, tmp_path / "run", "--greeting=ahoy", "--num_iterations=4")
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ahoy") and len(losses(tmp_path / "run")) == 4
    trained = load_file(tmp_path / "run" / "step_000004" / "model.safetensors")
    assert (trained["blocks.1.norm_weight"] != 1).any()


# ------------------------------------------------------------------------------------------------------
# Diagrams: GitHub shows an error in place of a diagram with one wrong line


DIAGRAM_NODE = r'(\w+)(?:\["[^"]+"\]|\{"[^"]+"\})?'
DIAGRAM_LINE = re.compile(
    rf'{DIAGRAM_NODE} (?:-->|-- "[^"]+" -->|-\. "[^"]+" \.->) {DIAGRAM_NODE}'
    r"|classDef \w+ [\w:#,-]+|class [\w,]+ \w+|subgraph \w+\[\"[^\"]+\"\]|end"
)


def wrong_lines(diagram: str) -> list[str]:
    """Lines of a flowchart that do not have one of the few forms that we use, or name an unknown box."""
    head, *lines = diagram.strip().splitlines()
    boxes = set(re.findall(r'\b(\w+)(?:\["|\{")', diagram))
    wrong = [] if head == "flowchart TD" else [head]
    for line in map(str.strip, lines):
        match = DIAGRAM_LINE.fullmatch(line)
        named = {box for box in match.groups() if box} if match else set()
        if line.startswith("class "):
            named = set(line.split()[1].split(","))
        if not match or named - boxes:
            wrong.append(line)
    return wrong


def test_a_wrong_line_in_a_diagram_is_noticed():
    good = 'flowchart TD\n    a["one"] --> b{"two?"}\n    b -- "yes" --> a\n    class a,b low\n'
    assert wrong_lines(good) == []
    for old, new in (('["one"]', "[one (1)]"), (" --> b", " -> b"), ("--> a", "--> c"), ("a,b", "a,c")):
        assert wrong_lines(good.replace(old, new, 1)), new


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_diagram_has_only_lines_that_github_can_draw(page):
    for diagram in re.findall(r"```mermaid\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        assert wrong_lines(diagram) == []
