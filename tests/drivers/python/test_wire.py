"""What drivers do on the wire: compression, large messages, cursors, writes without a reply, retries."""

import os
import threading
import time

import pytest
from bson import Int64
from conftest import URI, connect, history, order, until
from pymongo import InsertOne, UpdateOne, monitoring
from pymongo.errors import CursorNotFound, DocumentTooLarge, OperationFailure, WriteError
from pymongo.write_concern import WriteConcern

DOCUMENTS = list(history())


class Commands(monitoring.CommandListener):
    """The commands a client has sent."""

    def __init__(self):
        self.started_commands = []

    def started(self, event):
        self.started_commands.append(event)

    def succeeded(self, event):
        pass

    def failed(self, event):
        pass

    def names(self):
        return [event.command_name for event in self.started_commands]


@pytest.mark.parametrize("compressor", ["zlib", "snappy", "zstd", "zstd,snappy,zlib", ""])
def test_compressors(db, tenant, compressor):
    """Case 27."""
    with connect(**({"compressors": compressor} if compressor else {})) as client:
        # That it is really used, the handshake says.
        hello = client.admin.command("hello", compression=[c for c in compressor.split(",") if c])
        assert hello.get("compression", []) == [c for c in compressor.split(",") if c]
        orders = client[db.name].orders
        text = "compress me " * 1000
        orders.insert_many([order(tenant, n, n * 10, text=text) for n in range(10)])
        assert orders.count_documents({"tenant": tenant, "text": text}) == 10
        assert len(list(orders.find({"tenant": tenant}, batch_size=3))) == 10
        assert orders.delete_many({"tenant": tenant}).deleted_count == 10
        with pytest.raises(OperationFailure):
            client[db.name].command("noSuchCommand")


@pytest.mark.parametrize("age", [0, 90])
def test_documents_of_ten_megabytes(orders, tenant, age):
    big = os.urandom(10_000_000)
    orders.insert_many([order(tenant, n, age, big=big) for n in range(6)])
    for document in orders.find({"tenant": tenant}):
        assert document["big"] == big
    orders.update_one({"_id": f"{tenant}-0"}, {"$set": {"small": 1}})
    found = orders.find_one({"_id": f"{tenant}-0"})
    assert found["big"] == big and found["small"] == 1
    assert orders.count_documents({"tenant": tenant}) == 6
    orders.replace_one({"_id": f"{tenant}-1"}, order(tenant, 1, age, big=big[::-1]))
    assert orders.find_one({"_id": f"{tenant}-1"})["big"] == big[::-1]
    assert orders.delete_many({"tenant": tenant}).deleted_count == 6


def test_a_big_archived_document_changes(orders, tenant, archived):
    big = os.urandom(15_000_000)
    archived(orders, [order(tenant, 1, 90, big=big)])
    orders.update_one({"_id": f"{tenant}-1"}, {"$inc": {"n": 1}})
    found = orders.find_one({"_id": f"{tenant}-1"})
    assert found["big"] == big and found["n"] == 1
    orders.delete_one({"_id": f"{tenant}-1"})


def test_documents_too_large(orders, tenant):
    with pytest.raises(DocumentTooLarge):
        orders.insert_one(order(tenant, 1, big=b"x" * 17_000_000))
    orders.insert_one(order(tenant, 2, big=b"x" * 9_000_000))
    with pytest.raises(WriteError) as error:
        orders.update_one({"_id": f"{tenant}-2"}, {"$set": {"more": b"y" * 9_000_000}})
    assert error.value.code == 10334
    orders.delete_one({"_id": f"{tenant}-2"})


@pytest.mark.parametrize("filter", [{"tenant": "history"}, {"tenant": "history", "status": "paid"}])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 100, 1000])
def test_small_batches(db, filter, batch_size):
    commands = Commands()
    with connect(event_listeners=[commands]) as client:
        cursor = client[db.name].orders.find(filter, batch_size=batch_size).sort("number")
        expected = [d for d in DOCUMENTS if filter.get("status", d["status"]) == d["status"]]
        assert list(cursor) == expected
        assert not cursor.alive
    assert commands.names().count("getMore") >= (len(expected) - 1) // batch_size


def test_recent_cursors_in_small_batches(orders, tenant):
    orders.insert_many([order(tenant, n) for n in range(50)])
    recent = {"tenant": tenant, "created_at": {"$gte": DOCUMENTS[1]["created_at"]}}
    cursor = orders.find(recent, batch_size=3).sort("number")
    assert [d["number"] for d in cursor] == list(range(50))
    # What is deleted while a cursor is open is gone or seen, the rest is seen once.
    cursor = orders.find(recent, batch_size=2)
    first = next(cursor)["number"]
    orders.delete_many({"tenant": tenant, "number": {"$gte": 25}})
    rest = [d["number"] for d in cursor]
    assert first in range(50) and set(range(25)) <= {first, *rest} and len(rest) == len(set(rest))


