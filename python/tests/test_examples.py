"""The examples run as they stand."""

import importlib.util
import json
import os
import pathlib
import shutil
import socket as sockets
import subprocess
import sys
import time

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def second(servers, tmp_path):
    """The socket of another node, which looks at the first for objects."""
    program = os.environ.get("BEELINE_PROGRAM", "beeline")
    off = [word for name in ("resp", "http", "documents") for word in (f"--{name}-address", "off")]
    peers = ["--objects-peers", servers.removeprefix("auto://"), "--objects-memory", "256MiB"]
    small = ["--capacity", "256MiB", "--segment-size", "1MiB", "--fabric-address", "127.0.0.1:0"]
    node = subprocess.Popen(
        [program, "serve", "--json", "--data", str(tmp_path), *off, *peers, *small],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("BEELINE_")},
    )
    assert json.loads(node.stdout.readline())["event"] == "ready"
    yield str(tmp_path / "objects.sock")
    node.terminate()
    assert node.wait(timeout=60) == 0


def test_the_parallel_example_runs(socket, second):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "objects_parallel.py"), second],
        env={**os.environ, "BEELINE_OBJECTS_SOCKET": socket},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "summed 30 MiB in place" in ran.stdout, ran.stdout
    assert "none of them copied out" in ran.stdout, ran.stdout
    assert "came from the other node" in ran.stdout, ran.stdout
    for module, said in (("pyarrow", "Arrow: 4 tables"), ("dask", "Dask: four tasks")):
        assert (said in ran.stdout) == bool(importlib.util.find_spec(module)), ran.stdout


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
