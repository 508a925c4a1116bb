"""Runs the drivers' published specification tests (unified format) against a document store.

Usage: documents_spec.py URI FOLDER SUITE..., where FOLDER is the `test` folder of a pymongo source
distribution. Compares results and the final contents of collections; the events a driver tells of
itself are the driver's matter and are not compared. Prints one line for each suite and each failure.
"""

import os
import re
import sys
import time

import pymongo
import pymongo.common
from bson import Binary, Decimal128, Int64, ObjectId, Regex, Timestamp, json_util
from pymongo import (DeleteMany, DeleteOne, InsertOne, ReplaceOne, ReturnDocument, UpdateMany, UpdateOne)
from pymongo.change_stream import ChangeStream
from pymongo.client_session import ClientSession, TransactionOptions
from pymongo.command_cursor import CommandCursor
from pymongo.cursor import Cursor
from pymongo.errors import BulkWriteError, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import make_read_preference, read_pref_mode_from_name
from pymongo.write_concern import WriteConcern

SERVER = (7, 0, 0)
POINTS = ("failCommand", "onPrimaryTransactionalWrite")
# As the driver's own runner has it: a server that closed a connection is looked at again at once.
pymongo.common.MIN_HEARTBEAT_INTERVAL = 0.01
OPTIONS = json_util.JSONOptions(json_mode=json_util.JSONMode.RELAXED, tz_aware=False, document_class=dict)


# Words of the format for those of the driver.
CONCERN = {"wtimeoutMS": "wtimeout", "journal": "j"}


class Skip(Exception):
    pass


class Fail(Exception):
    pass


def snake(name):
    return re.sub(r"([A-Z])", lambda m: "_" + m.group(1).lower(), name)


def version(text):
    parts = [int(part) for part in text.split(".")]
    return tuple(parts + [0] * (3 - len(parts)))


def runnable(requirements):
    if not requirements:
        return True
    for one in requirements:
        if "minServerVersion" in one and SERVER < version(one["minServerVersion"]):
            continue
        if "maxServerVersion" in one and SERVER > version(one["maxServerVersion"]):
            continue
        if "topologies" in one and "replicaset" not in one["topologies"]:
            continue
        if one.get("auth") or one.get("csfle") or one.get("serverless") == "require":
            continue
        return True
    return False


TYPES = {
    "double": float, "string": str, "object": dict, "array": list, "binData": (Binary, bytes), "objectId": ObjectId,
    "bool": bool, "regex": Regex, "int": int, "timestamp": Timestamp, "long": (Int64, int), "decimal": Decimal128,
    "number": (int, float, Decimal128), "null": type(None),
}


