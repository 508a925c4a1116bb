"""pymongo through a router of three shards, beside a single node: the same results.

Usage: documents_router.py PHASE SEED ROUTER SINGLE SHARD...
Phases: walk (an empty cluster), again (after it), dead (one shard is gone), stale (one has other data).
Prints "fine ..." or what is wrong.
"""

import random
import socket
import struct
import sys

import bson
import pymongo
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

phase, seed = sys.argv[1], int(sys.argv[2])
router = pymongo.MongoClient(sys.argv[3], serverSelectionTimeoutMS=20000)
single = pymongo.MongoClient(sys.argv[4], directConnection=True)
shards = [pymongo.MongoClient(uri, directConnection=True) for uri in sys.argv[5:]]
chance = random.Random(seed)
KEYED = ["hashed", "ranged", "plain"]


def say(what):
    print(what, flush=True)


def code_of(work):
    try:
        work()
    except OperationFailure as error:
        return error.code
    except PyMongoError as error:
        return f"{type(error).__name__}: {error}"
    return None


def shard_key(name, document):
    return {"hashed": ["k"], "ranged": ["a", "b"], "plain": ["_id"]}[name]


def make(number):
    document = {"_id": number, "k": chance.randrange(200), "a": chance.randrange(30), "b": chance.choice("xyz")}
    document["n"] = chance.choice([chance.randrange(20), float(chance.randrange(20)), None, "s", [1, chance.randrange(5)]])
    document["tags"] = [chance.choice("pqrst") for _ in range(chance.randrange(4))]
    document["in"] = {"x": chance.randrange(5), "y": chance.choice(["u", "v"])}
    if chance.random() < 0.05:
        del document["k"]
    return document


def condition():
    return chance.choice(
        [
            lambda: {"k": chance.randrange(200)},
            lambda: {"k": {"$in": [chance.randrange(200) for _ in range(chance.randrange(4))]}},
            lambda: {"k": None},
            lambda: {"a": chance.randrange(30)},
            lambda: {"a": {"$gte": chance.randrange(20), "$lt": chance.randrange(10, 40)}},
            lambda: {"a": chance.randrange(30), "b": chance.choice("xyz")},
            lambda: {"a": {"$in": [chance.randrange(30) for _ in range(3)]}, "b": {"$gt": "x"}},
            lambda: {"n": {"$gt": chance.randrange(20)}},
            lambda: {"n": chance.choice([None, "s", 1, 2.0])},
            lambda: {"tags": chance.choice("pqrst")},
            lambda: {"in.x": {"$ne": chance.randrange(5)}},
            lambda: {"_id": chance.randrange(700)},
            lambda: {"$or": [{"a": chance.randrange(30)}, {"in.y": "u"}]},
            lambda: {"a": {"$exists": chance.random() < 0.5}},
            lambda: {},
        ]
    )()


def filter_of():
    parts = [condition() for _ in range(chance.choice([1, 1, 2]))]
    return parts[0] if len(parts) == 1 else {"$and": parts}


def frozen(documents):
    return sorted(bson.encode(one) for one in documents)


def same(what, one, other):
    if one != other:
        say(f"seed {seed}: {what}: the router says {str(one)[:600]} and the single node {str(other)[:600]}")
        sys.exit(1)


def both(name, work):
    """What work finds out in the collection of the router, and in that of the single node; errors too."""

    def tried(collection):
        try:
            return work(collection)
        except OperationFailure as error:
            return error.code

    return tried(router.shop[name]), tried(single.shop[name])


