"""Sessions: transactions over documents of every age (case 28), causal consistency, snapshots."""

import threading

import pytest
from conftest import connect, order, through_only
from pymongo import ReadPreference
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

OPTIONS = {"read_concern": ReadConcern("snapshot"), "write_concern": WriteConcern("majority")}


def balances(orders, tenant):
    return {d["number"]: d["balance"] for d in orders.find({"tenant": tenant})}


def transfer(orders, session, tenant, giver, taker, amount):
    for number, change in ((giver, -amount), (taker, amount)):
        result = orders.update_one(
            {"_id": f"{tenant}-{number}"}, {"$inc": {"balance": change}}, session=session
        )
        assert result.matched_count == 1


def test_with_transaction_over_both_tiers(client, orders, tenant, archived):
    """Case 28: one of the two is on the archive only."""
    archived(orders, [order(tenant, 1, 90, balance=100)])
    orders.insert_one(order(tenant, 2, 0, balance=100))
    with client.start_session() as session:
        session.with_transaction(
            lambda s: transfer(orders, s, tenant, 1, 2, 30), read_concern=OPTIONS["read_concern"],
            write_concern=OPTIONS["write_concern"],
        )  # fmt: skip
        session.with_transaction(lambda s: transfer(orders, s, tenant, 2, 1, 10))
    assert balances(orders, tenant) == {1: 80, 2: 120}


def test_transaction_over_many_archived_documents(client, orders, tenant, archived):
    archived(orders, [order(tenant, n, 90 + n, balance=0) for n in range(6)])
    runs = []

    def work(session):
        runs.append(1)
        for n in range(6):
            orders.update_one({"_id": f"{tenant}-{n}"}, {"$inc": {"balance": 1}}, session=session)
        orders.insert_one(order(tenant, 6, 0, balance=1), session=session)
        orders.delete_one({"_id": f"{tenant}-0"}, session=session)
        return orders.find_one({"_id": f"{tenant}-3"}, session=session)["balance"]

    with client.start_session() as session:
        assert session.with_transaction(work) == 1
    assert balances(orders, tenant) == {n: 1 for n in range(1, 7)}


def test_an_aborted_transaction_leaves_nothing(client, orders, tenant, archived):
    archived(orders, [order(tenant, 1, 90, balance=100)])
    orders.insert_one(order(tenant, 2, 0, balance=100))
    with client.start_session() as session:
        with pytest.raises(ZeroDivisionError):
            session.with_transaction(
                lambda s: (transfer(orders, s, tenant, 2, 1, 30), 1 / 0)
            )
        with session.start_transaction():
            orders.update_one({"_id": f"{tenant}-2"}, {"$inc": {"balance": 1}}, session=session)
            session.abort_transaction()
    assert balances(orders, tenant) == {1: 100, 2: 100}


def test_isolation(client, orders, tenant):
    orders.insert_one(order(tenant, 1, 0, balance=1))
    by_id = {"_id": f"{tenant}-1"}
    with client.start_session() as session:
        session.start_transaction(**OPTIONS)
        orders.update_one(by_id, {"$set": {"balance": 2}}, session=session)
        assert orders.find_one(by_id)["balance"] == 1
        assert orders.find_one(by_id, session=session)["balance"] == 2
        session.commit_transaction()
        # A repeated commit is fine.
        session.commit_transaction()
    assert orders.find_one(by_id)["balance"] == 2


def test_conflicts_are_transient(client, orders, tenant):
    orders.insert_one(order(tenant, 1, 0, balance=0))
    by_id = {"_id": f"{tenant}-1"}
    with client.start_session() as one, client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        orders.update_one(by_id, {"$inc": {"balance": 1}}, session=one)
        with pytest.raises(OperationFailure) as error:
            orders.update_one(by_id, {"$inc": {"balance": 1}}, session=two)
        assert error.value.code == 112
        assert error.value.has_error_label("TransientTransactionError")
        one.commit_transaction()
        two.abort_transaction()
    assert balances(orders, tenant) == {1: 1}


def test_contention(orders, tenant, archived):
    """Four clients, each transferring between documents of both tiers: nothing is lost."""
    archived(orders, [order(tenant, n, 90, balance=100) for n in range(2)])
    orders.insert_many([order(tenant, n, 0, balance=100) for n in range(2, 4)])
    failures = []

    def work(worker):
        try:
            with connect() as client:
                mine = client[orders.database.name].orders
                with client.start_session() as session:
                    for n in range(5):
                        giver, taker = (worker + n) % 4, (worker + 2 * n + 1) % 4
                        if giver != taker:
                            session.with_transaction(
                                lambda s: transfer(mine, s, tenant, giver, taker, 1)  # noqa: B023
                            )
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert sum(balances(orders, tenant).values()) == 400


def test_duplicate_in_a_transaction(client, orders, tenant, archived):
    archived(orders, [order(tenant, "old", 90)])
    orders.insert_one(order(tenant, "recent"))
    for number in ("old", "recent"):
        with client.start_session() as session:
            session.start_transaction()
            orders.insert_one(order(tenant, f"new {number}"), session=session)
            # A document that Halocline must first bring over makes the transaction run again.
            with pytest.raises(PyMongoError) as error:
                orders.insert_one(order(tenant, number), session=session)
            assert error.value.code == 11000 or error.value.has_error_label(
                "TransientTransactionError"
            )
    with client.start_session() as session, pytest.raises(PyMongoError) as error:
        session.with_transaction(lambda s: orders.insert_one(order(tenant, "old"), session=s))
    assert error.value.code == 11000
    assert orders.count_documents({"tenant": tenant}) == 2


