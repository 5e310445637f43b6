"""Every BSON type and every odd `_id`, byte for byte, recent and archived and brought back."""

import datetime
import math
import struct
import uuid

import bson
import pytest
from bson import (
    DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, SON, Timestamp, json_util,
)  # fmt: skip
from bson.binary import Binary, UuidRepresentation
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from conftest import order, wait_archived
from pymongo.errors import DuplicateKeyError

RAW = CodecOptions(document_class=RawBSONDocument)

VALUES = {
    "double": [0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan],
    "string": ["", "text", "ünïcödé 🦀", "with\0nul", "x" * 10_000],
    "document": [{}, {"a": {"b": {"c": 1}}}, {"": 1}, {"a.b": 1, "$x": 2, "10": 3}],
    "array": [[], [1, [2, [3]]], [None, {}, ""]],
    "binary": [Binary(b"", n) for n in (0, 1, 3, 5, 6, 7, 8, 128, 255)]
    + [Binary(b"\0\1\2", 0), Binary(b"old", 2), Binary(b"0123456789abcdef", 3), Binary(b"0123456789abcdef", 4)],
    "uuid": [Binary.from_uuid(uuid.UUID(int=n), UuidRepresentation.STANDARD) for n in range(2)],
    "objectid": [ObjectId(), ObjectId("0" * 24), ObjectId("f" * 24)],
    "bool": [True, False],
    "date": [
        datetime.datetime(1970, 1, 1), datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999000),
    ],
    "null": [None],
    "regex": [Regex("^a.*b$", "imsx"), Regex(""), Regex("ü")],
    "code": [Code("function () { return 1 }"), Code("")],
    "code with scope": [Code("f(x)", {"x": 1, "y": {"z": []}})],
    "int32": [0, 1, -1, 2**31 - 1, -(2**31)],
    "int64": [Int64(0), Int64(1), Int64(2**63 - 1), Int64(-(2**63))],
    "timestamp": [Timestamp(1, 1), Timestamp(2**32 - 1, 2**32 - 1)],
    "decimal128": [Decimal128(v) for v in ("0", "-0", "1.0", "1.00", "NaN", "Infinity", "9.999999999999999999999999999999999E+6144")],
    "minkey and maxkey": [MinKey(), MaxKey()],
    "reference": [DBRef("other", 1), DBRef("other", ObjectId(), "elsewhere", extra=1)],
}  # fmt: skip


def raw_element(type, name, value):
    return bytes([type]) + name.encode() + b"\0" + value


def raw_document(*elements):
    body = b"".join(elements) + b"\0"
    return struct.pack("<i", len(body) + 4) + body


def deprecated():
    """Types that drivers cannot write any more and old data still has."""
    text = struct.pack("<i", 4) + b"sym\0"
    return raw_document(
        raw_element(0x06, "undefined", b""),
        raw_element(0x0C, "dbpointer", struct.pack("<i", 4) + b"a.b\0" + b"x" * 12),
        raw_element(0x0E, "symbol", text),
        raw_element(0x08, "twice", b"\1"),
        raw_element(0x08, "twice", b"\0"),
    )


def everything(tenant, number, age):
    """One document with every value, as bytes."""
    values = {
        f"{kind} {n}": value for kind, values in VALUES.items() for n, value in enumerate(values)
    }
    document = bson.encode(SON([*order(tenant, number, age).items(), ("values", values)]))
    extra = raw_element(0x03, "deprecated", deprecated())
    body = document[4:-1] + extra + b"\0"
    return RawBSONDocument(struct.pack("<i", len(body) + 4) + body)


