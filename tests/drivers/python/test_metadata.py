"""Definitions: what there is, and what applications create at start."""

import pytest
from conftest import MODE
from pymongo import IndexModel
from pymongo.errors import CollectionInvalid, DuplicateKeyError, OperationFailure


def test_collections_and_databases(client, db, plain):
    plain.insert_one({})
    names = db.list_collection_names()
    assert {"orders", "readings", "products", plain.name} <= set(names)
    (described,) = db.list_collections(filter={"name": "orders"})
    assert described["type"] == "collection" and described["idIndex"]["name"] == "_id_"
    assert not described["info"]["readOnly"] and described["info"]["uuid"]
    assert db.name in client.list_database_names()
    (database,) = client.list_databases(filter={"name": db.name})
    assert database["sizeOnDisk"] > 0 and database["empty"] is False


def test_indexes(orders):
    information = orders.index_information()
    assert information["created_at"]["key"] == [("created_at", -1)]
    assert information["reference"]["sparse"] is True
    assert [index["name"] for index in orders.list_indexes()] == [
        "_id_", "created_at", "tenant_created_at", "reference",
    ]  # fmt: skip


def test_indexes_of_untiered_collections(plain):
    plain.insert_many([{"a": n, "b": n % 2, "t": f"word{n}"} for n in range(10)])
    assert plain.create_index([("a", 1)], unique=True) == "a_1"
    assert plain.create_index([("a", 1)], unique=True) == "a_1"
    names = plain.create_indexes(
        [
            IndexModel([("b", -1), ("a", 1)], name="both"),
            IndexModel([("t", "text")]),
            IndexModel([("c", 1)], expireAfterSeconds=3600, partialFilterExpression={"b": 1}),
            IndexModel([("place", "2dsphere")]),
            IndexModel([("$**", 1)], name="wild"),
            IndexModel([("h", "hashed")]),
        ]
    )
    assert names[0] == "both" and len(plain.index_information()) == 8
    with pytest.raises(DuplicateKeyError):
        plain.insert_one({"a": 1})
    assert plain.count_documents({"$text": {"$search": "word3"}}) == 1
    assert plain.count_documents({"b": 1}, hint="both") == 5
    with pytest.raises(OperationFailure) as error:
        plain.create_index([("a", 1)], name="other", unique=True)
    assert error.value.code == 85  # IndexOptionsConflict
    plain.drop_index("both")
    plain.drop_indexes()
    assert list(plain.index_information()) == ["_id_"]


def test_creating_what_is_there_already(db, orders):
    """Applications do so at every start, and get the answer they always got."""
    assert orders.create_index([("created_at", -1)], name="created_at") == "created_at"
    assert orders.create_index([("reference", 1)], name="reference", sparse=True) == "reference"
    with pytest.raises(CollectionInvalid):
        db.create_collection("orders")
    with pytest.raises(OperationFailure) as error:
        db.command("create", "orders", capped=True, size=1000)
    assert error.value.code == 48


def test_create_rename_drop(client, db, tenant):
    name = f"made_{tenant}"
    made = db.create_collection(name, capped=True, size=100_000, max=5)
    made.insert_many([{"_id": n} for n in range(10)])
    assert made.count_documents({}) == 5 and made.options()["capped"] is True
    with pytest.raises(CollectionInvalid):
        db.create_collection(name)
    made.rename(f"{name}_renamed")
    assert db[f"{name}_renamed"].count_documents({}) == 5
    db.drop_collection(f"{name}_renamed")
    assert db.drop_collection("nobody")["ok"] in (0, 1) if MODE else None
    assert f"{name}_renamed" not in db.list_collection_names()
    other = client[f"made_{tenant}"]
    other.things.insert_one({})
    client.drop_database(other)
    assert other.name not in client.list_database_names()


def test_time_series_and_clustered(db, tenant):
    import datetime

    name = f"series_{tenant}"
    db.create_collection(name, timeseries={"timeField": "t", "metaField": "m"})
    db[name].insert_many([{"t": datetime.datetime(2024, 1, n + 1), "m": n % 2, "v": n} for n in range(10)])
    assert db[name].count_documents({"m": 1}) == 5
    db.drop_collection(name)
    name = f"clustered_{tenant}"
    db.create_collection(name, clusteredIndex={"key": {"_id": 1}, "unique": True})
    db[name].insert_one({"_id": 5})
    assert db[name].find_one({"_id": 5})
    db.drop_collection(name)


def test_administration(client, db):
    assert client.admin.command("connectionStatus")["ok"] == 1
    assert client.admin.command("getParameter", logLevel=1)["logLevel"] == 0
    assert client.admin.command("serverStatus")["ok"] == 1
    assert client.admin.command("hostInfo")["ok"] == 1
    assert client.admin.command("listCommands")["commands"]
    assert client.admin.command("getLog", "global")["log"] is not None
    assert client.admin.command("whatsmyuri")["ok"] == 1
    assert client.admin.command("currentOp")["ok"] == 1
    assert client.admin.command("buildInfo")["version"]
    assert db.command("profile", -1)["ok"] == 1
    assert db.validate_collection("products")["valid"] is True


def test_users(client, tenant):
    users = client[f"users_{tenant}"]
    users.command("createUser", "someone", pwd="secret", roles=["read"])
    (user,) = users.command("usersInfo", "someone")["users"]
    assert user["user"] == "someone" and user["roles"] == [{"role": "read", "db": users.name}]
    users.command("updateUser", "someone", roles=["readWrite"])
    users.command("dropUser", "someone")
    assert users.command("usersInfo", "someone")["users"] == []
