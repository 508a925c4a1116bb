"""The object store of a node: values that other processes read without a copy.

What ``put`` writes, by the first byte of the metadata:

====  =========================  ================================================================
kind  value                      metadata after the kind; data
====  =========================  ================================================================
0     ``bytes`` and its kin      nothing; the bytes
1     a NumPy array              ``repr((dtype, shape, order))``; the array's memory
2     an Arrow table or batch    nothing; an Arrow IPC stream
3     anything that pickles      table of buffers, pickle (protocol 5); the out-of-band buffers
====  =========================  ================================================================

Objects that another program stored without this package are handed out as a ``memoryview``.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import os
import pickle
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from . import _native
from ._native import (
    Forked,
    ObjectDamaged,
    ObjectExists,
    ObjectNotFound,
    ObjectsError,
    ReadBuffer,
    StoreGone,
    WriteBuffer,
)

__all__ = [
    "AsyncStore",
    "Forked",
    "ObjectDamaged",
    "ObjectExists",
    "ObjectNotFound",
    "ObjectRef",
    "ObjectsError",
    "ReadBuffer",
    "Store",
    "StoreGone",
    "WriteBuffer",
    "connect",
]

MAGIC = b"BLO1"
RAW, NUMPY, ARROW, PICKLE = range(4)
ALIGNMENT = 64
DEFAULT_TIMEOUT = 10.0
SMALL = 64 << 10
TURN = 0.25
DEFAULT_SOCKET = "./beeline-data/objects.sock"


class ObjectRef:
    """Names an object in every store of a cluster. Small, hashable, and pickles."""

    __slots__ = ("id",)

    def __init__(self, id: bytes | str) -> None:
        raw = _native.NativeStore.parse_id(id) if isinstance(id, str) else bytes(id)
        if len(raw) != 20:
            raise ValueError(f"an object id has 20 bytes, not {len(raw)}")
        self.id: bytes = raw

    @classmethod
    def random(cls) -> ObjectRef:
        return cls(_native.NativeStore.random_id())

    def hex(self) -> str:
        return self.id.hex()

    def __repr__(self) -> str:
        return f"ObjectRef({self.id.hex()!r})"

    def __str__(self) -> str:
        return self.id.hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ObjectRef, (self.id,))


def connect(path: str | os.PathLike[str] | None = None, *, checksums: bool = False) -> Store:
    """Connects to the store whose socket is ``path``: by default what ``BEELINE_OBJECTS_SOCKET``
    names, else ``./beeline-data/objects.sock``. With ``checksums``, objects are sealed with a
    checksum and verified when read."""
    return Store(path, checksums=checksums)


class Store:
    """A connection to the object store of this host's node; any number of threads may use it.

    After ``fork`` the child connects anew by itself; arrays it inherited stay readable.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, checksums: bool = False
    ) -> None:
        chosen = path or os.environ.get("BEELINE_OBJECTS_SOCKET") or DEFAULT_SOCKET
        self._path = os.path.abspath(os.fspath(chosen))
        self._checksums = checksums
        self._native = _native.NativeStore(self._path, checksums)
        self._process = os.getpid()

    # A store travels to another process as its address.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_reconnect, (self._path, self._checksums))

    def __repr__(self) -> str:
        return f"<beeline.objects.Store at {self._path}>"

    def _after_fork(self) -> None:
        # The parent's connection is left alone: dropping it here must not end it there.
        self._inherited = self._native
        self._native = _native.NativeStore(self._path, self._checksums)
        self._process = os.getpid()

    # ── values ──────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        value: Any,
        *,
        ref: ObjectRef | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> ObjectRef:
        """Stores ``value`` and returns its reference. Waits up to ``timeout`` seconds for memory
        (``None``: for ever), then raises ``MemoryError``."""
        ref = ref or ObjectRef.random()
        metadata, parts, size = _encode(value)
        if parts is None:
            return self._put_arrow(value, ref, metadata, timeout)
        if size <= SMALL and len(parts) < 2:
            # One call and one round trip.
            self._call("put", _id(ref), parts[0][1] if parts else b"", metadata, timeout)
            return ref
        buffer = self._create(ref, size, metadata, timeout)
        try:
            for offset, part in parts:
                buffer.write_at(offset, part)
            buffer.seal()
        except BaseException:
            # A traceback would keep it, and with it the id and the memory.
            buffer.abort()
            raise
        return ref

    def _put_arrow(
        self, value: Any, ref: ObjectRef, metadata: bytes, timeout: float | None
    ) -> ObjectRef:
        import pyarrow as pa

        measure = pa.MockOutputStream()
        with pa.ipc.new_stream(measure, value.schema) as writer:
            writer.write(value)
        buffer = self._create(ref, measure.size(), metadata, timeout)
        try:
            with memoryview(buffer) as view:
                memory = pa.py_buffer(view)
                sink = pa.FixedSizeBufferWriter(memory)
                # A table's long columns, as other values' long parts.
                sink.set_memcopy_threads(min(4, os.cpu_count() or 1))
                with pa.ipc.new_stream(sink, value.schema) as writer:
                    writer.write(value)
                sink.close()
                del sink, memory, writer
            buffer.seal()
        except BaseException:
            with contextlib.suppress(BufferError):
                buffer.abort()
            raise
        return ref

    def _create(
        self, ref: ObjectRef, size: int, metadata: bytes, timeout: float | None
    ) -> WriteBuffer:
        try:
            return self._native.create(_id(ref), size, metadata, timeout)
        except Forked:
            self._after_fork()
            return self._native.create(_id(ref), size, metadata, timeout)

    def get(
        self, ref: ObjectRef, timeout: float | None = None, *, fetch: bool = True
    ) -> Any:
        """The value of ``ref``. Arrays, tables and large buffers lie in the store's own memory and
        are read-only. Waits until the object is sealed here, or, with ``fetch``, came from another
        node: for ever, or up to ``timeout`` seconds, after which it raises ``TimeoutError``. With 0
        nothing is waited for and other nodes are asked once; ``ObjectNotFound`` tells that no node
        has it."""
        try:
            buffer = self._native.get(_id(ref), timeout, fetch)
        except Forked:
            buffer = self.get_buffer(ref, timeout, fetch=fetch)
        return _decode(buffer)

    def get_buffer(
        self, ref: ObjectRef, timeout: float | None = None, *, fetch: bool = True
    ) -> ReadBuffer:
        """As :meth:`get`, the bytes themselves."""
        try:
            return self._native.get(_id(ref), timeout, fetch)
        except Forked:
            self._after_fork()
            return self._native.get(_id(ref), timeout, fetch)

    def get_in_memory(self, ref: ObjectRef) -> Any:
        """As :meth:`get`, without any wait: raises ``TimeoutError`` where the object is not sealed, or
        has to be read back from disk."""
        return _decode(self._call("get_in_memory", _id(ref)))

    def get_many(
        self, refs: Iterable[ObjectRef], timeout: float | None = None, *, fetch: bool = True
    ) -> list[Any]:
        """The values of several references, each as :meth:`get`. Those that are here come at the price
        of one round trip for many."""
        refs = list(refs)
        here = self._call("get_here", [_id(ref) for ref in refs])
        return [
            self.get(ref, timeout, fetch=fetch) if buffer is None else _decode(buffer)
            for ref, buffer in zip(refs, here)
        ]

    # ── bytes ───────────────────────────────────────────────────────────────────────────────────

    def create(
        self,
        ref: ObjectRef,
        size: int,
        metadata: bytes = b"",
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> WriteBuffer:
        """A buffer to write in place, then ``seal()``."""
        return self._create(ref, size, metadata, timeout)

    # ── the rest ────────────────────────────────────────────────────────────────────────────────

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._native, name)(*arguments)
        except Forked:
            self._after_fork()
            return getattr(self._native, name)(*arguments)

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is in this store, sealed."""
        return self._call("contains", _id(ref))

    def __contains__(self, ref: ObjectRef) -> bool:
        return self.contains(ref)

    def delete(self, ref: ObjectRef) -> None:
        """Removes the object; memory that is still in use stays until released."""
        self._call("delete", _id(ref))

    def subscribe(self, ref: ObjectRef) -> None:
        """Asks to be told by :meth:`next_sealed`, once, when the object is sealed here."""
        self._call("subscribe", _id(ref))

    def next_sealed(self, timeout: float | None = None) -> ObjectRef | None:
        """The next of the objects subscribed to, or ``None`` after ``timeout`` seconds."""
        raw = self._call("next_sealed", timeout)
        return None if raw is None else ObjectRef(raw)

    def fetch(
        self,
        refs: Iterable[ObjectRef],
        timeout: float | None = 60.0,
        *,
        source: str | None = None,
    ) -> None:
        """Brings objects into this store from the nodes that have them, or from the node whose
        fabric address is ``source`` (``HOST:PORT``).

        Raises ``ConnectionError`` naming each that did not come."""
        refs = list(refs)
        outcomes = self._call("fetch", [_id(ref) for ref in refs], timeout, source)
        failed = [text for text in outcomes if text is not None]
        if failed:
            raise ConnectionError("; ".join(failed))

    def pin(self, ref: ObjectRef) -> None:
        """Keeps the object in memory until :meth:`unpin`."""
        self._call("pin", _id(ref))

    def unpin(self, ref: ObjectRef) -> None:
        """Ends :meth:`pin`."""
        self._call("unpin", _id(ref))

    def list(self) -> list[dict[str, Any]]:
        """Every object: its ``ref``, ``size``, ``sealed``, ``spilled``, ``references`` and so on."""
        rows = self._call("list")
        for row in rows:
            row["ref"] = ObjectRef(row.pop("id"))
        return rows

    @property
    def generation(self) -> int:
        """Names this life of the store: with another number everything it held is gone."""
        return self._native.generation

    @property
    def is_connected(self) -> bool:
        return self._native.is_connected


class AsyncStore:
    """A store for ``asyncio``: what is here is answered at once, what has to be waited for waits
    on a thread, which ends soon after the task that waits was cancelled."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def put(
        self,
        value: Any,
        *,
        ref: ObjectRef | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> ObjectRef:
        ref = ref or ObjectRef.random()
        put = functools.partial(self.store.put, value, ref=ref)
        return await _on_thread(lambda turn: put(timeout=turn), timeout, MemoryError)

    async def get(
        self, ref: ObjectRef, timeout: float | None = None, *, fetch: bool = True
    ) -> Any:
        try:
            return self.store.get_in_memory(ref)
        except ObjectNotFound:
            if timeout == 0.0:
                raise
        except TimeoutError:
            # Its creator writes it, or the disk has it.
            pass
        return await _on_thread(
            lambda turn: self.store.get(ref, turn, fetch=fetch), timeout, TimeoutError
        )

    async def fetch(self, refs: Iterable[ObjectRef], timeout: float | None = 60.0) -> None:
        await asyncio.to_thread(self.store.fetch, list(refs), timeout)

    async def delete(self, ref: ObjectRef) -> None:
        self.store.delete(ref)

    async def sealed(self, refs: Iterable[ObjectRef]) -> AsyncIterator[ObjectRef]:
        """The references, each when its object is sealed here. One such loop a store at a time."""
        waiting = set(refs)
        for ref in waiting:
            self.store.subscribe(ref)
        while waiting:
            ref = await asyncio.to_thread(self.store.next_sealed, 1.0)
            if ref is not None and ref in waiting:
                waiting.discard(ref)
                yield ref


