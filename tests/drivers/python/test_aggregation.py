"""Pipelines over the whole history, joins, and results written elsewhere."""

import pytest
from conftest import EPOCH, MODE, days_ago, history, order, through_only
from pymongo.errors import OperationFailure

DOCUMENTS = list(history())
MINE = {"$match": {"tenant": "history"}}


def test_group(orders):
    found = list(
        orders.aggregate(
            [
                MINE,
                {"$group": {"_id": "$status", "n": {"$sum": 1}, "total": {"$sum": "$amount"}}},
                {"$sort": {"_id": 1}},
            ]
        )
    )
    expected = []
    for status in ("open", "paid", "void"):
        amounts = [d["amount"] for d in DOCUMENTS if d["status"] == status]
        expected.append({"_id": status, "n": len(amounts), "total": sum(amounts)})
    assert found == expected


def test_recent_part_only(orders):
    since = EPOCH - (DOCUMENTS[0]["created_at"] - DOCUMENTS[7]["created_at"])
    found = orders.aggregate(
        [
            {"$match": {"tenant": "history", "created_at": {"$gte": since}}},
            {"$unwind": "$items"},
            {"$group": {"_id": "$items.sku", "quantity": {"$sum": "$items.quantity"}}},
        ]
    )
    expected = {}
    for document in DOCUMENTS[:8]:
        for item in document["items"]:
            expected[item["sku"]] = expected.get(item["sku"], 0) + item["quantity"]
    assert {d["_id"]: d["quantity"] for d in found} == expected


def test_sort_limit_facet_bucket(orders):
    (facets,) = orders.aggregate(
        [
            MINE,
            {
                "$facet": {
                    "dearest": [
                        {"$sort": {"amount": -1, "_id": 1}},
                        {"$limit": 3},
                        {"$project": {"amount": 1, "_id": 0}},
                    ],
                    "count": [{"$count": "n"}],
                    "buckets": [
                        {"$bucket": {"groupBy": "$amount", "boundaries": [0, 250, 500, 1000]}}
                    ],
                }
            },
        ]
    )
    amounts = sorted((d["amount"] for d in DOCUMENTS), reverse=True)
    assert [d["amount"] for d in facets["dearest"]] == amounts[:3]
    assert facets["count"] == [{"n": 400}]
    assert [b["count"] for b in facets["buckets"]] == [
        sum(1 for a in amounts if low <= a < high) for low, high in ((0, 250), (250, 500), (500, 1000))
    ]


def test_by_id(orders):
    for number in (3, 303):
        (found,) = orders.aggregate(
            [
                {"$match": {"_id": f"h{number:04}"}},
                {"$set": {"twice": {"$multiply": ["$amount", 2]}}},
                {"$unset": "items"},
            ]
        )
        assert found["twice"] == 2 * DOCUMENTS[number]["amount"] and "items" not in found


def test_lookup_from_tiered_to_untiered(orders):
    (found,) = orders.aggregate(
        [
            {"$match": {"_id": "h0003"}},
            {"$lookup": {"from": "products", "localField": "items.sku", "foreignField": "_id", "as": "p"}},
        ]
    )
    assert [p["price"] for p in found["p"]] == [30]


def test_lookup_from_untiered_to_tiered_sees_fresh_writes(db, orders, tenant):
    products = db.products
    for round in range(5):
        orders.insert_one(order(tenant, round, 100 * round, sku="s1"))
        (found,) = products.aggregate(
            [
                {"$match": {"_id": "s1"}},
                {
                    "$lookup": {
                        "from": "orders",
                        "let": {"sku": "$_id"},
                        "pipeline": [
                            {"$match": {"tenant": tenant, "$expr": {"$eq": ["$sku", "$$sku"]}}},
                        ],
                        "as": "orders",
                    }
                },
            ]
        )
        assert len(found["orders"]) == round + 1