@pytest.mark.parametrize("age", [0, 90], ids=["recent", "archived"])
def test_every_type_round_trips(orders, tenant, servers, age):
    raw = orders.with_options(codec_options=RAW)
    document = everything(tenant, 1, age)
    raw.insert_one(document)
    id = f"{tenant}-1"
    assert raw.find_one({"_id": id}).raw == document.raw
    assert raw.find_one({"tenant": tenant}).raw == document.raw
    if age:
        wait_archived(servers, orders, [id])
        assert raw.find_one({"_id": id}).raw == document.raw
        assert raw.find_one({"tenant": tenant}).raw == document.raw
        # Brought back unchanged by a write that changes nothing, and by one that adds a field.
        result = orders.update_one({"_id": id}, {"$set": {"number": 1}})
        assert (result.matched_count, result.modified_count) == (1, 0)
        assert raw.find_one({"_id": id}).raw == document.raw
        orders.update_one({"_id": id}, {"$set": {"z": 1}})
        expected = document.raw[4:-1] + raw_element(0x10, "z", struct.pack("<i", 1)) + b"\0"
        expected = struct.pack("<i", len(expected) + 4) + expected
        assert raw.find_one({"_id": id}).raw == expected
        wait_archived(servers, orders, [id])
        assert raw.find_one({"_id": id}).raw == expected
        assert raw.find_one_and_delete({"_id": id}).raw == expected
        assert raw.find_one({"_id": id}) is None


def test_queries_by_every_type(orders, tenant, archived):
    kinds = {
        "double": 1.5, "string": "x", "object": {"a": 1}, "array": [1, 2], "binData": Binary(b"1", 128),
        "objectId": ObjectId(), "bool": True, "date": datetime.datetime(2001, 1, 1), "null": None,
        "regex": Regex("a"), "javascript": Code("x"), "int": 1, "timestamp": Timestamp(5, 5),
        "long": Int64(2**40), "decimal": Decimal128("2.5"), "minKey": MinKey(), "maxKey": MaxKey(),
    }  # fmt: skip
    documents = [order(tenant, name, 90, v=value) for name, value in kinds.items()]
    archived(orders, documents)
    for name, value in kinds.items():
        by_type = {d["number"] for d in orders.find({"tenant": tenant, "v": {"$type": name}})}
        assert name in by_type, name
        filter = {"tenant": tenant, "v": {"$eq": value}}
        assert name in {d["number"] for d in orders.find(filter)}, name
        assert orders.update_many(filter, {"$set": {"seen": True}}).matched_count >= 1, name
    # BSON's order of types.
    ordered = [d["number"] for d in orders.find({"tenant": tenant}).sort("v", 1)]
    assert ordered[0] == "minKey" and ordered[-1] == "maxKey"
    assert orders.count_documents({"tenant": tenant, "seen": True}) == len(kinds)


