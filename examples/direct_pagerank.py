"""PageRank over a generated graph, on the direct store and on Redis.

    beeline serve & redis-server --port 6380 &
    pip install ./python numpy redis
    python examples/direct_pagerank.py --redis 127.0.0.1:6380

Each vertex's rank is a key, an 8-byte number in units of 1/2^40. In a round every vertex sends its share
along its edges: one atomic addition an edge, many in a packet. Because the ranks are whole numbers, the
result is the same in whatever order the additions run.
"""

import argparse
import time

import numpy as np

import beeline

ONE = 1 << 40


def graph(vertices: int, edges: int):
    """Edges of a graph with a few popular vertices; every vertex has one out, at least."""
    generator = np.random.default_rng(7)
    to = (vertices * generator.random(edges) ** 3).astype(int)
    source = np.concatenate([np.arange(vertices), generator.integers(0, vertices, edges - vertices)])
    return source, to


class OnDirect:
    def __init__(self, servers):
        self.store = beeline.direct.connect(servers)

    def put(self, name, ranks):
        with self.store.batch() as batch:
            for vertex, rank in enumerate(ranks):
                batch.put(f"{name}{vertex}", int(rank))

    def get(self, name, count):
        with self.store.batch() as batch:
            found = [batch.get(f"{name}{vertex}") for vertex in range(count)]
        return np.array([int.from_bytes(result.value, "little") for result in found])

    def add(self, name, vertices, shares):
        with self.store.batch() as batch:
            for vertex, share in zip(vertices, shares):
                batch.update(f"{name}{vertex}", "add", int(share), returning=False)


class OnRedis:
    def __init__(self, address):
        import redis

        host, port = address.rsplit(":", 1)
        self.redis = redis.Redis(host, int(port))

    def put(self, name, ranks):
        self.redis.mset({f"{name}{vertex}": int(rank) for vertex, rank in enumerate(ranks)})

    def get(self, name, count):
        return np.array([int(rank) for rank in self.redis.mget([f"{name}{v}" for v in range(count)])])

    def add(self, name, vertices, shares):
        pipe = self.redis.pipeline(transaction=False)
        for vertex, share in zip(vertices, shares):
            pipe.incrby(f"{name}{vertex}", int(share))
        pipe.execute()


def pagerank(store, source, to, vertices, rounds, batch):
    """The ranks, and the edges that were followed a second."""
    degree = np.bincount(source, minlength=vertices)
    store.put("r0:", np.full(vertices, ONE // vertices))
    began = time.perf_counter()
    for turn in range(rounds):
        now, after = f"r{turn % 2}:", f"r{(turn + 1) % 2}:"
        ranks = store.get(now, vertices)
        store.put(after, np.full(vertices, ONE * 15 // 100 // vertices))
        shares = (ranks * 85 // 100 // np.maximum(degree, 1))[source]
        for start in range(0, len(to), batch):
            store.add(after, to[start : start + batch], shares[start : start + batch])
    seconds = time.perf_counter() - began
    return store.get(f"r{rounds % 2}:", vertices), rounds * len(to) / seconds


def expected(source, to, vertices, rounds):
    degree = np.bincount(source, minlength=vertices)
    ranks = np.full(vertices, ONE // vertices)
    for _ in range(rounds):
        shares = (ranks * 85 // 100 // np.maximum(degree, 1))[source]
        ranks = np.full(vertices, ONE * 15 // 100 // vertices)
        np.add.at(ranks, to, shares)
    return ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connect", help="nodes of the direct store, apart by commas")
    parser.add_argument("--redis", metavar="HOST:PORT", help="the same on this Redis, too")
    parser.add_argument("--vertices", type=int, default=5000)
    parser.add_argument("--edges", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=5000)
    arguments = parser.parse_args()
    source, to = graph(arguments.vertices, arguments.edges)
    right = expected(source, to, arguments.vertices, arguments.rounds)
    stores = [("direct", OnDirect(arguments.connect))]
    if arguments.redis:
        stores.append(("redis", OnRedis(arguments.redis)))
    for name, store in stores:
        vertices, rounds, batch = arguments.vertices, arguments.rounds, arguments.batch
        ranks, rate = pagerank(store, source, to, vertices, rounds, batch)
        same = "exact" if np.array_equal(ranks, right) else "WRONG"
        best = int(np.argmax(ranks))
        print(f"{name}: {rate:.0f} edges a second, {same}; vertex {best} leads")


if __name__ == "__main__":
    main()
