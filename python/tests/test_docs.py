"""What the documents show runs, and says what they say."""

import doctest
import pathlib
import re

import pytest

import beeline

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def node_at_hand(socket, servers, monkeypatch):
    # Other tests share the node: what the sessions find absent has to be.
    with beeline.direct.connect(servers) as direct, beeline.kv.connect(servers) as kv:
        for key in ("counter", "weights", "a", "b"):
            direct.delete(key)
        kv.delete("greeting")
    monkeypatch.setenv("BEELINE_OBJECTS_SOCKET", socket)
    monkeypatch.setenv("BEELINE_CONNECT", servers)


@pytest.mark.parametrize("module", [beeline, beeline.kv, beeline.direct])
def test_the_sessions_in_the_modules_run(module, node_at_hand):
    outcome = doctest.testmod(module)
    assert outcome.attempted >= 4 and outcome.failed == 0, outcome


@pytest.mark.parametrize("page", ["python/README.md", "docs/objects.md"])
def test_the_programs_in_the_pages_run(page, node_at_hand):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(block, names)
    assert not names["array"].flags.writeable and names["array"][-1] == 999_999
