"""A run over two hosts. Each host is a network namespace with its own address and its own torchrun."""

import os
import shutil
import subprocess
import sys
import uuid

import pytest
from helpers import ROOT, command, losses, run

from nanochat import checkpoint


@pytest.fixture
def hosts():
    """Names of two network namespaces joined by a cable (a veth pair): 10.99.0.1 and 10.99.0.2."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs Linux, root and iproute2")
    tag = uuid.uuid4().hex[:6]
    names = [f"nano-{tag}-{i}" for i in (1, 2)]
    commands = [f"ip netns add {names[0]}", f"ip netns add {names[1]}"]
    commands += [f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for i, name in enumerate(names, start=1):
        commands += [f"ip -n {name} addr add 10.99.0.{i}/24 dev eth0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "eth0")]
    try:
        for text in commands:
            done = subprocess.run(text.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no right to make network namespaces: {text}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_two_hosts(hosts: list, arguments: list, port: int = 29400) -> list[tuple[int, str]]:
    """Run the command with torchrun --nnodes=2 and two processes on each; (status, output) of both."""
    started = []
    for rank, name in enumerate(hosts):
        how = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}"]
        how += ["--nproc_per_node=2", "--master_addr=10.99.0.1", f"--master_port={port}", "-m"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *how, *arguments],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_two_hosts_of_two_processes_have_the_losses_of_one_and_resume_as_one(hosts, corpus, tmp_path):
    run(command(corpus, tmp_path / "calm"))
    expected = losses(tmp_path / "calm")
    out = tmp_path / "two"
    (status, printed), (other_status, other_printed) = on_two_hosts(hosts, command(corpus, out))
    assert status == other_status == 0, printed + other_printed
    assert "x 4 processes" in printed and "x 4 processes" not in other_printed  # only process 0 prints
    assert losses(out) == pytest.approx(expected, abs=1e-4)
    last = checkpoint.find(out, "auto")
    assert last.step == 8 and len(list(last.path.glob("optimizer-*-of-00004.safetensors"))) == 4
    run(command(corpus, out, "--num_iterations=10", "--warmdown_ratio=0"))  # one process reads all four parts
    assert sorted(losses(out)) == list(range(10))


@pytest.mark.slow
def test_a_run_folder_that_a_host_does_not_share_is_refused(hosts, corpus, tmp_path):
    """Each host mounts its own file system over the folder in which the run's folder is."""
    place = tmp_path / "own"
    place.mkdir()
    script = f"mount -t tmpfs tmpfs {place} && exec "
    arguments = command(corpus, place / "run")
    how = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=10.99.0.1 --master_port=29401"
    processes = []
    for rank, name in enumerate(hosts):
        line = f"{script} {sys.executable} {how} --node_rank={rank} -m {' '.join(arguments)}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", line],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    if "permission denied" in outputs[0].lower():
        pytest.skip("no right to mount")
    assert all(process.returncode for process in processes)
    assert f"process 1 does not see what process 0 writes to {place}" in outputs[0] + outputs[1]
