//! Memory under hostile or silent clients (cases 11 and 12). One test, in a process of its own:
//! what it measures is the whole process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "connections/echo.rs"]
mod echo;
#[path = "connections/raw.rs"]
mod raw;

use bson::doc;
use bytes::BytesMut;
use halocline_wire::{Compressor, MsgFlags, compress};

use echo::{Server, eventually, run};
use raw::{Raw, message, request};

/// Resident memory of this process, client and daemon alike.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// The growth that `work` leaves behind or reaches, whichever the caller measures.
fn grown_since(before: usize) -> usize {
    resident_bytes().saturating_sub(before)
}

const MEGABYTE: usize = 1 << 20;

#[test]
fn memory_stays_flat() {
    run(async {
        let server = Server::start().await;
        let compressors = [Compressor::Snappy, Compressor::Zlib, Compressor::Zstd];

        // Contexts of compressors, buffers, the allocator's arenas: everything a thread keeps.
        let mut client = Raw::connect(server.address).await;
        for compressor in compressors {
            let plain = request(1, MsgFlags::NONE, doc! { "echo": "x".repeat(1000), "$db": "d" });
            let mut packed = BytesMut::new();
            compress(&plain, compressor, &mut packed).unwrap();
            client.send(&packed).await;
            client.receive().await.unwrap();
        }
        drop(client);
        let bad_lengths = [0_i32, 15, -1, i32::MAX];
        for length in bad_lengths {
            let mut client = Raw::connect(server.address).await;
            client.send(&length.to_le_bytes()).await;
            client.closed().await;
        }

        // Case 12: impossible lengths, then silence.
        let before = resident_bytes();
        for _ in 0..25 {
            for length in bad_lengths {
                let mut client = Raw::connect(server.address).await;
                client.send(&length.to_le_bytes()).await;
                client.closed().await;
            }
        }
        let grown = grown_since(before);
        assert!(grown < MEGABYTE, "impossible lengths cost {grown} bytes");

        // A possible length, then silence: the message's size must not be taken for its bytes.
        let before = resident_bytes();
        let mut silent = Vec::new();
        for _ in 0..20 {
            let mut client = Raw::connect(server.address).await;
            let mut head = 47_000_000_i32.to_le_bytes().to_vec();
            head.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0, 221, 7, 0, 0]);
            client.send(&head).await;
            silent.push(client);
        }
        eventually("all are connected", || server.clients.open() == 20).await;
        Raw::connect(server.address).await.ping().await;
        let grown = grown_since(before);
        assert!(grown < 3 * MEGABYTE, "20 promises of 47 MB cost {grown} bytes");
        drop(silent);

        // Case 11: bombs. Declared honestly but beyond the limit, and declared small.
        let bomb = vec![0_u8; 40_000_000];
        let mut packed = Vec::new();
        for compressor in compressors {
            let mut out = BytesMut::new();
            compress(&message(1, 2013, &bomb), compressor, &mut out).unwrap();
            for declared in [47_999_985_i32, i32::MAX, 100] {
                let mut lie = out.to_vec();
                lie[20..24].copy_from_slice(&declared.to_le_bytes());
                packed.push(lie);
            }
        }
        drop(bomb);
        let before = resident_bytes();
        for _ in 0..3 {
            for bytes in &packed {
                let mut client = Raw::connect(server.address).await;
                client.send(bytes).await;
                client.closed().await;
            }
        }
        let grown = grown_since(before);
        assert!(grown < 4 * MEGABYTE, "bombs left {grown} bytes behind");

        // A client that never reads costs its one reply, however much it asks for.
        let before = resident_bytes();
        let mut greedy = Raw::connect(server.address).await;
        for number in 0..50 {
            let big = doc! { "big": 8_000_000, "$db": "d" };
            greedy.send(&request(number, MsgFlags::NONE, big)).await;
        }
        Raw::connect(server.address).await.ping().await;
        let grown = grown_since(before);
        assert!(grown < 30 * MEGABYTE, "50 unread replies of 8 MB cost {grown} bytes");
    });
}
