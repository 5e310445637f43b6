//! What no well-meaning client sends (cases 11 and 12): that connection ends, the others do not
//! notice, and the process does not grow (measured in `connection_memory`).

use bson::doc;
use bytes::BytesMut;
use halocline_wire::{Compressor, MsgFlags, compress};

use crate::echo::{Server, eventually, run};
use crate::metrics::protocol_errors;
use crate::raw::{Raw, message, query, request};

/// Sends bytes on a connection of its own; asserts that it ends without a reply and is counted.
async fn ends_silently(server: &Server, kind: &str, bytes: &[u8]) {
    let before = protocol_errors(kind);
    let mut client = Raw::connect(server.address).await;
    client.send(bytes).await;
    client.closed().await;
    eventually(&format!("{kind} is counted"), || protocol_errors(kind) > before).await;
}

/// Case 12.
#[test]
fn a_length_that_cannot_be_ends_the_connection_as_soon_as_it_is_read() {
    run(async {
        let server = Server::start().await;
        for (length, kind) in [
            (0_i32, "length_too_small"),
            (15, "length_too_small"),
            (-1, "length_too_small"),
            (i32::MAX, "length_too_large"),
            (48_000_001, "length_too_large"),
        ] {
            // Four bytes, then silence.
            ends_silently(&server, kind, &length.to_le_bytes()).await;
        }
    });
}

/// An OP_COMPRESSED from its parts.
fn compressed(op_code: i32, declared: i32, compressor: u8, data: &[u8]) -> Vec<u8> {
    let mut body = op_code.to_le_bytes().to_vec();
    body.extend_from_slice(&declared.to_le_bytes());
    body.push(compressor);
    body.extend_from_slice(data);
    message(1, 2012, &body).to_vec()
}

/// Case 11.
#[test]
fn a_compressed_message_that_lies_ends_its_connection_and_no_other() {
    run(async {
        let server = Server::start().await;
        let mut bystander = Raw::connect(server.address).await;
        bystander.ping().await;
        let plain = request(1, MsgFlags::NONE, doc! { "echo": "x".repeat(500), "$db": "d" });
        let size = plain.len() as i32 - 16;
        for compressor in [Compressor::Snappy, Compressor::Zlib, Compressor::Zstd] {
            let mut packed = BytesMut::new();
            compress(&plain, compressor, &mut packed).unwrap();
            let data = &packed[25..];
            let id = compressor.id();
            for off in [-1, 1] {
                let lie = compressed(2013, size + off, id, data);
                ends_silently(&server, "size_mismatch", &lie).await;
            }
            let mut client = Raw::connect(server.address).await;
            client.send(&compressed(2013, size, id, &data[..data.len() / 2])).await;
            client.closed().await;
            let negative = compressed(2013, -1, id, data);
            ends_silently(&server, "declared_size", &negative).await;
            ends_silently(&server, "declared_size", &compressed(2013, i32::MAX, id, data)).await;
            // Nothing of the refused messages shows in anybody's reply.
            let reply = bystander.command(doc! { "echo": "mine" }).await;
            assert_eq!(reply, doc! { "echo": "mine", "ok": 1.0 });
        }
        ends_silently(&server, "unknown_compressor", &compressed(2013, size, 9, &plain[16..]))
            .await;
        ends_silently(&server, "truncated", &message(1, 2012, &[1, 2, 3])).await;
        let mut inner = BytesMut::new();
        compress(&plain, Compressor::Snappy, &mut inner).unwrap();
        let nested = compressed(2012, inner.len() as i32 - 16, 0, &inner[16..]);
        ends_silently(&server, "nested_compression", &nested).await;
        bystander.ping().await;
    });
}

#[test]
fn a_command_that_is_no_valid_bson_is_answered_before_its_connection_ends() {
    run(async {
        let server = Server::start().await;
        let mut broken = request(6, MsgFlags::NONE, doc! { "ping": "text", "$db": "d" }).to_vec();
        // The string's length, far beyond the document.
        let at = broken.windows(5).position(|bytes| bytes == b"ping\0").unwrap() + 5;
        broken[at..at + 4].copy_from_slice(&1000_i32.to_le_bytes());

        let mut client = Raw::connect(server.address).await;
        client.send(&broken).await;
        let reply = client.receive().await.unwrap();
        assert_eq!((reply.header.op_code, reply.header.response_to), (2013, 6));
        assert_eq!(reply.document().get_f64("ok").unwrap(), 0.0);
        assert_eq!(reply.document().get_str("codeName").unwrap(), "InvalidBSON");
        client.closed().await;

        // The same without a wish for a reply.
        broken[16] = 2;
        ends_silently(&server, "malformed_document", &broken).await;
    });
}

