"""GridFS: files and chunks over untiered collections."""

import os

import gridfs
import pytest
from conftest import connect


@pytest.fixture
def bucket(db, tenant):
    bucket = gridfs.GridFSBucket(db, bucket_name=f"fs_{tenant}")
    yield bucket
    db.drop_collection(f"fs_{tenant}.files")
    db.drop_collection(f"fs_{tenant}.chunks")


@pytest.mark.parametrize("size", [0, 1, 255 * 1024, 3_000_000])
def test_files(bucket, size):
    content = os.urandom(size)
    id = bucket.upload_from_stream("a.bin", content, metadata={"size": size})
    with bucket.open_download_stream(id) as stream:
        assert stream.length == size and stream.metadata == {"size": size}
        assert stream.read() == content
    with bucket.open_download_stream_by_name("a.bin") as stream:
        stream.seek(size // 2)
        assert stream.read() == content[size // 2 :]
    bucket.rename(id, "b.bin")
    assert [f.filename for f in bucket.find({})] == ["b.bin"]
    bucket.delete(id)
    with pytest.raises(gridfs.NoFile):
        bucket.open_download_stream(id)


def test_versions_and_a_stream_in_parts(bucket):
    for version in range(3):
        with bucket.open_upload_stream("v.txt", chunk_size_bytes=1000) as stream:
            for part in range(50):
                stream.write(f"{version}:{part:04};".encode() * 10)
    newest = bucket.open_download_stream_by_name("v.txt").read()
    oldest = bucket.open_download_stream_by_name("v.txt", revision=0).read()
    assert newest.startswith(b"2:0000;") and oldest.startswith(b"0:0000;")


def test_an_aborted_upload_leaves_no_chunks(db, bucket, tenant):
    stream = bucket.open_upload_stream("c", chunk_size_bytes=10)
    stream.write(b"x" * 100)
    stream.abort()
    assert db[f"fs_{tenant}.chunks"].count_documents({}) == 0


@pytest.mark.parametrize("compressor", ["zlib", "snappy", "zstd"])
def test_compressed(db, bucket, tenant, compressor):
    content = (b"compressible " * 100_000) + os.urandom(100_000)
    id = bucket.upload_from_stream("z", content)
    with connect(compressors=compressor) as client:
        theirs = gridfs.GridFSBucket(client[db.name], bucket_name=f"fs_{tenant}")
        assert theirs.open_download_stream(id).read() == content


def test_the_older_interface_in_a_session(client, db, tenant):
    files = gridfs.GridFS(db, collection=f"old_{tenant}")
    with client.start_session() as session:
        id = files.put(b"hello", filename="h", session=session)
        assert files.get(id, session=session).read() == b"hello"
        assert files.exists(id) and files.list() == ["h"]
        files.delete(id)
    db.drop_collection(f"old_{tenant}.files")
    db.drop_collection(f"old_{tenant}.chunks")
