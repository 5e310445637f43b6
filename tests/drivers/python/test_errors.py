"""Errors: duplicates with keyPattern and keyValue (case 7), write concerns that cannot be met (case
18), bad commands. Code and form are a mongod's."""

import pytest
from conftest import order, through_only
from pymongo import InsertOne, UpdateOne
from pymongo.errors import (
    BulkWriteError, DuplicateKeyError, InvalidOperation, OperationFailure, WriteConcernError, WriteError,
)  # fmt: skip
from pymongo.write_concern import WriteConcern

AGES = pytest.mark.parametrize("age", [0, 90], ids=["recent", "archived"])


def put(orders, archived, age, *documents):
    if age:
        archived(orders, list(documents))
    else:
        orders.insert_many(documents)


@AGES
def test_duplicate_id(orders, tenant, archived, age):
    put(orders, archived, age, order(tenant, 1, age, v=1))
    with pytest.raises(DuplicateKeyError) as error:
        orders.insert_one(order(tenant, 1))
    details = error.value.details
    assert details["code"] == 11000
    assert details["keyPattern"] == {"_id": 1}
    assert details["keyValue"] == {"_id": f"{tenant}-1"}
    assert details["index"] == 0
    assert details["errmsg"] == (
        f"E11000 duplicate key error collection: {orders.full_name} index: _id_ "
        f'dup key: {{ _id: "{tenant}-1" }}'
    )
    assert orders.find_one({"_id": f"{tenant}-1"})["v"] == 1
    assert orders.count_documents({"tenant": tenant}) == 1


@pytest.fixture
def unique(plain):
    """Untiered: Halocline refuses to tier a collection with a unique index besides `_id`."""
    plain.create_index([("reference", 1)], unique=True, sparse=True)
    return plain


def test_duplicate_value_of_a_unique_index(unique, tenant):
    orders = unique
    orders.insert_many([order(tenant, 1, reference=f"U{tenant}"), order(tenant, 2)])
    expected = {"keyPattern": {"reference": 1}, "keyValue": {"reference": f"U{tenant}"}, "code": 11000}

    def is_refused(write):
        with pytest.raises(OperationFailure) as error:
            write()
        details = error.value.details
        assert {name: details.get(name) for name in expected} == expected

    same = {"reference": f"U{tenant}"}
    is_refused(lambda: orders.insert_one(order(tenant, 3, **same)))
    is_refused(lambda: orders.update_one({"_id": f"{tenant}-2"}, {"$set": same}))
    is_refused(lambda: orders.replace_one({"_id": f"{tenant}-2"}, order(tenant, 2, **same)))
    is_refused(lambda: orders.find_one_and_update({"_id": f"{tenant}-2"}, {"$set": same}))
    is_refused(
        lambda: orders.update_one({"_id": f"{tenant}-4"}, {"$set": {"tenant": tenant, **same}}, upsert=True)
    )
    assert orders.count_documents({"tenant": tenant}) == 2
    assert orders.count_documents(same) == 1
    # Once it is given up, another may have it.
    orders.update_one({"_id": f"{tenant}-1"}, {"$unset": {"reference": ""}})
    orders.update_one({"_id": f"{tenant}-2"}, {"$set": same})
    assert orders.find_one(same)["number"] == 2


def test_find_by_a_unique_value_then_swap(unique, tenant):
    """Case 9."""
    orders = unique
    orders.insert_many([order(tenant, 1, reference=f"A{tenant}"), order(tenant, 2, reference=f"B{tenant}")])
    assert orders.find_one({"reference": f"A{tenant}"})["number"] == 1
    assert orders.delete_one({"reference": f"A{tenant}"}).deleted_count == 1
    orders.insert_one(order(tenant, 3, 0, reference=f"A{tenant}"))
    assert orders.find_one({"reference": f"A{tenant}"})["number"] == 3
    client = orders.database.client

    def swap(session):
        orders.update_one({"_id": f"{tenant}-2"}, {"$set": {"reference": f"tmp{tenant}"}}, session=session)
        orders.update_one({"_id": f"{tenant}-3"}, {"$set": {"reference": f"B{tenant}"}}, session=session)
        orders.update_one({"_id": f"{tenant}-2"}, {"$set": {"reference": f"A{tenant}"}}, session=session)

    with client.start_session() as session:
        session.with_transaction(swap)
    found = {d["number"]: d["reference"] for d in orders.find({"tenant": tenant})}
    assert found == {2: f"A{tenant}", 3: f"B{tenant}"}