async def _on_thread(
    call: Callable[[float], Any], timeout: float | None, over: type[Exception]
) -> Any:
    """Waits on a thread, in turns: ``call`` takes the seconds of one and raises ``over`` after them. A
    thread that waited on for a cancelled task would keep the program from its end."""
    cancelled = threading.Event()

    def wait() -> Any:
        left = float("inf") if timeout is None else timeout
        while True:
            turn = min(left, TURN)
            left -= turn
            try:
                return call(turn)
            except over:
                if left <= 0 or cancelled.is_set():
                    raise

    try:
        return await asyncio.to_thread(wait)
    except asyncio.CancelledError:
        cancelled.set()
        raise


def _id(ref: ObjectRef) -> bytes:
    """The id of what is to be an ObjectRef."""
    if isinstance(ref, ObjectRef):
        return ref.id
    raise TypeError(f"objects are named by ObjectRef, not by {type(ref).__name__}; ObjectRef(id) makes one")


def _reconnect(path: str, checksums: bool) -> Store:
    return Store(path, checksums=checksums)


# ── what values look like ───────────────────────────────────────────────────────────────────────


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _encode(value: Any) -> tuple[bytes, list[tuple[int, Any]] | None, int]:
    """Metadata, the parts of the data with their offsets, and its size."""
    if isinstance(value, (bytes, bytearray)):
        return MAGIC + bytes([RAW]), [(0, value)], len(value)
    if isinstance(value, memoryview):
        whole = value.c_contiguous and value.nbytes
        plain = value.cast("B") if whole else memoryview(value.tobytes())
        return MAGIC + bytes([RAW]), [(0, plain)], plain.nbytes
    module = type(value).__module__
    if module == "numpy" and "numpy" in sys.modules:
        encoded = _encode_numpy(value)
        if encoded is not None:
            return encoded
    if module.startswith("pyarrow") and "pyarrow" in sys.modules:
        import pyarrow as pa

        if isinstance(value, (pa.Table, pa.RecordBatch)):
            return MAGIC + bytes([ARROW]), None, 0
    return _encode_pickle(value)


