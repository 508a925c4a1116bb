"""The direct store of a node, or of several: pairs in memory with atomics and vector operations.

>>> import beeline
>>> store = beeline.direct.connect()
>>> store.put("counter", 41)
>>> store.update("counter", "add", 1)
41
>>> store.put("weights", [1, 0, 3], dtype="u4")
>>> store.update_vector("weights", "add", 10, dtype="u4")
[1, 0, 3]
>>> store.reduce("weights", "add", dtype="u4")
34

The pairs are volatile: they end with their node. A value is bytes; numbers in it are little-endian
elements of a ``dtype``: ``i1 i2 i4 i8 u1 u2 u4 u8 f4 f8``, ``i8`` where nothing is said. Where the key is
absent the result is ``None`` (``False`` of ``delete``).

Many operations travel together in a batch; their results are there when its block ends:

>>> with store.batch() as batch:
...     sums = [batch.reduce(key, "add") for key in ("a", "b")]
>>> [sum.value for sum in sums]
[None, None]
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, Union

from ._native import DirectError, NativeDirect

__all__ = ["Batch", "DirectError", "Result", "Store", "StoreFull", "connect"]

Key = Union[bytes, str]
Number = Union[int, float]
Value = Union[bytes, bytearray, memoryview, str, Number, Iterable[Number]]
T = TypeVar("T")

DEFAULT_SERVER = "auto://127.0.0.1:4790"
GET, PUT, DELETE, SCALAR, BY_SCALAR, VECTOR, REDUCE, FILTER = range(1, 9)
OK, NOT_FOUND, FULL, TOO_LONG, MALFORMED, UNKNOWN, MISMATCH, MOVED = range(8)
CODES = {
    "i1": "b", "i2": "h", "i4": "i", "i8": "q",
    "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f4": "f", "f8": "d",
}
FUNCTIONS = {
    "add": 1, "subtract": 2, "max": 3, "min": 4, "and": 5, "or": 6, "xor": 7, "exchange": 8,
}
FLOATS = {"add": 10, "max": 11, "exchange": 8}
SWAP = 9
NEUTRAL = {"min": -1, "and": -1}


class StoreFull(DirectError, MemoryError):
    """The store has no memory for a pair; what is stored stays readable."""


def _key(key: Key) -> bytes:
    encoded = key.encode() if isinstance(key, str) else bytes(key)
    if not 1 <= len(encoded) <= 255:
        raise ValueError(f"a key has 1 to 255 bytes, not {len(encoded)}")
    return encoded


def _code(dtype: str) -> str:
    try:
        return CODES[dtype.lstrip("<|")]
    except KeyError:
        raise ValueError(f"dtype {dtype!r}; choose one of {' '.join(CODES)}") from None


def _width(dtype: str) -> int:
    return struct.calcsize("<" + _code(dtype))


def _pack(numbers: Sequence[Number], dtype: str) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}{_code(dtype)}", *numbers)
    except struct.error as error:
        raise ValueError(f"{error} (dtype {dtype})") from None


def _numbers(data: bytes, dtype: str) -> list[Any]:
    width = _width(dtype)
    return list(struct.unpack(f"<{len(data) // width}{_code(dtype)}", data))


def _parameter(value: Any, dtype: str) -> bytes:
    """A number, numbers, or an array whose own elements are of ``dtype``."""
    if isinstance(value, (int, float)):
        return _pack([value], dtype)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        kind = value.dtype.str.lstrip("<|=")
        if value.shape == ():
            return _pack([value.item()], dtype)
        if kind != dtype:
            raise ValueError(f"an array of {kind} where elements are {dtype}")
        return value.tobytes()
    return _pack(list(value), dtype)


def _function(name: str, dtype: str) -> int:
    known = FLOATS if dtype[0] == "f" else FUNCTIONS
    try:
        return known[name]
    except KeyError:
        raise ValueError(f"no function {name!r} for {dtype}; there are {' '.join(known)}") from None


class Result(Generic[T]):
    """What an operation of a batch will have given when the batch is done."""

    __slots__ = ("_decode", "_outcome")

    def __init__(self, decode: Callable[[int, bytes | None], T]) -> None:
        self._decode = decode
        self._outcome: tuple[int, bytes | None] | None = None

    @property
    def value(self) -> T:
        if self._outcome is None:
            raise DirectError("the batch is not done: its block has not ended, or it failed")
        return self._decode(*self._outcome)


def _failed(status: int) -> DirectError | ValueError:
    if status == FULL:
        return StoreFull("the store's memory is full: delete pairs, or raise direct-memory")
    if status == TOO_LONG:
        return ValueError("a pair has at most 2044 bytes, its key at most 255")
    if status == UNKNOWN:
        return ValueError("the store has no such function for elements of this dtype")
    if status == MISMATCH:
        return ValueError("the lengths of value and parameter do not fit each other or the dtype")
    if status == MOVED:
        return DirectError("the key is being moved to another server; ask again")
    return DirectError(f"the store refused the operation ({status})")


def _done(status: int, _: bytes | None) -> None:
    if status != OK:
        raise _failed(status)


def _existed(status: int, _: bytes | None) -> bool:
    if status not in (OK, NOT_FOUND):
        raise _failed(status)
    return status == OK


def _bytes(status: int, data: bytes | None) -> bytes | None:
    if status not in (OK, NOT_FOUND):
        raise _failed(status)
    return data if status == OK else None


def _decode_numbers(dtype: str) -> Callable[[int, bytes | None], list[Any] | None]:
    def decode(status: int, data: bytes | None) -> list[Any] | None:
        found = _bytes(status, data)
        return None if found is None else _numbers(found, dtype)

    return decode


def _decode_number(dtype: str) -> Callable[[int, bytes | None], Any]:
    def decode(status: int, data: bytes | None) -> Any:
        found = _bytes(status, data)
        return _numbers(found, dtype)[0] if found else None

    return decode


Operation = tuple[int, bytes, int, int, bytes, bool]


def _get(key: Key) -> tuple[Operation, Any]:
    return (GET, _key(key), 0, 1, b"", True), _bytes


def _put(key: Key, value: Value, dtype: str) -> tuple[Operation, Any]:
    data = value.encode() if isinstance(value, str) else _parameter(value, dtype)
    return (PUT, _key(key), 0, 1, data, True), _done


def _delete(key: Key) -> tuple[Operation, Any]:
    return (DELETE, _key(key), 0, 1, b"", True), _existed


def _update(
    kind: int, key: Key, function: str, by: Any, dtype: str, returning: bool
) -> tuple[Operation, Any]:
    parameter = _parameter(by, dtype)
    width = _width(dtype)
    if kind == VECTOR and len(parameter) == width:
        kind = BY_SCALAR
    decode: Any = _existed
    if returning:
        decode = _decode_number(dtype) if kind == SCALAR else _decode_numbers(dtype)
    return (kind, _key(key), _function(function, dtype), width, parameter, returning), decode


def _swap(key: Key, expected: Number, new: Number, dtype: str) -> tuple[Operation, Any]:
    both = _pack([expected, new], dtype)
    return (SCALAR, _key(key), SWAP, _width(dtype), both, True), _decode_number(dtype)


def _reduce(key: Key, function: str, initial: Number | None, dtype: str) -> tuple[Operation, Any]:
    width = _width(dtype)
    if initial is None and dtype[0] == "f":
        initial = float("-inf") if function == "max" else 0.0
    if initial is None:
        first = struct.pack("<q", NEUTRAL.get(function, 0))[:width]
    else:
        first = _pack([initial], dtype)
    return (REDUCE, _key(key), _function(function, dtype), width, first, True), _decode_number(dtype)


def _filter(key: Key, dtype: str) -> tuple[Operation, Any]:
    number = _function("add", dtype)
    return (FILTER, _key(key), number, _width(dtype), b"", True), _decode_numbers(dtype)


class Store:
    """The map that some nodes hold together. Threads may share it: each has its own connection."""

    def __init__(self, servers: Sequence[str], timeout: float) -> None:
        self._native = NativeDirect(list(servers), timeout)

    def _one(self, operation: tuple[Operation, Any]) -> Any:
        request, decode = operation
        ((status, data),) = self._native.execute([request])
        return decode(status, data)

    def get(self, key: Key) -> bytes | None:
        """The value of a key."""
        return self._one(_get(key))

    def put(self, key: Key, value: Value, dtype: str = "i8") -> None:
        """Stores a pair: bytes or text as they are, numbers as elements of ``dtype``."""
        self._one(_put(key, value, dtype))

    def delete(self, key: Key) -> bool:
        """Deletes a pair; whether it was there."""
        return self._one(_delete(key))

    def update(
        self, key: Key, function: str, by: Number, dtype: str = "i8", *, returning: bool = True
    ) -> Any:
        """Changes a value that is one number; the number before, or with ``returning=False``
        whether the key was there."""
        return self._one(_update(SCALAR, key, function, by, dtype, returning))

    def compare_and_swap(self, key: Key, expected: int, new: int, dtype: str = "i8") -> int | None:
        """Stores ``new`` in a number that is ``expected``; the number before."""
        return self._one(_swap(key, expected, new, dtype))

    def update_vector(
        self, key: Key, function: str, by: Any, dtype: str = "i8", *, returning: bool = True
    ) -> Any:
        """Changes every number of a vector, by one parameter for all or by one for each; the vector
        before, or with ``returning=False`` whether the key was there. Others see all or nothing."""
        return self._one(_update(VECTOR, key, function, by, dtype, returning))

    def reduce(
        self, key: Key, function: str, initial: Number | None = None, dtype: str = "i8"
    ) -> Any:
        """Folds a vector into one number. MIN and MAX of integers compare them unsigned."""
        return self._one(_reduce(key, function, initial, dtype))

    def filter(self, key: Key, dtype: str = "i8") -> list[Any] | None:
        """The numbers of a vector that are not zero."""
        return self._one(_filter(key, dtype))

    def batch(self) -> Batch:
        """Operations that travel together."""
        return Batch(self._native)

    def close(self) -> None:
        """Ends this thread's connection; the next call makes another."""
        self._native.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch:
    """Operations that are sent when the block ends, in their order for each key."""

    def __init__(self, native: NativeDirect) -> None:
        self._native = native
        self._operations: list[Operation] = []
        self._results: list[Result[Any]] = []

    def _add(self, operation: tuple[Operation, Any]) -> Result[Any]:
        request, decode = operation
        result: Result[Any] = Result(decode)
        self._operations.append(request)
        self._results.append(result)
        return result

    def get(self, key: Key) -> Result[bytes | None]:
        return self._add(_get(key))

    def put(self, key: Key, value: Value, dtype: str = "i8") -> Result[None]:
        return self._add(_put(key, value, dtype))

    def delete(self, key: Key) -> Result[bool]:
        return self._add(_delete(key))

    def update(
        self, key: Key, function: str, by: Number, dtype: str = "i8", *, returning: bool = True
    ) -> Result[Any]:
        return self._add(_update(SCALAR, key, function, by, dtype, returning))

    def compare_and_swap(
        self, key: Key, expected: int, new: int, dtype: str = "i8"
    ) -> Result[int | None]:
        return self._add(_swap(key, expected, new, dtype))

    def update_vector(
        self, key: Key, function: str, by: Any, dtype: str = "i8", *, returning: bool = True
    ) -> Result[Any]:
        return self._add(_update(VECTOR, key, function, by, dtype, returning))

    def reduce(
        self, key: Key, function: str, initial: Number | None = None, dtype: str = "i8"
    ) -> Result[Any]:
        return self._add(_reduce(key, function, initial, dtype))

    def filter(self, key: Key, dtype: str = "i8") -> Result[list[Any] | None]:
        return self._add(_filter(key, dtype))

    def execute(self) -> None:
        """Sends what was collected and waits for it."""
        operations, self._operations = self._operations, []
        results, self._results = self._results, []
        for result, outcome in zip(results, self._native.execute(operations), strict=True):
            result._outcome = outcome

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.execute()


def connect(servers: str | Sequence[str] | None = None, timeout: float = 5.0) -> Store:
    """Connects to the nodes that hold a map together, by their fabric addresses: those of
    ``BEELINE_CONNECT``, or this host's, where none are given."""
    if servers is None:
        servers = os.environ.get("BEELINE_CONNECT", DEFAULT_SERVER)
    if isinstance(servers, str):
        servers = servers.split(",")
    return Store(servers, timeout)
