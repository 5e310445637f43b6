"""What the driver suites run against: replica sets of real mongods, their seed, a Halocline daemon.

Everything is on loopback and ends with the process that started it. No test is here, and nothing
that a suite needs beyond addresses.
"""

import ctypes
import datetime
import fcntl
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure, PyMongoError

PATIENCE = 120.0
"""Seconds that anything is waited for: many times what it takes, because the machine may be compiling
meanwhile."""

LOOK_AGAIN = 0.05
"""Seconds between two looks at a condition."""

PORTS = range(12_000, 20_000)
"""Below those of the Rust testbed (20,000 and up) and those that systems give to clients."""

SUITES = ("python", "node", "mongosh")
"""Every suite has a database of its own, of this name."""

TIERED = {"orders": ("created_at", "date"), "readings": ("at", "epoch-millis")}
"""The tiered collections of each such database: date field and kind."""

KEEP_DAYS = 30
"""Documents older than this leave the fast tier."""

HISTORY = 400
"""Documents that `orders` begins with: number i is i * HISTORY_STEP_HOURS old, so that 15 are recent."""

HISTORY_STEP_HOURS = 48


class DeploymentError(Exception):
    """Something did not start, or did not end as it should."""


def find_mongod():
    """`$MONGOD`, the first on PATH, or the one that the Rust testbed fetched."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    fetched = sorted(cache.glob("halocline-testbed/*/mongod"))
    candidates = [os.environ.get("MONGOD"), shutil.which("mongod"), *map(str, fetched)]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise DeploymentError(
        "no mongod found: set MONGOD, or run `cargo test -p halocline-testbed` once, which fetches one"
    )


def until(what, look, patience=PATIENCE):
    """Waits until `look` says something true, and returns it."""
    began = time.monotonic()
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() - began > patience:
            raise DeploymentError(f"waited {patience:.0f} s for {what}")
        time.sleep(LOOK_AGAIN)


class Port:
    """A port that stays ours, locked against other runs of this program."""

    def __init__(self):
        directory = pathlib.Path("/tmp/halocline-driver-ports")
        directory.mkdir(exist_ok=True)
        for number in random.sample(PORTS, 200):
            lock = open(directory / str(number), "w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            except OSError:
                lock.close()
                continue
            self.number, self.lock = number, lock
            return
        raise DeploymentError(f"no free port in {PORTS}")


class Process:
    """A child that dies with us, whatever kills us."""

    def __init__(self, arguments, log, env=None):
        self.log = log

        def die_with_parent():
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with open(log, "ab") as output:
            self.child = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                preexec_fn=die_with_parent,
            )

    def check(self):
        """Fails if it has ended."""
        if self.child.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise DeploymentError(
                f"{self.child.args[0]} ended with {self.child.returncode}; its log ends so:\n{tail}"
            )

    def end(self, how=signal.SIGKILL):
        """Signals it and waits; returns its exit code."""
        if self.child.poll() is None:
            self.child.send_signal(how)
        return self.child.wait(PATIENCE)


class ReplicaSet:
    """So many mongods, initiated, with a primary."""

    def __init__(self, name, members, directory, mongod):
        self.name = name
        self.ports = [Port() for _ in range(members)]
        self.processes = []
        for index, port in enumerate(self.ports):
            data = directory / f"{name}-{index}"
            data.mkdir(parents=True)
            self.processes.append(
                Process(
                    [mongod, "--replSet", name, "--port", port.number, "--bind_ip", "127.0.0.1"]
                    + ["--dbpath", data, "--nounixsocket", "--oplogSize", 1024]
                    + ["--wiredTigerCacheSizeGB", "0.25", "--setParameter", "enableTestCommands=1"]
                    + ["--setParameter", "diagnosticDataCollectionEnabled=false"]
                    + ["--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100"],
                    directory / f"{name}-{index}.log",
                )
            )
        self._initiate()
        self.client = pymongo.MongoClient(self.uri, serverSelectionTimeoutMS=PATIENCE * 1000)
        until("a primary of " + name, lambda: self.client.admin.command("hello")["isWritablePrimary"])

    def _initiate(self):
        first = f"mongodb://127.0.0.1:{self.ports[0].number}/?directConnection=true"
        members = [
            {"_id": index, "host": f"127.0.0.1:{port.number}"}
            for index, port in enumerate(self.ports)
        ]
        config = {
            "_id": self.name,
            "members": members,
            "settings": {"electionTimeoutMillis": 5000, "heartbeatIntervalMillis": 500},
        }

        def initiated():
            for process in self.processes:
                process.check()
            try:
                with pymongo.MongoClient(first, serverSelectionTimeoutMS=500) as client:
                    client.admin.command("replSetInitiate", config)
                return True
            except OperationFailure as error:
                if error.code in (23, None):  # AlreadyInitialized
                    return True
                # 74: another member does not listen yet.
                if error.code == 74:
                    return False
                raise
            except PyMongoError:
                return False

        until(f"{self.name} to be initiated", initiated)

    @property
    def uri(self):
        """Names every member."""
        hosts = ",".join(f"127.0.0.1:{port.number}" for port in self.ports)
        return f"mongodb://{hosts}/?replicaSet={self.name}"

    def end(self):
        """Kills it."""
        self.client.close()
        for process in self.processes:
            process.end()


def history(epoch_ms):
    """What `orders` begins with. The suites compute the same documents to know the right answers."""
    for i in range(HISTORY):
        created = epoch_ms - i * HISTORY_STEP_HOURS * 3_600_000
        yield {
            "_id": f"h{i:04}",
            "tenant": "history",
            "created_at": datetime.datetime.fromtimestamp(created / 1000, datetime.timezone.utc),
            "number": i,
            "amount": (i * 37) % 1000,
            "status": ("paid", "open", "void")[i % 3],
            "customer": i % 20,
            "items": [{"sku": f"s{i % 7}", "quantity": i % 5 + 1}, {"sku": "gift", "quantity": 1}],
            "name": f"{'Anna' if i % 2 else 'anna'} {i % 10}",
            "reference": f"R{i:05}",
        }


def seed(replica_set, epoch_ms):
    """What an application had in its replica set before Halocline came."""
    for suite in SUITES:
        database = replica_set.client[suite]
        orders = database.orders
        orders.create_index([("created_at", -1)], name="created_at")
        orders.create_index([("tenant", 1), ("created_at", -1)], name="tenant_created_at")
        # Not unique: Halocline does not tier collections with unique indexes yet.
        orders.create_index([("reference", 1)], name="reference", sparse=True)
        orders.insert_many(history(epoch_ms))
        database.readings.create_index([("at", -1)], name="at")
        database.products.insert_many(
            {"_id": f"s{i}", "title": f"Product {i}", "price": 10 * i} for i in range(7)
        )


class Daemon:
    """A Halocline in front of two replica sets."""

    def __init__(self, binary, fast, archive, directory):
        self.listen, self.admin = Port(), Port()
        self.directory = directory
        config = directory / "halocline.toml"
        config.write_text(self._config(fast, archive))
        env = {name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE")}
        self.process = Process(
            [binary, "run", "--config", config], directory / "halocline.log", env
        )
        until("the daemon to be ready", self._ready)
        until("the recent documents to be warm", self._warm)

    def _config(self, fast, archive):
        collections = "".join(
            f"""
