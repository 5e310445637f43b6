"""Documents written, read, changed and deleted one by one, recent and old alike."""

import pytest
from bson import ObjectId
from conftest import days_ago, order
from pymongo import ReturnDocument

AGES = pytest.mark.parametrize("age", [0, 29, 31, 700], ids=lambda age: f"{age}_days")


@AGES
def test_insert_find_update_delete(orders, tenant, age):
    document = order(tenant, 1, age, amount=5)
    result = orders.insert_one(document)
    assert result.acknowledged and result.inserted_id == document["_id"]
    assert orders.find_one({"_id": document["_id"]}) == document

    result = orders.update_one({"_id": document["_id"]}, {"$set": {"amount": 6}})
    assert (result.matched_count, result.modified_count, result.upserted_id) == (1, 1, None)
    result = orders.update_one({"_id": document["_id"]}, {"$set": {"amount": 6}})
    assert (result.matched_count, result.modified_count) == (1, 0)
    assert orders.find_one({"tenant": tenant}) == {**document, "amount": 6}

    replacement = {**document, "amount": 7, "replaced": True}
    result = orders.replace_one({"_id": document["_id"]}, replacement)
    assert (result.matched_count, result.modified_count) == (1, 1)
    assert orders.find_one({"tenant": tenant}) == replacement

    assert orders.delete_one({"_id": document["_id"]}).deleted_count == 1
    assert orders.delete_one({"_id": document["_id"]}).deleted_count == 0
    assert orders.find_one({"_id": document["_id"]}) is None
    assert orders.count_documents({"tenant": tenant}) == 0


def test_archived_documents_change_like_others(orders, tenant, archived):
    archived(orders, [order(tenant, n, 100 + n, amount=n, tags=["a", "b"]) for n in range(8)])
    ids = [f"{tenant}-{n}" for n in range(8)]

    result = orders.update_one({"_id": ids[0]}, {"$inc": {"amount": 10}, "$push": {"tags": "c"}})
    assert (result.matched_count, result.modified_count) == (1, 1)
    result = orders.update_one({"_id": ids[1], "amount": 99}, {"$set": {"wrong": True}})
    assert (result.matched_count, result.modified_count) == (0, 0)
    result = orders.update_one({"tenant": tenant, "amount": 2}, {"$set": {"by_filter": True}})
    assert (result.matched_count, result.modified_count) == (1, 1)
    result = orders.replace_one({"_id": ids[3]}, order(tenant, 3, 100, replaced=True))
    assert (result.matched_count, result.modified_count) == (1, 1)
    assert orders.delete_one({"_id": ids[4]}).deleted_count == 1
    assert orders.delete_one({"tenant": tenant, "number": 5}).deleted_count == 1
    result = orders.update_one({"_id": ids[6], "tags": "b"}, {"$set": {"tags.$": "B"}})
    assert result.modified_count == 1

    after = {document["_id"]: document for document in orders.find({"tenant": tenant})}
    assert set(after) == {ids[0], ids[1], ids[2], ids[3], ids[6], ids[7]}
    assert after[ids[0]]["amount"] == 10 and after[ids[0]]["tags"] == ["a", "b", "c"]
    assert "wrong" not in after[ids[1]]
    assert after[ids[2]]["by_filter"] is True
    assert after[ids[3]]["replaced"] is True
    assert after[ids[6]]["tags"] == ["a", "B"]


def test_many_documents_of_every_age_at_once(orders, tenant, archived):
    archived(orders, [order(tenant, n, 50 + n, group=n % 2) for n in range(10)])
    orders.insert_many([order(tenant, n, 0, group=n % 2) for n in range(10, 20)])

    result = orders.update_many({"tenant": tenant, "group": 0}, {"$inc": {"seen": 1}})
    assert (result.matched_count, result.modified_count) == (10, 10)
    result = orders.update_many({"tenant": tenant, "group": 0}, {"$set": {"seen": 1}})
    assert (result.matched_count, result.modified_count) == (10, 0)
    result = orders.update_many({"tenant": tenant, "group": 7}, {"$set": {"seen": 1}})
    assert (result.matched_count, result.modified_count) == (0, 0)
    assert orders.count_documents({"tenant": tenant, "seen": 1}) == 10

    result = orders.delete_many({"tenant": tenant, "group": 1})
    assert result.deleted_count == 10
    assert sorted(d["number"] for d in orders.find({"tenant": tenant})) == list(range(0, 20, 2))
    assert orders.delete_many({"tenant": tenant}).deleted_count == 10
    assert orders.count_documents({"tenant": tenant}) == 0


