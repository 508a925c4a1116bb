"""Walks a document store with pymongo as it comes from its registry.

Usage: documents.py URI PHASE, where PHASE is `first` (fills and checks) or `again` (after a kill:
everything that was acknowledged is there). Prints one line of what was run.
"""

import datetime
import socket
import struct
import sys
import threading
import time

import bson
import pymongo
from bson import Binary, Decimal128, Int64, ObjectId, Regex, Timestamp
from pymongo import DeleteOne, InsertOne, ReplaceOne, ReturnDocument, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

CHECKS = 0


def same(found, wanted):
    global CHECKS
    CHECKS += 1
    if found != wanted:
        raise AssertionError(f"found {found!r}, wanted {wanted!r}")


def refused(code, work):
    global CHECKS
    CHECKS += 1
    try:
        work()
    except OperationFailure as failure:
        if failure.code != code:
            raise AssertionError(f"refused with {failure.code} ({failure}), wanted {code}")
        return failure
    raise AssertionError(f"not refused; wanted {code}")


def raw(command):
    """A command as it stands, which pymongo would give a session of its own."""
    host, port = sys.argv[1].removeprefix("mongodb://").split(":")
    body = bson.encode({**command, "$db": "walk"})
    with socket.create_connection((host, int(port))) as talk:
        talk.sendall(struct.pack("<iiiii", 21 + len(body), 1, 0, 2013, 0) + b"\0" + body)
        answer = b""
        while len(answer) < 4 or len(answer) < struct.unpack("<i", answer[:4])[0]:
            answer += talk.recv(1 << 16)
    return bson.decode(answer[21:])


def crud(db):
    people = db.people
    people.drop()
    same(people.insert_one({"_id": 1, "name": "ada", "born": 1815}).inserted_id, 1)
    ids = people.insert_many([{"name": name, "n": n} for n, name in enumerate("abcdef")]).inserted_ids
    same(len(ids), 6)
    same(people.find_one({"_id": 1}), {"_id": 1, "name": "ada", "born": 1815})
    same(people.find_one({"_id": ids[2]})["name"], "c")
    same(people.find_one({"name": "nobody"}), None)
    refused(11000, lambda: people.insert_one({"_id": 1}))
    same([p["name"] for p in people.find({"n": {"$gte": 2, "$lt": 5}}).sort("n", -1)], ["e", "d", "c"])
    same([p["n"] for p in people.find({"n": {"$exists": True}}, {"_id": 0, "n": 1}).sort("n").skip(1).limit(2)], [1, 2])
    result = people.update_one({"_id": 1}, {"$set": {"name": "Ada"}, "$inc": {"born": 1}, "$push": {"tags": {"$each": [3, 1], "$sort": 1}}})
    same((result.matched_count, result.modified_count), (1, 1))
    same(people.find_one({"_id": 1}), {"_id": 1, "name": "Ada", "born": 1816, "tags": [1, 3]})
    same(people.update_many({"n": {"$gt": 2}}, {"$set": {"big": True}}).modified_count, 3)
    result = people.update_one({"_id": 99}, {"$set": {"x": 1}, "$setOnInsert": {"y": 2}}, upsert=True)
    same((result.upserted_id, result.matched_count), (99, 0))
    same(people.replace_one({"_id": 99}, {"z": 1}).modified_count, 1)
    same(people.find_one({"_id": 99}), {"_id": 99, "z": 1})
    same(people.find_one_and_update({"_id": 99}, {"$inc": {"z": 5}}, return_document=ReturnDocument.AFTER)["z"], 6)
    same(people.find_one_and_delete({"_id": 99})["z"], 6)
    same(people.find_one_and_replace({"_id": 98}, {"q": 1}, upsert=True, return_document=ReturnDocument.AFTER), {"_id": 98, "q": 1})
    same(people.delete_one({"_id": 98}).deleted_count, 1)
    same(people.delete_many({"big": True}).deleted_count, 3)
    same(people.count_documents({}), 4)
    same(people.estimated_document_count(), 4)
    same(sorted(people.distinct("n")), [0, 1, 2])
    refused(66, lambda: people.update_one({"_id": 1}, {"$set": {"_id": 2}}))
    refused(14, lambda: people.update_one({"_id": 1}, {"$inc": {"name": 1}}))
    refused(2, lambda: list(people.find({"a": {"$nope": 1}})))
    return ids


