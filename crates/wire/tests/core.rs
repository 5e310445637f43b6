//! The everyday path: what drivers send and servers answer, through the public API.
#![allow(clippy::unwrap_used)]

use bson::raw::{RawDocument, RawDocumentBuf};
use bson::{Timestamp, rawdoc};
use bytes::{Bytes, BytesMut};
use halocline_wire::patch::{self, Edit, ReplyView};
use halocline_wire::*;

fn message(flags: MsgFlags, body: &RawDocument, sequences: &[(&str, &[&RawDocument])]) -> OpMsg {
    let mut out = BytesMut::new();
    encode_msg(7, 0, flags, body, sequences, &mut out);
    OpMsg::from_bytes(out.freeze(), &Limits::CLIENT).unwrap()
}

fn reply_bytes(body: &RawDocument) -> Vec<u8> {
    let mut out = BytesMut::new();
    encode_msg(1, 2, MsgFlags::NONE, body, &[], &mut out);
    out.to_vec()
}

fn find() -> RawDocumentBuf {
    rawdoc! {
        "find": "orders",
        "filter": { "_id": 5 },
        "limit": 1i64,
        "lsid": { "id": bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] } },
        "txnNumber": 12i64,
        "$clusterTime": { "clusterTime": Timestamp { time: 9, increment: 4 } },
        "readConcern": { "level": "majority", "afterClusterTime": Timestamp { time: 8, increment: 3 } },
        "maxTimeMS": 250,
        "comment": ["a", "b"],
        "$readPreference": { "mode": "secondaryPreferred" },
        "$db": "shop",
    }
}

#[test]
fn the_command_view_shows_the_envelope() {
    let body = find();
    let msg = message(MsgFlags::NONE, &body, &[]);
    let command = Command::parse(&msg).unwrap();
    assert_eq!(command.name(), "find");
    assert_eq!(command.target().as_str(), Some("orders"));
    assert_eq!(command.namespace(), Some(("shop", "orders")));
    assert_eq!(command.txn_number(), Some(12));
    assert!(!command.start_transaction());
    assert!(!command.in_transaction());
    assert_eq!(command.max_time_ms(), Some(250));
    assert_eq!(command.after_cluster_time(), Some(Timestamp { time: 8, increment: 3 }));
    assert_eq!(command.lsid(), Some(body.get_document("lsid").unwrap()));
    assert_eq!(command.cluster_time(), Some(body.get_document("$clusterTime").unwrap()));
    assert_eq!(command.read_preference().unwrap().get_str("mode").unwrap(), "secondaryPreferred");
    assert_eq!(command.comment().unwrap().as_array().unwrap().get_str(1).unwrap(), "b");
    assert_eq!(command.write_concern(), None);
    assert_eq!(command.cursor_id(), None);
    assert_eq!(command.get("limit").unwrap().as_i64(), Some(1));

    let names: Vec<&str> = command.raw_fields().map(|field| field.name).collect();
    let expected: Vec<&str> = body.iter().map(|field| field.unwrap().0.as_str()).collect();
    assert_eq!(names, expected);
    for field in command.raw_fields() {
        let element = &msg.bytes()[field.span.clone()];
        assert_eq!(&element[1..1 + field.name.len()], field.name.as_bytes());
        assert_eq!(element.len() - 2 - field.name.len(), field.value_span.len());
        assert_eq!(field.span.end, field.value_span.end);
    }
    let limit = command.raw_field("limit").unwrap();
    assert_eq!(&msg.bytes()[limit.value_span], &1i64.to_le_bytes());
}

#[test]
fn a_get_more_names_cursor_and_collection() {
    let body = rawdoc! { "getMore": 77i64, "collection": "orders", "$db": "shop" };
    let msg = message(MsgFlags::NONE, &body, &[]);
    let command = Command::parse(&msg).unwrap();
    assert_eq!(command.cursor_id(), Some(77));
    assert_eq!(command.namespace(), Some(("shop", "orders")));

    let body = rawdoc! { "getMore": 77, "collection": "orders", "$db": "shop" };
    let msg = message(MsgFlags::NONE, &body, &[]);
    assert_eq!(Command::parse(&msg).unwrap_err().kind(), "wrong_type");
}