[[collection]]
namespace = "{suite}.{collection}"
date_field = "{field}"
date_kind = "{kind}"
keep = "{KEEP_DAYS}d"
"""
            for suite in SUITES
            for collection, (field, kind) in TIERED.items()
        )
        # A short residency: what a test has made old leaves the fast tier while the test waits.
        return f"""
[listen]
addresses = ["127.0.0.1:{self.listen.number}"]
[admin]
listen = "127.0.0.1:{self.admin.number}"
[fast]
uri = "{fast.uri}"
[archive]
uri = "{archive.uri}"
[actors]
connection_threads = 2
[feeder]
coalesce = "10ms"
token_interval = "200ms"
[moves]
evict_interval = "200ms"
evict_grace = "1s"
residency = "3s"
allow_short_residency = true
[log]
level = "info"
{collections}"""

    def get(self, path):
        """Status code and body of the admin port's answer."""
        url = f"http://127.0.0.1:{self.admin.number}{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return None, ""

    def _ready(self):
        self.process.check()
        return self.get("/readyz")[0] == 200

    def _warm(self):
        self.process.check()
        code, body = self.get("/status")
        collections = json.loads(body)["collections"] if code == 200 else []
        return collections and all(collection["warm"] for collection in collections)

    @property
    def uri(self):
        """A daemon looks like a mongos, not like a replica set."""
        return f"mongodb://127.0.0.1:{self.listen.number}/"

    def complaints(self):
        """Errors and panics in its log."""
        lines = self.process.log.read_text(errors="replace").splitlines()
        return [line for line in lines if re.search(r"\bERROR\b|panicked", line)]

    def end(self):
        """SIGTERM; returns the exit code."""
        return self.process.end(signal.SIGTERM)


def disagreements(daemon, fast, archive):
    """Differences between the tiers, once everything acknowledged has been mirrored: a document of the
    fast tier that the archive has otherwise, or not at all."""
    found = []
    with pymongo.MongoClient(daemon.uri) as through:
        for suite in SUITES:
            for name in TIERED:
                # A count that the fast tier cannot cover is answered behind a barrier.
                through[suite][name].count_documents({"no such field": 1})
                raw = RawBSONDocument
                options = fast.client.codec_options.with_options(document_class=raw)
                recent = fast.client[suite].get_collection(name, options)
                everything = archive.client[suite].get_collection(name, options)
                for document in recent.find():
                    # By the bytes of the _id, which the server's own equality would blur (1 and 1.0).
                    there = everything.find_one({"_id": {"$eq": document["_id"]}})
                    if there is None or there.raw != document.raw:
                        # A change that is on its way to one of them is not a difference.
                        again = recent.find_one({"_id": {"$eq": document["_id"]}})
                        if again is None or again.raw != document.raw:
                            continue
                        found.append(f"{suite}.{name} _id {document['_id']!r}")
    return found
