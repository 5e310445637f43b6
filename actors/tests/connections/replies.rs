//! Which reply goes to which request, and in which form.

use bson::doc;
use bytes::BytesMut;
use halocline_wire::{Compressor, Decoded, Frame, Limits, Message, MsgFlags, compress, decode};

use crate::echo::{Server, run};
use crate::raw::{Raw, request};

#[test]
fn a_command_is_answered_with_one_message_that_names_it() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        client.send(&request(77, MsgFlags::NONE, doc! { "ping": 1, "$db": "admin" })).await;
        let reply = client.receive().await.unwrap();
        let mut expected = vec![38, 0, 0, 0];
        expected.extend_from_slice(&1_000_077_i32.to_le_bytes());
        expected.extend_from_slice(&77_i32.to_le_bytes());
        expected.extend_from_slice(&2013_i32.to_le_bytes());
        // No flags, a body section, {ok: 1.0}.
        expected.extend_from_slice(&[0, 0, 0, 0, 0, 17, 0, 0, 0, 1, b'o', b'k', 0]);
        expected.extend_from_slice(&1_f64.to_le_bytes());
        expected.push(0);
        assert_eq!(reply.bytes[..], expected);
        assert!(client.is_silent().await);
    });
}

/// Case 10: a `w: 0` write followed at once by a read on the same connection.
#[test]
fn a_request_without_a_reply_leaves_the_next_reply_to_the_next_request() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let insert = doc! { "insert": "c", "$db": "d", "documents": [{ "_id": 1 }] };
        // `ping` would be answered if it were asked aloud: the handler drops what nobody waits for.
        let quiet_ping = doc! { "ping": 1, "$db": "d" };
        let mut burst = Vec::new();
        burst.extend_from_slice(&request(1, MsgFlags::MORE_TO_COME, insert.clone()));
        burst.extend_from_slice(&request(2, MsgFlags::MORE_TO_COME, insert));
        burst.extend_from_slice(&request(3, MsgFlags::MORE_TO_COME, quiet_ping));
        burst.extend_from_slice(&request(4, MsgFlags::NONE, doc! { "inserts": 1, "$db": "d" }));
        client.send(&burst).await;
        let reply = client.receive().await.unwrap();
        assert_eq!(reply.header.response_to, 4);
        assert_eq!(reply.flags(), MsgFlags::NONE);
        assert_eq!(reply.document(), doc! { "n": 2_i64, "ok": 1.0 });
        assert!(client.is_silent().await);
    });
}

#[test]
fn commands_sent_ahead_are_answered_in_their_order() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        // More than one read buffer's worth, so that messages straddle its end.
        let filler = "f".repeat(700);
        let mut burst = Vec::new();
        for number in 0..200 {
            let command = doc! { "echo": number, "$db": "d", "filler": &filler };
            burst.extend_from_slice(&request(number, MsgFlags::NONE, command));
        }
        client.send(&burst).await;
        for number in 0..200 {
            let reply = client.receive().await.unwrap();
            assert_eq!(reply.header.response_to, number);
            assert_eq!(reply.document(), doc! { "echo": number, "ok": 1.0 });
        }
    });
}

#[test]
fn a_message_may_arrive_byte_by_byte_and_a_large_one_in_many_reads() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let command = doc! { "echo": "slow", "$db": "d" };
        for byte in request(5, MsgFlags::NONE, command) {
            client.send(&[byte]).await;
            tokio::task::yield_now().await;
        }
        assert_eq!(client.receive().await.unwrap().document().get_str("echo").unwrap(), "slow");

        let large = "l".repeat(15_000_000);
        let reply = client.command(doc! { "echo": &large }).await;
        assert_eq!(reply.get_str("echo").unwrap(), large);
        client.ping().await;
    });
}

#[test]
fn several_replies_are_written_in_their_order() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        client.send(&request(9, MsgFlags::NONE, doc! { "two": 1, "$db": "d" })).await;
        for (n, flags) in [(1, MsgFlags::MORE_TO_COME), (2, MsgFlags::NONE)] {
            let reply = client.receive().await.unwrap();
            assert_eq!((reply.flags(), reply.header.response_to), (flags, 9));
            assert_eq!(reply.document().get_i32("n").unwrap(), n);
        }
    });
}

#[test]
fn a_request_with_a_checksum_gets_a_reply_with_one() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        for command in [doc! { "echo": "sum", "$db": "d" }, doc! { "hello": 1, "$db": "admin" }] {
            client.send(&request(3, MsgFlags::CHECKSUM_PRESENT, command)).await;
            let reply = client.receive().await.unwrap();
            // Reading the flags verifies the checksum.
            assert_eq!(reply.flags(), MsgFlags::CHECKSUM_PRESENT);
            assert_eq!(reply.header.response_to, 3);
        }
        client.send(&request(4, MsgFlags::NONE, doc! { "ping": 1, "$db": "d" })).await;
        assert_eq!(client.receive().await.unwrap().flags(), MsgFlags::NONE);
    });
}

/// Case 27, without a driver.
#[test]
fn a_compressed_request_gets_a_reply_compressed_alike() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let compressors =
            [Compressor::Snappy, Compressor::Zlib, Compressor::Zstd, Compressor::Noop];
        for (number, compressor) in compressors.into_iter().enumerate() {
            for flags in [MsgFlags::NONE, MsgFlags::CHECKSUM_PRESENT] {
                let text = "compressible ".repeat(1000);
                let plain = request(number as i32, flags, doc! { "echo": &text, "$db": "d" });
                let mut packed = BytesMut::new();
                compress(&plain, compressor, &mut packed).unwrap();
                client.send(&packed).await;
                let reply = client.receive().await.unwrap();
                assert_eq!(reply.header.op_code, 2012);
                assert_eq!(reply.header.response_to, number as i32);
                let frame = Frame { header: reply.header, bytes: reply.bytes };
                let decoded: Decoded = decode(frame, &Limits::SERVER).unwrap();
                assert_eq!(decoded.compressor, Some(compressor));
                let Message::Msg(msg) = decoded.message else { panic!("not an OP_MSG") };
                assert_eq!(msg.flags(), flags);
                assert_eq!(msg.body().get_str("echo").unwrap(), text);
            }
        }
        client.ping().await;
    });
}

#[test]
fn an_executor_may_end_a_connection() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let before = crate::metrics::errors("told_to_close");
        client.send(&request(1, MsgFlags::NONE, doc! { "close": 1, "$db": "d" })).await;
        client.closed().await;
        crate::echo::eventually("the count", || {
            crate::metrics::errors("told_to_close") == before + 1.0
        })
        .await;
    });
}
