"""Change streams: what applications changed, in order, resumed after a break, and nothing of moves
between the tiers (case 30)."""

import pytest
from conftest import MODE, PATIENCE, connect, order, wait_archived
from pymongo.errors import OperationFailure


def collect(stream, count):
    """The next so many events."""
    import time

    events, began = [], time.monotonic()
    while len(events) < count:
        event = stream.try_next()
        if event is not None:
            events.append(event)
        assert time.monotonic() - began < PATIENCE, f"{len(events)} of {count} events came"
    return events


def only(tenant):
    """Events of one test: moves and other tests' changes would show otherwise. Deletes carry the key
    alone, which has the tenant in it."""
    return [{"$match": {"documentKey._id": {"$regex": f"^{tenant}-"}}}]


def test_every_kind_of_change(orders, tenant):
    with orders.watch(only(tenant), max_await_time_ms=200) as stream:
        document = order(tenant, 1)
        orders.insert_one(document)
        orders.update_one({"_id": document["_id"]}, {"$set": {"v": 1}, "$unset": {"number": ""}})
        orders.replace_one({"_id": document["_id"]}, {**document, "replaced": True})
        orders.delete_one({"_id": document["_id"]})
        inserted, updated, replaced, deleted = collect(stream, 4)
    assert [e["operationType"] for e in (inserted, updated, replaced, deleted)] == [
        "insert", "update", "replace", "delete",
    ]  # fmt: skip
    assert inserted["fullDocument"] == document
    assert inserted["ns"] == {"db": orders.database.name, "coll": "orders"}
    assert updated["updateDescription"]["updatedFields"] == {"v": 1}
    assert updated["updateDescription"]["removedFields"] == ["number"]
    assert replaced["fullDocument"]["replaced"] is True
    assert deleted["documentKey"] == {"_id": document["_id"]} and "fullDocument" not in deleted


def test_moves_between_the_tiers_do_not_show(orders, tenant, archived, servers):
    """Case 30. The document leaves the fast tier, is brought back by the update, and leaves again."""
    with orders.watch(only(tenant), max_await_time_ms=200, full_document="updateLookup") as stream:
        (document,) = archived(orders, [order(tenant, 1, 90)])
        orders.update_one({"_id": document["_id"]}, {"$set": {"v": 1}})
        wait_archived(servers, orders, [document["_id"]])
        orders.update_one({"_id": document["_id"]}, {"$set": {"v": 2}})
        wait_archived(servers, orders, [document["_id"]])
        orders.insert_one(order(tenant, "end"))
        events = collect(stream, 4)
    assert [e["operationType"] for e in events] == ["insert", "update", "update", "insert"]
    assert events[3]["documentKey"] == {"_id": f"{tenant}-end"}


def test_full_documents(orders, tenant, archived):
    (document,) = archived(orders, [order(tenant, 1, 90, a=1)])
    with orders.watch(only(tenant), max_await_time_ms=200, full_document="updateLookup") as stream:
        orders.update_one({"_id": document["_id"]}, {"$set": {"b": 2}})
        (event,) = collect(stream, 1)
    assert event["fullDocument"] == {**document, "b": 2}


@pytest.mark.parametrize("how", ["resume_after", "start_after"])
def test_resume(orders, tenant, how):
    with orders.watch(only(tenant), max_await_time_ms=200) as stream:
        orders.insert_many([order(tenant, n) for n in range(3)])
        first = collect(stream, 1)[0]
        token = stream.resume_token
    assert token == first["_id"]
    orders.insert_many([order(tenant, n) for n in range(3, 6)])
    # Another client goes on where the first stopped.
    with connect() as other:
        theirs = other[orders.database.name].orders
        with theirs.watch(only(tenant), max_await_time_ms=200, **{how: token}) as stream:
            rest = collect(stream, 5)
    assert [e["documentKey"]["_id"] for e in rest] == [f"{tenant}-{n}" for n in range(1, 6)]