def test_kill_cursors(client, db, orders):
    """Case 14."""
    for batch in ({"tenant": "history"}, {"_id": {"$gte": "h0000", "$lt": "h0300"}}):
        cursor = orders.find(batch, batch_size=2)
        next(cursor)
        id = cursor.cursor_id
        assert id
        cursor.close()
        with pytest.raises(OperationFailure) as error:
            db.command({"getMore": Int64(id), "collection": "orders"})
        assert error.value.code == 43
        assert isinstance(error.value, CursorNotFound)
    with client.start_session() as session:
        cursors = [orders.find({"tenant": "history"}, batch_size=2, session=session) for _ in range(3)]
        ids = [(next(cursor), cursor.cursor_id)[1] for cursor in cursors]
        reply = db.command("killCursors", "orders", cursors=[*ids, Int64(12345)], session=session)
        assert sorted(reply["cursorsKilled"]) == sorted(ids)
        assert reply["cursorsNotFound"] == [12345]
        assert reply["cursorsAlive"] == [] and reply["ok"] == 1


def test_a_cursor_goes_on_over_another_connection(client, db):
    """Case 14: the pool gives the getMore another connection while the first is busy."""
    with connect() as other, other.start_session() as session:
        orders = other[db.name].orders
        cursor = orders.find({"tenant": "history"}, batch_size=5, session=session).sort("number")
        seen = [next(cursor)["number"]]
        # The connection just used is the one that the pool hands out first.
        started = threading.Event()

        def wait():
            started.set()
            with orders.watch(max_await_time_ms=1500) as stream:
                stream.try_next()

        waiter = threading.Thread(target=wait)
        waiter.start()
        started.wait()
        time.sleep(0)
        seen += [d["number"] for d in cursor]
        waiter.join()
    assert seen == list(range(400))


def test_many_abandoned_cursors(db, servers):
    """Case 14. When the client closes, its sessions end, and their cursors with them."""

    def open_cursors():
        counts = [s.admin.command("serverStatus")["metrics"]["cursor"]["open"]["total"] for s in servers]
        return sum(counts)

    before = open_cursors()
    client = connect()
    cursors = [client[db.name].orders.find({"tenant": "history"}, batch_size=1) for _ in range(100)]
    for cursor in cursors:
        next(cursor)
    assert open_cursors() >= before + 100
    del cursor, cursors
    client.close()
    until("abandoned cursors to go", lambda: open_cursors() < before + 50)


def test_get_more_of_another_namespace_is_refused(client, db, orders, plain):
    plain.insert_one({})
    with client.start_session() as session:
        cursor = orders.find({"tenant": "history"}, batch_size=2, session=session)
        next(cursor)
        get_more = {"getMore": Int64(cursor.cursor_id), "collection": plain.name}
        with pytest.raises(OperationFailure) as error:
            db.command(get_more, session=session)
        assert error.value.code == 13
        # Nor from another session.
        with pytest.raises(OperationFailure) as error:
            db.command({**get_more, "collection": "orders"})
        assert error.value.code == 50738
        assert len(list(cursor)) == 399


def test_unacknowledged_writes_then_a_read(db, tenant):
    """Case 10: no reply to the first, and the next reply belongs to the read."""
    with connect(maxPoolSize=1) as client:
        orders = client[db.name].orders
        careless = orders.with_options(write_concern=WriteConcern(w=0))
        for n in range(20):
            document = order(tenant, n, n * 10)
            assert not careless.insert_one(document).acknowledged
            assert orders.find_one({"_id": document["_id"]}) == document
            careless.update_one({"_id": document["_id"]}, {"$set": {"v": n}})
            assert orders.find_one({"_id": document["_id"]})["v"] == n
        # Errors of unacknowledged writes are nobody's reply either.
        careless.insert_one(order(tenant, 1))
        assert orders.count_documents({"tenant": tenant}) == 20
        careless.delete_many({"tenant": tenant})
        assert orders.count_documents({"tenant": tenant}) == 0


