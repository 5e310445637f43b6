//! The handshake over the wire: both opcodes, awaitable and streaming `hello`, what a client says
//! of itself.

use std::time::Duration;

use bson::{Document, doc};
use halocline_actors::hello::HelloFacts;
use halocline_wire::MsgFlags;

use crate::echo::{Server, eventually, facts, run};
use crate::raw::{Raw, query, request};

/// Long: a test that waits it out has failed.
const NEVER_MS: i32 = 600_000;

fn awaitable(known: &Document, max_await_ms: i32) -> Document {
    doc! {
        "hello": 1,
        "$db": "admin",
        "topologyVersion": known.get_document("topologyVersion").unwrap().clone(),
        "maxAwaitTimeMS": max_await_ms,
    }
}

fn counter(hello: &Document) -> i64 {
    hello.get_document("topologyVersion").unwrap().get_i64("counter").unwrap()
}

#[test]
fn the_legacy_handshake_is_answered_by_op_reply() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        for (number, name) in ["ismaster", "isMaster", "hello"].into_iter().enumerate() {
            let request_id = number as i32 + 1;
            let command = doc! { name: 1, "helloOk": true };
            client.send(&query(request_id, "admin.$cmd", command)).await;
            let reply = client.receive().await.unwrap();
            assert_eq!((reply.header.op_code, reply.header.response_to), (1, request_id));
            // Flags: await capable, no failure. No cursor, from 0, one document.
            let head = [8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
            assert_eq!(reply.bytes[16..36], head);
            let hello = reply.document();
            assert_eq!(hello.get_str("msg").unwrap(), "isdbgrid");
            assert!(hello.get_bool("helloOk").unwrap());
            let primary = if name == "hello" { "isWritablePrimary" } else { "ismaster" };
            assert!(hello.get_bool(primary).unwrap());
            assert!(!hello.contains_key("hosts") && !hello.contains_key("setName"));
        }
        // Nobody has to say goodbye to the old opcode.
        client.ping().await;
    });
}

#[test]
fn a_wrapped_legacy_handshake_is_understood() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let wrapped =
            doc! { "$query": { "ismaster": 1 }, "$readPreference": { "mode": "primary" } };
        client.send(&query(4, "admin.$cmd", wrapped)).await;
        assert!(client.receive().await.unwrap().document().get_bool("ismaster").unwrap());
    });
}

#[test]
fn a_handshake_that_cannot_be_read_is_answered_and_the_connection_goes_on() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let hello = client.command(doc! { "hello": 1, "maxAwaitTimeMS": 5 }).await;
        assert_eq!(hello.get_i32("code").unwrap(), 51760);
        client.send(&query(4, "admin.$cmd", doc! { "ismaster": 1, "maxAwaitTimeMS": 5 })).await;
        assert_eq!(client.receive().await.unwrap().document().get_i32("code").unwrap(), 51760);
        client.ping().await;
    });
}

/// Case 10: `hello` without `exhaustAllowed`.
#[test]
fn no_stream_for_those_who_did_not_allow_one() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(1, MsgFlags::NONE, awaitable(&known, 1))).await;
        let reply = client.receive().await.unwrap();
        assert_eq!(reply.flags(), MsgFlags::NONE);
        assert!(client.is_silent().await);

        // Allowed, but the client does not wait for news: there is nothing to stream.
        let plain = doc! { "hello": 1, "$db": "admin" };
        client.send(&request(2, MsgFlags::EXHAUST_ALLOWED, plain)).await;
        assert_eq!(client.receive().await.unwrap().flags(), MsgFlags::NONE);

        // Other commands are answered without a stream.
        let ping = doc! { "ping": 1, "$db": "admin" };
        client.send(&request(3, MsgFlags::EXHAUST_ALLOWED, ping)).await;
        assert_eq!(client.receive().await.unwrap().flags(), MsgFlags::NONE);
        assert!(client.is_silent().await);
    });
}

#[test]
fn each_reply_of_a_stream_answers_the_one_before_it() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(500, MsgFlags::EXHAUST_ALLOWED, awaitable(&known, 20))).await;
        let mut answers = 500;
        for _ in 0..4 {
            let reply = client.receive().await.unwrap();
            assert_eq!(reply.header.op_code, 2013);
            // Raw: bit 1 of the flags, nothing else.
            assert_eq!(reply.bytes[16..20], [2, 0, 0, 0]);
            assert_eq!(reply.header.response_to, answers);
            assert_ne!(reply.header.request_id, answers);
            assert_eq!(counter(&reply.document()), 0);
            answers = reply.header.request_id;
        }

        // A change is told at once and the stream goes on under the new version.
        server.hello.set_facts(HelloFacts { max_wire_version: 21, ..facts() });
        let changed = loop {
            let reply = client.receive().await.unwrap();
            assert_eq!(reply.header.response_to, answers);
            answers = reply.header.request_id;
            if counter(&reply.document()) == 1 {
                break reply;
            }
        };
        assert_eq!(changed.flags(), MsgFlags::MORE_TO_COME);
        assert_eq!(changed.document().get_i32("maxWireVersion").unwrap(), 21);
        let next = client.receive().await.unwrap();
        assert_eq!(next.header.response_to, answers);

        // The last one says so, and why.
        let drain = server.drain();
        let last = async {
            let mut answers = next.header.request_id;
            loop {
                let reply = client.receive().await.unwrap();
                assert_eq!(reply.header.response_to, answers);
                answers = reply.header.request_id;
                if reply.flags() == MsgFlags::NONE {
                    break reply.document();
                }
            }
        };
        let (report, last) = tokio::join!(drain, last);
        assert_eq!(last.get_i32("code").unwrap(), 91);
        assert_eq!(counter(&last), 2);
        client.closed().await;
        assert!(report.is_clean(), "{report:?}");
    });
}