class World:
    def __init__(self, uri, description):
        self.uri = uri
        self.entities = {}
        self.clients = []
        self.description = description

    def close(self):
        for entity in list(self.entities.values()):
            try:
                if isinstance(entity, ClientSession):
                    entity.end_session()
                elif isinstance(entity, (ChangeStream, Cursor, CommandCursor)):
                    entity.close()
            except PyMongoError:
                pass
        for client in self.clients:
            client.close()

    def create(self, specification):
        (kind, given), = specification.items()
        if kind == "client":
            uri_options = dict(given.get("uriOptions", {}))
            for unfit in ("appname",):
                uri_options.pop(unfit, None)
            if uri_options.get("readPreference", "primary").lower() == "secondary":
                raise Skip("no secondary")
            if given.get("serverApi") or given.get("autoEncryptOpts"):
                raise Skip("client options")
            entity = pymongo.MongoClient(self.uri, serverSelectionTimeoutMS=10000, **uri_options)
            self.clients.append(entity)
        elif kind == "database":
            entity = self.entities[given["client"]].get_database(given["databaseName"], **self.concerns(given.get("databaseOptions", {})))
        elif kind == "collection":
            entity = self.entities[given["database"]].get_collection(given["collectionName"], **self.concerns(given.get("collectionOptions", {})))
        elif kind == "session":
            options = {snake(name): value for name, value in given.get("sessionOptions", {}).items()}
            defaults = options.pop("default_transaction_options", None)
            if defaults is not None:
                time_limit = defaults.pop("maxCommitTimeMS", None)
                options["default_transaction_options"] = TransactionOptions(**self.concerns(defaults), max_commit_time_ms=time_limit)
            entity = self.entities[given["client"]].start_session(**options)
        else:
            raise Skip(f"entity {kind}")
        self.entities[given["id"]] = entity

    @staticmethod
    def concerns(options):
        made = {}
        for name, value in options.items():
            if name == "readConcern":
                made["read_concern"] = ReadConcern(value.get("level"))
            elif name == "writeConcern":
                made["write_concern"] = WriteConcern(**{CONCERN.get(k, k): v for k, v in value.items()})
            elif name == "readPreference":
                if value["mode"].lower() == "secondary":
                    raise Skip("no secondary")
                made["read_preference"] = make_read_preference(read_pref_mode_from_name(value["mode"].lower() if value["mode"] == "primary" else value["mode"]), None)
            else:
                raise Skip(f"option {name}")
        return made

    # What is expected of a value.

    def match(self, expected, actual, root=False, path="result"):
        if isinstance(actual, dict) and actual == {"acknowledged": False} and path == "result":
            # Of a write that is not acknowledged nothing is known.
            return None
        if isinstance(expected, dict):
            if len(expected) == 1:
                (key, value), = expected.items()
                if key == "$$unsetOrMatches" and isinstance(value, dict) and set(value) == {"acknowledged"} and isinstance(actual, dict) and actual.get("acknowledged") is False:
                    return None
                if key == "$$unsetOrMatches":
                    return None if actual is MISSING or actual is None else self.match(value, actual, root, path)
                if key == "$$exists":
                    if (actual is not MISSING) != value:
                        raise Fail(f"{path}: exists is not {value}")
                    return None
                if key == "$$type":
                    names = [value] if isinstance(value, str) else value
                    if not any(isinstance(actual, TYPES[name]) for name in names if name in TYPES) and "date" not in names:
                        raise Fail(f"{path}: {actual!r} is no {value}")
                    return None
                if key == "$$matchesEntity":
                    return self.match(self.entities[value], actual, root, path)
                if key == "$$matchesHexBytes":
                    return None
                if key == "$$sessionLsid":
                    return self.match(self.entities[value].session_id, actual, root, path)
                if key == "$$lte":
                    if not actual <= value:
                        raise Fail(f"{path}: {actual!r} is more than {value!r}")
                    return None
            if not isinstance(actual, dict):
                raise Fail(f"{path}: {actual!r} is no document, wanted {expected!r}")
            for key, value in expected.items():
                self.match(value, actual.get(key, MISSING), False, f"{path}.{key}")
            if not root:
                extra = set(actual) - set(expected)
                if extra:
                    raise Fail(f"{path}: unexpected {sorted(extra)} in {actual!r}")
            return None
        if isinstance(expected, list):
            if not isinstance(actual, list) or len(actual) != len(expected):
                raise Fail(f"{path}: {actual!r}, wanted {expected!r}")
            for at, (one, other) in enumerate(zip(expected, actual)):
                self.match(one, other, root, f"{path}[{at}]")
            return None
        if actual is MISSING:
            raise Fail(f"{path}: missing, wanted {expected!r}")
        both = isinstance(expected, (int, float)) and isinstance(actual, (int, float))
        if isinstance(expected, bool) != isinstance(actual, bool) or (expected != actual and not (both and float(expected) == float(actual))):
            raise Fail(f"{path}: {actual!r}, wanted {expected!r}")
        return None

    # Operations.

    def arguments(self, given):
        made = {}
        for name, value in (given or {}).items():
            key = snake(name)
            if name == "session":
                value = self.entities[value]
            elif name in ("sort",) and isinstance(value, dict):
                value = list(value.items())
            elif name == "hint" and isinstance(value, dict):
                value = list(value.items())
            elif name == "returnDocument":
                value = ReturnDocument.AFTER if value == "After" else ReturnDocument.BEFORE
            elif name == "readConcern":
                value = ReadConcern(value.get("level"))
            elif name == "timeoutMS":
                raise Skip("timeoutMS")
            elif name == "collation":
                pass
            elif name == "maxTimeMS":
                key = "max_time_ms"
            elif name == "maxAwaitTimeMS":
                key = "max_await_time_ms"
            made[key] = value
        return made

    def requests(self, listed):
        kinds = {"insertOne": InsertOne, "updateOne": UpdateOne, "updateMany": UpdateMany, "replaceOne": ReplaceOne, "deleteOne": DeleteOne, "deleteMany": DeleteMany}
        made = []
        for one in listed:
            (name, given), = one.items()
            arguments = self.arguments(given)
            made.append(kinds[name](**arguments))
        return made

    def run(self, operation):
        name, target, given = operation["name"], operation["object"], operation.get("arguments", {})
        if target == "testRunner":
            return self.special(name, given)
        entity = self.entities[target]
        arguments = self.arguments(given)
        method = getattr(self, "do_" + snake(name), None)
        if method is None:
            raise Skip(f"operation {name}")
        result = method(entity, arguments)
        if "saveResultAsEntity" in operation:
            self.entities[operation["saveResultAsEntity"]] = result
        return result

    def special(self, name, given):
        if name in ("failPoint", "targetedFailPoint"):
            point = given["failPoint"]
            if point["configureFailPoint"] not in POINTS:
                raise Skip("fail point " + point["configureFailPoint"])
            with pymongo.MongoClient(self.uri) as plain:
                plain.admin.command(point)
            return None
        if name in ("assertCollectionExists", "assertCollectionNotExists", "assertIndexExists", "assertIndexNotExists"):
            client = pymongo.MongoClient(self.uri)
            database = client[given["databaseName"]]
            if name.startswith("assertCollection"):
                found = given["collectionName"] in database.list_collection_names()
            else:
                found = given["indexName"] in database[given["collectionName"]].index_information()
            client.close()
            if found != (not name.endswith("NotExists")):
                raise Fail(f"{name} {given}")
            return None
        if name == "assertSessionTransactionState":
            number = self.entities[given["session"]]._transaction.state
            state = {1: "none", 2: "starting", 3: "in_progress", 4: "committed", 5: "committed", 6: "aborted"}[number]
            if state != given["state"]:
                raise Fail(f"the session is {state}, wanted {given['state']}")
            return None
        if name == "createEntities":
            for one in given["entities"]:
                self.create(one)
            return None
        raise Skip(f"testRunner {name}")

    def do_find(self, c, a):
        a.pop("max_await_time_ms", None)
        return list(c.find(**a))

    def do_find_one(self, c, a):
        return c.find_one(**a)

    def do_create_find_cursor(self, c, a):
        cursor = c.find(**a)
        return cursor

    def do_aggregate(self, c, a):
        pipeline = a.pop("pipeline")
        for long, short in (("batch_size", "batchSize"), ("allow_disk_use", "allowDiskUse"), ("bypass_document_validation", "bypassDocumentValidation"), ("max_time_ms", "maxTimeMS")):
            if long in a:
                a[short] = a.pop(long)
        return list(c.aggregate(pipeline, **a))

    def do_insert_one(self, c, a):
        return {"insertedId": c.insert_one(**a).inserted_id}

    def do_insert_many(self, c, a):
        result = c.insert_many(**a)
        return {"insertedIds": {str(at): one for at, one in enumerate(result.inserted_ids)}, "insertedCount": len(result.inserted_ids)}

    def updated(self, r):
        if not r.acknowledged:
            return {"acknowledged": False}
        made = {"matchedCount": r.matched_count, "modifiedCount": r.modified_count, "upsertedCount": 0 if r.upserted_id is None else 1}
        if r.upserted_id is not None:
            made["upsertedId"] = r.upserted_id
        return made

    def do_update_one(self, c, a):
        return self.updated(c.update_one(**a))

    def do_update_many(self, c, a):
        return self.updated(c.update_many(**a))

    def do_replace_one(self, c, a):
        return self.updated(c.replace_one(**a))

    @staticmethod
    def deleted(r):
        return {"deletedCount": r.deleted_count} if r.acknowledged else {"acknowledged": False}

    def do_delete_one(self, c, a):
        return self.deleted(c.delete_one(**a))

    def do_delete_many(self, c, a):
        return self.deleted(c.delete_many(**a))

    def do_bulk_write(self, c, a):
        requests = self.requests(a.pop("requests"))
        r = c.bulk_write(requests, **a)
        if not r.acknowledged:
            return {"acknowledged": False}
        made = self.bulk_result(r.bulk_api_result)
        # pymongo does not tell the identifiers it gave; the requests hold them.
        made["insertedIds"] = {str(at): one._doc["_id"] for at, one in enumerate(requests) if isinstance(one, InsertOne)}
        return made

    @staticmethod
    def bulk_result(r):
        return {
            "deletedCount": r["nRemoved"], "insertedCount": r["nInserted"], "matchedCount": r["nMatched"], "modifiedCount": r["nModified"],
            "upsertedCount": r["nUpserted"], "upsertedIds": {str(one["index"]): one["_id"] for one in r["upserted"]}, "insertedIds": {},
        }

    @staticmethod
    def as_command(a):
        """Keyword arguments that pymongo hands to the command as they are."""
        for long, short in (("bypass_document_validation", "bypassDocumentValidation"), ("max_time_ms", "maxTimeMS")):
            if long in a:
                a[short] = a.pop(long)

    def do_find_one_and_update(self, c, a):
        self.as_command(a)
        return c.find_one_and_update(**a)

    def do_find_one_and_replace(self, c, a):
        self.as_command(a)
        return c.find_one_and_replace(**a)

    def do_find_one_and_delete(self, c, a):
        self.as_command(a)
        return c.find_one_and_delete(**a)

    def do_count_documents(self, c, a):
        if "max_time_ms" in a:
            a["maxTimeMS"] = a.pop("max_time_ms")
        return c.count_documents(**a)

    def do_estimated_document_count(self, c, a):
        if "max_time_ms" in a:
            a["maxTimeMS"] = a.pop("max_time_ms")
        return c.estimated_document_count(**a)

    def do_distinct(self, c, a):
        a["key"] = a.pop("field_name")
        if "max_time_ms" in a:
            a["maxTimeMS"] = a.pop("max_time_ms")
        return c.distinct(**a)

    def do_create_index(self, c, a):
        keys = list(a.pop("keys").items())
        return c.create_index(keys, **a)

    def do_drop_index(self, c, a):
        return c.drop_index(a.pop("name"), **a)

    def do_drop_indexes(self, c, a):
        return c.drop_indexes(**a)

    def do_list_indexes(self, c, a):
        a.pop("batch_size", None)
        return list(c.list_indexes(**a))

    def do_list_index_names(self, c, a):
        return [one["name"] for one in c.list_indexes(**a)]

    def do_rename(self, c, a):
        return c.rename(a.pop("to"), **a)

    def do_run_command(self, d, a):
        a.pop("command_name", None)
        a.pop("read_concern", None)
        return d.command(a.pop("command"), **{k: v for k, v in a.items() if k == "session"})

    def do_create_collection(self, d, a):
        name = a.pop("collection")
        for long in list(a):
            if long not in ("session", "check_exists"):
                camel = re.sub(r"_([a-z])", lambda m: m.group(1).upper(), long)
                a[camel] = a.pop(long)
        d.create_collection(name, **a)

    def do_drop_collection(self, d, a):
        return d.drop_collection(a.pop("collection"), **a)

    def do_list_collections(self, d, a):
        a.pop("batch_size", None)
        return list(d.list_collections(**a))

    def do_list_collection_names(self, d, a):
        return d.list_collection_names(**a)

    def do_modify_collection(self, d, a):
        name = a.pop("collection")
        command = {"collMod": name}
        command.update({re.sub(r"_([a-z])", lambda m: m.group(1).upper(), k): v for k, v in a.items()})
        return d.command(command)

    def do_list_databases(self, c, a):
        return list(c.list_databases(**a))

    def do_list_database_names(self, c, a):
        return c.list_database_names(**a)

    def do_create_change_stream(self, e, a):
        a.setdefault("max_await_time_ms", 500)
        return e.watch(**a)

    def do_iterate_until_document_or_error(self, e, a):
        if not isinstance(e, ChangeStream):
            return next(e)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            event = e.try_next()
            if event is not None:
                return event
        raise Fail("no event within five seconds")

    def do_iterate_once(self, e, a):
        return e.try_next() if hasattr(e, "try_next") else next(e, None)

    def do_close(self, e, a):
        return e.close()

    def do_end_session(self, e, a):
        return e.end_session()

    @staticmethod
    def transaction_options(a):
        if "max_commit_time_m_s" in a:
            a["max_commit_time_ms"] = a.pop("max_commit_time_m_s")
        if isinstance(a.get("write_concern"), dict):
            a["write_concern"] = WriteConcern(**{CONCERN.get(k, k): v for k, v in a["write_concern"].items()})
        if isinstance(a.get("read_preference"), dict):
            a["read_preference"] = World.concerns({"readPreference": a["read_preference"]})["read_preference"]
        return a

    def do_start_transaction(self, e, a):
        e.start_transaction(**self.transaction_options(a))

    def do_commit_transaction(self, e, a):
        e.commit_transaction()

    def do_abort_transaction(self, e, a):
        e.abort_transaction()

    def do_with_transaction(self, e, a):
        callback = a.pop("callback")

        def run(_):
            for operation in callback:
                # An expected error ends the callback all the same.
                try:
                    result = self.run(operation)
                except (Skip, Fail):
                    raise
                except Exception as error:
                    if "expectError" in operation:
                        self.check_error(operation["expectError"], error)
                    raise
                if "expectResult" in operation:
                    self.match(operation["expectResult"], result, True)

        e.with_transaction(run, **self.transaction_options(a))

    def check_error(self, expected, error):
        if expected.get("isClientError") is True and hasattr(error, "code") and getattr(error, "code", None) is not None and not isinstance(error, BulkWriteError):
            raise Fail(f"wanted an error of the client, got {error!r}")
        if "errorCode" in expected:
            code = getattr(error, "code", None)
            if isinstance(error, BulkWriteError):
                code = (error.details["writeErrors"] or [{"code": error.code}])[0]["code"]
            if code != expected["errorCode"]:
                raise Fail(f"code {code}, wanted {expected['errorCode']}: {error}")
        if "errorCodeName" in expected:
            name = (getattr(error, "details", None) or {}).get("codeName")
            if name != expected["errorCodeName"]:
                raise Fail(f"code name {name}, wanted {expected['errorCodeName']}")
        if "errorContains" in expected and expected["errorContains"].lower() not in str(error).lower():
            raise Fail(f"{error} does not contain {expected['errorContains']!r}")
        for label in expected.get("errorLabelsContain", []):
            if not error.has_error_label(label):
                raise Fail(f"lacks the label {label}: {error!r}")
        for label in expected.get("errorLabelsOmit", []):
            if error.has_error_label(label):
                raise Fail(f"has the label {label}: {error!r}")
        if "expectResult" in expected and isinstance(error, BulkWriteError):
            self.match(expected["expectResult"], self.bulk_result(error.details), True)