def odd_ids(salt):
    """Case 6: distinct where a mongod says distinct. The salt keeps runs apart."""
    code = int(salt[:6], 16)
    half = uuid.UUID(int=code).bytes
    return [
        Binary(half, 3), Binary(half, 4), Binary(half, 0), Binary(half, 5),
        {"x": 1, "y": 2, "s": salt}, {"y": 2, "x": 1, "s": salt}, {"x": 1, "y": 2, "s": salt, "z": {}},
        {"s": salt}, {"s": [salt]}, {"s": salt, "n": None},
        salt, salt.upper() + "X", salt + "\0", salt + " ", "x" * 900 + salt,
        code, code + 0.5, -code, Int64(code + 2**40), Decimal128(f"{code}.25"),
        ObjectId(salt + salt), datetime.datetime(2000, 1, 1) + datetime.timedelta(milliseconds=code),
        Timestamp(code, 1), Code(salt), Code(salt, {"a": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize("age", [0, 90], ids=["recent", "archived"])
def test_odd_ids(orders, tenant, archived, age):
    ids = odd_ids(tenant)
    documents = [{**order(tenant, n, age), "_id": id} for n, id in enumerate(ids)]
    raw = orders.with_options(codec_options=RAW)
    if age:
        archived(orders, documents)
    else:
        orders.insert_many(documents)
    for n, id in enumerate(ids):
        by_id = {"_id": {"$eq": id}}
        found = list(raw.find(by_id))
        assert [d["number"] for d in found] == [n], id
        assert found[0].raw == bson.encode(documents[n]), id
        assert orders.count_documents(by_id) == 1
        with pytest.raises(DuplicateKeyError):
            orders.insert_one({**order(tenant, "twice"), "_id": id})
        result = orders.update_one(by_id, {"$set": {"v": n}})
        assert (result.matched_count, result.modified_count) == (1, 1), id
    found = {d["number"]: d["v"] for d in orders.find({"tenant": tenant})}
    assert found == {n: n for n in range(len(ids))}
    many = orders.find({"_id": {"$in": ids}})
    assert sorted(d["number"] for d in many) == list(range(len(ids)))
    for id in ids[:5]:
        assert orders.delete_one({"_id": {"$eq": id}}).deleted_count == 1
    assert orders.delete_many({"_id": {"$in": ids}}).deleted_count == len(ids) - 5


def test_ids_without_a_salt(orders, tenant):
    """Null, the empty document, keys at the ends: one each in a collection."""
    ids = [None, {}, "", MinKey(), MaxKey(), math.nan, math.inf, Int64(-(2**63)), False]
    orders.delete_many({"_id": {"$in": ids}})
    orders.insert_many([{**order(tenant, n, 45 * n), "_id": id} for n, id in enumerate(ids)])
    for n, id in enumerate(ids):
        assert [d["number"] for d in orders.find({"_id": {"$eq": id}})] == [n]
        with pytest.raises(DuplicateKeyError):
            orders.insert_one({**order(tenant, "twice"), "_id": id})
        assert orders.delete_one({"_id": {"$eq": id}}).deleted_count == 1


@pytest.mark.parametrize("age", [0, 90], ids=["recent", "archived"])
def test_equal_numbers_are_one_id(orders, tenant, archived, age):
    """Case 6: 1, 1.0 and decimal 1 are duplicates of one another."""
    number = int(tenant[:7], 16) + 2**30
    kinds = [Int64(number), float(number), Decimal128(str(number)), Decimal128(f"{number}.0")]
    document = {**order(tenant, 1, age), "_id": kinds[0]}
    if age:
        archived(orders, [document])
    else:
        orders.insert_one(document)
    for other in kinds:
        with pytest.raises(DuplicateKeyError) as error:
            orders.insert_one({**order(tenant, 2), "_id": other})
        assert error.value.details["keyValue"] == {"_id": other} or number in error.value.details["keyValue"].values()
        assert orders.find_one({"_id": other})["number"] == 1
        assert orders.update_one({"_id": other}, {"$inc": {"v": 1}}).modified_count == 1
    # The document keeps the type it was inserted with.
    assert type(orders.find_one({"_id": kinds[1]})["_id"]) is Int64
    assert orders.delete_one({"_id": kinds[2]}).deleted_count == 1


@pytest.mark.parametrize("id", [[1, 2], Regex("a"), {"$x": 1}], ids=["array", "regex", "dollar"])
def test_ids_that_cannot_be(orders, plain, id):
    """The error is the server's own, as for any collection."""
    errors = []
    for collection in (plain, orders):
        with pytest.raises(Exception) as error:
            collection.insert_one({"_id": id})
        errors.append((type(error.value), getattr(error.value, "code", None)))
    assert errors[0] == errors[1]


def test_dates_outside_of_pythons_range(orders, tenant):
    options = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
    far = orders.with_options(codec_options=options)
    from bson.datetime_ms import DatetimeMS

    values = [DatetimeMS(2**62), DatetimeMS(-(2**62)), DatetimeMS(2**63 - 1)]
    far.insert_many({**order(tenant, n), "created_at": v} for n, v in enumerate(values))
    for n, value in enumerate(values):
        assert far.find_one({"_id": f"{tenant}-{n}"})["created_at"] == value
    newest = next(far.find({"tenant": tenant}).sort("created_at", -1).limit(1))
    assert newest["number"] == 2


def test_deep_documents(orders, tenant, archived):
    nested = 1
    for _ in range(90):
        nested = {"d": nested}
    archived(orders, [order(tenant, 1, 90, nested=nested)])
    orders.update_one({"_id": f"{tenant}-1"}, {"$set": {"v": 1}})
    assert orders.find_one({"_id": f"{tenant}-1"})["nested"] == nested


def test_extended_json(orders, tenant):
    """As tools do that export and import."""
    written = order(tenant, 1, 0, d=Decimal128("1.5"), r=Regex("a"), n=Int64(5), b=b"\0")
    document = json_util.loads(json_util.dumps(written))
    orders.insert_one(document)
    assert json_util.dumps(orders.find_one({"_id": f"{tenant}-1"})) == json_util.dumps(document)