def read(name, turns):
    for _ in range(turns):
        wanted = filter_of()
        order = chance.choice([None, [("n", 1), ("_id", 1)], [("in.x", -1), ("tags", 1), ("_id", -1)], [("a", 1), ("_id", 1)]])
        shown = chance.choice([None, {"a": 1}, {"_id": 0, "n": 1, "in.x": 1}, {"tags": 0}])
        skip, limit = chance.choice([0, 0, 3, 50]), chance.choice([0, 0, 1, 7, 200])
        batch = chance.choice([0, 2, 10, 1000])

        def find(collection):
            cursor = collection.find(wanted, shown, batch_size=batch)
            if order:
                return list(cursor.sort(order).skip(skip).limit(limit))
            return frozen(cursor)

        same(f"{name} find {wanted} {order} {shown} {skip} {limit}", *both(name, find))
        same(f"{name} count {wanted}", *both(name, lambda one: one.count_documents(wanted, skip=skip)))
        field = chance.choice(["n", "tags", "in", "a"])
        # Of equal numbers of two types either one may be there.
        plain = lambda value: repr(float(value)) if isinstance(value, int) else repr(value)
        distinct = both(name, lambda one: [plain(value) for value in one.distinct(field, wanted)])
        same(f"{name} distinct {field} {wanted}", *distinct)
    pipelines = [
        [{"$match": {"a": {"$gt": 5}}}, {"$group": {"_id": "$b", "n": {"$sum": "$a"}, "c": {"$sum": 1}, "most": {"$max": "$k"}, "mean": {"$avg": "$a"}}}, {"$sort": {"_id": 1}}],
        [{"$unwind": "$tags"}, {"$sortByCount": "$tags"}, {"$sort": {"count": -1, "_id": 1}}],
        [{"$sort": {"a": -1, "_id": 1}}, {"$skip": 5}, {"$limit": 20}, {"$project": {"a": 1, "twice": {"$multiply": ["$a", 2]}}}],
        [{"$group": {"_id": {"a": "$a", "b": "$b"}}}, {"$group": {"_id": "$_id.b", "n": {"$sum": 1}}}, {"$sort": {"_id": 1}}],
        [{"$match": {"k": {"$lt": 100}}}, {"$count": "few"}],
        [{"$sort": {"_id": 1}}, {"$group": {"_id": "$b", "first": {"$first": "$a"}, "all": {"$push": "$_id"}}}, {"$sort": {"_id": 1}}],
        [{"$addFields": {"m": {"$mod": ["$a", 3]}}}, {"$bucket": {"groupBy": "$a", "boundaries": [0, 10, 20, 40], "output": {"n": {"$sum": "$m"}}}}],
        [{"$sort": {"_id": 1}}, {"$facet": {"few": [{"$limit": 3}, {"$project": {"a": 1}}], "sum": [{"$group": {"_id": None, "n": {"$sum": "$a"}}}]}}],
    ]
    for pipeline in pipelines:
        same(f"{name} {pipeline}", *both(name, lambda one: list(one.aggregate(pipeline))))


def change(name, turns):
    fresh = 10_000 + chance.randrange(1000) * 1000
    for turn in range(turns):
        document = make(fresh + turn)
        wanted = filter_of()
        keyed = {field: document.get(field) for field in shard_key(name, document)}
        value = chance.randrange(1000)
        statement = chance.choice(
            [
                InsertOne(document),
                UpdateMany(wanted, {"$inc": {"in.x": 1}, "$set": {"v": value}}),
                UpdateOne(keyed, {"$set": {"v": value}, "$setOnInsert": {"made": 1, "_id": document["_id"]} if name != "plain" else {"made": 1}}, upsert=True),
                UpdateOne({"_id": chance.randrange(600)}, {"$push": {"tags": "w"}}),
                ReplaceOne({**keyed, "_id": chance.randrange(600)}, {**keyed, "replaced": value}) if name != "plain" else UpdateMany({"_id": value}, {"$set": {"v": 1}}),
                DeleteOne({"_id": chance.randrange(600)}),
                DeleteMany({**wanted, "in.x": 3, "v": {"$gt": 500}}),
            ]
        )

        def write(collection):
            try:
                done = collection.bulk_write([statement])
                return (done.inserted_count, done.matched_count, done.modified_count, done.deleted_count, len(done.upserted_ids))
            except BulkWriteError as error:
                return [one["code"] for one in error.details["writeErrors"]]

        same(f"{name} {statement}", *both(name, write))
    same(f"{name} all", *both(name, lambda one: frozen(one.find())))


