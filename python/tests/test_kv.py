"""The durable keys through the package."""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

import beeline
from beeline.kv import AsyncStore, KvError


@pytest.fixture
def kv(servers):
    with beeline.kv.connect(servers) as store:
        yield store


@pytest.fixture
def key():
    return b"test:" + os.urandom(8)


def test_values_are_stored_read_and_deleted(kv, key):
    assert kv.get(key) is None and key not in kv
    first = kv.put(key, b"value")
    assert kv.get(key) == b"value" and key in kv
    assert kv.put(key, "text") > first
    assert kv.get_with_version(key)[0] == b"text"
    assert kv.delete(key) and not kv.delete(key)
    assert kv.get_with_version(key) is None
    assert kv.provider in ("shm", "tcp", "verbs", "ntb")


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
def test_values_of_every_size_come_back(kv, key, size):
    value = os.urandom(size)
    kv.put(key, memoryview(value))
    assert kv.get(key) == value
    kv.delete(key)


def test_what_is_too_long_is_a_value_error(kv, key):
    with pytest.raises(ValueError):
        kv.put(key, bytes(8 << 20))
    with pytest.raises(ValueError):
        kv.get(b"x" * 5000)
    with pytest.raises((ValueError, OverflowError)):
        beeline.kv.connect(kv._server, database=300).get(key)


def test_a_key_expires(kv, key):
    kv.put(key, b"for long", ttl=1000)
    assert 900 < kv.ttl(key) < 1001
    kv.put(key, b"for a moment", ttl=0.05)
    for _ in range(2000):
        if kv.get(key) is None:
            break
        time.sleep(0.01)
    assert kv.get(key) is None and kv.ttl(key) is None


def test_every_key_is_listed_once(kv, key):
    wanted = {key + b":%d" % number for number in range(1000)}
    for one in wanted:
        kv.put(one, b"")
    found = [one for one in kv.keys() if one.startswith(key)]
    assert len(found) == len(wanted) and set(found) == wanted
    for one in wanted:
        kv.delete(one)


def test_databases_are_apart(servers, kv, key):
    other = beeline.kv.connect(servers, database=1)
    kv.put(key, b"of the first")
    assert other.get(key) is None
    kv.delete(key)


def test_threads_share_a_store(kv, key):
    failures = []

    def work(number):
        try:
            for round in range(50):
                kv.put(key + b"%d" % number, b"%d" % round)
                assert kv.get(key + b"%d" % number) == b"%d" % round
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _double(task):
    store, key = task
    return store.put(key + b":twice", store.get(key) * 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_travels_to_other_processes(kv, key, method):
    assert pickle.loads(pickle.dumps(kv)).get(key) is None
    kv.put(key, b"ab")
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.map(_double, [(kv, key)])
    assert kv.get(key + b":twice") == b"abab"


def test_connections_end_with_their_store(servers):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    beeline.kv.connect(servers).get(b"first")
    before = descriptors()
    for _ in range(30):
        beeline.kv.connect(servers).get(b"x")
    assert descriptors() <= before + 10


def test_a_child_that_ends_leaves_its_parents_connection(servers):
    program = (
        "import beeline, os, sys\n"
        "kv = beeline.kv.connect(sys.argv[1])\n"
        "kv.put(b'test:of the parent', b'1')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "for _ in range(100):\n"
        "    kv.put(b'test:of the parent', kv.get(b'test:of the parent'))\n"
        "print(kv.delete(b'test:of the parent'))\n"
    )
    arguments = [sys.executable, "-c", program, servers]
    parent = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert parent.stdout == "True\n", parent


def test_asyncio_waits_on_threads(kv, key):
    async def main():
        store = AsyncStore(kv)
        await asyncio.gather(*(store.put(key + b"%d" % n, b"%d" % n) for n in range(8)))
        return await asyncio.gather(*(store.get(key + b"%d" % n) for n in range(8)))

    assert asyncio.run(main()) == [b"%d" % n for n in range(8)]


def test_a_node_that_is_not_there_is_a_connection_error():
    with pytest.raises(ConnectionError, match="127.0.0.1:1"):
        beeline.kv.connect("tcp://127.0.0.1:1", timeout=2)
    assert issubclass(beeline.kv.OutcomeUnknown, KvError)