#[test]
fn null_envelope_fields_are_absent_as_on_a_server() {
    let body = rawdoc! {
        "ping": 1, "lsid": null, "txnNumber": null, "maxTimeMS": null, "autocommit": null,
        "readConcern": null, "$db": "admin",
    };
    let msg = message(MsgFlags::NONE, &body, &[]);
    let command = Command::parse(&msg).unwrap();
    assert_eq!((command.lsid(), command.txn_number()), (None, None));
    assert_eq!((command.max_time_ms(), command.autocommit()), (None, None));
    assert_eq!(command.collection(), None);
}

#[test]
fn numbers_of_any_type_are_accepted_for_max_time() {
    let decimal: bson::Decimal128 = "1500".parse().unwrap();
    let bodies = [
        rawdoc! { "ping": 1, "maxTimeMS": 1500, "$db": "a" },
        rawdoc! { "ping": 1, "maxTimeMS": 1500i64, "$db": "a" },
        rawdoc! { "ping": 1, "maxTimeMS": 1500.0, "$db": "a" },
        rawdoc! { "ping": 1, "maxTimeMS": decimal, "$db": "a" },
    ];
    for body in bodies {
        let msg = message(MsgFlags::NONE, &body, &[]);
        assert_eq!(Command::parse(&msg).unwrap().max_time_ms(), Some(1500));
    }
}

#[test]
fn ambiguous_commands_are_refused() {
    let refused = |body: &RawDocument, sequences: &[(&str, &[&RawDocument])]| {
        Command::parse(&message(MsgFlags::NONE, body, sequences)).unwrap_err()
    };
    for name in ["$db", "lsid", "txnNumber", "autocommit", "find", "filter", "x"] {
        let mut body = rawdoc! {
            "find": "c", "lsid": {}, "txnNumber": 1i64, "autocommit": false, "filter": {}, "x": 1,
            "$db": "shop",
        };
        let repeated = bson::RawBson::from(body.get(name).unwrap().unwrap());
        body.append(bson::raw::CString::try_from(name).unwrap(), repeated);
        let error = refused(&body, &[]);
        assert_eq!(error, WireError::DuplicateField(name.into()));
        assert_eq!(error.answer_code(), Some(40413));
    }
    assert_eq!(refused(&rawdoc! { "find": "c" }, &[]), WireError::MissingDatabase);
    assert_eq!(refused(&rawdoc! { "find": "c", "$db": "" }, &[]), WireError::MissingDatabase);
    assert_eq!(refused(&rawdoc! {}, &[]), WireError::EmptyCommand);
    assert_eq!(refused(&rawdoc! { "ping": 1, "$db": 1 }, &[]).kind(), "wrong_type");
    assert_eq!(refused(&rawdoc! { "ping": 1, "lsid": "x", "$db": "a" }, &[]).kind(), "wrong_type");
    assert_eq!(
        refused(&rawdoc! { "ping": 1, "txnNumber": 3, "$db": "a" }, &[]).kind(),
        "wrong_type"
    );
    let body = rawdoc! { "insert": "c", "documents": [], "$db": "shop" };
    let error = refused(&body, &[("documents", &[&rawdoc! {}])]);
    assert_eq!(error, WireError::DuplicateSequence("documents".into()));
}

#[test]
fn duplicates_are_found_among_very_many_fields() {
    let mut body = rawdoc! { "getParameter": 1, "$db": "admin" };
    for number in 0..500 {
        body.append(bson::raw::CString::try_from(format!("f{number}")).unwrap(), 1);
    }
    assert!(Command::parse(&message(MsgFlags::NONE, &body, &[])).is_ok());
    for repeated in ["f3", "f499", "$db"] {
        let mut body = body.clone();
        body.append(bson::raw::CString::try_from(repeated).unwrap(), 1);
        let error = Command::parse(&message(MsgFlags::NONE, &body, &[])).unwrap_err();
        assert_eq!(error.kind(), "duplicate_field", "{repeated}");
    }
}

#[test]
fn documents_come_from_array_or_sequence_alike() {
    let docs = [rawdoc! { "_id": 1 }, rawdoc! { "_id": 2 }, rawdoc! {}];
    let refs: Vec<&RawDocument> = docs.iter().map(|doc| doc.as_ref()).collect();
    let body = rawdoc! { "insert": "c", "ordered": false, "$db": "shop" };
    let by_sequence = message(MsgFlags::NONE, &body, &[("documents", &refs)]);
    let body = rawdoc! {
        "insert": "c", "documents": [docs[0].clone(), docs[1].clone(), docs[2].clone()], "$db": "shop",
    };
    let by_array = message(MsgFlags::NONE, &body, &[]);
    for msg in [&by_sequence, &by_array] {
        let command = Command::parse(msg).unwrap();
        let found: Vec<&RawDocument> = command.documents("documents").unwrap().collect();
        assert_eq!(found, refs);
        assert_eq!(command.documents_len("documents").unwrap(), 3);
        let shared = msg.bytes().slice_ref(found[1].as_bytes());
        assert_eq!(shared, docs[1].as_bytes());
        assert_eq!(command.documents("updates").err().unwrap().kind(), "missing_field");
    }
    let body = rawdoc! { "insert": "c", "documents": [{}, 3], "$db": "shop" };
    let msg = message(MsgFlags::NONE, &body, &[]);
    let error = Command::parse(&msg).unwrap().documents("documents").err().unwrap();
    assert_eq!(error, WireError::WrongType { field: "documents.1".into(), expected: "object" });
}