def walk():
    hello = router.admin.command("hello")
    assert hello["msg"] == "isdbgrid" and hello["isWritablePrimary"] and "setName" not in hello, hello
    assert router.topology_description.topology_type_name == "Sharded", router.topology_description
    names = [one["_id"] for one in router.admin.command("listShards")["shards"]]
    assert names == ["s0", "s1", "s2"], names
    router.admin.command("shardCollection", "shop.hashed", key={"k": "hashed"})
    router.admin.command("shardCollection", "shop.ranged", key=bson.SON([("a", 1), ("b", 1)]))
    least = bson.MinKey()
    for bound, shard in [(8, "s0"), (16, "s1"), (24, "s2")]:
        router.admin.command("split", "shop.ranged", middle=bson.SON([("a", bound), ("b", least)]))
        router.admin.command("moveChunk", "shop.ranged", find=bson.SON([("a", bound), ("b", "x")]), to=shard)
    chunks = list(router.config.chunks.find({"ns": "shop.ranged"}))
    assert len(chunks) == 4 and {one["shard"] for one in chunks} == {"s0", "s1", "s2"}, chunks
    documents = [make(number) for number in range(600)]
    for name in KEYED:
        for ordered in [True, False]:
            half = documents[:300] if ordered else documents[300:]
            router.shop[name].insert_many(half, ordered=ordered)
            single.shop[name].insert_many(half)
    parts = [[one.shop[name].count_documents({}) for one in shards] for name in KEYED]
    assert all(sum(part) == 600 for part in parts), parts
    assert min(parts[0]) > 100 and min(parts[1]) > 100 and sorted(parts[2])[:2] == [0, 0], parts
    for name in ["hashed", "ranged"]:
        router.shop[name].create_index([("n", 1)])
    for name in KEYED:
        read(name, 40)
        change(name, 60)
        read(name, 40)
    cursors()
    refusals()
    retried()
    say(f"fine: {parts} documents of {KEYED} in three shards, seed {seed}")


def cursors():
    before = [one.admin.command("serverStatus")["metrics"]["cursor"]["open"]["total"] for one in shards]
    for _ in range(5):
        cursor = router.shop.hashed.find(batch_size=3)
        next(cursor)
        assert cursor.cursor_id
        cursor.close()
    after = [one.admin.command("serverStatus")["metrics"]["cursor"]["open"]["total"] for one in shards]
    assert after == before, (before, after)
    assert router.admin.command("serverStatus")["process"] == "mongos"


def refusals():
    hashed, ranged = router.shop.hashed, router.shop.ranged
    for what, work, code in [
        ("findAndModify without the key", lambda: hashed.find_one_and_update({"a": 1}, {"$set": {"v": 1}}), 61),
        ("an upsert without the key", lambda: ranged.update_one({"a": 1}, {"$set": {"v": 1}}, upsert=True), 61),
        ("a change of the key", lambda: hashed.update_one({"k": 1}, {"$set": {"k": 2}}), 20),
        ("a replacement with another key", lambda: ranged.replace_one({"a": 1, "b": "x"}, {"a": 2, "b": "x"}), 20),
        ("an array as key", lambda: hashed.insert_one({"k": [1]}), 61),
        ("a unique index without the key", lambda: hashed.create_index("n", unique=True), 67),
        ("a join over shards", lambda: list(hashed.aggregate([{"$lookup": {"from": "plain", "localField": "a", "foreignField": "a", "as": "o"}}])), 115),
        ("a change stream", lambda: next(hashed.watch()), 40573),
        ("sharding by another key", lambda: router.admin.command("shardCollection", "shop.hashed", key={"z": 1}), 20),
        ("a chunk with documents", lambda: router.admin.command("moveChunk", "shop.ranged", find=bson.SON([("a", 9), ("b", "x")]), to="s2"), 115),
        ("a collation", lambda: list(hashed.find(collation={"locale": "de"})), 115),
    ]:
        found = code_of(work)
        assert found == code, (what, found)
    with router.start_session() as session:
        session.start_transaction()
        found = code_of(lambda: hashed.insert_one({"k": 1}, session=session))
        assert found == 263, found
        code_of(session.abort_transaction)
    document = {"_id": "twice", "k": 5}
    hashed.insert_one(document)
    try:
        hashed.insert_many([{"_id": "once", "k": 6}, document, {"_id": "never", "k": 7}])
        raise AssertionError("a duplicate was inserted")
    except BulkWriteError as error:
        assert error.details["nInserted"] == 1 and error.details["writeErrors"][0]["index"] == 1, error.details
    try:
        hashed.insert_many([document, {"_id": "more", "k": 7}, {"k": [1]}], ordered=False)
        raise AssertionError("a duplicate was inserted")
    except BulkWriteError as error:
        places = {one["index"]: one["code"] for one in error.details["writeErrors"]}
        assert error.details["nInserted"] == 1 and places == {0: 11000, 2: 61}, error.details
    assert hashed.find_one_and_update({"k": 5, "_id": "twice"}, {"$set": {"v": 1}})["_id"] == "twice"
    hashed.delete_many({"_id": {"$in": ["twice", "once", "more"]}})


