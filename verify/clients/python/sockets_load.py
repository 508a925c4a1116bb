"""Clients and servers of unmodified programs' protocols: sockets_load.py WHAT PORT ..."""

import asyncio
import hashlib
import multiprocessing.managers
import os
import socket
import sys
import threading
import urllib.request


def memcached(port):
    """Eight threads store and fetch; every value is looked at."""

    def talk(number):
        peer = socket.create_connection(("127.0.0.1", port), timeout=30)
        lines = peer.makefile("rb")
        for turn in range(60):
            value = os.urandom((turn * 977) % 60000 + 1)
            key = b"key-%d-%d" % (number, turn)
            peer.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
            assert lines.readline() == b"STORED\r\n"
            peer.sendall(b"get %s\r\n" % key)
            assert lines.readline() == b"VALUE %s 0 %d\r\n" % (key, len(value))
            assert lines.read(len(value)) == value
            assert lines.readline() == b"\r\n" and lines.readline() == b"END\r\n"
        peer.close()

    in_threads(talk, 8)


def in_threads(work, count):
    failures = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def post(port):
    """Bodies go to a server that answers with their digest, from four threads."""

    def talk(number):
        for turn in range(12):
            body = os.urandom((turn * 31337 + number) % 300000)
            address = "http://127.0.0.1:%d/" % port
            with urllib.request.urlopen(address, data=body, timeout=30) as answer:
                said = answer.read()
            assert said == hashlib.sha1(body).hexdigest().encode() * 1000, turn

    in_threads(talk, 4)


async def echo(reader, writer):
    while data := await reader.read(50000):
        writer.write(data)
        await writer.drain()
    writer.close()


async def asyncio_serve(port):
    server = await asyncio.start_server(echo, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


async def asyncio_ask(port):
    async def talk(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = os.urandom(400000 + number)

        async def send():
            writer.write(body)
            await writer.drain()
            writer.write_eof()

        sender = asyncio.create_task(send())
        back = await reader.read(-1)
        await sender
        assert back == body, len(back)
        writer.close()
        await writer.wait_closed()

    await asyncio.wait_for(asyncio.gather(*(talk(number) for number in range(10))), 40)


class Manager(multiprocessing.managers.BaseManager):
    pass


def managed(port):
    return Manager(address=("127.0.0.1", port), authkey=b"between tests")


def manager_serve(port):
    store = {}
    Manager.register("store", callable=lambda: store, exposed=["update", "get", "__len__"])
    managed(port).get_server().serve_forever()


def manager_ask(port):
    """Several processes work on one dictionary that lives in another."""
    children = [multiprocessing.Process(target=fill, args=(port, n)) for n in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(40)
        assert child.exitcode == 0, child.exitcode
    Manager.register("store")
    manager = managed(port)
    manager.connect()
    store = manager.store()
    for number in range(4):
        for turn in range(20):
            assert store.get((number, turn)) == bytes([turn]) * 5000 * turn


def fill(port, number):
    Manager.register("store")
    manager = managed(port)
    manager.connect()
    store = manager.store()
    for turn in range(20):
        store.update({(number, turn): bytes([turn]) * 5000 * turn})


def streams(port):
    """Lines through the C library's own streams, by a program that knows nothing else."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=30)
    lines = peer.makefile("rwb")
    for turn in range(500):
        line = b"line %d " % turn + b"x" * (turn * 7 % 900) + b"\n"
        lines.write(line)
        lines.flush()
        assert lines.readline() == line, turn
    peer.shutdown(socket.SHUT_WR)
    assert lines.read() == b"over\n"


def held(port):
    """As `streams`, from a program that had written a word before its output was the connection."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=30)
    lines = peer.makefile("rwb")
    for turn in range(100):
        line = b"line %d\n" % turn
        lines.write(line)
        lines.flush()
        expected = (b"held " if turn == 0 else b"") + line
        assert lines.readline() == expected, turn
    peer.shutdown(socket.SHUT_WR)
    assert lines.read() == b"over\n"


def shell(port):
    """Lines to a server that lets a shell answer one of them, and another program the rest."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=30)
    lines = peer.makefile("rwb")
    for turn in range(60):
        line = b"line %d" % turn
        lines.write(line + b"\n")
        lines.flush()
        expected = line + (b" it's" if turn == 20 else b"") + b"\n"
        assert lines.readline() == expected, turn
    peer.shutdown(socket.SHUT_WR)
    assert lines.read() == b"over\n"


def main():
    what, port = sys.argv[1], int(sys.argv[2])
    work = globals()[what]
    outcome = work(port)
    if asyncio.iscoroutine(outcome):
        asyncio.run(outcome)
    print("all right")


if __name__ == "__main__":
    main()
