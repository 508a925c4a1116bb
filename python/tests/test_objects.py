"""The package against a running node."""

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

import beeline
from beeline.objects import (
    AsyncStore,
    Forked,
    ObjectExists,
    ObjectNotFound,
    ObjectRef,
    Store,
    connect,
)

np = pytest.importorskip("numpy")


def references(store, ref):
    return next(row["references"] for row in store.list() if row["ref"] == ref)


def eventually(question, what):
    for _ in range(2000):
        if question():
            return
        time.sleep(0.01)
    raise AssertionError(what)


def test_what_is_no_reference_is_refused_by_its_type(store):
    ref = store.put(1)
    for call in (store.get, store.contains, store.delete, store.pin, store.unpin, lambda no: store.get_many([no])):
        for no in (str(ref), ref.id, None):
            with pytest.raises(TypeError, match=f"ObjectRef, not by {type(no).__name__}"):
                call(no)
    assert store.get(ObjectRef(str(ref))) == 1


def test_long_values_come_back_whole(store):
    # Several threads copy these.
    array = np.random.default_rng(2).integers(0, 255, (20 << 20) + 3, np.uint8)
    assert (store.get(store.put(array)) == array).all()
    raw = array.tobytes()[: 9 << 20]
    assert store.get(store.put(raw)) == raw
    several = {"one": array, "two": array[::-1].copy()}
    back = store.get(store.put(several))
    assert all((back[name] == several[name]).all() for name in several)
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"column": array[: 16 << 20]})
    assert store.get(store.put(table)).equals(table)


def test_an_array_comes_back_in_the_stores_own_memory_and_read_only(store):
    array = np.arange(1_000_000)
    ref = store.put(array)
    back = store.get(ref)
    assert (back == array).all() and back.dtype == array.dtype
    assert not back.flags.writeable and not back.flags.owndata
    with pytest.raises(ValueError):
        back[0] = 1
    with pytest.raises(ValueError):
        back.flags.writeable = True
    address = back.__array_interface__["data"][0]
    mapping = next(
        line
        for line in open("/proc/self/maps")
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    )
    assert "memfd:beeline-objects" in mapping and " r--s " in mapping, mapping
    again = store.get(ref)
    assert again.__array_interface__["data"][0] == address


def test_writing_through_a_pointer_faults(socket, store):
    ref = store.put(np.zeros(1000))
    program = (
        "import beeline, ctypes, sys\n"
        "array = beeline.objects.connect(sys.argv[1]).get(beeline.objects.ObjectRef(sys.argv[2]))\n"
        "print('read', array[0], flush=True)\n"
        "ctypes.memset(array.ctypes.data, 1, 8)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, socket, ref.hex()], capture_output=True, text=True
    )
    assert child.returncode == -11 and "read 0.0" in child.stdout, child
    assert (store.get(ref) == 0).all()


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.array([], dtype="f4"),
        np.zeros((0, 7), dtype="u1"),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(24).reshape(2, 3, 4)[:, ::2],
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.array(["one", "three"]),
        np.arange(5, dtype=">i8"),
        np.array(["2024-01-01"], dtype="M8[D]"),
        np.ones((2, 2), dtype=bool),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_of_every_shape_and_kind(store, array):
    back = store.get(store.put(array))
    assert back.dtype == array.dtype and back.shape == array.shape
    assert (back == array).all()
    assert back.flags.f_contiguous == array.flags.f_contiguous or array.ndim > 1


def test_bytes_and_views_come_back_as_read_only_views(store):
    for value in (b"", b"some bytes", bytearray(b"mutable"), memoryview(b"abcdef")[::2]):
        view = store.get(store.put(value))
        assert isinstance(view, memoryview) and view.readonly and bytes(view) == bytes(value)


def test_views_of_any_layout_are_put_as_their_bytes(store):
    for array in (np.asfortranarray(np.arange(12).reshape(3, 4)), np.zeros((0, 3)), np.arange(6)):
        assert bytes(store.get(store.put(memoryview(array)))) == memoryview(array).tobytes()


def test_a_type_that_is_more_than_its_bytes_comes_back_as_it_was(store):
    records = np.dtype((np.record, [("a", "<i4"), ("b", "<f8")]))
    kinds = [np.array([(1, 2.5)], dtype=records)]
    if hasattr(np.dtypes, "StringDType"):
        kinds.append(np.array(["a", "long" * 100], dtype=np.dtypes.StringDType()))
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        kinds.append(np.arange(3).astype(ml_dtypes.bfloat16))
    for array in kinds:
        back = store.get(store.put(array))
        assert back.dtype == array.dtype and back.dtype.type is array.dtype.type
        assert (back == array).all()