def raw(command):
    """Sends a command as it is: the driver would give it a session of its own."""
    host, port = router.address
    body = bson.encode({**command, "$db": "shop"})
    with socket.create_connection((host, port)) as wire:
        wire.sendall(struct.pack("<iiiiib", 21 + len(body), 1, 0, 2013, 0, 0) + body)
        reply = b""
        while len(reply) < 4 or len(reply) < struct.unpack("<i", reply[:4])[0]:
            reply += wire.recv(65536)
    return bson.decode(reply[21:])


def retried():
    """A command of a session that is sent twice does its part in every shard once."""
    session = {"id": bson.Binary(bytes(range(16)), 4)}
    documents = [{"_id": f"retried-{n}", "k": n, "n": 0} for n in range(20)]
    for _ in range(2):
        done = raw({"insert": "hashed", "documents": documents, "lsid": session, "txnNumber": bson.Int64(1)})
        assert done["n"] == 20 and "writeErrors" not in done, done
    updates = [{"q": {"k": n, "_id": f"retried-{n}"}, "u": {"$inc": {"n": 1}}} for n in range(20)]
    for _ in range(2):
        done = raw({"update": "hashed", "updates": updates, "lsid": session, "txnNumber": bson.Int64(2)})
        assert done["n"] == 20, done
    found = router.shop.hashed.distinct("n", {"_id": {"$regex": "^retried"}})
    assert found == [1], found
    router.shop.hashed.delete_many({"_id": {"$regex": "^retried"}})


def again():
    for name in KEYED:
        read(name, 10)
        change(name, 10)
    names = sorted(router.shop.list_collection_names())
    assert names == sorted(KEYED), names
    router.drop_database("gone")
    router.admin.command("shardCollection", "gone.things", key={"k": "hashed"})
    router.gone.things.insert_many([{"k": n} for n in range(50)])
    router.gone.things.drop()
    assert router.gone.things.count_documents({}) == 0
    assert router.config.chunks.count_documents({"ns": "gone.things"}) == 0
    assert all("things" not in one.gone.list_collection_names() for one in shards)
    router.gone.things.insert_many([{"k": n} for n in range(50)])
    parts = [one.gone.things.count_documents({}) for one in shards]
    assert sorted(parts) == [0, 0, 50], parts
    say(f"fine, seed {seed}")


def broken(code):
    """One shard is of no use: what it is not needed for goes on."""
    answered = 0
    for number in range(40):
        found = code_of(lambda: list(router.shop.hashed.find({"k": number})))
        assert found in (None, code), found
        answered += found is None
    assert 0 < answered < 40, answered
    for work in [
        lambda: list(router.shop.hashed.find({"n": 1})),
        lambda: router.shop.hashed.count_documents({}),
        lambda: list(router.shop.hashed.aggregate([{"$group": {"_id": "$a"}}])),
        lambda: router.shop.hashed.update_many({"n": "nowhere"}, {"$set": {"w": 1}}),
    ]:
        found = code_of(work)
        assert found == code, found
    say(f"fine: {answered} of 40 finds were answered by the other shards, the rest refused with {code}")


{"walk": walk, "again": again, "dead": lambda: broken(133), "stale": lambda: broken(13388)}[phase]()