def test_writes_by_a_filter_on_the_date(orders, tenant, archived):
    archived(orders, [order(tenant, n, 60 + n) for n in range(4)])
    orders.insert_many([order(tenant, n, 0) for n in range(4, 8)])
    recent = {"tenant": tenant, "created_at": {"$gte": days_ago(1)}}
    old = {"tenant": tenant, "created_at": {"$lt": days_ago(1)}}
    assert orders.update_many(recent, {"$set": {"recent": True}}).modified_count == 4
    assert orders.update_many(old, {"$set": {"recent": False}}).modified_count == 4
    assert orders.count_documents({"tenant": tenant, "recent": True}) == 4
    assert orders.delete_many(old).deleted_count == 4
    assert orders.count_documents({"tenant": tenant}) == 4


def test_upserts(orders, tenant, archived):
    archived(orders, [order(tenant, 1, 90)])
    # One that exists on the archive only is changed, not inserted.
    result = orders.update_one({"_id": f"{tenant}-1"}, {"$set": {"n": 1}}, upsert=True)
    assert (result.matched_count, result.modified_count, result.upserted_id) == (1, 1, None)
    # A new one.
    result = orders.update_one(
        {"_id": f"{tenant}-2"},
        {"$set": {"tenant": tenant, "created_at": days_ago(0)}, "$inc": {"n": 3}},
        upsert=True,
    )
    assert (result.matched_count, result.modified_count) == (0, 0)
    assert result.upserted_id == f"{tenant}-2"
    # An old one, replaced as a whole.
    result = orders.replace_one({"_id": f"{tenant}-3"}, order(tenant, 3, 90), upsert=True)
    assert result.upserted_id == f"{tenant}-3"
    # By a filter that is not the key: the server chooses an _id.
    filter = {"tenant": tenant, "code": "x"}
    result = orders.update_one(filter, {"$setOnInsert": {"created_at": days_ago(0)}}, upsert=True)
    assert isinstance(result.upserted_id, ObjectId)
    result = orders.update_one(filter, {"$set": {"again": True}}, upsert=True)
    assert (result.matched_count, result.upserted_id) == (1, None)
    assert orders.count_documents({"tenant": tenant}) == 4


def test_find_one_and(orders, tenant, archived):
    old = archived(orders, [order(tenant, n, 90 + n, rank=n) for n in range(4)])
    assert orders.find_one_and_update({"_id": old[0]["_id"]}, {"$set": {"rank": 10}}) == old[0]
    after = orders.find_one_and_update(
        {"_id": old[1]["_id"]}, {"$inc": {"rank": 10}}, return_document=ReturnDocument.AFTER
    )
    assert after == {**old[1], "rank": 11}
    first = orders.find_one_and_update(
        {"tenant": tenant},
        {"$set": {"first": True}},
        sort=[("rank", 1)],
        projection={"rank": 1},
        return_document=ReturnDocument.AFTER,
    )
    assert first == {"_id": old[2]["_id"], "rank": 2}
    replacement = order(tenant, 3, 90, rank=20)
    assert orders.find_one_and_replace({"_id": old[3]["_id"]}, replacement) == old[3]
    last = orders.find_one_and_delete({"tenant": tenant}, sort=[("rank", -1)])
    assert last == replacement
    assert orders.find_one_and_delete({"_id": old[3]["_id"]}) is None
    assert orders.find_one_and_update({"_id": "nobody"}, {"$set": {"x": 1}}) is None
    upserted = orders.find_one_and_update(
        {"_id": f"{tenant}-new"},
        {"$set": {"tenant": tenant, "created_at": days_ago(0)}},
        upsert=True,
        return_document=ReturnDocument.AFTER,
    )
    assert upserted["tenant"] == tenant
    assert orders.count_documents({"tenant": tenant}) == 4