UNMET = WriteConcern(w=5, wtimeout=1)


def is_unmet(error):
    """`{w: 5}` where there are fewer members: done, and reported."""
    assert error.code == 100
    assert error.details["codeName"] in ("UnsatisfiableWriteConcern", "CannotSatisfyWriteConcern")


@AGES
def test_write_concern_that_cannot_be_met(orders, tenant, archived, age):
    """Case 18: done, and said so."""
    put(orders, archived, age, *(order(tenant, n, age, v=0) for n in range(8)))
    strict = orders.with_options(write_concern=UNMET)
    id = lambda n: {"_id": f"{tenant}-{n}"}  # noqa: E731
    writes = {
        "insert_one": lambda: strict.insert_one(order(tenant, 100, age)),
        "update_one": lambda: strict.update_one(id(0), {"$set": {"v": 1}}),
        "update_one by filter": lambda: strict.update_one({"tenant": tenant, "number": 1}, {"$set": {"v": 1}}),
        "update_many": lambda: strict.update_many({"tenant": tenant, "number": {"$in": [2, 3]}}, {"$set": {"v": 1}}),
        "replace_one": lambda: strict.replace_one(id(4), order(tenant, 4, age, v=1)),
        "delete_one": lambda: strict.delete_one(id(5)),
        "delete_many": lambda: strict.delete_many({"tenant": tenant, "number": 6}),
        "find_one_and_update": lambda: strict.find_one_and_update(id(7), {"$set": {"v": 1}}),
        "upsert": lambda: strict.update_one(id(101), {"$set": {"tenant": tenant, "v": 1}}, upsert=True),
    }  # fmt: skip
    for name, write in writes.items():
        with pytest.raises(WriteConcernError) as error:
            pytest.fail(f"{name} was acknowledged: {write()}")
        is_unmet(error.value)
    assert orders.count_documents({"tenant": tenant}) == 8
    assert orders.count_documents({"tenant": tenant, "v": 1}) == 7


@AGES
@pytest.mark.parametrize("ordered", [True, False])
def test_write_concern_of_bulk_writes(orders, tenant, archived, age, ordered):
    put(orders, archived, age, *(order(tenant, n, age, v=0) for n in range(3)))
    strict = orders.with_options(write_concern=UNMET)
    with pytest.raises(BulkWriteError) as error:
        strict.bulk_write(
            [
                InsertOne(order(tenant, 10, age)),
                UpdateOne({"_id": f"{tenant}-0"}, {"$set": {"v": 1}}),
                UpdateOne({"tenant": tenant, "number": 1}, {"$set": {"v": 1}}),
                UpdateOne({"_id": f"{tenant}-nobody"}, {"$set": {"v": 1}}),
            ],
            ordered=ordered,
        )
    details = error.value.details
    assert details["writeErrors"] == []
    assert {e["code"] for e in details["writeConcernErrors"]} == {100}
    assert len(details["writeConcernErrors"]) == 2
    assert (details["nInserted"], details["nMatched"], details["nModified"]) == (1, 2, 2)
    # A write error and a write concern error in one reply.
    with pytest.raises(BulkWriteError) as error:
        strict.bulk_write([InsertOne(order(tenant, 11)), InsertOne(order(tenant, 10))], ordered=ordered)
    details = error.value.details
    assert [e["index"] for e in details["writeErrors"]] == [1]
    assert [e["code"] for e in details["writeConcernErrors"]] == [100]


def test_write_concern_of_untiered_writes(plain):
    strict = plain.with_options(write_concern=UNMET)
    for write in (lambda: strict.insert_one({"_id": 1}), lambda: strict.update_many({}, {"$set": {"v": 1}})):
        with pytest.raises(WriteConcernError) as error:
            write()
        is_unmet(error.value)
    assert plain.find_one({"_id": 1})["v"] == 1