class Missing:
    def __repr__(self):
        return "missing"


MISSING = Missing()


def outcome_of(world, operation):
    expected = operation.get("expectError")
    try:
        result = world.run(operation)
    except (Skip, Fail):
        raise
    except Exception as error:  # whatever a driver raises is what is looked at
        if operation.get("ignoreResultAndError"):
            return
        if expected is None:
            raise Fail(f"{operation['name']}: {type(error).__name__}: {error}") from error
        world.check_error(expected, error)
        return
    if expected is not None:
        raise Fail(f"{operation['name']}: no error, wanted {expected}")
    if "expectResult" in operation and not operation.get("ignoreResultAndError"):
        world.match(operation["expectResult"], result, True)


def run_test(uri, whole, test):
    if test.get("skipReason"):
        raise Skip(test["skipReason"])
    if not runnable(whole.get("runOnRequirements")) or not runnable(test.get("runOnRequirements")):
        raise Skip("not for a replica set of this version")
    with pymongo.MongoClient(uri) as plain:
        for data in whole.get("initialData", []):
            database = plain[data["databaseName"]]
            database.drop_collection(data["collectionName"])
            if data["documents"]:
                database[data["collectionName"]].insert_many(data["documents"])
            else:
                database.create_collection(data["collectionName"], **data.get("createOptions", {}))
    world = World(uri, test["description"])
    try:
        for one in whole.get("createEntities", []):
            world.create(one)
        for operation in test["operations"]:
            outcome_of(world, operation)
    finally:
        with pymongo.MongoClient(uri) as plain:
            for point in POINTS:
                plain.admin.command({"configureFailPoint": point, "mode": "off"})
        world.close()
    with pymongo.MongoClient(uri) as plain:
        for data in test.get("outcome", []):
            collection = plain[data["databaseName"]][data["collectionName"]]
            world.match(data["documents"], list(collection.find(sort=[("_id", 1)])), False, data["collectionName"])