#[test]
fn checksums_are_verified_and_written() {
    let body = rawdoc! { "ping": 1, "$db": "admin" };
    let mut out = BytesMut::new();
    encode_msg(1, 0, MsgFlags::CHECKSUM_PRESENT, &body, &[("s", &[&body])], &mut out);
    let good = out.freeze();
    assert!(OpMsg::from_bytes(good.clone(), &Limits::CLIENT).unwrap().has_checksum());
    for at in 16..good.len() {
        let mut bytes = good.to_vec();
        bytes[at] ^= 0x40;
        assert!(OpMsg::from_bytes(bytes.into(), &Limits::CLIENT).is_err(), "byte {at}");
    }
}

#[test]
fn a_refused_message_still_says_whether_it_wants_an_answer() {
    for flags in [MsgFlags::NONE, MsgFlags::MORE_TO_COME] {
        let mut out = BytesMut::new();
        encode_msg(7, 0, flags, &rawdoc! { "insert": "c" }, &[], &mut out);
        let end = out.len();
        out[end - 2] = 0xff;
        let frame = Frame::from_bytes(out.freeze(), 1000).unwrap();
        assert!(decode(frame.clone(), &Limits::CLIENT).is_err());
        assert_eq!(frame.msg_flags(), Some(flags));
        assert_eq!(frame.header.request_id, 7);
    }
}

#[test]
fn legacy_handshakes_are_read_and_answered() {
    for (query, name) in [
        (rawdoc! { "isMaster": 1, "helloOk": true }, "isMaster"),
        (rawdoc! { "$query": { "ismaster": 1 }, "$readPreference": {} }, "ismaster"),
    ] {
        let mut bytes = vec![0; 16];
        bytes.extend(4i32.to_le_bytes());
        bytes.extend(b"admin.$cmd\0");
        bytes.extend(0i32.to_le_bytes());
        bytes.extend((-1i32).to_le_bytes());
        bytes.extend(query.as_bytes());
        let header =
            Header { length: bytes.len(), request_id: 9, response_to: 0, op_code: OP_QUERY };
        bytes[..16].copy_from_slice(&header.encode());

        let frame = Frame::from_bytes(bytes.into(), 1000).unwrap();
        let decoded = decode(frame, &Limits::CLIENT).unwrap();
        assert_eq!(decoded.request_id, 9);
        let Message::Query(query) = decoded.message else { panic!("not a query") };
        assert!(query.is_handshake());
        assert_eq!(query.command_db(), Some("admin"));
        let command = Command::parse_query(&query).unwrap();
        assert_eq!((command.name(), command.db()), (name, "admin"));
        for field in command.raw_fields() {
            assert_eq!(
                &query.bytes()[field.span.start + 1..][..field.name.len()],
                field.name.as_bytes()
            );
        }
    }
    let mut out = BytesMut::new();
    encode_query_reply(3, 9, &rawdoc! { "ok": 1 }, &mut out);
    let document = rawdoc! { "ok": 1 };
    let mut expected = Vec::new();
    for int in [36 + document.as_bytes().len() as i32, 3, 9, 1, 8, 0, 0, 0, 1] {
        expected.extend(int.to_le_bytes());
    }
    expected.extend(document.as_bytes());
    assert_eq!(out, expected);
}

#[test]
fn error_documents_have_the_servers_shape() {
    let document =
        error_document(112, codes::code_name(112), "again", &["TransientTransactionError"]);
    assert_eq!(document.get_f64("ok").unwrap(), 0.0);
    assert_eq!(document.get_i32("code").unwrap(), 112);
    assert_eq!(document.get_str("codeName").unwrap(), "WriteConflict");
    let labels = document.get_array("errorLabels").unwrap();
    assert_eq!(labels.get_str(0).unwrap(), "TransientTransactionError");
    assert!(error_document(1, "InternalError", "", &[]).get("errorLabels").unwrap().is_none());
}