def test_union_and_graph_lookup(db, orders, tenant, archived):
    archived(orders, [order(tenant, n, 90, parent=n - 1) for n in range(3)])
    orders.insert_many([order(tenant, n, 0, parent=n - 1) for n in range(3, 5)])
    found = db.products.aggregate(
        [
            {"$match": {"_id": "s1"}},
            {"$unionWith": {"coll": "orders", "pipeline": [{"$match": {"tenant": tenant}}]}},
            {"$count": "n"},
        ]
    )
    assert list(found) == [{"n": 6}]
    (found,) = orders.aggregate(
        [
            {"$match": {"_id": f"{tenant}-4"}},
            {
                "$graphLookup": {
                    "from": "orders",
                    "startWith": "$parent",
                    "connectFromField": "parent",
                    "connectToField": "number",
                    "as": "ancestors",
                    "restrictSearchWithMatch": {"tenant": tenant},
                }
            },
        ]
    )
    assert sorted(a["number"] for a in found["ancestors"]) == [0, 1, 2, 3]


def test_window_functions(orders):
    found = list(
        orders.aggregate(
            [
                MINE,
                {
                    "$setWindowFields": {
                        "partitionBy": "$customer",
                        "sortBy": {"number": 1},
                        "output": {"rank": {"$documentNumber": {}}},
                    }
                },
                {"$match": {"rank": 20}},
                {"$sort": {"customer": 1}},
            ]
        )
    )
    assert [d["number"] for d in found] == [380 + customer for customer in range(20)]


def test_out_and_merge_into_untiered(orders, plain):
    orders.aggregate([MINE, {"$match": {"status": "open"}}, {"$out": plain.name}])
    assert plain.count_documents({}) == 133
    orders.aggregate(
        [MINE, {"$set": {"merged": True}}, {"$merge": {"into": plain.name, "on": "_id"}}]
    )
    assert plain.count_documents({"merged": True}) == 400


@through_only
def test_out_into_tiered_is_refused(db):
    """It would write past both tiers' rules."""
    for stage in ({"$out": "orders"}, {"$merge": {"into": "orders"}}):
        with pytest.raises(OperationFailure) as error:
            db.products.aggregate([stage])
        assert error.value.code == 20 and "tiered" in error.value.details["errmsg"]


def test_options(orders):
    cursor = orders.aggregate(
        [{"$match": {"tenant": "history", "$expr": {"$lt": ["$number", "$$n"]}}}, {"$sort": {"number": 1}}],
        let={"n": 50},
        allowDiskUse=True,
        batchSize=7,
        hint="tenant_created_at",
        comment="options",
        maxTimeMS=60_000,
        collation={"locale": "en"},
    )
    assert [d["number"] for d in cursor] == list(range(50))


def test_views(db, orders, tenant):
    name = f"view_{tenant}"
    db.create_collection(name, viewOn="orders", pipeline=[{"$match": {"tenant": tenant}}])
    try:
        for n in range(3):
            orders.insert_one(order(tenant, n, 60 * n))
            assert db[name].count_documents({}) == n + 1
        assert {d["number"] for d in db[name].find({"number": {"$gt": 0}})} == {1, 2}
        assert name in db.list_collection_names()
    finally:
        db.drop_collection(name)


def test_sample_and_index_statistics(orders):
    assert len(list(orders.aggregate([MINE, {"$sample": {"size": 10}}]))) == 10
    names = {d["name"] for d in orders.aggregate([{"$indexStats": {}}])}
    assert {"_id_", "created_at", "reference"} <= names


def test_database_aggregations(client):
    (document,) = client.admin.aggregate([{"$documents": [{"a": 1}]}]) if MODE else ()
    assert document == {"a": 1}
    sessions = list(client.admin.aggregate([{"$listLocalSessions": {}}, {"$limit": 1}]))
    assert len(sessions) <= 1


def test_map_reduce_into_the_reply(db, orders):
    reply = db.command(
        {
            "mapReduce": "orders",
            "map": "function () { emit(this.status, 1) }",
            "reduce": "function (key, values) { return Array.sum(values) }",
            "query": {"tenant": "history"},
            "out": {"inline": 1},
        }
    )
    assert {r["_id"]: r["value"] for r in reply["results"]} == {"paid": 134, "open": 133, "void": 133}


def test_reads_its_own_writes_by_pipeline(orders, tenant):
    for n in range(10):
        orders.insert_one(order(tenant, n, 10 * n, created=days_ago(10 * n)))
        (count,) = orders.aggregate([{"$match": {"tenant": tenant}}, {"$count": "n"}])
        assert count["n"] == n + 1