#[test]
fn a_stream_without_a_wait_does_not_run_wild() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(1, MsgFlags::EXHAUST_ALLOWED, awaitable(&known, 0))).await;
        // Many replies fit into the socket's buffers: without a pause between them the stream
        // would have filled these long before the other client is served.
        client.receive().await.unwrap();
        let mut other = Raw::connect(server.address).await;
        for _ in 0..100 {
            other.ping().await;
        }
        for _ in 0..3 {
            assert_eq!(client.receive().await.unwrap().flags(), MsgFlags::MORE_TO_COME);
        }
    });
}

#[test]
fn an_awaitable_hello_returns_when_something_changes() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(1, MsgFlags::NONE, awaitable(&known, NEVER_MS))).await;
        assert!(client.is_silent().await);
        server.hello.set_facts(HelloFacts { max_write_batch_size: 7, ..facts() });
        let reply = client.receive().await.unwrap();
        assert_eq!(reply.header.response_to, 1);
        assert_eq!(counter(&reply.document()), 1);
        assert_eq!(reply.document().get_i32("maxWriteBatchSize").unwrap(), 7);

        // Known under another process, or older than now: told at once.
        for known in [
            &known,
            &doc! { "topologyVersion": {
                "processId": bson::oid::ObjectId::new(), "counter": 1_i64,
            } },
        ] {
            client.send(&request(2, MsgFlags::NONE, awaitable(known, NEVER_MS))).await;
            assert_eq!(counter(&client.receive().await.unwrap().document()), 1);
        }
    });
}

#[test]
fn a_monitor_that_goes_away_while_it_waits_is_noticed() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(1, MsgFlags::NONE, awaitable(&known, NEVER_MS))).await;
        assert!(client.is_silent().await);
        drop(client);
        eventually("the connection ends", || server.clients.open() == 0).await;
    });
}

#[test]
fn a_message_sent_during_a_wait_is_served_after_it() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let known = client.command(doc! { "hello": 1 }).await;
        client.send(&request(1, MsgFlags::NONE, awaitable(&known, 300))).await;
        client.send(&request(2, MsgFlags::NONE, doc! { "ping": 1, "$db": "admin" })).await;
        assert_eq!(client.receive().await.unwrap().header.response_to, 1);
        assert_eq!(client.receive().await.unwrap().header.response_to, 2);
    });
}

#[test]
fn what_a_client_says_of_itself_is_kept_for_the_executor_and_for_operators() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let introduction = |name: &str| {
            doc! { "hello": 1, "client": {
                "application": { "name": name },
                "driver": { "name": "raw", "version": "1" },
            } }
        };
        let hello = client.command(introduction("orders")).await;
        let id = hello.get_i32("connectionId").unwrap();
        client.command(introduction("another")).await;
        let me = client.command(doc! { "whoAmI": 1 }).await;
        assert_eq!(me, doc! { "app": "orders", "connectionId": id, "ok": 1.0 });

        let described = &server.describe().await[0][0];
        assert_eq!(described.app_name.as_deref(), Some("orders"));
        assert_eq!(described.driver.as_deref(), Some("raw"));
        assert_eq!(described.connection_id, id);
        assert_eq!(described.peer, client.socket.local_addr().unwrap());
        assert_eq!((described.commands, described.busy_seconds), (1, None));

        let mut busy = Raw::connect(server.address).await;
        busy.send(&request(1, MsgFlags::NONE, doc! { "wait": 1, "$db": "d" })).await;
        let shared = server.shared.clone();
        eventually("it waits", || shared.waiting.load(std::sync::atomic::Ordering::SeqCst) == 1)
            .await;
        let all = server.describe().await;
        assert_eq!(all[0].iter().filter(|client| client.busy_seconds.is_some()).count(), 1);
    });
}

#[test]
fn before_authentication_only_short_messages_are_read() {
    run(async {
        let server = Server::with(1, 10, |settings| settings.authentication = true).await;
        let mut client = Raw::connect(server.address).await;
        client.ping().await;
        let long = doc! { "echo": "x".repeat(17_000), "$db": "d" };
        let mut stranger = Raw::connect(server.address).await;
        stranger.send(&request(1, MsgFlags::NONE, long.clone())).await;
        stranger.closed().await;

        client.command(doc! { "logIn": 1 }).await;
        client.send(&request(1, MsgFlags::NONE, long)).await;
        assert_eq!(client.receive().await.unwrap().header.response_to, 1);
    });
}

#[test]
fn handshakes_of_a_draining_daemon_send_the_client_away() {
    run(async {
        let server = Server::start().await;
        let mut first = Raw::connect(server.address).await;
        let mut second = Raw::connect(server.address).await;
        first.ping().await;
        second.ping().await;
        server.hello.begin_draining(std::time::Instant::now() + Duration::from_secs(60));
        let refusal = first.command(doc! { "hello": 1 }).await;
        assert_eq!(refusal.get_str("codeName").unwrap(), "ShutdownInProgress");
        first.closed().await;
        second.send(&query(8, "admin.$cmd", doc! { "ismaster": 1 })).await;
        assert_eq!(second.receive().await.unwrap().document().get_i32("code").unwrap(), 91);
        second.closed().await;
    });
}