def test_what_pickles_comes_back_with_its_arrays_in_place(store):
    value = {"name": "x", "arrays": [np.arange(10_000), np.ones((100, 100))], "list": [1, None]}
    back = store.get(store.put(value))
    assert back["name"] == "x" and back["list"] == [1, None]
    for ours, theirs in zip(back["arrays"], value["arrays"]):
        assert (ours == theirs).all() and not ours.flags.owndata and not ours.flags.writeable
        assert ours.__array_interface__["data"][0] % 64 == 0
    objects = np.array([{"a": 1}, None], dtype=object)
    assert store.get(store.put(objects))[0] == {"a": 1}


def test_arrow_tables_come_back_without_a_copy(store):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"number": list(range(50_000)), "text": [str(i) for i in range(50_000)]})
    before = pa.total_allocated_bytes()
    back = store.get(store.put(table))
    assert back.equals(table)
    assert pa.total_allocated_bytes() - before < 100_000
    batch = table.to_batches()[0]
    assert store.get(store.put(batch)).num_rows == batch.num_rows


def test_an_array_keeps_its_object_and_the_last_one_lets_it_go(store):
    ref = store.put(np.arange(100))
    assert references(store, ref) == 0
    array = store.get(ref)
    part = array[10:20]
    assert references(store, ref) == 1
    del array
    gc.collect()
    assert references(store, ref) == 1 and part[0] == 10
    del part
    gc.collect()
    eventually(lambda: references(store, ref) == 0, "the reference was not given back")


def test_a_deleted_object_is_gone_and_held_memory_stays(store, ref):
    store.put(np.arange(1000), ref=ref)
    held = store.get(ref)
    with pytest.raises(ObjectExists):
        store.put(b"again", ref=ref)
    assert ref in store
    store.delete(ref)
    assert ref not in store
    with pytest.raises(ObjectNotFound):
        store.get(ref, timeout=0)
    with pytest.raises(ObjectNotFound):
        store.delete(ref)
    store.put(np.zeros(1000), ref=ref)
    assert held[999] == 999


def test_a_get_waits_as_long_as_it_is_told(store, ref):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        store.get(ref, timeout=0.05)
    assert time.monotonic() - start < 30
    timer = threading.Timer(0.05, lambda: store.put(b"late", ref=ref))
    timer.start()
    assert bytes(store.get(ref, timeout=30)) == b"late"
    timer.join()


@pytest.mark.parametrize("get", [Store.get, lambda store, ref: store.get_many([ref])[0]])
def test_a_get_without_a_time_out_waits_for_the_seal(store, ref, get):
    buffer = store.create(ref, 5)
    with pytest.raises(TimeoutError):
        store.get(ref, timeout=0)
    got = []
    thread = threading.Thread(target=lambda: got.append(bytes(get(store, ref))), daemon=True)
    thread.start()
    # Long enough for a get that does not wait to have failed.
    thread.join(0.2)
    assert thread.is_alive() and not got
    buffer.write_at(0, b"later")
    buffer.seal()
    thread.join(60)
    assert got == [b"later"]


@pytest.mark.parametrize("wait", [
    "store.get(ref)",
    "store.get(ref, timeout=float('inf'), fetch=False)",
    "store.next_sealed()",
])
def test_an_interrupt_ends_a_wait_without_end(socket, ref, wait):
    program = (
        "import beeline, signal, sys\n"
        # A shell may have started the tests with interrupts ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "store = beeline.objects.connect(sys.argv[1])\n"
        "ref = beeline.objects.ObjectRef(sys.argv[2])\n"
        "try:\n"
        "    print('waits', flush=True)\n"
        f"    {wait}\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, socket, ref.hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "waits\n"
        # Mostly it waits by then; where it does not yet, the interrupt ends it all the same.
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        assert "interrupted" in child.communicate(timeout=60)[0]
    finally:
        child.kill()


def test_a_task_that_was_cancelled_keeps_no_program_from_its_end(socket, ref):
    program = (
        "import asyncio, beeline, sys\n"
        "from beeline.objects import AsyncStore, ObjectRef, connect\n"
        "async def main():\n"
        "    store = AsyncStore(connect(sys.argv[1]))\n"
        "    try:\n"
        "        await asyncio.wait_for(store.get(ObjectRef(sys.argv[2])), 0.05)\n"
        "    except asyncio.TimeoutError:\n"
        "        print('over')\n"
        "asyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", program, socket, ref.hex()]
    child = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stdout) == (0, "over\n"), child


