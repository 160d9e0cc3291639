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


def on_two_hosts(hosts: list, arguments: list) -> list:
    """Run the command by torchrun on both hosts, with two processes each; (status, output) of each."""
    started = []
    for rank, name in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}"]
        torchrun += ["--nproc_per_node=2", "--master_addr=10.99.0.1", "--master_port=29400"]
        host = ["ip", "netns", "exec", name, *torchrun, "-m", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(host, cwd=ROOT, env=environment, **pipes))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_two_hosts_of_two_processes_have_the_losses_of_one_and_resume_as_one(hosts, corpus, tmp_path):
    run(command(corpus, tmp_path / "calm"))
    expected = losses(tmp_path / "calm")
    out = tmp_path / "two"
    first, second = on_two_hosts(hosts, command(corpus, out))
    (status, printed), (other_status, other_printed) = first, second
    assert status == other_status == 0, printed + other_printed
    assert "x 4 processes" in printed and "x 4 processes" not in other_printed  # only process 0 prints
    assert losses(out) == pytest.approx(expected, abs=1e-4)
    last = checkpoint.find(out, "auto")
    assert last.step == 8 and len(list(last.path.glob("optimizer-*-of-00004.safetensors"))) == 4
    run(command(corpus, out, "--num_iterations=10", "--warmdown_ratio=0"))  # one process reads all four parts
    assert sorted(losses(out)) == list(range(10))
