"""A node for the tests: the one `BEELINE_OBJECTS_SOCKET` names, or one of their own."""

import json
import os
import subprocess
import uuid

import pytest

import beeline


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """The object store's socket and the fabric address."""
    given = os.environ.get("BEELINE_OBJECTS_SOCKET")
    if given:
        yield given, os.environ.get("BEELINE_CONNECT", "auto://127.0.0.1:4790")
        return
    program = os.environ.get("BEELINE_PROGRAM", "beeline")
    data = tmp_path_factory.mktemp("node")
    off = ["--resp-address", "off", "--http-address", "off", "--fabric-address", "127.0.0.1:0",
           "--documents-address", "off"]
    node = subprocess.Popen(
        [program, "serve", "--json", "--data", str(data), "--capacity", "256MiB",
         "--segment-size", "1MiB", "--objects-memory", "256MiB", *off],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("BEELINE_")},
    )
    banner = json.loads(node.stdout.readline())
    assert banner["event"] == "ready"
    yield str(data / "objects.sock"), f"auto://{banner['fabric_address']}"
    node.terminate()
    assert node.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def socket(node):
    return node[0]


@pytest.fixture(scope="session")
def servers(node):
    return node[1]


@pytest.fixture
def store(socket):
    store = beeline.objects.connect(socket)
    yield store


@pytest.fixture
def ref():
    return beeline.objects.ObjectRef(uuid.uuid4().bytes + b"test")