def test_several_are_got_at_once_and_a_missing_one_is_told(store):
    refs = [store.put(np.full(10, number)) for number in range(100)]
    assert [int(array[0]) for array in store.get_many(refs)] == list(range(100))
    with pytest.raises(ObjectNotFound):
        store.get_many([*refs, ObjectRef.random()], timeout=0)


def test_a_buffer_is_written_in_place_and_not_after_the_seal(store, ref):
    buffer = store.create(ref, 16, b"mine")
    view = memoryview(buffer)
    view[:5] = b"hello"
    with pytest.raises(BufferError):
        buffer.seal()
    with pytest.raises(TimeoutError):
        store.get(ref, timeout=0)
    view.release()
    with pytest.raises(ValueError):
        buffer.write_at(15, b"ab")
    buffer.seal()
    with pytest.raises(BufferError):
        memoryview(buffer)
    with pytest.raises(ValueError):
        buffer.seal()
    got = store.get_buffer(ref)
    assert bytes(got)[:5] == b"hello" and got.metadata == b"mine" and got.id == ref.id


def test_a_view_released_while_the_buffer_is_written_is_not_counted_for_ever(store, ref):
    buffer = store.create(ref, 16)
    buffer.write_at(0, b"0123456789abcdef")
    # The view of this call is taken, and let go of, while the buffer is written.
    buffer.write_at(0, buffer)
    buffer.seal()
    assert bytes(store.get_buffer(ref)) == b"0123456789abcdef"