fn cursor_reply() -> RawDocumentBuf {
    rawdoc! {
        "cursor": { "firstBatch": [{ "_id": 1 }, { "_id": 2, "id": 7i64 }], "id": 123i64, "ns": "shop.orders" },
        "ok": 1.0,
        "$clusterTime": { "clusterTime": Timestamp { time: 5, increment: 6 }, "signature": { "keyId": 0i64 } },
        "operationTime": Timestamp { time: 3, increment: 4 },
    }
}

#[test]
fn replies_are_patched_in_place() {
    let original = reply_bytes(&cursor_reply());
    let mut bytes = original.clone();
    let mut view = ReplyView::parse(&bytes).unwrap();
    assert!(view.ok);
    let cursor = view.cursor.clone().unwrap();
    assert_eq!((cursor.id, cursor.is_first, cursor.is_empty), (123, true, false));
    assert_eq!(cursor.documents(&bytes).count(), 2);
    assert_eq!(view.operation_time, Some(Timestamp { time: 3, increment: 4 }));
    assert_eq!(view.cluster_time, Some(Timestamp { time: 5, increment: 6 }));

    let clock = rawdoc! { "clusterTime": Timestamp { time: 50, increment: 60 }, "signature": { "keyId": 9i64 } };
    assert!(view.set_cursor_id(&mut bytes, -2).unwrap());
    assert!(view.set_operation_time(&mut bytes, Timestamp { time: 30, increment: 40 }).unwrap());
    assert!(view.set_cluster_time(&mut bytes, &clock).unwrap());
    let other_size = rawdoc! { "clusterTime": Timestamp { time: 50, increment: 60 } };
    assert!(!view.set_cluster_time(&mut bytes, &other_size).unwrap());
    let expected = rawdoc! {
        "cursor": { "firstBatch": [{ "_id": 1 }, { "_id": 2, "id": 7i64 }], "id": -2i64, "ns": "shop.orders" },
        "ok": 1.0,
        "$clusterTime": clock,
        "operationTime": Timestamp { time: 30, increment: 40 },
    };
    assert_eq!(bytes, reply_bytes(&expected));
    assert_eq!(ReplyView::parse(&bytes).unwrap(), view);

    let mut bytes = original;
    assert_eq!(patch::set_cursor_id(&mut bytes, 9).unwrap(), Some(123));
    patch::set_request_id(&mut bytes, 44).unwrap();
    patch::set_response_to(&mut bytes, 45).unwrap();
    let header = Header::parse(&bytes, 10_000).unwrap().unwrap();
    assert_eq!((header.request_id, header.response_to), (44, 45));
    assert_eq!(ReplyView::parse(&bytes).unwrap().cursor.unwrap().id, 9);
}

#[test]
fn patches_keep_a_checksum_right() {
    let mut out = BytesMut::new();
    encode_msg(1, 2, MsgFlags::CHECKSUM_PRESENT, &cursor_reply(), &[], &mut out);
    patch::set_cursor_id(&mut out, 5).unwrap();
    patch::set_request_id(&mut out, 6).unwrap();
    patch::set_response_to(&mut out, 6).unwrap();
    assert!(OpMsg::from_bytes(out.freeze(), &Limits::SERVER).is_ok());
}

#[test]
fn write_replies_are_read_in_one_pass() {
    let view = ReplyView::parse(&reply_bytes(&rawdoc! {
        "n": 3, "nModified": 2i64, "upserted": [{ "index": 0, "_id": 1 }], "writeErrors": [{ "index": 1 }],
        "writeConcernError": { "code": 64 }, "ok": 1.0,
    }))
    .unwrap();
    assert_eq!((view.n, view.n_modified, view.ok), (Some(3), Some(2), true));
    assert!(view.has_write_errors && view.has_write_concern_error && view.has_upserted);

    let failed = error_document(11000, "DuplicateKey", "x", &["L"]);
    let view = ReplyView::parse(&reply_bytes(&failed)).unwrap();
    assert_eq!((view.ok, view.code, view.has_error_labels), (false, Some(11000), true));
    assert!(!view.has_write_errors && view.cursor.is_none() && view.n.is_none());
}

