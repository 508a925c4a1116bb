"""Transactions of a document store, through pymongo as it comes from its registry.

Usage: documents_transactions.py URI PHASE, where PHASE is `first`, `again` (after a kill: what was
committed is there, what was open is not, a commit that is sent again does nothing) or `load` (transfers
until the node is killed; prints how many were committed) or `sum` (nothing was lost or made).
"""

import random
import socket
import struct
import sys
import threading

import bson
import pymongo
from bson import Binary, Int64
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

CHECKS = 0
ACCOUNTS = 20
LSID = {"id": Binary(b"fedcba9876543210", 4)}


def same(found, wanted):
    global CHECKS
    CHECKS += 1
    if found != wanted:
        raise AssertionError(f"found {found!r}, wanted {wanted!r}")


def refused(code, work, label=None):
    global CHECKS
    CHECKS += 1
    try:
        work()
    except OperationFailure as failure:
        if failure.code != code or (label and not failure.has_error_label(label)):
            raise AssertionError(f"refused with {failure.code} {failure.details}, wanted {code} {label}")
        return
    raise AssertionError(f"not refused; wanted {code}")


def all_or_nothing(client, c):
    with client.start_session() as session:
        with session.start_transaction():
            c.insert_one({"_id": 1, "n": 1}, session=session)
            c.insert_many([{"_id": 2, "n": 2}, {"_id": 3, "n": 3}], session=session)
            c.update_one({"_id": 1}, {"$inc": {"n": 10}}, session=session)
            c.delete_one({"_id": 3}, session=session)
            # Its own changes are seen by the transaction and by no other.
            same([d["n"] for d in c.find({}, session=session).sort("_id", 1)], [11, 2])
            same([d["_id"] for d in c.find({"n": {"$gte": 2}}, session=session).sort("n", -1)], [1, 2])
            same(c.count_documents({}, session=session), 2)
            same(c.count_documents({}), 0)
            same(c.distinct("n", session=session), [2, 11])
        same([d["n"] for d in c.find().sort("_id", 1)], [11, 2])
        try:
            with session.start_transaction():
                c.update_many({}, {"$set": {"lost": True}}, session=session)
                c.insert_one({"_id": 9}, session=session)
                raise KeyError("the program changed its mind")
        except KeyError:
            pass
        same(c.count_documents({"$or": [{"lost": True}, {"_id": 9}]}), 0)


def snapshot(client, c):
    with client.start_session() as session, session.start_transaction(read_concern=ReadConcern("snapshot")):
        same(c.find_one({"_id": 1}, session=session)["n"], 11)
        c.update_one({"_id": 1}, {"$set": {"n": 100}})
        c.insert_one({"_id": 50, "n": 50})
        c.delete_one({"_id": 2})
        same([(d["_id"], d["n"]) for d in c.find({}, session=session).sort("_id", 1)], [(1, 11), (2, 2)])
        same([d["_id"] for d in c.find({"n": {"$gte": 0}}, session=session).hint("n_1")], [2, 1])
        same(c.find_one({"_id": 50}, session=session), None)
    same([d["n"] for d in c.find().sort("_id", 1)], [100, 50])


def conflicts(client, c):
    one, two = client.start_session(), client.start_session()
    one.start_transaction()
    two.start_transaction()
    c.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=one)
    same(c.find_one({"_id": 1}, session=two)["n"], 100)
    one.commit_transaction()
    refused(112, lambda: c.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=two), "TransientTransactionError")
    two.abort_transaction()
    # Both write before either commits: the first wins.
    one.start_transaction()
    two.start_transaction()
    for session in (one, two):
        c.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
    one.commit_transaction()
    refused(112, two.commit_transaction, "TransientTransactionError")
    same(c.find_one({"_id": 1})["n"], 102)
    # A value of a unique index, in documents that neither has in common.
    one.start_transaction()
    two.start_transaction()
    c.insert_one({"_id": 70, "u": "same"}, session=one)
    c.insert_one({"_id": 71, "u": "same"}, session=two)
    two.commit_transaction()
    refused(112, one.commit_transaction, "TransientTransactionError")
    one.start_transaction()
    refused(11000, lambda: c.insert_one({"_id": 70, "u": "same"}, session=one))
    # An error ends the transaction.
    refused(251, one.commit_transaction)
    # An index that is made meanwhile would lack what the transaction writes.
    one.start_transaction()
    c.insert_one({"_id": 80, "late": 1}, session=one)
    c.create_index("late")
    refused(112, one.commit_transaction, "TransientTransactionError")
    same(c.database.command("validate", c.name)["valid"], True)

    def add(session):
        value = c.find_one({"_id": 1}, session=session)["n"]
        c.update_one({"_id": 1}, {"$set": {"n": value + 1}}, session=session)

    def worker():
        with client.start_session() as session:
            for _ in range(10):
                session.with_transaction(add)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(c.find_one({"_id": 1})["n"], 142)
    one.end_session()
    two.end_session()


def limits(client, c):
    with client.start_session() as session:
        session.start_transaction()
        c.insert_one({"_id": 90}, session=session)
        refused(263, lambda: client.other.c.insert_one({"_id": 1}, session=session))
        session.abort_transaction()
        session.start_transaction()
        refused(263, lambda: c.database.command("count", c.name, session=session))
        session.abort_transaction()
    refused(251, lambda: talk({"commitTransaction": 1, "$db": "admin", "lsid": LSID, "txnNumber": Int64(77), "autocommit": False}), "TransientTransactionError")
    same(c.count_documents({"_id": 90}), 0)


