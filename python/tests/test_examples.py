"""The examples run as they stand."""

import os
import pathlib
import shutil
import socket as sockets
import subprocess
import sys
import time

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def test_the_parallel_example_runs(socket):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "objects_parallel.py")],
        env={**os.environ, "BEELINE_OBJECTS_SOCKET": socket},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "summed 30 MiB in place" in ran.stdout, ran.stdout


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """Arguments that name a Redis of the test's own; none where there is none."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        yield []
        return
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    words = ["--port", str(port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1"]
    server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            sockets.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield ["--redis", f"127.0.0.1:{port}"]
    server.terminate()
    server.wait(timeout=60)


def run(name, servers, redis, words):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--connect", servers, *redis, *words.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_parameter_server_learns(servers, redis):
    words = "--features 256 --samples 3000 --batch 32"
    said = run("direct_parameter_server.py", servers, redis, words)
    for line in said.splitlines():
        share = float(line.split()[5].rstrip("%"))
        assert share > 80, said
    assert len(said.splitlines()) == 1 + bool(redis), said


def test_the_ranks_of_pages_are_exact(servers, redis):
    said = run("direct_pagerank.py", servers, redis, "--vertices 300 --edges 3000 --rounds 3")
    lines = said.splitlines()
    assert len(lines) == 1 + bool(redis) and all("exact" in line for line in lines), said


def test_the_sequencer_has_no_gap_and_a_lock_one_holder(servers, redis):
    said = run("direct_locks.py", servers, redis, "--numbers 2000 --turns 30")
    assert said.count("no gap") == said.count("one holder at a time") == 1 + bool(redis), said
