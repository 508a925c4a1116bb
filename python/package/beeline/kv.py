"""The durable keys of a node: what a put has stored survives the node.

>>> import beeline
>>> kv = beeline.kv.connect()
>>> version = kv.put("greeting", "hello")
>>> kv.get("greeting")
b'hello'
>>> "greeting" in kv
True
>>> kv.delete("greeting")
True

The same keys that the node's Redis door serves as strings; a put goes one-sided into the node's durable
memory, and returns once it is stored at the node's level of durability. Keys and values are bytes, or
text, which is UTF-8. Where the key is absent a get is ``None``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Union

from ._native import KvError, NativeKv, OutcomeUnknown, ValueDamaged

__all__ = ["AsyncStore", "KvError", "OutcomeUnknown", "Store", "ValueDamaged", "connect"]

Text = Union[bytes, bytearray, memoryview, str]

DEFAULT_SERVER = "auto://127.0.0.1:4790"


def _bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


class Store:
    """The durable keys of a node. Threads may share it: each has its own connection, and a child of
    ``fork`` makes one.

    Raises ``ConnectionError`` where the node cannot be reached, ``TimeoutError`` where it does not answer,
    :class:`OutcomeUnknown` where a connection broke in the middle of a change, ``MemoryError`` where the
    node is full, ``ValueError`` for what is too long, :class:`ValueDamaged` for bytes that do not carry
    their checksum."""

    def __init__(self, server: str, timeout: float, database: int) -> None:
        self._server, self._timeout, self._database = server, timeout, database
        self._native = NativeKv(server, timeout)

    # A store travels to another process as its address.
    def __reduce__(self) -> tuple[type[Store], tuple[str, float, int]]:
        return (Store, (self._server, self._timeout, self._database))

    def put(self, key: Text, value: Text, *, ttl: float | None = None) -> int:
        """Stores ``value``, for ``ttl`` seconds or for good; its version."""
        expires = 0 if ttl is None else int((time.time() + ttl) * 1000)
        return self._native.put(self._database, _bytes(key), _bytes(value), expires)

    def get(self, key: Text) -> bytes | None:
        """The value of ``key``."""
        found = self._native.get(self._database, _bytes(key))
        return None if found is None else found[0]

    def get_with_version(self, key: Text) -> tuple[bytes, int] | None:
        """The value of ``key`` and its version, which grows with each put."""
        found = self._native.get(self._database, _bytes(key))
        return None if found is None else found[:2]

    def ttl(self, key: Text) -> float | None:
        """Seconds until the key expires; ``None`` where it does not, or is not there."""
        found = self._native.get(self._database, _bytes(key))
        return None if found is None or found[2] == 0 else found[2] / 1000 - time.time()

    def delete(self, key: Text) -> bool:
        """Removes ``key``; whether it was there."""
        return self._native.delete(self._database, _bytes(key))

    def __contains__(self, key: Text) -> bool:
        return self._native.get(self._database, _bytes(key)) is not None

    def keys(self) -> Iterator[bytes]:
        """Every key, in no order. One that is there all the while comes once; one that comes or goes
        meanwhile may or may not."""
        place: tuple[int, int] | None = (0, 0)
        while place is not None:
            place, keys = self._native.scan(self._database, place, 256)
            yield from keys

    @property
    def provider(self) -> str:
        """What this thread's connection runs over: ``shm``, ``tcp``, ``verbs`` or ``ntb``."""
        return self._native.provider()

    def close(self) -> None:
        """Ends this thread's connection; the next call makes another."""
        self._native.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStore:
    """A store for ``asyncio``: each call waits on a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def put(self, key: Text, value: Text, *, ttl: float | None = None) -> int:
        return await asyncio.to_thread(self.store.put, key, value, ttl=ttl)

    async def get(self, key: Text) -> bytes | None:
        return await asyncio.to_thread(self.store.get, key)

    async def delete(self, key: Text) -> bool:
        return await asyncio.to_thread(self.store.delete, key)


def connect(server: str | None = None, timeout: float = 5.0, *, database: int = 0) -> Store:
    """Connects to the node with this fabric address: that of ``BEELINE_CONNECT``, or this host's, where
    none is given. ``database`` is as Redis's ``SELECT``; no call takes longer than ``timeout`` seconds."""
    return Store(server or os.environ.get("BEELINE_CONNECT") or DEFAULT_SERVER, timeout, database)