def bulk(db):
    items = db.items
    items.drop()
    result = items.bulk_write([
        InsertOne({"_id": 1, "v": 1}), InsertOne({"_id": 2, "v": 2}), UpdateOne({"_id": 1}, {"$set": {"v": 5}}),
        UpdateMany({}, {"$inc": {"v": 1}}), ReplaceOne({"_id": 3}, {"v": 9}, upsert=True), DeleteOne({"_id": 2}),
    ])
    same((result.inserted_count, result.modified_count, result.upserted_count, result.deleted_count), (2, 3, 1, 1))
    try:
        items.insert_many([{"_id": 1}, {"_id": 7}], ordered=True)
        raise AssertionError("a duplicate went in")
    except BulkWriteError as error:
        same((error.details["nInserted"], error.details["writeErrors"][0]["code"]), (0, 11000))
    try:
        items.insert_many([{"_id": 1}, {"_id": 7}], ordered=False)
        raise AssertionError("a duplicate went in")
    except BulkWriteError as error:
        same((error.details["nInserted"], error.details["writeErrors"][0]["index"]), (1, 0))
    same(items.find_one({"_id": 7}), {"_id": 7})


def types(db):
    values = db.types
    values.drop()
    when = datetime.datetime(2024, 2, 29, 12, 30, 15, 123000)
    document = {
        "_id": ObjectId(), "int": 1, "long": Int64(1 << 40), "double": 1.5, "text": "Grüße \x00 end", "bytes": Binary(b"\x00\x01", 5),
        "date": when, "none": None, "yes": True, "list": [1, [2, {"a": 3}]], "sub": {"x": {"y": []}},
        "decimal": Decimal128("1.2300"), "regex": Regex("^a", "i"),
    }
    values.insert_one(document)
    same(values.find_one(), document)
    same(values.count_documents({"decimal": Decimal128("1.23")}), 1)
    same(values.count_documents({"int": 1.0, "long": {"$gt": 1}}), 1)
    same(values.count_documents({"date": {"$gte": when}}), 1)
    same(values.count_documents({"sub.x.y": []}), 1)
    same(values.count_documents({"list.1.1.a": 3}), 1)


def indexes(db):
    many = db.many
    many.drop()
    many.insert_many([{"_id": n, "a": n % 10, "b": -n, "t": [n, n + 1], "u": f"u{n}"} for n in range(2000)])
    same(many.create_index([("a", 1), ("b", -1)]), "a_1_b_-1")
    many.create_index("t")
    many.create_index("u", unique=True)
    many.create_index("maybe", sparse=True)
    many.create_index("b", partialFilterExpression={"a": {"$gt": 7}}, name="few")
    many.create_index([("u", "hashed")])
    same(len(list(many.list_indexes())), 7)
    refused(11000, lambda: many.insert_one({"u": "u7"}))
    plan = many.find({"a": 3, "b": {"$gt": -100}}).explain()
    same(plan["queryPlanner"]["winningPlan"]["inputStage"]["indexName"], "a_1_b_-1")
    same([d["_id"] for d in many.find({"a": 3}).sort("b", -1).limit(3)], [3, 13, 23])
    same([d["_id"] for d in many.find({"a": 3}).sort("b", 1).limit(2)], [1993, 1983])
    same(sorted(d["_id"] for d in many.find({"t": 500})), [499, 500])
    same(many.find_one({"u": "u77"})["_id"], 77)
    same(many.count_documents({"a": {"$in": [1, 2]}, "b": {"$lt": -1000}}), 200)
    refused(67, lambda: many.create_index([("x", "text")]))
    refused(11000, lambda: many.create_index("a", unique=True))
    many.drop_index("t_1")
    same(len(list(many.list_indexes())), 6)
    same(db.command("validate", "many")["valid"], True)