#[test]
fn empty_batches_are_seen() {
    let view = ReplyView::parse(&reply_bytes(&rawdoc! {
        "cursor": { "id": 0i64, "ns": "a.b", "nextBatch": [] }, "ok": 1,
    }))
    .unwrap();
    let cursor = view.cursor.unwrap();
    assert_eq!((cursor.id, cursor.is_first, cursor.is_empty), (0, false, true));
}

#[test]
fn fields_are_stripped_and_the_rest_is_copied() {
    let docs = [rawdoc! { "_id": 1 }];
    let body = find();
    for flags in [MsgFlags::NONE, MsgFlags::CHECKSUM_PRESENT] {
        let msg = message(flags, &body, &[("documents", &[&docs[0]])]);
        let mut out = BytesMut::from(&b"before"[..]);
        let edits = [Edit::Drop("$clusterTime"), Edit::DropIn("readConcern", "afterClusterTime")];
        patch::rewrite(&msg, &edits, &mut out).unwrap();
        let expected = rawdoc! {
            "find": "orders",
            "filter": { "_id": 5 },
            "limit": 1i64,
            "lsid": { "id": bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] } },
            "txnNumber": 12i64,
            "readConcern": { "level": "majority" },
            "maxTimeMS": 250,
            "comment": ["a", "b"],
            "$readPreference": { "mode": "secondaryPreferred" },
            "$db": "shop",
        };
        let rewritten = OpMsg::from_bytes(Bytes::from(out[6..].to_vec()), &Limits::CLIENT).unwrap();
        assert_eq!(rewritten.body(), expected.as_ref());
        assert_eq!(rewritten.flags(), flags);
        assert_eq!(rewritten.sequences().next().unwrap().identifier(), "documents");
        assert_eq!(rewritten.bytes()[..16].get(4..), msg.bytes()[..16].get(4..));

        let mut out = BytesMut::new();
        patch::strip_fields(&msg, &["nothing"], &mut out).unwrap();
        assert_eq!(out, msg.bytes());
    }
}

#[test]
fn fields_are_set_in_place_or_appended() {
    let body = rawdoc! { "find": "a", "readConcern": { "level": "local" }, "x": null };
    let stamp = Timestamp { time: 1, increment: 2 };
    let edits = [
        Edit::Set("find", "b".into()),
        Edit::SetIn("readConcern", "afterClusterTime", stamp.into()),
        Edit::SetIn("readConcern", "level", "majority".into()),
        Edit::SetIn("x", "y", 1.into()),
        Edit::Set("z", 2.into()),
        Edit::SetIn("fresh", "a", 3.into()),
        Edit::SetIn("fresh", "b", 4.into()),
        Edit::DropIn("absent", "a"),
    ];
    assert_eq!(
        patch::edited(&body, &edits).unwrap(),
        rawdoc! {
            "find": "b", "readConcern": { "level": "majority", "afterClusterTime": stamp },
            "x": { "y": 1 }, "z": 2, "fresh": { "a": 3, "b": 4 },
        }
    );
    assert!(patch::edited(&body, &[Edit::Set("a\0b", 1.into())]).is_err());
    for name in ["find", "absent"] {
        let edits = [Edit::Set(name, 1.into()), Edit::Drop(name), Edit::SetIn(name, "a", 1.into())];
        assert_eq!(
            patch::edited(&body, &edits).unwrap(),
            patch::edited(&body, &[Edit::Drop(name)]).unwrap()
        );
        let edits = [
            Edit::SetIn(name, "a", 1.into()),
            Edit::Set(name, 1.into()),
            Edit::Set(name, 2.into()),
        ];
        assert_eq!(
            patch::edited(&body, &edits).unwrap(),
            patch::edited(&body, &[Edit::Set(name, 2.into())]).unwrap()
        );
    }
}

#[test]
fn compressed_messages_come_back() {
    let body = find();
    let mut plain = BytesMut::new();
    encode_msg(5, 6, MsgFlags::NONE, &body, &[], &mut plain);
    for compressor in [Compressor::Noop, Compressor::Snappy, Compressor::Zlib, Compressor::Zstd] {
        let mut out = BytesMut::new();
        compress(&plain, compressor, &mut out).unwrap();
        let frame = take_frame(&mut out, MAX_MESSAGE_BYTES).unwrap().unwrap();
        let decoded = decode(frame, &Limits::CLIENT).unwrap();
        assert_eq!(decoded.compressor, Some(compressor));
        assert_eq!((decoded.request_id, decoded.response_to), (5, 6));
        let Message::Msg(msg) = decoded.message else { panic!("not a message") };
        assert_eq!(msg.bytes(), &plain);
    }
}