def test_a_put_that_fails_leaves_no_object_behind(store, ref, monkeypatch):
    too_much = (b"about", [(0, b"x" * 100_000), (100_000, b"y")], 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(beeline.objects, "_encode", lambda value: too_much)
        with pytest.raises(ValueError) as failure:
            store.put(b"", ref=ref)
    # Its traceback still has the buffer.
    store.put(b"another", ref=ref)
    assert bytes(store.get(ref)) == b"another" and failure.traceback


def test_a_buffer_is_written_by_the_process_that_made_it(store, ref):
    buffer = store.create(ref, 100)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = []
            for attempt in (lambda: buffer.write_at(0, b"x"), lambda: memoryview(buffer)):
                try:
                    attempt()
                    said.append("written")
                except (Forked, BufferError) as error:
                    said.append(type(error).__name__)
            os.write(writing, " ".join(said).encode())
        finally:
            os._exit(0)
    os.close(writing)
    answer = os.read(reading, 100)
    os.waitpid(child, 0)
    assert answer == b"Forked BufferError"
    buffer.write_at(0, b"y" * 100)
    buffer.seal()
    assert bytes(store.get_buffer(ref)) == b"y" * 100


def test_a_buffer_that_is_dropped_gives_its_object_up(store, ref):
    buffer = store.create(ref, 100)
    del buffer
    gc.collect()
    eventually(lambda: store.put(b"x", ref=ref) is ref, "the id stayed taken")


def test_too_much_is_a_memory_error_with_the_remedy(store, ref):
    with pytest.raises(MemoryError, match="--objects-memory"):
        store.create(ref, 1 << 50)


def test_subscribers_are_told(store, ref):
    store.subscribe(ref)
    assert store.next_sealed(timeout=0.01) is None
    store.put(b"x", ref=ref)
    assert store.next_sealed(timeout=30) == ref


def test_a_missing_store_says_what_to_do(tmp_path):
    with pytest.raises(ConnectionError, match="beeline serve"):
        connect(tmp_path / "objects.sock")


def test_references_and_stores_travel_to_other_processes(store, ref):
    assert pickle.loads(pickle.dumps(ref)) == ref and hash(ObjectRef(ref.hex())) == hash(ref)
    assert bytes(pickle.loads(pickle.dumps(store)).get(store.put(b"x"))) == b"x"
    with pytest.raises(ValueError):
        ObjectRef("12")


def _sum(task):
    store, ref = task
    return float(store.get(ref).sum()), store.put(np.full(10, os.getpid()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_arrays_by_reference(store, method):
    ref = store.put(np.ones(100_000))
    with multiprocessing.get_context(method).Pool(3) as pool:
        results = pool.map(_sum, [(store, ref)] * 6)
    assert {total for total, _ in results} == {100_000.0}
    pids = {int(store.get(result)[0]) for _, result in results}
    assert os.getpid() not in pids and pids


def test_a_forked_child_connects_anew_and_keeps_what_it_inherited(store):
    ref = store.put(np.arange(1000))
    array = store.get(ref)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ok = array[999] == 999
            try:
                store._native.contains(ref.id)
                ok = False
            except Forked:
                pass
            own = store.put(b"from the child")
            del array
            gc.collect()
            ok = ok and store.contains(ref)
            os.write(writing, own.id if ok else b"no")
        finally:
            os._exit(0)
    os.close(writing)
    answer = os.read(reading, 100)
    os.waitpid(child, 0)
    assert len(answer) == 20, answer
    assert bytes(store.get(ObjectRef(answer))) == b"from the child"
    assert references(store, ref) == 1 and array[0] == 0


@pytest.mark.parametrize("size", [0, 1, 1000, 65536, 65537, 200_000])
def test_values_of_every_size_are_put_whole(store, size):
    # Up to 64 KiB an object is put by one request, beyond it by two.
    for value in (b"x" * size, bytearray(range(256)) * (size // 256), np.arange(size) % 251):
        ref = store.put(value)
        assert np.array_equal(np.asarray(store.get(ref)), np.asarray(memoryview(value)))
        with pytest.raises(ObjectExists):
            store.put(value, ref=ref)
        store.delete(ref)
    ref = store.put({"size": size, "text": "a" * size})
    assert store.get(ref) == {"size": size, "text": "a" * size}


def test_a_fetch_names_its_node(store):
    with pytest.raises(ConnectionError):
        store.fetch([ObjectRef.random()], timeout=5, source="127.0.0.1:1")
    with pytest.raises((ValueError, OSError)):
        store.fetch([ObjectRef.random()], timeout=5, source="nowhere")


def test_threads_share_a_connection(store):
    failures = []

    def work(number):
        try:
            for round in range(100):
                ref = store.put(np.full(100, number * 1000 + round))
                assert store.get(ref)[99] == number * 1000 + round
                store.delete(ref)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_asyncio_waits_without_blocking_the_loop(store):
    async def main():
        shared = AsyncStore(store)
        ref, later = ObjectRef.random(), ObjectRef.random()
        getting = asyncio.create_task(shared.get(ref, timeout=30))
        await asyncio.sleep(0.01)
        assert not getting.done()
        await shared.put(np.arange(3), ref=ref)
        assert list(await getting) == [0, 1, 2]
        await shared.put(b"later", ref=later)
        return [found async for found in shared.sealed([ref, later])], {ref, later}

    found, expected = asyncio.run(main())
    assert set(found) == expected


def test_asyncio_does_not_wait_for_the_disk_on_the_loop(store, monkeypatch):
    # More than the node's memory holds: the first of them go to disk.
    refs = [store.put(np.full(48 << 20, number, np.uint8)) for number in range(6)]
    spilled = [row["ref"] for row in store.list() if row["spilled"] and row["ref"] in refs]
    assert spilled
    threads = []

    def get(ref, *arguments, **options):
        threads.append(threading.get_ident())
        return type(store).get(store, ref, *arguments, **options)

    monkeypatch.setattr(store, "get", get)
    array = asyncio.run(AsyncStore(store).get(spilled[0], timeout=0.0))
    assert array[0] == array[-1] == refs.index(spilled[0])
    assert threads and threading.get_ident() not in threads
    with pytest.raises(ObjectNotFound):
        asyncio.run(AsyncStore(store).get(ObjectRef.random(), timeout=0.0))
    del array
    for ref in refs:
        store.delete(ref)


def test_checksums_find_a_creator_that_breaks_the_rules(socket):
    store = connect(socket, checksums=True)
    import ctypes

    ref = ObjectRef.random()
    buffer = store.create(ref, 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    gc.collect()
    buffer.seal()
    assert len(store.get_buffer(ref)) == 64
    ctypes.memset(address, 7, 1)
    with pytest.raises(beeline.objects.ObjectDamaged):
        store.get(ref)


def test_objects_of_other_programs_are_views(store, ref):
    buffer = store.create(ref, 3, b"someone else's")
    buffer.write_at(0, b"abc")
    buffer.seal()
    assert bytes(store.get(ref)) == b"abc"
