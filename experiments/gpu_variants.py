"""Models that train, ours and the peer's, for `python -m scripts.bench --what=gpu`.

A variant is {"name", "side": "ours" or "peer", "depth", "settings"}; its settings go to the job of sides.py.
Those of a group take turns (gpu_turns.py).
"""

import statistics
from pathlib import Path

from experiments.gpu_parts import DEPTHS, model_job
from experiments.sides import ROOT, Side
from experiments.step_split import tables, time_split
from nanochat.ops import kernels


def groups(job: dict) -> dict[str, list[dict]]:
    """{group: the variants that take turns}, in order of importance. The first of a group is the base."""

    def ours(name: str, depth: int = 12, **settings) -> dict:
        return {"name": name, "side": "ours", "depth": depth, "settings": settings}

    def both(depth: int) -> list[dict]:
        return [{"name": "peer", "side": "peer", "depth": depth, "settings": {}}, ours("ours", depth)]

    def window(name: str, backend: str, flash: str = "") -> dict:
        asked = {"window": backend, "flash": flash}
        return ours(name, window_pattern="SSSL", attention=asked)

    flash = job.get("flash", [])
    levers = [ours(name, kernels=name) for name in kernels.PROBES]
    levers.append(ours("none, gradients of tables apart", kernels="", kept_gradients=False))
    levers.append(ours("none, no copying", kernels="", copying="off"))
    levers.append(ours("none, rows in loops", kernels="", rows_in_loops=True))
    if flash:
        levers.append(ours("cudnn", attention={"full": "cudnn", "flash": ""}))
    windows = [window(name, name) for name in (("banded", "blocks") if job["small"] else ("varlen", "flex"))]
    windows += [window(f"varlen {version}", "varlen", version) for version in flash]
    return {
        "d12": both(12),
        "d24": both(24),
        "levers": [ours("none", kernels=""), *levers],
        "windows": windows,
        "fp8": [ours(f"d{depth}", depth, fp8=True) for depth in DEPTHS],
    }


def missing(variant: dict, job: dict) -> str:
    """Why a variant cannot run; empty if it can."""
    if variant["side"] == "peer" and not job["peer"]:
        return "give --peer=FOLDER, a checkout of karpathy/nanochat"
    return "needs cuda" if variant["settings"].keys() & {"fp8", "kernels"} and job["device"] != "cuda" else ""


def prepare(variant: dict, job: dict, limit_s: float) -> Side:
    """A process whose model is compiled and has made its first steps, and that waits. Its rows are halved as
    long as they do not fit; its `facts` say so."""
    step_job = model_job(job, variant["depth"], **variant["settings"])
    step_job |= {name: job[name] for name in ("lock", "environment", "nice") if name in job}
    folder, said = Path(job["peer"]) if variant["side"] == "peer" else ROOT, {}
    while True:
        try:
            return prepared(variant["side"], step_job, folder, limit_s, said)
        except MemoryError as error:
            tried = step_job["rows"] if step_job["rows"] > 0 else 32
            if tried == 1:
                raise
            step_job = step_job | {"rows": tried // 2}
            said = {"rows_halved_to": tried // 2, "because": str(error)[:200]}


def prepared(whose: str, step_job: dict, folder: Path, limit_s: float, said: dict) -> Side:
    side = Side(whose, step_job, folder, limit_s=limit_s)
    try:
        side.facts |= side.do("first", limit_s=limit_s) | said
    except BaseException:
        side.__exit__()
        raise
    side.job = step_job
    return side


def figures(side, turns: list[dict]) -> dict:
    """The figures of a prepared side, from the times of its turns; without turns, of its second step."""
    step_s = statistics.median(turn["step_s"] for turn in turns or [side.facts])
    facts, last = side.facts, turns[-1] if turns else side.facts
    rate = side.job["total_batch_size"] / step_s
    row = {
        "tok_per_sec": rate,
        "step_s": step_s,
        "turns": len(turns),
        "first_step_s": facts["first_step_s"],
        "model": f"d{side.job['depth']}, {facts['parameters'] / 1e6:,.0f} M parameters",
        "micro_batch": f"{facts['rows']} x {side.job['max_seq_len']}, {facts['micro_steps']} a step",
        "attention": facts["attention"],
    }
    if "peak_flops" in facts:
        row["mfu"] = rate * facts["flops_per_token"] / facts["peak_flops"]
    if peak := last["peak_bytes"]:
        row |= {"peak_gib": peak / 2**30, "reserved_gib": last["reserved_bytes"] / 2**30}
    if expected := facts.get("expected_bytes"):
        row |= {"expected_gib": expected / 2**30} | ({"expected_over_peak": expected / peak} if peak else {})
    return row | {name: facts[name] for name in ("kernels", "rows_halved_to", "because") if name in facts}


# ------------------------------------------------------------------------------------------------------
# Where a step's time goes


def split(trace: Path, steps: int, head: tuple[int, int], name: str, folder: str | None) -> dict:
    """step_split.time_split of a trace, which goes. With a folder also a file in it, step-NAME.md: tables of
    the kinds of kernels and of the 60 longest."""
    try:
        found = time_split(trace, steps, head, most=60)
        if folder:
            Path(folder, f"step-{name}.md").write_text(tables(found))
    except (ValueError, KeyError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        trace.unlink(missing_ok=True)
    return found | {"longest": found["longest"][:8]}