def test_start_at_a_time(client, orders, tenant):
    with client.start_session() as session:
        orders.insert_one(order(tenant, 0), session=session)
        since = session.operation_time
    orders.insert_one(order(tenant, 1))
    with orders.watch(only(tenant), start_at_operation_time=since, max_await_time_ms=200) as stream:
        events = collect(stream, 2)
    assert [e["documentKey"]["_id"] for e in events] == [f"{tenant}-{n}" for n in range(2)]


def test_an_idle_stream_still_advances(orders, tenant):
    with orders.watch(only(tenant), max_await_time_ms=50) as stream:
        assert stream.try_next() is None
        before = stream.resume_token
        orders.insert_one({"_id": f"someone-else-{tenant}", "tenant": tenant})
        import time

        began = time.monotonic()
        while stream.resume_token == before:
            assert stream.try_next() is None
            assert time.monotonic() - began < PATIENCE
        token = stream.resume_token
    orders.insert_one(order(tenant, 1))
    with orders.watch(only(tenant), resume_after=token, max_await_time_ms=200) as stream:
        assert collect(stream, 1)[0]["documentKey"]["_id"] == f"{tenant}-1"


def test_a_stream_survives_its_connection(servers, orders, tenant):
    """The driver resumes by itself after an error of the server, at the right place."""
    fast, _ = servers
    with orders.watch(only(tenant), max_await_time_ms=200) as stream:
        orders.insert_one(order(tenant, 0))
        assert collect(stream, 1)[0]["documentKey"]["_id"] == f"{tenant}-0"
        fault = {
            "configureFailPoint": "failCommand",
            "mode": {"times": 1},
            # 11600 InterruptedAtShutdown, which drivers resume after.
            "data": {
                "failCommands": ["getMore"], "errorCode": 11600, "namespace": orders.full_name,
                "errorLabels": ["ResumableChangeStreamError"],
            },
        }  # fmt: skip
        fast.admin.command(fault)
        try:
            orders.insert_many([order(tenant, n) for n in range(1, 4)])
            events = collect(stream, 3)
        finally:
            fast.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
    assert [e["documentKey"]["_id"] for e in events] == [f"{tenant}-{n}" for n in range(1, 4)]


def test_transactions_show_as_their_changes(client, orders, tenant):
    with orders.watch(only(tenant), max_await_time_ms=200) as stream:
        with client.start_session() as session, session.start_transaction():
            orders.insert_many([order(tenant, n) for n in range(3)], session=session)
            orders.delete_one({"_id": f"{tenant}-0"}, session=session)
        events = collect(stream, 4)
    assert [e["operationType"] for e in events] == ["insert"] * 3 + ["delete"]
    assert len({e["clusterTime"] for e in events}) == 1


def test_untiered_collections(plain):
    plain.insert_one({"_id": 0})
    with plain.watch(max_await_time_ms=200) as stream:
        plain.insert_one({"_id": 1})
        plain.update_one({"_id": 1}, {"$set": {"v": 1}})
        events = collect(stream, 2)
    assert [e["operationType"] for e in events] == ["insert", "update"]
    plain.insert_one({"_id": 2})
    with plain.watch(resume_after=events[0]["_id"], max_await_time_ms=200) as stream:
        assert [e["operationType"] for e in collect(stream, 2)] == ["update", "insert"]


def test_a_database_and_the_deployment(client, db, plain, tenant):
    ours = [{"$match": {"ns.coll": plain.name}}]
    for watched in (db, client):
        with watched.watch(ours, max_await_time_ms=200) as stream:
            plain.insert_one({"tenant": tenant})
            (event,) = collect(stream, 1)
            assert event["ns"]["coll"] == plain.name and event["operationType"] == "insert"


def test_a_token_that_is_none_is_refused(orders):
    with pytest.raises(OperationFailure) as error:
        orders.watch(resume_after={"_data": "nonsense"})
    assert error.value.code in (9, 40647, 40649, 50811) or MODE