def main():
    uri, folder, suites = sys.argv[1], sys.argv[2], sys.argv[3:]
    totals = [0, 0, 0]
    for suite in suites:
        passed, failed, reasons = 0, 0, {}
        for name in sorted(os.listdir(os.path.join(folder, suite))):
            if not name.endswith(".json"):
                continue
            with open(os.path.join(folder, suite, name), encoding="utf-8") as file:
                whole = json_util.loads(file.read(), json_options=OPTIONS)
            if "tests" not in whole or "schemaVersion" not in whole:
                continue
            for test in whole["tests"]:
                try:
                    run_test(uri, whole, test)
                    passed += 1
                except Skip as skip:
                    reasons[str(skip)] = reasons.get(str(skip), 0) + 1
                except Exception as error:  # a failure is a line, and the next test runs
                    failed += 1
                    print(f"FAILED {suite}/{name}: {test['description']}: {type(error).__name__}: {error}"[:400])
        skipped = sum(reasons.values())
        totals = [totals[0] + passed, totals[1] + failed, totals[2] + skipped]
        listed = ", ".join(f"{reason[:60]} {count}" for reason, count in sorted(reasons.items(), key=lambda one: -one[1])[:4])
        print(f"{suite}: {passed} passed, {failed} failed, {skipped} skipped ({listed})")
    print(f"specification tests: {totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    sys.exit(1 if totals[1] else 0)


main()