def aggregation(db):
    many = db.many
    found = list(many.aggregate([
        {"$match": {"a": {"$lt": 3}}}, {"$group": {"_id": "$a", "n": {"$sum": 1}, "least": {"$min": "$_id"}}}, {"$sort": {"_id": 1}},
    ]))
    same(found, [{"_id": a, "n": 200, "least": a} for a in range(3)])
    same(list(many.aggregate([{"$match": {"a": 1}}, {"$count": "n"}])), [{"n": 200}])
    same(list(many.aggregate([{"$sort": {"_id": -1}}, {"$limit": 1}, {"$project": {"s": {"$concat": ["$u", "!"]}, "_id": 0}}])), [{"s": "u1999!"}])
    same(len(list(many.aggregate([{"$unwind": "$t"}, {"$match": {"t": {"$lt": 4}}}]))), 7)
    same(list(many.aggregate([{"$limit": 1}, {"$lookup": {"from": "people", "localField": "_id", "foreignField": "n", "as": "p"}}]))[0]["p"][0]["name"], "a")
    list(many.aggregate([{"$match": {"_id": {"$lt": 10}}}, {"$out": "copied"}]))
    same(db.copied.count_documents({}), 10)
    list(many.aggregate([{"$match": {"_id": {"$lt": 12}}}, {"$merge": {"into": "copied"}}]))
    same(db.copied.count_documents({}), 12)
    refused(40324, lambda: list(many.aggregate([{"$nope": 1}])))


def cursors(db):
    many = db.many
    same(sum(1 for _ in many.find(batch_size=17)), 2000)
    cursor = many.find(batch_size=2)
    next(cursor)
    cursor.close()
    same(len(list(many.aggregate([{"$match": {}}], batchSize=100))), 2000)
    capped = db.create_collection("capped", capped=True, size=4096, max=5)
    for n in range(9):
        capped.insert_one({"_id": 9 - n})
    same([d["_id"] for d in capped.find()], [5, 4, 3, 2, 1])
    same([d["_id"] for d in capped.find().sort("$natural", -1)], [1, 2, 3, 4, 5])
    tail = capped.find(cursor_type=pymongo.CursorType.TAILABLE)
    same([d["_id"] for d in tail], [5, 4, 3, 2, 1])
    capped.insert_one({"_id": 77})
    same([d["_id"] for d in tail], [77])


def catalog(client, db):
    db.drop_collection("valid")
    valid = db.create_collection("valid", validator={"$jsonSchema": {"required": ["a"], "properties": {"a": {"bsonType": "int"}}}})
    valid.insert_one({"a": 1})
    refused(121, lambda: valid.insert_one({"a": "x"}))
    refused(48, lambda: db.create_collection("valid", validator={"a": 1}, check_exists=False))
    valid.rename("renamed")
    same("renamed" in db.list_collection_names(), True)
    same("valid" in db.list_collection_names(), False)
    same(db.name in client.list_database_names(), True)
    same(db.command("dbStats")["ok"], 1.0)
    refused(59, lambda: db.command("noSuchCommand"))
    client.drop_database("gone")
    client.gone.x.insert_one({})
    client.drop_database("gone")
    same("gone" in client.list_database_names(), False)


