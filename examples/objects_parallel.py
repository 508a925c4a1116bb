"""Processes that pass references, not data: multiprocessing, Arrow, and Dask where it is installed.

    beeline serve &
    pip install ./python numpy pyarrow
    python examples/objects_parallel.py
"""

import multiprocessing
import os

import numpy as np

import beeline
from beeline.objects import ObjectRef, Store


def part_of_sum(task: tuple[Store, ObjectRef, slice]) -> tuple[float, int]:
    """In a worker: the array is the store's own memory; only the reference came over the pipe."""
    store, ref, part = task
    array = store.get(ref, timeout=10)
    return float(array[part].sum()), os.getpid()


def with_processes(store: Store) -> None:
    array = np.random.default_rng(1).random(4_000_000)
    ref = store.put(array)
    parts = [slice(start, start + 500_000) for start in range(0, len(array), 500_000)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(part_of_sum, [(store, ref, part) for part in parts])
    total = sum(result for result, _ in results)
    assert np.isclose(total, array.sum())
    print(f"{len({pid for _, pid in results})} processes summed {array.nbytes >> 20} MiB in place")
    store.delete(ref)


def rows_with(task: tuple[Store, ObjectRef, int]) -> ObjectRef:
    """In a worker: an Arrow table in, an Arrow table out, both in the store."""
    store, ref, digit = task
    import pyarrow.compute as pc

    table = store.get(ref, timeout=10)
    return store.put(table.filter(pc.equal(table["digit"], digit)))


def with_arrow(store: Store) -> None:
    try:
        import pyarrow as pa
    except ImportError:
        print("pyarrow is not installed; its part is left out")
        return
    table = pa.table({"number": range(100_000), "digit": [n % 10 for n in range(100_000)]})
    ref = store.put(table)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        refs = pool.map(rows_with, [(store, ref, digit) for digit in range(4)])
    tables = [store.get(found) for found in refs]
    assert all(found.num_rows == 10_000 for found in tables)
    print(f"Arrow: {len(refs)} tables of {tables[0].num_rows} rows, filtered by other processes")


def with_dask(store: Store) -> None:
    try:
        import dask
    except ImportError:
        print("dask is not installed; its part is left out")
        return
    ref = store.put(np.arange(1_000_000))
    lazy = [
        dask.delayed(part_of_sum)((store, ref, slice(start, start + 250_000)))
        for start in range(0, 1_000_000, 250_000)
    ]
    results = dask.compute(*lazy, scheduler="processes", num_workers=2)
    assert sum(total for total, _ in results) == 499_999_500_000
    print("Dask: four tasks, one array, no copy")


if __name__ == "__main__":
    shared = beeline.objects.connect()
    with_processes(shared)
    with_arrow(shared)
    with_dask(shared)
