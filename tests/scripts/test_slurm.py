"""runs/slurm.sh with substitutes for srun and scontrol: at the warning it saves and requeues the job."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, command, losses, wait_for_step

from nanochat import checkpoint

SRUN = """#!{python}
# Starts two tasks on this machine, as srun does, and passes SIGUSR1 on to them
import os, signal, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[3:], env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range(2)
]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_job_saves_and_requeues_at_the_warning_and_the_next_one_finishes(corpus, tmp_path):
    tools, log, out = tmp_path / "bin", tmp_path / "log", tmp_path / "run"
    tools.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ, "PATH": path, "SCONTROL_LOG": str(log), "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here",
    }  # fmt: skip
    arguments = command(corpus, out, "--num_iterations=150", "--save_every=-1")[1:]

    def submit(restarts):
        job = ["bash", "runs/slurm.sh", *arguments, "--resume=never"]
        own = environment | {"SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(job, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True)

    job = submit(restarts=0)
    wait_for_step(job, out, 3)
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0 and "stopped by SIGUSR1" in printed, printed
    assert log.read_text() == "requeue 4711\n"
    stopped_at = checkpoint.find(out, "auto").step
    assert 3 < stopped_at < 150
    job = submit(restarts=1)  # --resume=never must not make it start over
    printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0 and "going on from" in printed and "done:" in printed
    assert sorted(losses(out)) == list(range(150))
    assert log.read_text() == "requeue 4711\n"  # the job has finished: no second requeue