def test_a_matching_nothing_write_with_an_unmet_concern(orders, tenant):
    strict = orders.with_options(write_concern=UNMET)
    with pytest.raises(WriteConcernError) as error:
        strict.update_one({"_id": f"{tenant}-nobody"}, {"$set": {"v": 1}})
    is_unmet(error.value)


BAD = {
    "operator": (lambda c: c.find_one({"x": {"$nonsense": 1}}), 2),
    "id operator": (lambda c: c.find_one({"_id": {"$nonsense": 1}}), 2),
    "update operator": (lambda c: c.update_one({"_id": "h0300"}, {"$nonsense": {"a": 1}}), 9),
    "changed id": (lambda c: c.update_one({"_id": "h0300"}, {"$set": {"_id": 2}}), 66),
    "changed id of a recent one": (lambda c: c.update_one({"_id": "h0001"}, {"$set": {"_id": 2}}), 66),
    "increment of text": (lambda c: c.update_one({"_id": "h0300"}, {"$inc": {"status": 1}}), 14),
    "conflicting update": (lambda c: c.update_one({"_id": "h0300"}, {"$set": {"a": 1}, "$inc": {"a": 1}}), 40),
    "stage": (lambda c: list(c.aggregate([{"$nonsense": 1}])), 40324),
    "expression": (lambda c: list(c.aggregate([{"$set": {"a": {"$nonsense": 1}}}])), 168),
    "collation": (lambda c: c.find_one({"a": 1}, collation={"locale": "nowhere"}), 2),
    "projection": (lambda c: c.find_one({}, {"a": 1, "b": 0}), 31254),
    "array filter": (lambda c: c.update_one({"_id": "h0300"}, {"$set": {"items.$[x].q": 1}}, array_filters=[]), 2),
    "unknown variable": (lambda c: c.find_one({"$expr": {"$eq": ["$a", "$$nobody"]}}), 17276),
    "distinct": (lambda c: c.database.command("distinct", "orders", key=1), 14),
    "command": (lambda c: c.database.command("noSuchCommand"), 59),
    "hint": (lambda c: c.update_one({"_id": "h0300"}, {"$set": {"a": 1}}, hint="nobody"), 2),
    "text": (lambda c: c.find_one({"$text": {"$search": "x"}}), 27),
    "near": (lambda c: c.find_one({"place": {"$near": [1, 1]}}), 291),
    "negative skip": (lambda c: c.database.command("find", "orders", skip=-1), 51024),
    "unknown field": (lambda c: c.database.command("find", "orders", nonsense=1), 40415),
    "namespace": (lambda c: c.database.command("find", ""), 73),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_commands(orders, name):
    run, code = BAD[name]
    with pytest.raises(OperationFailure) as error:
        run(orders)
    assert error.value.code == code, error.value.details


def test_nothing_changed_by_bad_commands(orders):
    assert orders.find_one({"_id": "h0300"})["status"] == "paid"
    assert "a" not in orders.find_one({"_id": "h0300"})


def test_validation(db, tenant):
    name = f"validated_{tenant}"
    db.create_collection(name, validator={"$jsonSchema": {"required": ["a"]}})
    with pytest.raises(WriteError) as error:
        db[name].insert_one({"b": 1})
    assert error.value.code == 121
    assert error.value.details["errInfo"]["details"]["operatorName"] == "$jsonSchema"
    db.drop_collection(name)


@through_only
def test_refusals_say_what_to_do(client, db, orders):
    """What Halocline does not do, it says with a proper code."""
    refused = [
        (lambda: client.admin.command("shutdown"), 115),
        (lambda: client.admin.command("replSetStepDown", 1), 115),
        (lambda: db.command("renameCollection", f"{db.name}.orders", to=f"{db.name}.others"), 115),
        (lambda: client.admin.command("renameCollection", f"{db.name}.orders", to=f"{db.name}.x"), 115),
        (lambda: orders.drop(), 115),
        (lambda: client.drop_database(db.name), 115),
        (lambda: client.halocline.state.find_one(), 13),
    ]
    for run, code in refused:
        with pytest.raises(OperationFailure) as error:
            run()
        assert error.value.code == code and len(error.value.details["errmsg"]) > 20, error.value


def test_client_side_errors_are_the_same(orders):
    with pytest.raises((InvalidOperation, ValueError)):
        orders.bulk_write([])