def events(client, c):
    with c.watch(max_await_time_ms=2000) as stream:
        with client.start_session() as session, session.start_transaction():
            c.insert_one({"_id": 100}, session=session)
            c.insert_one({"_id": 60})
            c.update_one({"_id": 100}, {"$set": {"x": 1}}, session=session)
            c.delete_one({"_id": 100}, session=session)
        seen = [next(stream) for _ in range(4)]
        same([(e["operationType"], e["documentKey"]["_id"]) for e in seen],
             [("insert", 60), ("insert", 100), ("update", 100), ("delete", 100)])


def first(client):
    client.drop_database("walk")
    c = client.walk.transactions
    c.create_index("n")
    c.create_index("u", unique=True, sparse=True)
    all_or_nothing(client, c)
    snapshot(client, c)
    conflicts(client, c)
    limits(client, c)
    events(client, c)
    # For the kill: one committed, one open, by a session of our own.
    def own(number):
        return {"lsid": LSID, "autocommit": False, "txnNumber": Int64(number)}

    talk({"insert": "transactions", "documents": [{"_id": 200}, {"_id": 201}], "startTransaction": True, **own(1)})
    talk({"commitTransaction": 1, "$db": "admin", **own(1)})
    talk({"commitTransaction": 1, "$db": "admin", **own(1)})
    talk({"insert": "transactions", "documents": [{"_id": 300}], "startTransaction": True, **own(2)})


def talk(body):
    """A command as it stands, which pymongo would give a session of its own."""
    host, port = sys.argv[1].removeprefix("mongodb://").split(":")
    body = bson.encode({**body, "$db": body.get("$db", "walk")})
    with socket.create_connection((host, int(port))) as stream:
        stream.sendall(struct.pack("<iiiii", 21 + len(body), 1, 0, 2013, 0) + b"\0" + body)
        answer = b""
        while len(answer) < 4 or len(answer) < struct.unpack("<i", answer[:4])[0]:
            answer += stream.recv(1 << 16)
    reply = bson.decode(answer[21:])
    if reply["ok"] != 1.0:
        raise OperationFailure(reply["errmsg"], reply["code"], reply)
    return reply


def again(client):
    c = client.walk.transactions
    same(c.count_documents({"_id": {"$in": [200, 201]}}), 2)
    same(c.find_one({"_id": 300}), None)
    c.delete_one({"_id": 201})
    named = {"lsid": LSID, "autocommit": False, "$db": "admin"}
    talk({"commitTransaction": 1, "txnNumber": Int64(1), **named})
    same(c.count_documents({"_id": {"$in": [200, 201]}}), 1)
    refused(251, lambda: talk({"commitTransaction": 1, "txnNumber": Int64(2), **named}), "TransientTransactionError")
    same(c.find_one({"_id": 1})["n"], 142)
    same(client.walk.command("validate", "transactions")["valid"], True)


def load(client):
    """Transfers between accounts by several clients, until the node is gone."""
    accounts = client.walk.accounts
    if accounts.count_documents({}) == 0:
        accounts.insert_many([{"_id": n, "money": 100} for n in range(ACCOUNTS)])
    print("ready", flush=True)
    done = [0] * 4

    def transfer(session):
        source, target = random.sample(range(ACCOUNTS), 2)
        accounts.update_one({"_id": source}, {"$inc": {"money": -1}}, session=session)
        accounts.update_one({"_id": target}, {"$inc": {"money": 1}}, session=session)
        client.walk.log.insert_one({"from": source, "to": target}, session=session)

    def worker(at):
        # By hand: `with_transaction` goes on for two minutes after the node is gone.
        while True:
            try:
                with client.start_session() as session, session.start_transaction():
                    transfer(session)
                done[at] += 1
            except ConnectionFailure:
                return
            except PyMongoError as error:
                if not error.has_error_label("TransientTransactionError"):
                    return

    threads = [threading.Thread(target=worker, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"committed {sum(done)}", flush=True)


def total(client):
    """What was told to be committed is there, and the sum of the money is what it was."""
    told = int(sys.argv[3])
    accounts = list(client.walk.accounts.find())
    same(sum(account["money"] for account in accounts), 100 * ACCOUNTS)
    moved = {n: 100 for n in range(ACCOUNTS)}
    log = list(client.walk.log.find())
    for one in log:
        moved[one["from"]] -= 1
        moved[one["to"]] += 1
    same({account["_id"]: account["money"] for account in accounts}, moved)
    # Clients that were cut off do not know of their last one.
    if not told <= len(log) <= told + 8:
        raise AssertionError(f"{told} were told to be committed, {len(log)} are there")


def main():
    options = {"serverSelectionTimeoutMS": 10000} if sys.argv[2] == "load" else {"serverSelectionTimeoutMS": 20000}
    client = pymongo.MongoClient(sys.argv[1], **options)
    {"first": first, "again": again, "load": load, "sum": total}[sys.argv[2]](client)
    if sys.argv[2] != "load":
        print(f"pymongo {pymongo.version}: {CHECKS} checks")


main()