def _encode_numpy(value: Any) -> tuple[bytes, list[tuple[int, Any]], int] | None:
    import numpy as np

    if type(value) is not np.ndarray:
        return None
    descr = _numpy_descr(value.dtype, value.dtype.type)
    if descr is None:
        return None
    order = "C"
    array = value
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order = "F"
            array = array.T
        else:
            array = np.ascontiguousarray(array)
    metadata = MAGIC + bytes([NUMPY]) + repr((descr, value.shape, order)).encode()
    flat = array.reshape(-1).view(np.uint8) if array.size and array.dtype.itemsize else b""
    return metadata, [(0, memoryview(flat))], array.nbytes


def _encode_pickle(value: Any) -> tuple[bytes, list[tuple[int, Any]], int]:
    outside: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=outside.append)
    parts: list[tuple[int, Any]] = []
    table = [struct.pack("<I", len(outside))]
    end = 0
    for buffer in outside:
        raw = buffer.raw()
        start = _aligned(end)
        parts.append((start, raw))
        table.append(struct.pack("<QQB", start, raw.nbytes, raw.readonly))
        end = start + raw.nbytes
    return MAGIC + bytes([PICKLE]) + b"".join(table) + pickled, parts, end


@functools.lru_cache(maxsize=256)
def _numpy_descr(dtype: Any, kind: type) -> Any:
    """How ``dtype`` is written; ``None`` where its values are not their bytes, or where it would come
    back as another type, as those of other packages do. ``kind`` is the class of its values: types may
    be equal and differ in that."""
    import numpy as np

    if dtype.hasobject or dtype.kind not in "biufcmMSUV":
        return None
    descr = np.lib.format.dtype_to_descr(dtype)
    back = np.lib.format.descr_to_dtype(descr)
    return descr if back == dtype and back.type is kind else None


