"""What the PyMongo suite shares: clients, collections, and documents that are on the archive only.

Every test runs direct and through Halocline with the same assertions. `SUITE_MODE` says which; a test
that needs to know has a reason and says it.
"""

import datetime
import os
import time
import uuid

import pymongo
import pytest

URI = os.environ["SUITE_URI"]
MODE = os.environ["SUITE_MODE"]
MEMBERS = int(os.environ["SUITE_MEMBERS"])
EPOCH = datetime.datetime.fromtimestamp(
    int(os.environ["SUITE_EPOCH_MS"]) / 1000, datetime.timezone.utc
)
DB = "python"
PATIENCE = 90.0
"""Many times what anything waited for takes. No test asserts a time."""

through_only = pytest.mark.skipif(MODE == "direct", reason="says what Halocline alone does")
three_members = pytest.mark.skipif(MEMBERS < 3, reason="needs secondaries")


def connect(**options):
    """A client of what is under test, which decodes dates with their time zone."""
    options = {"tz_aware": True, "serverSelectionTimeoutMS": PATIENCE * 1000, **options}
    return pymongo.MongoClient(options.pop("uri", URI), **options)


def days_ago(days):
    """A date as servers keep it: whole milliseconds."""
    date = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=days)
    return date.replace(microsecond=date.microsecond // 1000 * 1000)


def until(what, look):
    """Waits until `look` says something true, and returns it."""
    began = time.monotonic()
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() - began < PATIENCE, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def client():
    with connect() as client:
        yield client


@pytest.fixture(scope="session")
def servers():
    """Clients of the replica set that takes the writes, and of the one that keeps everything; direct
    they are one. For faults, and to know where a document is; never to write."""
    with connect(uri=os.environ["SUITE_FAST_URI"]) as fast:
        with connect(uri=os.environ["SUITE_ARCHIVE_URI"]) as archive:
            yield fast, archive


@pytest.fixture
def db(client):
    return client[DB]


@pytest.fixture
def orders(db):
    """The tiered collection. Tests tell their documents from others' by `tenant`."""
    return db.orders


@pytest.fixture
def tenant():
    return uuid.uuid4().hex[:12]


@pytest.fixture
def plain(db):
    """An untiered collection that nobody else uses."""
    collection = db[f"plain_{uuid.uuid4().hex[:12]}"]
    yield collection
    collection.drop()


@pytest.fixture
def archived(servers):
    """Inserts documents and waits until only the archive has them, as if they had grown old there.
    Through Halocline that is what becomes of a document with an old date; direct there is nothing to
    wait for."""

    def insert(collection, documents):
        collection.insert_many(documents)
        wait_archived(servers, collection, [document["_id"] for document in documents])
        return documents

    return insert


def wait_archived(servers, collection, ids):
    """Waits until the fast tier has none of them."""
    if MODE == "direct":
        return
    fast, archive = (client[collection.database.name][collection.name] for client in servers)
    until("eviction", lambda: fast.count_documents({"_id": {"$in": ids}}) == 0)
    assert archive.count_documents({"_id": {"$in": ids}}) == len(ids)


def order(tenant, number, age_days=0.0, **fields):
    """An order as the application writes it."""
    return {
        "_id": f"{tenant}-{number}",
        "tenant": tenant,
        "created_at": days_ago(age_days),
        "number": number,
        **fields,
    }


def history():
    """What `orders` begins with; the runner's `deployment.py` has put it there before Halocline came."""
    for i in range(400):
        yield {
            "_id": f"h{i:04}",
            "tenant": "history",
            "created_at": EPOCH - datetime.timedelta(hours=48 * i),
            "number": i,
            "amount": (i * 37) % 1000,
            "status": ("paid", "open", "void")[i % 3],
            "customer": i % 20,
            "items": [{"sku": f"s{i % 7}", "quantity": i % 5 + 1}, {"sku": "gift", "quantity": 1}],
            "name": f"{'Anna' if i % 2 else 'anna'} {i % 10}",
            "reference": f"R{i:05}",
        }
