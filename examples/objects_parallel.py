"""Processes that pass references, not data: multiprocessing, pickles whose buffers stay where they are,
Arrow tables, Dask, and a process beside another node, which fetches.

    beeline serve &
    pip install ./python numpy pyarrow dask
    python examples/objects_parallel.py

With a second node that looks at the first, its socket as an argument:

    beeline serve --data ./second --fabric-address 127.0.0.1:4791 --objects-peers 127.0.0.1:4790 \\
        --resp-address off --http-address off --documents-address off &
    python examples/objects_parallel.py ./second/objects.sock
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass

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


@dataclass
class Model:
    """Any class will do: what it holds is pickled, and its arrays lie in the store."""

    name: str
    weights: dict[str, np.ndarray]


def norms(task: tuple[Store, ObjectRef]) -> tuple[str, dict[str, float], bool]:
    """In a worker: the arrays are the store's own memory, as they were when they were put."""
    store, ref = task
    model = store.get(ref, timeout=10)
    in_place = all(not array.flags.owndata for array in model.weights.values())
    sizes = {name: float(np.linalg.norm(array)) for name, array in model.weights.items()}
    return model.name, sizes, in_place


def with_pickles(store: Store) -> None:
    layers = {f"layer {number}": np.full((500, 500), number, float) for number in range(4)}
    ref = store.put(Model("four layers", layers))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(norms, [(store, ref)] * 2)
    for name, sizes, in_place in results:
        assert name == "four layers" and in_place
        assert sizes == {layer: 500.0 * number for number, layer in enumerate(layers)}
    print("pickle: an object of four arrays, none of them copied out")
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


def with_nodes(store: Store, other: Store) -> None:
    """The other store fetches from the node this one belongs to."""
    array = np.arange(2_000_000)
    ref = store.put(array)
    assert ref not in other
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (total, _), = pool.map(part_of_sum, [(other, ref, slice(None))])
    assert total == float(array.sum()) and ref in other
    other.delete(ref)
    assert other.get(ref)[-1] == array[-1]
    print(f"nodes: {array.nbytes >> 20} MiB came from the other node, for a reference of 20 bytes")
    store.delete(ref)
    other.delete(ref)


if __name__ == "__main__":
    shared = beeline.objects.connect()
    with_processes(shared)
    with_pickles(shared)
    with_arrow(shared)
    with_dask(shared)
    for socket in sys.argv[1:]:
        with_nodes(shared, beeline.objects.connect(socket))
