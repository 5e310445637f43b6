"""Bulk writes: ordered and unordered, over documents here and there, with the client's own indexes."""

import pytest
from bson import ObjectId
from conftest import days_ago, order
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError
from pymongo.write_concern import WriteConcern


@pytest.mark.parametrize("ordered", [True, False])
def test_every_kind_at_once(orders, tenant, archived, ordered):
    archived(orders, [order(tenant, n, 60 + n, v=0) for n in range(6)])
    orders.insert_many([order(tenant, n, 0, v=0) for n in range(6, 12)])
    id = lambda n: f"{tenant}-{n}"  # noqa: E731
    result = orders.bulk_write(
        [
            InsertOne(order(tenant, 100)),
            InsertOne(order(tenant, 101, 60)),
            UpdateOne({"_id": id(0)}, {"$inc": {"v": 1}}),
            UpdateOne({"_id": id(6)}, {"$inc": {"v": 1}}),
            UpdateOne({"_id": id("nobody")}, {"$inc": {"v": 1}}),
            UpdateOne(
                {"_id": id("new")},
                {"$set": {"tenant": tenant, "created_at": days_ago(0)}},
                upsert=True,
            ),
            UpdateOne({"_id": id(1)}, {"$set": {"v": 7}}, upsert=True),
            UpdateMany({"tenant": tenant, "number": {"$in": [2, 7]}}, {"$set": {"v": 5}}),
            ReplaceOne({"_id": id(3)}, order(tenant, 3, 60, v="replaced")),
            DeleteOne({"_id": id(4)}),
            DeleteMany({"tenant": tenant, "number": {"$in": [5, 8, 100]}}),
        ],
        ordered=ordered,
    )
    assert result.inserted_count == 2
    # 0, 6, 1, 2, 7, 3.
    assert (result.matched_count, result.modified_count) == (6, 6)
    assert result.upserted_ids == {5: id("new")}
    # In an unordered bulk write PyMongo groups the kinds, so inserts still come before deletes.
    assert result.deleted_count == 4
    after = {d["_id"]: d.get("v") for d in orders.find({"tenant": tenant})}
    assert after == {
        id(101): None, id(0): 1, id(6): 1, id("new"): None, id(1): 7, id(2): 5, id(7): 5,
        id(3): "replaced", id(9): 0, id(10): 0, id(11): 0,
    }  # fmt: skip


def duplicates(tenant):
    """Inserts of which 1 meets a document of the archive, 3 a recent one, 5 one of the same command."""
    return [
        InsertOne(order(tenant, n))
        for n in ["new0", "old", "new1", "recent", "new2", "new0", "new3"]
    ]


def test_ordered_stops_at_the_first_error(orders, tenant, archived):
    archived(orders, [order(tenant, "old", 90)])
    orders.insert_one(order(tenant, "recent"))
    with pytest.raises(BulkWriteError) as error:
        orders.bulk_write(duplicates(tenant))
    details = error.value.details
    assert details["nInserted"] == 1
    (failed,) = details["writeErrors"]
    assert failed["index"] == 1 and failed["code"] == 11000
    assert failed["keyPattern"] == {"_id": 1} and failed["keyValue"] == {"_id": f"{tenant}-old"}
    assert failed["errmsg"] == (
        f"E11000 duplicate key error collection: {orders.full_name} index: _id_ "
        f'dup key: {{ _id: "{tenant}-old" }}'
    )
    assert failed["op"]["_id"] == f"{tenant}-old"
    assert orders.count_documents({"tenant": tenant}) == 3


def test_unordered_goes_on(orders, tenant, archived):
    archived(orders, [order(tenant, "old", 90)])
    orders.insert_one(order(tenant, "recent"))
    with pytest.raises(BulkWriteError) as error:
        orders.bulk_write(duplicates(tenant), ordered=False)
    details = error.value.details
    assert details["nInserted"] == 4
    assert [(e["index"], e["code"]) for e in details["writeErrors"]] == [
        (1, 11000),
        (3, 11000),
        (5, 11000),
    ]
    assert orders.count_documents({"tenant": tenant}) == 6