#[test]
fn nesting_beyond_the_limit_is_answered_before_its_connection_ends() {
    run(async {
        let server = Server::start().await;
        let mut nested = doc! {};
        for _ in 0..250 {
            nested = doc! { "n": nested };
        }
        let mut client = Raw::connect(server.address).await;
        let deep = doc! { "echo": nested, "$db": "d" };
        client.send(&request(6, MsgFlags::NONE, deep)).await;
        let reply = client.receive().await.unwrap().document();
        assert_eq!(reply.get_i32("code").unwrap(), 15);
        client.closed().await;
    });
}

#[test]
fn messages_whose_parts_do_not_add_up_end_their_connection() {
    run(async {
        let server = Server::start().await;
        let ping = request(1, MsgFlags::NONE, doc! { "ping": 1, "$db": "d" }).to_vec();
        let mut flagged = ping.clone();
        flagged[16] = 4;
        ends_silently(&server, "unknown_flags", &flagged).await;
        let mut section = ping.clone();
        section[20] = 7;
        ends_silently(&server, "unknown_section", &section).await;
        let mut sum =
            request(1, MsgFlags::CHECKSUM_PRESENT, doc! { "ping": 1, "$db": "d" }).to_vec();
        *sum.last_mut().unwrap() ^= 1;
        ends_silently(&server, "checksum_mismatch", &sum).await;
        ends_silently(&server, "missing_body", &message(1, 2013, &[0, 0, 0, 0])).await;
        ends_silently(&server, "truncated", &message(1, 2013, &[0, 0])).await;
    });
}

#[test]
fn legacy_opcodes_get_the_reply_their_protocol_has_and_then_the_end() {
    run(async {
        let server = Server::start().await;
        let before = protocol_errors("unsupported_op_query");
        let find = query(7, "test.things", doc! { "x": 1 });
        let command = query(7, "test.$cmd", doc! { "find": "things" });
        let get_more = message(7, 2005, &[0; 24]);
        for bytes in [find, command, get_more] {
            let mut client = Raw::connect(server.address).await;
            client.send(&bytes).await;
            let reply = client.receive().await.unwrap();
            assert_eq!((reply.header.op_code, reply.header.response_to), (1, 7));
            assert_eq!(reply.bytes[16] & 2, 2, "the query failure flag");
            assert_eq!(reply.document().get_i32("code").unwrap(), 352);
            assert!(reply.document().get_str("$err").unwrap().contains("OP_MSG"));
            client.closed().await;
        }
        eventually("both queries are counted", || {
            protocol_errors("unsupported_op_query") >= before + 2.0
        })
        .await;
        // OP_UPDATE, OP_INSERT, OP_DELETE, OP_KILL_CURSORS, and numbers nobody assigned.
        for op_code in [2001, 2002, 2006, 2007, 0, -1, 12345] {
            ends_silently(&server, "unsupported_opcode", &message(1, op_code, &[0; 24])).await;
        }
    });
}

#[test]
fn noise_ends_connections_and_never_panics() {
    run(async {
        let server = Server::start().await;
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut noise = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed);
        let template = request(1, MsgFlags::NONE, doc! { "echo": { "a": [1, "b"] }, "$db": "d" });
        for round in 0..300 {
            let mut bytes = template.to_vec();
            if round % 3 == 0 {
                rand::Rng::fill(&mut noise, &mut bytes[..]);
            }
            for _ in 0..4 {
                let at = rand::Rng::random_range(&mut noise, 4..bytes.len());
                bytes[at] = rand::random();
            }
            let length = bytes.len() as i32;
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            let mut client = Raw::connect(server.address).await;
            client.send(&bytes).await;
            // Answered or not, the connection must come to an end by itself or with ours.
            tokio::io::AsyncWriteExt::shutdown(&mut client.socket).await.unwrap();
            while client.receive().await.is_some() {}
        }
        eventually("all have ended", || server.clients.open() == 0).await;
        assert_eq!(server.counts("connection_handler").panics, 0);
        Raw::connect(server.address).await.ping().await;
    });
}
