"""Ray's object store, through its Python interface: answers as plasma.py does."""

import sys
import time

import numpy as np
import ray

folder, memory = sys.argv[1:]
ray.init(
    num_cpus=1,
    object_store_memory=int(memory),
    include_dashboard=False,
    logging_level="ERROR",
    log_to_driver=False,
    _temp_dir=folder + "/ray",
)
clock = time.perf_counter
try:
    print("ready", flush=True)
    for line in sys.stdin:
        call, size, batch, seconds = line.split()
        data, batch = np.full(int(size), 7, np.uint8), int(batch)
        kept = ray.put(data)
        calls, took, end = 0, 0.0, clock() + float(seconds)
        while calls == 0 or clock() < end:
            start = clock()
            if call == "get":
                for _ in range(batch):
                    ray.get(kept)
                took += clock() - start
            else:
                refs = [ray.put(data) for _ in range(batch)]
                put = clock() - start
                start = clock()
                # Ray frees an object when the last reference goes, and the call returns before.
                refs.clear()
                took += put if call == "put" else clock() - start
            calls += batch
        del kept
        print(calls / took, flush=True)
finally:
    ray.shutdown()