def test_bulk_and_find_and_modify_in_a_transaction(client, orders, tenant, archived):
    archived(orders, [order(tenant, n, 90, v=0) for n in range(3)])

    def work(session):
        orders.insert_many([order(tenant, n, 0, v=0) for n in range(3, 6)], session=session)
        before = orders.find_one_and_update(
            {"_id": f"{tenant}-0"}, {"$set": {"v": 1}}, session=session
        )
        orders.delete_many({"_id": {"$in": [f"{tenant}-1", f"{tenant}-3"]}}, session=session)
        orders.update_one(
            {"_id": f"{tenant}-9"}, {"$set": {"tenant": tenant, "v": 9}}, upsert=True, session=session
        )
        return before["v"]

    with client.start_session() as session:
        assert session.with_transaction(work) == 0
    assert {d["_id"]: d["v"] for d in orders.find({"tenant": tenant})} == {
        f"{tenant}-{n}": v for n, v in ((0, 1), (2, 0), (4, 0), (5, 0), (9, 9))
    }


def test_reads_of_both_ages_in_a_transaction(client, orders, tenant, archived):
    archived(orders, [order(tenant, n, 90) for n in range(2)])
    orders.insert_many([order(tenant, n) for n in range(2, 4)])
    ids = [f"{tenant}-{n}" for n in range(4)]

    def work(session):
        one = orders.find_one({"_id": ids[0]}, session=session)
        many = orders.find({"_id": {"$in": ids}}, session=session, batch_size=1).sort("number")
        return [one["number"], *(d["number"] for d in many)]

    with client.start_session() as session:
        assert session.with_transaction(work) == [0, 0, 1, 2, 3]


def test_untiered_transactions(client, plain):
    plain.insert_many([{"_id": n, "v": 0} for n in range(3)])

    def work(session):
        plain.update_many({}, {"$inc": {"v": 1}}, session=session)
        plain.insert_one({"_id": 3, "v": 1}, session=session)
        return plain.count_documents({"v": 1}, session=session)

    with client.start_session() as session:
        assert session.with_transaction(work) == 4
        with session.start_transaction(**OPTIONS):
            cursor = plain.find({}, session=session, batch_size=2)
            assert len(list(cursor)) == 4
    assert plain.count_documents({"v": 1}) == 4


@through_only
def test_tiered_and_untiered_together_are_refused(client, orders, plain, tenant):
    """They live on two replica sets. The application is told before anything is committed."""
    plain.insert_one({"_id": 1})
    with client.start_session() as session:
        session.start_transaction()
        orders.insert_one(order(tenant, 1), session=session)
        with pytest.raises(OperationFailure) as error:
            plain.insert_one({"_id": 2}, session=session)
        assert error.value.code == 263
        assert not error.value.has_error_label("TransientTransactionError")
        session.abort_transaction()
    assert orders.count_documents({"tenant": tenant}) == 0
    assert plain.count_documents({}) == 1


def test_a_session_sees_its_own_writes(client, orders, plain, tenant):
    """Case 17: written on the fast tier, read on the archive, and the other way round."""
    with client.start_session(causal_consistency=True) as session:
        majority = {"read_concern": ReadConcern("majority"), "write_concern": WriteConcern("majority")}
        mine, untiered = orders.with_options(**majority), plain.with_options(**majority)
        for n in range(20):
            mine.insert_one(order(tenant, n, 5 * n), session=session)
            assert mine.count_documents({"tenant": tenant}, session=session) == n + 1
            untiered.insert_one({"_id": n}, session=session)
            assert untiered.count_documents({}, session=session) == n + 1
            mine.update_one({"_id": f"{tenant}-{n}"}, {"$set": {"v": 1}}, session=session)
            assert mine.find_one({"tenant": tenant, "number": n}, session=session)["v"] == 1
        assert session.operation_time is not None and session.cluster_time is not None


def test_times_pass_from_one_client_to_another(client, orders, tenant):
    with client.start_session() as writer:
        orders.insert_one(order(tenant, 1, 0), session=writer)
        with connect() as other, other.start_session(causal_consistency=True) as reader:
            reader.advance_cluster_time(writer.cluster_time)
            reader.advance_operation_time(writer.operation_time)
            theirs = other[orders.database.name].orders
            assert theirs.count_documents({"tenant": tenant}, session=reader) == 1
            assert theirs.find_one({"_id": f"{tenant}-1"}, session=reader)


def test_secondary_reads_of_a_causal_session(client, orders, plain, tenant):
    preferred = ReadPreference.SECONDARY_PREFERRED
    with client.start_session(causal_consistency=True) as session:
        for n in range(10):
            plain.insert_one({"_id": n}, session=session)
            orders.insert_one(order(tenant, n, 10 * n), session=session)
            seen = plain.with_options(read_preference=preferred)
            assert seen.count_documents({}, session=session) == n + 1
            seen = orders.with_options(read_preference=preferred)
            assert seen.count_documents({"tenant": tenant}, session=session) == n + 1


def test_snapshot_sessions(client, plain):
    majority = plain.with_options(write_concern=WriteConcern("majority"))
    majority.insert_many([{"_id": n} for n in range(3)])
    with client.start_session(snapshot=True) as session:
        assert plain.count_documents({}, session=session) == 3
        majority.insert_one({"_id": 3})
        assert plain.count_documents({}, session=session) == 3
        assert len(list(plain.find({}, session=session, batch_size=1))) == 3
    assert plain.count_documents({}) == 4


def test_sessions_end(client, orders):
    session = client.start_session()
    orders.find_one({"_id": "h0001"}, session=session)
    id = session.session_id
    session.end_session()
    reply = client.admin.command("endSessions", [id])
    assert reply["ok"] == 1
    reply = client.admin.command("refreshSessions", [id])
    assert reply["ok"] == 1
    reply = client.admin.command("killSessions", [id])
    assert reply["ok"] == 1