def changes(client, db):
    """Change streams: what happened arrives in order, from a token on, and while one waits."""
    watched = db.watched
    watched.drop()
    watched.insert_one({"_id": 0})
    with watched.watch() as stream:
        watched.insert_one({"_id": 1, "a": 1, "l": [1, 2]})
        watched.update_one({"_id": 1}, {"$set": {"a": 2}, "$unset": {"b": 1}, "$push": {"l": 3}})
        watched.replace_one({"_id": 1}, {"z": 1})
        watched.delete_one({"_id": 1})
        events = [next(stream) for _ in range(4)]
        same([e["operationType"] for e in events], ["insert", "update", "replace", "delete"])
        same(events[0]["fullDocument"], {"_id": 1, "a": 1, "l": [1, 2]})
        same(events[1]["updateDescription"]["updatedFields"], {"a": 2, "l.2": 3})
        same(events[3]["documentKey"], {"_id": 1})
        same(events[0]["ns"], {"db": db.name, "coll": "watched"})
        same(stream.try_next(), None)
    with watched.watch(resume_after=events[1]["_id"]) as stream:
        same([next(stream)["operationType"] for _ in range(2)], ["replace", "delete"])
    with db.watch([{"$match": {"operationType": "insert"}}], full_document="updateLookup") as stream:
        db.other.insert_one({"_id": 5})
        watched.update_one({"_id": 0}, {"$set": {"x": 1}})
        db.other.insert_one({"_id": 6})
        same([next(stream)["documentKey"]["_id"] for _ in range(2)], [5, 6])
    arrived = []
    with client.watch(max_await_time_ms=20000) as stream:
        def late():
            time.sleep(0.5)
            client.elsewhere.late.insert_one({"_id": "late"})
        helper = threading.Thread(target=late)
        helper.start()
        arrived.append(next(stream))
        helper.join()
    same((arrived[0]["ns"]["db"], arrived[0]["documentKey"]), ("elsewhere", {"_id": "late"}))
    with watched.watch() as stream:
        watched.drop()
        same([e["operationType"] for e in stream], ["drop", "invalidate"])
    client.drop_database("elsewhere")


def retries(client, db):
    """A retryable write that is sent again does nothing again, and says what it did."""
    kept = db.kept
    kept.drop()
    kept.insert_one({"_id": 1, "n": 0})
    lsid = {"id": Binary(b"0123456789abcdef", 4)}

    def twice(number, command):
        command = {**command, "lsid": lsid, "txnNumber": Int64(number)}
        return [raw(command) for _ in range(2)]

    update = {"update": "kept", "updates": [{"q": {"_id": 1}, "u": {"$inc": {"n": 1}}}]}
    one, two = twice(1, update)
    same((one["nModified"], two["nModified"], two["retriedStmtIds"]), (1, 1, [0]))
    same(kept.find_one({"_id": 1})["n"], 1)
    one, two = twice(2, {"insert": "kept", "documents": [{"_id": 7}, {"_id": 8}]})
    same((one["n"], two["n"], "writeErrors" in two), (2, 2, False))
    one, two = twice(3, {"delete": "kept", "deletes": [{"q": {"_id": 7}, "limit": 1}]})
    same((one["n"], two["n"]), (1, 1))
    one, two = twice(4, {"findAndModify": "kept", "query": {"_id": 1}, "update": {"$inc": {"n": 1}}, "new": True})
    same((one["value"], two["value"]), ({"_id": 1, "n": 2}, {"_id": 1, "n": 2}))
    one, two = twice(5, {"update": "kept", "updates": [{"q": {"_id": 9}, "u": {"$set": {"n": 1}}, "upsert": True}]})
    same(one["upserted"], two["upserted"])
    same(twice(4, update)[0]["code"], 225)
    same(kept.count_documents({}), 3)


def bounds(db):
    """Requests of a few bytes that would make a value without end; the node refuses them and stays."""
    deep = {"$reduce": {"input": {"$range": [0, 100000]}, "initialValue": None, "in": {"a": "$$value"}}}
    refused(15, lambda: list(db.aggregate([{"$documents": [{"x": 1}]}, {"$set": {"x": deep}}])))
    refused(15, lambda: list(db.people.aggregate([{"$replaceWith": {"a": "$$ROOT"}}] * 300)))
    wide = {"$reduce": {"input": {"$range": [0, 100]}, "initialValue": "ab", "in": {"$concat": ["$$value", "$$value"]}}}
    refused(146, lambda: list(db.aggregate([{"$documents": [{"x": 1}]}, {"$set": {"x": wide}}])))
    db.bounds.insert_one({"_id": 1, "a": 1})
    path = ".".join(["a"] * 120)
    nested = {}
    for _ in range(100):
        nested = {"a": nested}
    refused(15, lambda: db.bounds.update_one({"_id": 1}, {"$set": {"x." + path: nested}}))
    lists = [list(range(1000)) for _ in range(4)]
    db.bounds.insert_one({"_id": 2, "l": lists, "text": "x" * 100000})
    stages = [{"$match": {"_id": 2}}, {"$unwind": "$l"}, {"$unwind": "$l"}, {"$group": {"_id": "$l", "all": {"$push": "$$ROOT"}}}]
    refused(292, lambda: list(db.bounds.aggregate(stages)))
    same(db.bounds.count_documents({}), 2)