def test_array_filters_and_update_pipelines(orders, tenant, archived):
    lines = [{"sku": "a", "n": 1}, {"sku": "b", "n": 2}, {"sku": "c", "n": 3}]
    archived(orders, [order(tenant, n, 90, lines=lines, amount=n) for n in range(2)])
    result = orders.update_one(
        {"_id": f"{tenant}-0"},
        {"$inc": {"lines.$[big].n": 10}},
        array_filters=[{"big.n": {"$gte": 2}}],
    )
    assert result.modified_count == 1
    assert [line["n"] for line in orders.find_one({"_id": f"{tenant}-0"})["lines"]] == [1, 12, 13]
    # Case 21: a pipeline that shortens an array, and sets odd names.
    result = orders.update_many(
        {"tenant": tenant},
        [
            {"$set": {"lines": {"$slice": ["$lines", 1]}, "double": {"$multiply": ["$amount", 2]}}},
            {"$replaceWith": {"$setField": {"field": {"$literal": "$a.b"}, "input": "$$ROOT", "value": 1}}},
        ],
    )
    assert result.modified_count == 2
    for n, document in enumerate(orders.find({"tenant": tenant}).sort("number")):
        assert len(document["lines"]) == 1 and document["double"] == 2 * n
        assert document["$a.b"] == 1


def test_a_document_that_grows_old_and_young_again(orders, tenant, archived, servers):
    document = archived(orders, [order(tenant, 1, 90)])[0]
    orders.update_one({"_id": document["_id"]}, {"$set": {"created_at": days_ago(0)}})
    recent = {"tenant": tenant, "created_at": {"$gte": days_ago(1)}}
    assert orders.count_documents(recent) == 1
    orders.update_one({"_id": document["_id"]}, {"$set": {"created_at": days_ago(365)}})
    assert orders.count_documents(recent) == 0
    assert orders.count_documents({"tenant": tenant}) == 1


def test_documents_without_a_usable_date(orders, tenant):
    odd = ["2024-01-01", None, [days_ago(90), days_ago(0)], 17, {"nested": days_ago(0)}]
    orders.insert_many({**order(tenant, n), "created_at": date} for n, date in enumerate(odd))
    orders.insert_one({"_id": f"{tenant}-absent", "tenant": tenant})
    found = sorted(d["_id"] for d in orders.find({"tenant": tenant}))
    assert found == sorted([*(f"{tenant}-{n}" for n in range(len(odd))), f"{tenant}-absent"])
    recent = list(orders.find({"tenant": tenant, "created_at": {"$gte": days_ago(1)}}))
    assert [d["_id"] for d in recent] == [f"{tenant}-2"]
    assert orders.update_many({"tenant": tenant}, {"$set": {"x": 1}}).modified_count == 6
    assert orders.delete_many({"tenant": tenant}).deleted_count == 6


def test_dates_in_milliseconds(db, tenant, archived):
    """The other tiered collection, whose date is a number."""
    readings = db.readings
    now = int(days_ago(0).timestamp() * 1000)
    day = 86_400_000
    old = [{"_id": f"{tenant}-{n}", "at": now - (40 + n) * day, "t": tenant} for n in range(3)]
    archived(readings, old)
    readings.insert_many({"_id": f"{tenant}-r{n}", "at": now - n, "t": tenant} for n in range(3))
    assert readings.count_documents({"t": tenant}) == 6
    assert readings.count_documents({"t": tenant, "at": {"$gte": now - day}}) == 3
    newest = list(readings.find({"t": tenant}).sort("at", -1).limit(2))
    assert [d["_id"] for d in newest] == [f"{tenant}-r0", f"{tenant}-r1"]
    assert readings.update_one({"_id": f"{tenant}-0"}, {"$set": {"v": 1}}).modified_count == 1
    assert readings.delete_many({"t": tenant}).deleted_count == 6


def test_untiered_collections_are_the_same_as_ever(plain):
    plain.insert_many([{"_id": n, "v": n % 3} for n in range(30)])
    assert plain.update_many({"v": 0}, {"$set": {"w": 1}}).modified_count == 10
    assert plain.find_one_and_delete({"v": 1}, sort=[("_id", -1)])["_id"] == 28
    assert plain.delete_many({"v": 2}).deleted_count == 10
    assert plain.distinct("v") == [0, 1]
    assert plain.estimated_document_count() == 19
