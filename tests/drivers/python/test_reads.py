"""Queries over a history of which a part is recent: answers computed here, asked there."""

import datetime
import re

import pytest
from bson.son import SON
from conftest import EPOCH, connect, days_ago, history, order, three_members
from pymongo import ASCENDING, DESCENDING, ReadPreference
from pymongo.errors import ExecutionTimeout, OperationFailure
from pymongo.read_concern import ReadConcern

DOCUMENTS = list(history())


def ids(documents):
    return [document["_id"] for document in documents]


def where(condition):
    return [document for document in DOCUMENTS if condition(document)]


FILTERS = {
    "all": ({}, lambda d: True),
    "recent": (
        {"created_at": {"$gte": EPOCH - datetime.timedelta(days=10)}},
        lambda d: d["number"] <= 5,
    ),
    "old": (
        {"created_at": {"$lt": EPOCH - datetime.timedelta(days=10)}},
        lambda d: d["number"] > 5,
    ),
    "across": (
        {"created_at": {"$gte": EPOCH - datetime.timedelta(days=100)}},
        lambda d: d["number"] <= 50,
    ),
    "status": ({"status": "open"}, lambda d: d["status"] == "open"),
    "range": ({"amount": {"$gte": 100, "$lt": 200}}, lambda d: 100 <= d["amount"] < 200),
    "array": ({"items.sku": "s3"}, lambda d: d["number"] % 7 == 3),
    "element": (
        {"items": {"$elemMatch": {"sku": "s3", "quantity": {"$gt": 2}}}},
        lambda d: d["number"] % 7 == 3 and d["number"] % 5 + 1 > 2,
    ),
    "or": (
        {"$or": [{"customer": 3}, {"created_at": {"$gte": EPOCH}}]},
        lambda d: d["customer"] == 3 or d["number"] == 0,
    ),
    "ids": ({"_id": {"$in": ["h0001", "h0399", "nobody"]}}, lambda d: d["number"] in (1, 399)),
    "pattern": ({"_id": re.compile("^h00")}, lambda d: d["number"] < 100),
    "expression": (
        {"$expr": {"$gt": ["$amount", {"$multiply": ["$number", 5]}]}},
        lambda d: d["amount"] > d["number"] * 5,
    ),
    "unique": ({"reference": "R00333"}, lambda d: d["number"] == 333),
    "nothing": ({"status": "lost"}, lambda d: False),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(orders, name):
    filter, condition = FILTERS[name]
    filter = {"tenant": "history", **filter}
    expected = where(condition)
    found = list(orders.find(filter).sort("number", ASCENDING))
    assert found == expected
    assert orders.count_documents(filter) == len(expected)
    assert sorted(orders.distinct("customer", filter)) == sorted({d["customer"] for d in expected})
    newest = list(orders.find(filter).sort("created_at", DESCENDING).limit(5))
    assert newest == expected[:5]
    assert orders.find_one(filter, sort=[("amount", -1), ("_id", 1)]) == next(
        iter(sorted(expected, key=lambda d: (-d["amount"], d["_id"]))), None
    )


@pytest.mark.parametrize("number", [0, 14, 15, 16, 399])
def test_by_id(orders, number):
    expected = DOCUMENTS[number]
    assert orders.find_one(expected["_id"]) == expected
    assert orders.find_one({"_id": expected["_id"], "status": expected["status"]}) == expected
    assert orders.find_one({"_id": expected["_id"], "status": "lost"}) is None
    assert orders.count_documents({"_id": expected["_id"]}) == 1
    assert orders.find_one({"_id": expected["_id"]}, {"amount": 1, "_id": 0}) == {
        "amount": expected["amount"]
    }


def test_sort_skip_limit_projection(orders):
    cursor = orders.find({"tenant": "history"}, {"number": 1, "items.sku": 1, "_id": 0})
    found = list(cursor.sort([("customer", 1), ("number", -1)]).skip(37).limit(50))
    expected = sorted(DOCUMENTS, key=lambda d: (d["customer"], -d["number"]))[37:87]
    assert found == [
        {"number": d["number"], "items": [{"sku": i["sku"]} for i in d["items"]]} for d in expected
    ]
    sliced = orders.find_one({"_id": "h0300"}, {"items": {"$slice": -1}, "status": 1})
    assert sliced["items"] == [{"sku": "gift", "quantity": 1}]
    matched = orders.find_one({"_id": "h0300", "items.sku": "gift"}, {"items.$": 1})
    assert matched == {"_id": "h0300", "items": [{"sku": "gift", "quantity": 1}]}


@pytest.mark.parametrize("limit", [1, 5, 15, 16, 40])
def test_the_newest(orders, limit):
    cursor = orders.find({"tenant": "history"}).sort("created_at", DESCENDING).limit(limit)
    assert list(cursor) == DOCUMENTS[:limit]
    cursor = orders.find({"tenant": "history"}).sort("created_at", DESCENDING)
    assert list(cursor.skip(3).limit(limit)) == DOCUMENTS[3 : 3 + limit]


def test_the_newest_with_equal_dates(orders, tenant):
    date = days_ago(0)
    orders.insert_many({**order(tenant, n), "created_at": date} for n in range(6))
    found = list(orders.find({"tenant": tenant}).sort("created_at", -1).limit(4))
    assert len(found) == 4 and len({d["_id"] for d in found}) == 4


def test_collation(orders):
    filter = {"tenant": "history", "name": "anna 3"}
    exact = ids(where(lambda d: d["name"] == "anna 3"))
    any_case = ids(where(lambda d: d["name"].lower() == "anna 3"))
    assert exact != any_case
    assert ids(orders.find(filter).sort("number")) == exact
    blind = {"locale": "en", "strength": 2}
    assert ids(orders.find(filter).collation(blind).sort("number")) == any_case
    assert orders.count_documents(filter, collation=blind) == len(any_case)
    assert len(orders.distinct("name", {"tenant": "history"})) == 10
    # By _id too: case 19.
    assert orders.find_one({"_id": "H0300"}) is None
    assert orders.find_one({"_id": "H0300"}, collation=blind)["_id"] == "h0300"
    updated = orders.update_one({"_id": "H0300"}, {"$set": {"status": "paid"}}, collation=blind)
    assert (updated.matched_count, updated.modified_count) == (1, 0)


def test_hint_comment_let_and_max_time(orders):
    by_name = orders.find({"tenant": "history"}).hint("tenant_created_at").sort("number")
    assert list(by_name) == DOCUMENTS
    by_keys = orders.find({"tenant": "history"}).hint([("created_at", -1)]).max_time_ms(60_000)
    assert len(list(by_keys.comment("a comment"))) == 400
    with pytest.raises(OperationFailure) as error:
        list(orders.find({"tenant": "history"}).hint("no such index"))
    assert error.value.code == 2
    found = orders.find(
        {"$expr": {"$eq": ["$number", "$$wanted"]}, "tenant": "history"}, let={"wanted": 77}
    )
    assert ids(found) == ["h0077"]
    commented = orders.find({"_id": "h0100"}, comment={"reason": "a document as comment"})
    assert ids(commented) == ["h0100"]
    assert orders.count_documents({"tenant": "history"}, hint="tenant_created_at", maxTimeMS=60_000) == 400
    # Ten milliseconds do not suffice for a query that sleeps in every document.
    slow = {"tenant": "history", "$where": "sleep(50) || true"}
    with pytest.raises(ExecutionTimeout) as error:
        list(orders.find(slow).max_time_ms(10))
    assert error.value.code == 50


def test_where_and_text_free_javascript(orders):
    found = orders.find({"tenant": "history", "$where": "this.number % 100 == 1"}).sort("number")
    assert ids(found) == ["h0001", "h0101", "h0201", "h0301"]


@pytest.mark.parametrize("level", ["local", "available", "majority", "linearizable"])
def test_read_concern(orders, level):
    collection = orders.with_options(read_concern=ReadConcern(level))
    assert collection.find_one({"_id": "h0002"})["number"] == 2
    assert collection.find_one({"_id": "h0302"})["number"] == 302
    assert len(list(collection.find({"tenant": "history", "status": "open"}))) == 133


@pytest.mark.parametrize("mode", ["primary", "primaryPreferred", "secondaryPreferred", "nearest"])
def test_read_preference(db, mode):
    with connect(readPreference=mode) as client:
        orders = client[db.name].orders
        for number in (2, 302):
            assert orders.find_one({"_id": f"h{number:04}"})["number"] == number
        assert orders.count_documents({"tenant": "history"}) == 400
        assert client[db.name].products.count_documents({}) == 7


@three_members
def test_secondaries(db):
    with connect(readPreference="secondary", maxStalenessSeconds=90) as client:
        assert client[db.name].orders.count_documents({"tenant": "history"}) == 400
        assert client[db.name].products.find_one({"_id": "s3"})["price"] == 30


def test_statistics(db, orders):
    assert orders.estimated_document_count() >= 400
    stats = db.command("collStats", "orders")
    assert stats["ns"] == f"{db.name}.orders" and stats["count"] >= 400
    assert db.command("dbStats")["db"] == db.name
    assert next(orders.aggregate([{"$collStats": {"count": {}}}]))["count"] >= 400
    assert db.command("ping")["ok"] == 1


def test_explain(orders):
    for filter in ({"_id": "h0001"}, {"_id": "h0301"}, {"tenant": "history", "status": "open"}):
        plan = orders.find(filter).explain()
        assert plan["ok"] == 1
        assert plan["queryPlanner"]["namespace"] == f"{orders.database.name}.orders"
        assert plan["queryPlanner"]["winningPlan"]
    plan = orders.database.command(
        "explain",
        SON([("find", "orders"), ("filter", {"tenant": "history"})]),
        verbosity="executionStats",
    )
    assert plan["executionStats"]["nReturned"] == 400
    plan = orders.database.command(
        "explain",
        SON([("update", "orders"), ("updates", [{"q": {"_id": "h0001"}, "u": {"$set": {"x": 1}}}])]),
        verbosity="queryPlanner",
    )
    assert plan["ok"] == 1
    assert "x" not in orders.find_one({"_id": "h0001"})


def test_find_raw_batches(orders):
    import bson

    raw = b"".join(orders.find_raw_batches({"tenant": "history"}, batch_size=100))
    assert len(bson.decode_all(raw)) == 400