def first(client):
    db = client.walk
    client.drop_database("walk")
    crud(db)
    bulk(db)
    types(db)
    indexes(db)
    aggregation(db)
    cursors(db)
    catalog(client, db)
    changes(client, db)
    retries(client, db)
    bounds(db)


def again(client):
    db = client.walk
    same(db.people.find_one({"_id": 1}), {"_id": 1, "name": "Ada", "born": 1816, "tags": [1, 3]})
    same(db.many.count_documents({}), 2000)
    same(db.many.estimated_document_count(), 2000)
    same(len(list(db.many.list_indexes())), 6)
    plan = db.many.find({"a": 3, "b": {"$gt": -100}}).explain()
    same(plan["queryPlanner"]["winningPlan"]["inputStage"]["indexName"], "a_1_b_-1")
    same(db.many.count_documents({"a": 3, "b": {"$gt": -100}}), 10)
    refused(11000, lambda: db.many.insert_one({"u": "u7"}))
    same(db.command("validate", "many")["valid"], True)
    same([d["_id"] for d in db.capped.find()], [4, 3, 2, 1, 77][-5:])
    db.capped.insert_one({"_id": 78})
    same([d["_id"] for d in db.capped.find()], [3, 2, 1, 77, 78])
    refused(121, lambda: db.renamed.insert_one({"a": "x"}))
    # The outcome of a retryable write outlives the node.
    command = {"findAndModify": "kept", "query": {"_id": 9}, "update": {"$inc": {"n": 1}}, "new": True}
    command.update({"lsid": {"id": Binary(b"0123456789abcdef", 4)}, "txnNumber": Int64(6)})
    same(raw(command)["value"]["n"], 2)
    same(raw(command)["value"]["n"], 2)
    same(db.kept.find_one({"_id": 9})["n"], 2)
    with db.kept.watch(start_at_operation_time=Timestamp(1, 1)) as stream:
        same(next(stream)["documentKey"], {"_id": 1})


def users(client):
    """SCRAM-SHA-256: the first user is made from this host, then nobody comes in without."""
    refused(13, lambda: client.walk.x.find_one())
    client.admin.command("createUser", "ann", pwd="pencil", roles=["root"])
    refused(13, lambda: client.admin.command("createUser", "eve", pwd="x", roles=[]))
    uri = sys.argv[1].replace("mongodb://", "mongodb://ann:{}@")
    ann = pymongo.MongoClient(uri.format("pencil"), authSource="admin")
    same(ann.walk.x.insert_one({"_id": 1}).inserted_id, 1)
    same(ann.admin.command("connectionStatus")["authInfo"]["authenticatedUsers"][0]["user"], "ann")
    refused(18, lambda: pymongo.MongoClient(uri.format("wrong"), authSource="admin").walk.x.find_one())
    same([u["user"] for u in ann.admin.command("usersInfo")["users"]], ["ann"])
    ann.admin.command("updateUser", "ann", pwd="pen")
    refused(18, lambda: pymongo.MongoClient(uri.format("pencil"), authSource="admin").walk.x.find_one())
    same(pymongo.MongoClient(uri.format("pen"), authSource="admin").walk.x.count_documents({}), 1)


def main():
    compressors = sys.argv[3] if len(sys.argv) > 3 else None
    options = {"compressors": compressors} if compressors else {}
    client = pymongo.MongoClient(sys.argv[1], serverSelectionTimeoutMS=20000, **options)
    {"first": first, "again": again, "users": users}[sys.argv[2]](client)
    print(f"pymongo {pymongo.version}: {CHECKS} checks")


main()