@pytest.mark.parametrize("ordered", [True, False])
def test_errors_of_updates_keep_their_places(orders, tenant, archived, ordered):
    archived(orders, [order(tenant, n, 90, v="text") for n in range(3)])
    orders.insert_many([order(tenant, n, 0, v=1) for n in range(3, 6)])
    # $inc of a text fails: 0, 1 and 2.
    requests = [
        UpdateOne({"_id": f"{tenant}-{n}"}, {"$inc": {"v": 1}}) for n in (3, 0, 4, 1, 5, 2)
    ]
    with pytest.raises(BulkWriteError) as error:
        orders.bulk_write(requests, ordered=ordered)
    details = error.value.details
    places = [e["index"] for e in details["writeErrors"]]
    assert places == ([1] if ordered else [1, 3, 5])
    assert all(e["code"] == 14 for e in details["writeErrors"])
    assert details["nModified"] == (1 if ordered else 3)
    changed = {d["number"] for d in orders.find({"tenant": tenant, "v": 2})}
    assert changed == ({3} if ordered else {3, 4, 5})


def test_deletes_in_bulk(orders, tenant, archived):
    archived(orders, [order(tenant, n, 90) for n in range(10)])
    orders.insert_many([order(tenant, n) for n in range(10, 20)])
    result = orders.bulk_write(
        [DeleteOne({"_id": f"{tenant}-{n}"}) for n in (0, 10, 0, 11, 1, "nobody")]
    )
    assert result.deleted_count == 4
    result = orders.bulk_write(
        [DeleteMany({"tenant": tenant, "number": {"$lt": n}}) for n in (5, 5, 15)], ordered=False
    )
    assert result.deleted_count == 3 + 8
    assert orders.count_documents({"tenant": tenant}) == 5


def test_a_large_batch(orders, tenant):
    """More than one command's worth of statements (drivers split at 100,000) is too slow for a test;
    several thousands are one command in many parts."""
    documents = [order(tenant, n, n % 60, pad="x" * 200) for n in range(3000)]
    assert len(orders.insert_many(documents, ordered=False).inserted_ids) == 3000
    assert orders.count_documents({"tenant": tenant}) == 3000
    result = orders.bulk_write(
        [UpdateOne({"_id": f"{tenant}-{n}"}, {"$set": {"v": n}}) for n in range(0, 3000, 3)]
    )
    assert (result.matched_count, result.modified_count) == (1000, 1000)
    assert orders.delete_many({"tenant": tenant, "v": {"$exists": True}}).deleted_count == 1000
    assert orders.count_documents({"tenant": tenant}) == 2000


def test_generated_ids(orders, tenant):
    documents = [{"tenant": tenant, "created_at": days_ago(n)} for n in (0, 90)]
    inserted = orders.insert_many(documents).inserted_ids
    assert all(isinstance(id, ObjectId) for id in inserted)
    assert {d["_id"] for d in orders.find({"tenant": tenant})} == set(inserted)


def test_unacknowledged(orders, tenant):
    careless = orders.with_options(write_concern=WriteConcern(w=0))
    result = careless.bulk_write([InsertOne(order(tenant, n)) for n in range(3)], ordered=False)
    assert not result.acknowledged


def test_options_of_statements(orders, tenant, archived):
    archived(orders, [order(tenant, n, 90, name="Anna", tags=[1, 2, 3]) for n in range(2)])
    blind = {"locale": "en", "strength": 2}
    result = orders.bulk_write(
        [
            UpdateOne({"_id": f"{tenant}-0", "name": "ANNA"}, {"$set": {"a": 1}}, collation=blind),
            UpdateOne({"_id": f"{tenant}-0", "name": "ANNA"}, {"$set": {"a": 2}}),
            UpdateMany(
                {"tenant": tenant}, {"$set": {"tags.$[t]": 0}}, array_filters=[{"t": {"$gt": 1}}]
            ),
            UpdateOne({"_id": f"{tenant}-1"}, {"$set": {"b": 1}}, hint="_id_"),
            DeleteOne({"tenant": tenant, "name": "anna", "number": 1}, collation=blind),
        ],
        let=None,
        comment="every option",
    )
    assert (result.matched_count, result.modified_count, result.deleted_count) == (4, 4, 1)
    (left,) = orders.find({"tenant": tenant})
    assert left["a"] == 1 and left["tags"] == [1, 0, 0]
