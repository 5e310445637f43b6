//! What parsing asks of the allocator: nothing for an ordinary command, and never more than a
//! checked length for a hostile one.
#![allow(unsafe_code, clippy::unwrap_used, clippy::indexing_slicing)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bson::raw::RawDocument;
use bson::{Timestamp, rawdoc};
use bytes::{Bytes, BytesMut};
use halocline_wire::patch::ReplyView;
use halocline_wire::*;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn note(size: usize) {
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every call is handed to the system allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations, and the largest, made by `work` on this thread.
fn measured<T>(work: impl FnOnce() -> T) -> (usize, usize, T) {
    COUNT.set(0);
    LARGEST.set(0);
    let result = work();
    (COUNT.get(), LARGEST.get(), result)
}

#[test]
fn an_ordinary_command_is_parsed_without_allocation() {
    let lsid = bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] };
    let find = rawdoc! {
        "find": "orders", "filter": { "_id": 5 }, "limit": 1i64, "singleBatch": true,
        "lsid": { "id": lsid.clone() }, "$db": "shop",
    };
    let insert = rawdoc! {
        "insert": "orders", "ordered": true, "lsid": { "id": lsid }, "txnNumber": 4i64,
        "$clusterTime": { "clusterTime": Timestamp { time: 9, increment: 4 } }, "$db": "shop",
    };
    let document = rawdoc! { "_id": 1, "x": "y" };
    let documents: [(&str, &[&RawDocument]); 1] = [("documents", &[&document])];
    let mut first = BytesMut::new();
    encode_msg(1, 0, MsgFlags::NONE, &find, &[], &mut first);
    assert!((130..180).contains(&first.len()), "{}", first.len());
    let mut second = BytesMut::new();
    encode_msg(2, 0, MsgFlags::NONE, &insert, &documents, &mut second);
    for bytes in [first, second] {
        let frame = Frame::from_bytes(bytes.freeze(), MAX_MESSAGE_BYTES).unwrap();
        let (count, _, name_len) = measured(|| {
            let decoded = decode(frame, &Limits::CLIENT).unwrap();
            let Message::Msg(msg) = decoded.message else { unreachable!() };
            let command = Command::parse(&msg).unwrap();
            let documents = match command.name() {
                "insert" => command.documents("documents").unwrap().count(),
                _ => 0,
            };
            command.name().len() + command.raw_fields().count() + documents
        });
        assert!(name_len > 0);
        assert_eq!(count, 0);
    }
}

#[test]
fn a_reply_is_read_and_patched_without_allocation() {
    let mut bytes = BytesMut::new();
    let reply = rawdoc! {
        "cursor": { "firstBatch": [{ "_id": 1 }], "id": 8i64, "ns": "a.b" }, "ok": 1.0,
        "operationTime": Timestamp { time: 1, increment: 1 },
    };
    encode_msg(1, 2, MsgFlags::NONE, &reply, &[], &mut bytes);
    let (count, _, patched) = measured(|| {
        let mut view = ReplyView::parse(&bytes).unwrap();
        view.set_cursor_id(&mut bytes, 9).unwrap()
    });
    assert!(patched);
    assert_eq!(count, 0);
}

fn compressed(declared: i32, compressor: u8, data: &[u8]) -> Bytes {
    let mut bytes = Vec::new();
    for int in [25 + data.len() as i32, 1, 0, 2012, 2013, declared] {
        bytes.extend(int.to_le_bytes());
    }
    bytes.push(compressor);
    bytes.extend(data);
    bytes.into()
}

#[test]
fn lies_about_sizes_allocate_nothing_large() {
    let small = 4096;
    for length in [0, 15, -1, i32::MAX] {
        let mut buf = BytesMut::from(&[0; 16][..]);
        buf[..4].copy_from_slice(&i32::to_le_bytes(length));
        let (_, largest, result) = measured(|| take_frame(&mut buf, MAX_MESSAGE_BYTES).is_err());
        assert!(result && largest < small, "{length}: {largest}");
    }
    let mut buf = BytesMut::from(&[0; 16][..]);
    buf[..4].copy_from_slice(&48_000_000i32.to_le_bytes());
    let (_, largest, result) = measured(|| take_frame(&mut buf, MAX_MESSAGE_BYTES).unwrap());
    assert!(result.is_none() && largest < 256 * 1024, "{largest}");

    for compressor in 0..=4 {
        for declared in [-1, i32::MAX, 48_000_000, 47_999_985] {
            let frame =
                Frame::from_bytes(compressed(declared, compressor, &[1; 60]), 1 << 20).unwrap();
            let (_, largest, result) = measured(|| decode(frame, &Limits::CLIENT).is_err());
            assert!(result && largest < small, "{compressor} {declared}: {largest}");
        }
    }
}

#[test]
fn a_bomb_costs_no_more_than_it_declares() {
    let zeros = vec![0; 20_000_000];
    let bombs = [
        (1, snap::raw::Encoder::new().compress_vec(&zeros).unwrap()),
        (2, {
            let mut encoder =
                flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
            std::io::Write::write_all(&mut encoder, &zeros).unwrap();
            encoder.finish().unwrap()
        }),
        (3, zstd::bulk::compress(&zeros, 3).unwrap()),
    ];
    for (compressor, data) in bombs {
        let declared = 100_000;
        // The contexts of this thread are made once, whatever is decompressed.
        let mut plain = BytesMut::new();
        encode_msg(1, 0, MsgFlags::NONE, &rawdoc! {}, &[], &mut plain);
        let mut out = BytesMut::new();
        compress(&plain, Compressor::from_id(compressor).unwrap(), &mut out).unwrap();
        decode(Frame::from_bytes(out.freeze(), 1 << 20).unwrap(), &Limits::CLIENT).unwrap();

        let bytes = compressed(declared, compressor, &data);
        let frame = Frame::from_bytes(bytes, MAX_MESSAGE_BYTES).unwrap();
        let (_, largest, result) = measured(|| decode(frame, &Limits::CLIENT));
        assert_eq!(result.unwrap_err().kind(), "size_mismatch", "compressor {compressor}");
        assert!(largest <= declared as usize + 16, "compressor {compressor}: {largest}");
    }
}
