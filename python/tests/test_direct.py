"""The direct store through the package."""

import os
import threading

import numpy as np
import pytest

import beeline
from beeline.direct import DirectError, StoreFull


@pytest.fixture
def direct(servers):
    with beeline.direct.connect(servers) as store:
        yield store


def test_pairs_are_stored_read_and_deleted(direct):
    assert direct.get("absent") is None
    direct.put("key", b"value")
    direct.put(b"\x00\xff", "text")
    assert (direct.get("key"), direct.get(b"\x00\xff")) == (b"value", b"text")
    assert direct.delete("key") and not direct.delete("key")
    for key in ("", "x" * 256):
        with pytest.raises(ValueError, match="1 to 255"):
            direct.get(key)
    with pytest.raises(ValueError, match="2044"):
        direct.put("key", bytes(4000))


def test_scalars_return_what_was_there(direct):
    direct.put("n", 41)
    assert direct.update("n", "add", 1) == 41
    assert direct.update("n", "subtract", 50) == 42
    assert direct.update("n", "exchange", 7) == -8
    assert direct.compare_and_swap("n", 7, 9) == 7
    assert direct.compare_and_swap("n", 7, 10) == 9
    assert direct.update("n", "max", 100, returning=False) is True
    assert direct.update("n", "add", 0) == 100
    assert direct.update("none", "add", 1) is None
    assert direct.update("none", "add", 1, returning=False) is False
    direct.put("f", 1.5, dtype="f8")
    assert direct.update("f", "add", 0.25, dtype="f8") == 1.5
    assert np.frombuffer(direct.get("f")) == 1.75


def test_vectors_are_updated_reduced_and_filtered(direct):
    direct.put("v", [1, 0, 3], dtype="u4")
    assert direct.update_vector("v", "add", 10, dtype="u4") == [1, 0, 3]
    assert direct.update_vector("v", "subtract", [11, 0, 1], dtype="u4") == [11, 10, 13]
    assert direct.reduce("v", "add", dtype="u4") == 22
    assert direct.reduce("v", "max", 50, dtype="u4") == 50
    assert direct.reduce("v", "min", dtype="u4") == 0
    assert direct.filter("v", dtype="u4") == [10, 12]
    array = np.array([0.5, 0, -2], dtype="f4")
    direct.put("a", array, dtype="f4")
    direct.update_vector("a", "add", array, dtype="f4", returning=False)
    assert np.array_equal(np.frombuffer(direct.get("a"), dtype="f4"), array * 2)
    assert direct.reduce("a", "add", dtype="f4") == -3.0
    assert direct.filter("a", dtype="f4") == [1.0, -4.0]
    with pytest.raises(ValueError, match="lengths"):
        direct.update_vector("v", "add", [1, 2], dtype="u4")
    with pytest.raises(ValueError, match="no function"):
        direct.reduce("a", "xor", dtype="f4")
    with pytest.raises(ValueError, match="f4"):
        direct.put("a", array, dtype="f8")


def test_a_batch_keeps_the_order_of_each_key(direct):
    with direct.batch() as batch:
        batch.put("b", 0)
        before = [batch.update("b", "add", 1) for _ in range(300)]
        gone = batch.get("nothing")
        bad = batch.update_vector("b", "add", [1, 2, 3])
        with pytest.raises(DirectError, match="not done"):
            gone.value
    assert [result.value for result in before] == list(range(300))
    assert gone.value is None
    with pytest.raises(ValueError, match="lengths"):
        bad.value
    assert direct.update("b", "add", 0) == 300


def test_threads_share_a_store(direct):
    direct.put("shared", 0)
    seen = []

    def add():
        seen.extend(direct.update("shared", "add", 1) for _ in range(200))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(seen) == list(range(800))


def test_a_child_of_a_fork_connects_anew(direct):
    direct.put("fork", 1)
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            ended = 0 if direct.update("fork", "add", 1) == 1 else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert direct.update("fork", "add", 0) == 2


def test_a_node_that_is_not_there_is_a_connection_error():
    with pytest.raises(ConnectionError):
        beeline.direct.connect("auto://127.0.0.1:1", timeout=1)


def test_full_is_an_error_of_its_own():
    assert issubclass(StoreFull, MemoryError) and issubclass(StoreFull, DirectError)