@functools.lru_cache(maxsize=4096)
def _numpy_header(metadata: bytes) -> tuple[Any, tuple[int, ...], str]:
    import numpy as np

    descr, shape, order = ast.literal_eval(metadata[5:].decode())
    return np.lib.format.descr_to_dtype(descr), shape, order


def _decode(buffer: ReadBuffer) -> Any:
    metadata = buffer.metadata
    if not metadata.startswith(MAGIC) or len(metadata) < 5:
        return memoryview(buffer)
    kind = metadata[4]
    if kind == NUMPY:
        import numpy as np

        dtype, shape, order = _numpy_header(metadata)
        return np.ndarray(shape, dtype, buffer=buffer, order=order)
    if kind == RAW:
        return memoryview(buffer)
    if kind == ARROW:
        import pyarrow as pa

        return pa.ipc.open_stream(pa.py_buffer(buffer)).read_all()
    if kind == PICKLE:
        return _decode_pickle(metadata, buffer)
    raise ObjectsError(f"the object has contents of kind {kind}; a newer version wrote it")


def _decode_pickle(metadata: bytes, buffer: ReadBuffer) -> Any:
    (count,) = struct.unpack_from("<I", metadata, 5)
    view = memoryview(buffer)
    buffers = []
    at = 9
    for _ in range(count):
        start, length, _read_only = struct.unpack_from("<QQB", metadata, at)
        buffers.append(pickle.PickleBuffer(view[start : start + length]))
        at += 17
    return pickle.loads(memoryview(metadata)[at:], buffers=buffers)