def retry_faults():
    yield "closeConnection", {"closeConnection": True}
    yield "not primary", {"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}
    # The write is done; only the reply says otherwise.
    yield "after the write", {
        "writeConcernError": {
            "code": 91, "codeName": "ShutdownInProgress", "errmsg": "a test's",
            "errorLabels": ["RetryableWriteError"],
        }
    }  # fmt: skip


@pytest.mark.parametrize("fault", retry_faults(), ids=lambda fault: fault[0])
def test_retryable_writes_happen_once(servers, orders, tenant, archived, fault):
    """Case 16."""
    archived(orders, [order(tenant, "old", 90, v=0)])
    orders.insert_one(order(tenant, "recent", v=0))
    fast, _ = servers

    def broken(command, write):
        data = {"failCommands": [command], "namespace": orders.full_name, **fault[1]}
        fast.admin.command(
            {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data}
        )
        try:
            return write()
        finally:
            fast.admin.command({"configureFailPoint": "failCommand", "mode": "off"})

    increment = {"$inc": {"v": 1}}
    for number in ("old", "recent"):
        by_id = {"_id": f"{tenant}-{number}"}
        result = broken("update", lambda: orders.update_one(by_id, increment))  # noqa: B023
        assert (result.matched_count, result.modified_count) == (1, 1)
        before = broken("findAndModify", lambda: orders.find_one_and_update(by_id, increment))  # noqa: B023
        assert before["v"] == 1
        assert orders.find_one(by_id)["v"] == 2
    result = broken("insert", lambda: orders.insert_many([order(tenant, n) for n in range(3)]))
    assert len(result.inserted_ids) == 3
    result = broken(
        "update",
        lambda: orders.bulk_write(
            [UpdateOne({"_id": f"{tenant}-{n}"}, increment) for n in ("old", "recent", 0, 1)]
        ),
    )
    assert (result.matched_count, result.modified_count) == (4, 4)
    assert orders.find_one({"_id": f"{tenant}-old"})["v"] == 3
    result = broken("delete", lambda: orders.delete_one({"_id": f"{tenant}-old"}))
    assert result.deleted_count == 1
    assert orders.count_documents({"tenant": tenant}) == 4


def test_retryable_reads(servers, orders):
    _, archive = servers
    data = {"failCommands": ["find", "aggregate"], "namespace": orders.full_name, "closeConnection": True}
    for server in servers:
        server.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data})
        try:
            assert orders.find_one({"_id": "h0300"})["number"] == 300
            assert orders.count_documents({"tenant": "history"}) == 400
        finally:
            server.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


def test_many_clients_at_once(tenant, db):
    """Forty threads share one pool of ten."""
    failures = []
    with connect(maxPoolSize=10) as client:
        orders = client[db.name].orders

        def work(worker):
            try:
                for n in range(5):
                    document = order(tenant, f"{worker}-{n}", 20 * n, worker=worker)
                    orders.insert_one(document)
                    assert orders.find_one({"_id": document["_id"]}) == document
                    assert orders.find_one({"_id": "h0350"})["number"] == 350
                orders.bulk_write(
                    [InsertOne(order(tenant, f"{worker}-b{n}", 40 * n)) for n in range(5)], ordered=False
                )
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(40)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures
        assert orders.count_documents({"tenant": tenant}) == 400


def test_stable_api(db, orders, tenant):
    from pymongo.server_api import ServerApi

    with connect(server_api=ServerApi("1", strict=True, deprecation_errors=True)) as client:
        orders = client[db.name].orders
        orders.insert_one(order(tenant, 1, 90))
        assert orders.count_documents({"tenant": tenant}) == 1
        assert orders.find_one({"_id": "h0300"})["number"] == 300
        assert len(list(orders.find({"tenant": "history"}, batch_size=50))) == 400
        with pytest.raises(OperationFailure) as error:
            orders.distinct("number")
        assert error.value.code == 323  # APIStrictError


def test_handshake():
    with connect() as client:
        hello = client.admin.command("hello")
        assert hello["isWritablePrimary"] is True
        assert hello["maxBsonObjectSize"] == 16 * 1024 * 1024
        assert hello["maxMessageSizeBytes"] == 48_000_000
        assert hello["maxWriteBatchSize"] == 100_000
        assert hello["logicalSessionTimeoutMinutes"] == 30
        assert hello["minWireVersion"] <= 9 and hello["maxWireVersion"] >= 17
        assert client.server_info()["version"].split(".")[0] >= "6"
    for options in ("?retryWrites=false", "?directConnection=true", "?appName=suite&w=majority&journal=true"):
        uri = URI.split("?")[0] + options
        with connect(uri=uri) as client:
            assert client.python.orders.find_one({"_id": "h0300"})["number"] == 300
