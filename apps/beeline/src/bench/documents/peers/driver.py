"""Operations each second through pymongo: told a line, answers with a figure. A find is of what was inserted last."""

import sys
import threading
import time

import pymongo


def each(connections, work):
    """Runs work(number) on a thread for each connection; seconds of all together."""
    failed = []
    barrier = threading.Barrier(connections + 1)

    def run(number):
        barrier.wait()
        try:
            work(number)
        except Exception as error:  # told below, on the one thread that answers
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - start


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        uri, kind, connections, count, size = line.split()
        connections, count, size = int(connections), int(count), int(size)
        client = pymongo.MongoClient(
            uri, maxPoolSize=connections, minPoolSize=connections, retryWrites=False, directConnection=True
        )
        records = client.bench.get_collection("records", write_concern=pymongo.WriteConcern(1))
        if kind == "insert":
            records.drop()
        text = "x" * size
        client.admin.command("ping")

        def insert(number):
            for at in range(number * count, (number + 1) * count):
                records.insert_one({"_id": at, "n": 0, "text": text})

        def find(number):
            for at in range(number * count, (number + 1) * count):
                assert records.find_one({"_id": at}) is not None

        took = each(connections, find if kind == "find" else insert)
        client.close()
        print(connections * count / took, flush=True)


main()
