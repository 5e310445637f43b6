//! What must hold for any bytes at all: what is written comes back, and what is malformed is an
//! error, never a panic, never an allocation beyond what was checked.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use bson::raw::{RawArrayBuf, RawBson, RawDocument, RawDocumentBuf};
use bson::spec::BinarySubtype;
use bson::{Binary, DateTime, Decimal128, Regex, Timestamp, oid::ObjectId, rawdoc};
use bytes::{Bytes, BytesMut};
use halocline_wire::patch::{self, Edit, ReplyView};
use halocline_wire::*;
use proptest::collection::vec;
use proptest::prelude::*;

const COMPRESSORS: [Compressor; 4] =
    [Compressor::Noop, Compressor::Snappy, Compressor::Zlib, Compressor::Zstd];

fn cstring(text: &str) -> bson::raw::CString {
    bson::raw::CString::try_from(text.replace('\0', "")).unwrap()
}

fn document(fields: Vec<(String, RawBson)>) -> RawDocumentBuf {
    let mut doc = RawDocumentBuf::new();
    for (name, value) in fields {
        doc.append(cstring(&name), value);
    }
    doc
}

/// Any BSON value, nested a little.
fn value() -> impl Strategy<Value = RawBson> {
    let leaf = prop_oneof![
        any::<f64>().prop_map(RawBson::Double),
        ".{0,20}".prop_map(RawBson::String),
        any::<bool>().prop_map(RawBson::Boolean),
        any::<i32>().prop_map(RawBson::Int32),
        any::<i64>().prop_map(RawBson::Int64),
        any::<[u8; 12]>().prop_map(|id| RawBson::ObjectId(ObjectId::from_bytes(id))),
        any::<[u8; 16]>().prop_map(|d| RawBson::Decimal128(Decimal128::from_bytes(d))),
        any::<i64>().prop_map(|ms| RawBson::DateTime(DateTime::from_millis(ms))),
        any::<(u32, u32)>()
            .prop_map(|(time, increment)| RawBson::Timestamp(Timestamp { time, increment })),
        (vec(any::<u8>(), 0..30), 0u8..=9).prop_map(|(bytes, subtype)| {
            RawBson::Binary(Binary { subtype: BinarySubtype::from(subtype), bytes })
        }),
        ("[^\0]{0,9}", "[ilmsux]{0,3}").prop_map(|(pattern, options)| {
            RawBson::RegularExpression(Regex {
                pattern: cstring(&pattern),
                options: cstring(&options),
            })
        }),
        ".{0,9}".prop_map(RawBson::JavaScriptCode),
        ".{0,9}".prop_map(RawBson::Symbol),
        ".{0,9}".prop_map(|code| {
            let scope = rawdoc! { "x": 1 };
            RawBson::JavaScriptCodeWithScope(bson::raw::RawJavaScriptCodeWithScope { code, scope })
        }),
        Just(RawBson::Null),
        Just(RawBson::Undefined),
        Just(RawBson::MinKey),
        Just(RawBson::MaxKey),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            vec(("[^\0]{0,6}", inner.clone()), 0..5)
                .prop_map(|fields| RawBson::Document(document(fields))),
            vec(inner, 0..5).prop_map(|values| {
                let mut array = RawArrayBuf::new();
                values.into_iter().for_each(|value| array.push(value));
                RawBson::Array(array)
            }),
        ]
    })
}

fn any_document() -> impl Strategy<Value = RawDocumentBuf> {
    vec(("[^\0]{0,8}", value()), 0..6).prop_map(document)
}

/// Field names that differ, none of them an envelope field.
fn command_document() -> impl Strategy<Value = RawDocumentBuf> {
    vec(("[a-z\u{e9}]{0,6}", value()), 1..7).prop_map(|fields| {
        let mut doc = document(
            fields
                .into_iter()
                .enumerate()
                .map(|(at, (name, v))| (format!("{name}{at}"), v))
                .collect(),
        );
        doc.append(cstring("$db"), "shop");
        doc
    })
}

fn any_flags() -> impl Strategy<Value = MsgFlags> {
    (0u32..4, any::<bool>(), 0u32..0x8000).prop_map(|(required, exhaust, unknown_optional)| {
        MsgFlags(required | u32::from(exhaust) << 16 | unknown_optional << 17)
    })
}

type Parts = (MsgFlags, RawDocumentBuf, Vec<(String, Vec<RawDocumentBuf>)>);

fn any_message() -> impl Strategy<Value = Parts> {
    let sequence = (vec(any_document(), 0..4), "[A-Za-z]{0,8}");
    (any_flags(), any_document(), vec(sequence, 0..4)).prop_map(|(flags, body, sequences)| {
        let named = sequences
            .into_iter()
            .enumerate()
            .map(|(at, (docs, name))| (format!("{name}{at}"), docs))
            .collect();
        (flags, body, named)
    })
}

fn encode((flags, body, sequences): &Parts) -> Bytes {
    let documents: Vec<Vec<&RawDocument>> =
        sequences.iter().map(|(_, docs)| docs.iter().map(AsRef::as_ref).collect()).collect();
    let sequences: Vec<(&str, &[&RawDocument])> = sequences
        .iter()
        .zip(&documents)
        .map(|((name, _), docs)| (name.as_str(), docs.as_slice()))
        .collect();
    let mut out = BytesMut::new();
    encode_msg(11, 22, *flags, body, &sequences, &mut out);
    out.freeze()
}

/// Everything a reader does with a message it was sent; only panics matter.
fn read_everything(bytes: Bytes, limits: &Limits) -> Result<(), WireError> {
    let decoded = decode(Frame::from_bytes(bytes, limits.max_message)?, limits)?;
    let command = match &decoded.message {
        Message::Msg(msg) => {
            for sequence in msg.sequences() {
                assert_eq!(sequence.documents().count(), sequence.len());
                let _ = sequence.identifier();
            }
            if let Ok(mut view) = ReplyView::parse(msg.bytes()) {
                let mut copy = msg.bytes().to_vec();
                let _ = view.cursor.as_ref().map(|cursor| cursor.documents(&copy).count());
                view.set_cursor_id(&mut copy, 1)?;
                view.set_operation_time(&mut copy, Timestamp { time: 1, increment: 1 })?;
                assert_eq!(copy.len(), msg.bytes().len());
            }
            let mut out = BytesMut::new();
            let edits = [Edit::Drop("a"), Edit::SetIn("b", "c", 1.into()), Edit::DropIn("d", "e")];
            patch::rewrite(msg, &edits, &mut out)?;
            OpMsg::from_bytes(out.freeze(), &Limits::SERVER)?;
            Command::parse(msg)?
        }
        Message::Query(query) => {
            let _ = query.is_handshake();
            Command::parse_query(query)?
        }
    };
    assert_eq!(command.raw_fields().count(), command.body().iter().map(Result::unwrap).count());
    for field in command.raw_fields() {
        assert_eq!(command.get(field.name), Some(field.value));
        if let Ok(documents) = command.documents(field.name) {
            assert_eq!(documents.len(), documents.count());
        }
    }
    let _ = (command.target(), command.comment(), command.after_cluster_time());
    Ok(())
}

fn with_length(mut bytes: Vec<u8>) -> Bytes {
    let length = (bytes.len() as i32).to_le_bytes();
    bytes[..4].copy_from_slice(&length);
    bytes.into()
}

proptest! {
    #[test]
    fn messages_round_trip(parts in any_message()) {
        let bytes = encode(&parts);
        let (flags, body, sequences) = &parts;
        let msg = OpMsg::from_bytes(bytes.clone(), &Limits::CLIENT).unwrap();
        prop_assert_eq!(msg.flags(), *flags);
        prop_assert_eq!(msg.body(), body.as_ref() as &RawDocument);
        prop_assert_eq!(&bytes[msg.body_range()], body.as_bytes());
        let found: Vec<(String, Vec<RawDocumentBuf>)> = msg
            .sequences()
            .map(|s| (s.identifier().to_owned(), s.documents().map(ToOwned::to_owned).collect()))
            .collect();
        prop_assert_eq!(&found, sequences);
        let mut again = BytesMut::new();
        patch::rewrite(&msg, &[], &mut again).unwrap();
        prop_assert_eq!(again.freeze(), bytes);
    }

    #[test]
    fn a_stream_gives_the_same_frames_however_it_is_cut(
        messages in vec(any_message(), 1..4), cut in 1usize..40,
    ) {
        let expected: Vec<Bytes> = messages.iter().map(encode).collect();
        let stream = expected.concat();
        let mut buf = BytesMut::new();
        let mut found = Vec::new();
        for piece in stream.chunks(cut) {
            buf.extend_from_slice(piece);
            while let Some(frame) = take_frame(&mut buf, MAX_MESSAGE_BYTES).unwrap() {
                found.push(frame.bytes);
            }
        }
        prop_assert_eq!(found, expected);
        prop_assert!(buf.is_empty());
    }

    #[test]
    fn arbitrary_bytes_are_survived(
        tail in vec(any::<u8>(), 0..200), op_code in prop::sample::select(vec![1, 2004, 2012, 2013]),
    ) {
        let mut bytes = vec![0; 16];
        bytes[12..].copy_from_slice(&i32::to_le_bytes(op_code));
        bytes.extend(tail);
        let bytes = with_length(bytes);
        let _ = read_everything(bytes.clone(), &Limits::CLIENT);
        let _ = read_everything(bytes, &Limits::SERVER);
    }

    #[test]
    fn flipped_bytes_are_survived(parts in any_message(), flips in vec((any::<usize>(), any::<u8>()), 1..6)) {
        let mut bytes = encode(&parts).to_vec();
        for (at, flip) in flips {
            let at = 16 + at % (bytes.len() - 16);
            bytes[at] ^= flip;
        }
        let _ = read_everything(Bytes::from(bytes.clone()), &Limits::CLIENT);
        let _ = read_everything(bytes.into(), &Limits::SERVER);
    }

    #[test]
    fn what_is_accepted_from_clients_is_sound_bson(parts in any_message(), at: usize, flip in 1u8..) {
        let mut bytes = encode(&(MsgFlags::NONE, parts.1, parts.2)).to_vec();
        let at = 20 + at % (bytes.len() - 20);
        bytes[at] ^= flip;
        if let Ok(msg) = OpMsg::from_bytes(bytes.into(), &Limits::CLIENT) {
            fn walk(doc: &RawDocument) {
                for element in doc.iter_elements() {
                    // Every element is found; only a text may be unreadable.
                    match element.unwrap().value() {
                        Ok(bson::RawBsonRef::Document(nested)) => walk(nested),
                        Ok(bson::RawBsonRef::Array(nested)) => {
                            walk(RawDocument::from_bytes(nested.as_bytes()).unwrap());
                        }
                        _ => {}
                    }
                }
            }
            walk(msg.body());
            msg.sequences().flat_map(|s| s.documents()).for_each(walk);
        }
    }

    #[test]
    fn trailing_garbage_is_an_error(parts in any_message(), garbage in vec(2u8.., 1..20)) {
        let mut bytes = encode(&parts).to_vec();
        bytes.extend(garbage);
        prop_assert!(OpMsg::from_bytes(with_length(bytes), &Limits::CLIENT).is_err());
    }

    #[test]
    fn commands_show_every_field_where_it_is(body in command_document()) {
        let bytes = encode(&(MsgFlags::NONE, body.clone(), vec![]));
        let msg = OpMsg::from_bytes(bytes.clone(), &Limits::CLIENT).unwrap();
        let command = Command::parse(&msg).unwrap();
        let mut rebuilt = RawDocumentBuf::new();
        let mut copied = Vec::new();
        for field in command.raw_fields() {
            rebuilt.append(cstring(field.name), field.value);
            copied.extend_from_slice(&bytes[field.span]);
        }
        prop_assert_eq!(rebuilt, body.clone());
        prop_assert_eq!(&copied, &body.as_bytes()[4..body.as_bytes().len() - 1]);
    }

    #[test]
    fn stripping_equals_building_without(body in command_document(), drop in vec(any::<bool>(), 8)) {
        let names: Vec<String> =
            body.iter().map(|field| field.unwrap().0.as_str().to_owned()).collect();
        let dropped: Vec<&str> = names
            .iter().zip(&drop).filter(|(_, drop)| **drop).map(|(name, _)| name.as_str()).collect();
        let mut expected = RawDocumentBuf::new();
        for field in body.iter() {
            let (name, value) = field.unwrap();
            if !dropped.contains(&name.as_str()) {
                expected.append(name, value);
            }
        }
        let docs = vec![("documents".to_owned(), vec![rawdoc! { "a": 1 }])];
        let bytes = encode(&(MsgFlags::CHECKSUM_PRESENT, body, docs.clone()));
        let msg = OpMsg::from_bytes(bytes, &Limits::CLIENT).unwrap();
        let mut out = BytesMut::new();
        patch::strip_fields(&msg, &dropped, &mut out).unwrap();
        prop_assert_eq!(out.freeze(), encode(&(MsgFlags::CHECKSUM_PRESENT, expected, docs)));
    }

    #[test]
    fn setting_equals_building_with(body in command_document(), at: usize, new in value()) {
        let names: Vec<String> =
            body.iter().map(|field| field.unwrap().0.as_str().to_owned()).collect();
        let target = &names[at % names.len()];
        let mut expected = RawDocumentBuf::new();
        for field in body.iter() {
            let (name, value) = field.unwrap();
            if name.as_str() == target {
                expected.append(name, new.clone());
            } else {
                expected.append(name, value);
            }
        }
        expected.append(cstring("new"), new.clone());
        let edits =
            [Edit::Set("new", new.as_raw_bson_ref()), Edit::Set(target, new.as_raw_bson_ref())];
        prop_assert_eq!(patch::edited(&body, &edits).unwrap(), expected);
    }

    #[test]
    fn replies_are_patched_like_rebuilt_ones(
        batch in vec(any_document(), 0..4), old: i64, new: i64, first: bool,
        times: [(u32, u32); 2], junk in value(),
    ) {
        let [from, to] = times.map(|(time, increment)| Timestamp { time, increment });
        let build = |id: i64, time: Timestamp| {
            let mut array = RawArrayBuf::new();
            batch.iter().for_each(|doc| array.push(doc.clone()));
            let mut cursor = RawDocumentBuf::new();
            cursor.append(cstring(if first { "firstBatch" } else { "nextBatch" }), array);
            cursor.append(cstring("id"), id);
            let mut body = rawdoc! { "junk": junk.clone(), "operationTime": time };
            body.append(cstring("cursor"), cursor);
            body.append(cstring("$clusterTime"), rawdoc! { "clusterTime": time });
            body.append(cstring("ok"), 1.0);
            encode(&(MsgFlags::NONE, body, vec![])).to_vec()
        };
        let mut bytes = build(old, from);
        let mut view = ReplyView::parse(&bytes).unwrap();
        let cursor = view.cursor.clone().unwrap();
        prop_assert_eq!((cursor.id, cursor.is_first), (old, first));
        prop_assert_eq!(cursor.is_empty, batch.is_empty());
        let found: Vec<&RawDocument> = cursor.documents(&bytes).collect();
        let docs: Vec<&RawDocument> = batch.iter().map(AsRef::as_ref).collect();
        prop_assert_eq!(found, docs);
        prop_assert!(view.set_cursor_id(&mut bytes, new).unwrap());
        prop_assert!(view.set_operation_time(&mut bytes, to).unwrap());
        let clock = rawdoc! { "clusterTime": to };
        prop_assert!(view.set_cluster_time(&mut bytes, &clock).unwrap());
        prop_assert_eq!(bytes, build(new, to));
    }

    #[test]
    fn a_reply_view_never_patches_another_message_beyond_its_end(parts in any_message()) {
        let reply = rawdoc! {
            "junk": "x".repeat(5000), "cursor": { "id": 1i64 },
            "operationTime": Timestamp { time: 1, increment: 1 },
        };
        let mut view = ReplyView::parse(&encode(&(MsgFlags::NONE, reply, vec![]))).unwrap();
        let mut short = encode(&(parts.0, parts.1, vec![])).to_vec();
        if short.len() < 4000 {
            prop_assert!(view.set_cursor_id(&mut short, 1).is_err());
            let time = Timestamp { time: 1, increment: 1 };
            prop_assert!(view.set_operation_time(&mut short, time).is_err());
        }
    }

    #[test]
    fn compression_round_trips(parts in any_message(), noise in vec(any::<u8>(), 0..3000)) {
        let (flags, mut body, sequences) = parts;
        body.append(cstring("noise"), Binary { subtype: BinarySubtype::Generic, bytes: noise });
        let plain = encode(&(flags, body, sequences));
        for compressor in COMPRESSORS {
            let mut out = BytesMut::from(&b"kept"[..]);
            compress(&plain, compressor, &mut out).unwrap();
            let frame = Frame::from_bytes(out.freeze().slice(4..), MAX_MESSAGE_BYTES).unwrap();
            let decoded = decode(frame, &Limits::CLIENT).unwrap();
            prop_assert_eq!(decoded.compressor, Some(compressor));
            let Message::Msg(msg) = decoded.message else { unreachable!() };
            prop_assert_eq!(msg.bytes(), &plain);
        }
    }

    #[test]
    fn lying_compressed_sizes_are_errors(parts in any_message(), lie in 1usize..400) {
        let plain = encode(&parts);
        let size = plain.len() - 16;
        for compressor in COMPRESSORS {
            let mut out = BytesMut::new();
            compress(&plain, compressor, &mut out).unwrap();
            for declared in [size + 1, size.saturating_sub(1), size + lie, size.saturating_sub(lie), 0] {
                let mut bytes = out.to_vec();
                bytes[20..24].copy_from_slice(&(declared as i32).to_le_bytes());
                let result = read_everything(bytes.into(), &Limits::CLIENT);
                prop_assert!(result.is_err(), "{compressor:?} {size} {declared}");
            }
        }
    }

}

proptest! {
    // Each case tries every byte of its message.
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_truncation_is_an_error(parts in any_message()) {
        let bytes = encode(&parts);
        for end in 0..bytes.len() {
            // As it stands: the header says more than there is.
            prop_assert!(read_everything(bytes.slice(..end), &Limits::CLIENT).is_err());
            // With a header that fits what is left. A cut exactly behind a section is a whole
            // message again, unless the checksum tells.
            if end >= 16 {
                let cut = with_length(bytes[..end].to_vec());
                if let Ok(msg) = OpMsg::from_bytes(cut, &Limits::CLIENT) {
                    prop_assert!(!parts.0.contains(MsgFlags::CHECKSUM_PRESENT));
                    prop_assert_eq!(msg.body(), parts.1.as_ref() as &RawDocument);
                    prop_assert!(msg.sequences().len() < parts.2.len());
                }
            }
        }
    }

    #[test]
    fn forged_lengths_anywhere_are_survived(parts in any_message()) {
        let bytes = encode(&parts);
        for at in 0..bytes.len() - 3 {
            for forged in [0, 4, 15, -1, i32::MAX, i32::MIN, bytes.len() as i32] {
                let mut copy = bytes.to_vec();
                copy[at..at + 4].copy_from_slice(&i32::to_le_bytes(forged));
                let _ = read_everything(copy.into(), &Limits::CLIENT);
                let mut copy = bytes.to_vec();
                copy[at..at + 4].copy_from_slice(&i32::to_le_bytes(forged));
                let _ = read_everything(copy.into(), &Limits::SERVER);
            }
        }
    }

    #[test]
    fn broken_compressed_streams_are_errors(
        parts in any_message(), at: usize, flip in 1u8.., garbage in vec(any::<u8>(), 1..9),
    ) {
        let plain = encode(&parts);
        for compressor in COMPRESSORS {
            let mut out = BytesMut::new();
            compress(&plain, compressor, &mut out).unwrap();
            for end in 16..out.len() {
                let cut = with_length(out[..end].to_vec());
                prop_assert!(read_everything(cut, &Limits::CLIENT).is_err(), "{compressor:?} cut at {end}");
            }
            let mut longer = out.to_vec();
            longer.extend(&garbage);
            prop_assert!(read_everything(with_length(longer), &Limits::CLIENT).is_err());
            let mut flipped = out.to_vec();
            let at = 16 + at % (flipped.len() - 16);
            flipped[at] ^= flip;
            let _ = read_everything(flipped.into(), &Limits::CLIENT);
            // And the contexts that are reused still work.
            prop_assert!(decode(Frame::from_bytes(out.freeze(), 1 << 20).unwrap(), &Limits::CLIENT).is_ok());
        }
    }
}

/// A message of hand-made sections.
fn sections(flags: u32, parts: &[&[u8]]) -> Bytes {
    let mut bytes = vec![0; 16];
    bytes[12..].copy_from_slice(&2013i32.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    with_length(bytes)
}

fn body_section(doc: &RawDocument) -> Vec<u8> {
    [&[0], doc.as_bytes()].concat()
}

fn sequence_section(size: i32, identifier: &[u8], documents: &[u8]) -> Vec<u8> {
    [&[1], &size.to_le_bytes()[..], identifier, documents].concat()
}

fn kind_of(bytes: Bytes) -> &'static str {
    OpMsg::from_bytes(bytes, &Limits::CLIENT).unwrap_err().kind()
}

#[test]
fn sections_that_do_not_add_up_are_refused() {
    let body = body_section(&rawdoc! { "ping": 1, "$db": "admin" });
    let doc = rawdoc! { "a": 1 };
    let doc = doc.as_bytes();
    let good = sequence_section(6 + doc.len() as i32, b"s\0", doc);
    assert!(OpMsg::from_bytes(sections(0, &[&good, &body]), &Limits::CLIENT).is_ok());

    assert_eq!(kind_of(sections(0, &[])), "missing_body");
    assert_eq!(kind_of(sections(0, &[&good])), "missing_body");
    assert_eq!(kind_of(sections(0, &[&body, &body])), "second_body");
    assert_eq!(kind_of(sections(0, &[&body, &[2]])), "unknown_section");
    assert_eq!(kind_of(sections(0, &[&body, &good, &good])), "duplicate_sequence");
    assert_eq!(kind_of(sections(4, &[&body])), "unknown_flags");
    assert_eq!(kind_of(sections(0x8000, &[&body])), "unknown_flags");
    assert_eq!(kind_of(sections(1, &[&body])), "checksum_mismatch");
    assert_eq!(kind_of(sections(1, &[])), "truncated");
    for size in [0, 3, 4, 5, 6, 7, 5 + doc.len() as i32, 7 + doc.len() as i32, -1, i32::MAX] {
        let lying = sequence_section(size, b"s\0", doc);
        let error = OpMsg::from_bytes(sections(0, &[&body, &lying]), &Limits::CLIENT);
        // A sequence that ends before its first document is well formed, what follows is not.
        assert!(error.is_err(), "size {size}");
    }
    let bad_name = sequence_section(6 + doc.len() as i32, b"\xff\0", doc);
    assert_eq!(kind_of(sections(0, &[&body, &bad_name])), "invalid_utf8");
    let many: Vec<Vec<u8>> = (0..9).map(|at| sequence_section(6, &[b'a' + at, 0], &[])).collect();
    let mut parts: Vec<&[u8]> = vec![&body];
    parts.extend(many.iter().map(Vec::as_slice));
    assert!(OpMsg::from_bytes(sections(0, &parts[..=MAX_SEQUENCES]), &Limits::CLIENT).is_ok());
    assert_eq!(kind_of(sections(0, &parts)), "too_many_sequences");
}

#[test]
fn documents_that_break_the_rules_are_refused() {
    let element = |bytes: &[u8]| {
        let mut doc = (5 + bytes.len() as i32).to_le_bytes().to_vec();
        doc.extend_from_slice(bytes);
        doc.push(0);
        [&[0], doc.as_slice()].concat()
    };
    for (bytes, kind) in [
        (&b"\x10\xff\xfe\0\x01\0\0\0"[..], "invalid_utf8"),
        (b"\x0br\0\xff\0\0", "invalid_utf8"),
        (b"\x0br\0\0\xff\0", "invalid_utf8"),
        (b"\x08b\0\x02", "malformed_document"),
        (b"\x02s\0\0\0\0\0", "malformed_document"),
        (b"\x02s\0\x01\0\0\0x", "malformed_document"),
        (b"\x02s\0\xff\xff\xff\xff\0", "malformed_document"),
        (b"\x05b\0\xff\xff\xff\xff\0", "malformed_document"),
        (b"\x05b\0\x09\0\0\0\0", "malformed_document"),
        (b"\x03d\0\x04\0\0\0", "malformed_document"),
        (b"\x03d\0\x06\0\0\0\0", "malformed_document"),
        (b"\x03d\0\x05\0\0\0\x01", "malformed_document"),
        (b"\x0fc\0\x0e\0\0\0\x01\0\0\0\0\x05\0\0\0", "malformed_document"),
        (b"\x0fc\0\0\0\0\0", "malformed_document"),
        (b"\x0br\0abc\0", "malformed_document"),
        (b"\x10i\0\x01\0", "malformed_document"),
        (b"\x14i\0", "malformed_document"),
        (b"\x0a", "malformed_document"),
        (b"\0", "malformed_document"),
        (b"\x0an\0\0\x0am\0", "malformed_document"),
    ] {
        assert_eq!(kind_of(sections(0, &[&element(bytes)])), kind, "{bytes:?}");
        let nested = [b"\x03d\0", &element(bytes)[1..]].concat();
        let nested = [b"\x04a\0", &element(&nested)[1..]].concat();
        let nested = sections(0, &[&element(&nested)]);
        assert_eq!(kind_of(nested.clone()), kind, "nested {bytes:?}");
        // What our own servers send is checked on its top level only, and not trusted below.
        assert!(OpMsg::from_bytes(nested, &Limits::SERVER).is_ok());
    }
}

#[test]
fn nesting_is_bounded() {
    let nest = |levels: usize, array: bool| {
        let mut doc = RawDocumentBuf::new();
        for _ in 1..levels {
            let mut outer = RawDocumentBuf::new();
            if array {
                let mut inner = RawArrayBuf::new();
                inner.push(1);
                outer.append(cstring("x"), inner);
            }
            outer.append(cstring("d"), doc);
            doc = outer;
        }
        doc
    };
    let limits = Limits { max_depth: 10, ..Limits::CLIENT };
    let parse = |body: RawDocumentBuf, docs: Vec<RawDocumentBuf>| {
        let bytes = encode(&(MsgFlags::NONE, body, vec![("s".into(), docs)]));
        OpMsg::from_bytes(bytes, &limits).map(|_| ())
    };
    assert_eq!(parse(nest(10, false), vec![nest(10, false)]), Ok(()));
    let too_deep = Err(WireError::TooDeep { limit: 10 });
    assert_eq!(parse(nest(11, false), vec![]), too_deep);
    assert_eq!(parse(nest(11, true), vec![]), too_deep);
    assert_eq!(parse(nest(1, true), vec![nest(11, false)]), too_deep);
    // Scopes of code count too.
    let scope = RawBson::JavaScriptCodeWithScope(bson::raw::RawJavaScriptCodeWithScope {
        code: String::new(),
        scope: nest(10, false),
    });
    assert_eq!(parse(document(vec![("f".into(), scope)]), vec![]), too_deep);
    // However deep and whatever the limit, the stack holds.
    let absurd = Limits { max_depth: usize::MAX, ..Limits::CLIENT };
    let bytes = encode(&(MsgFlags::NONE, nest(5000, false), vec![]));
    assert_eq!(OpMsg::from_bytes(bytes, &absurd).unwrap_err().kind(), "too_deep");
}

/// An OP_COMPRESSED of hand-made parts.
fn compressed(op_code: i32, declared: i32, compressor: u8, data: &[u8]) -> Bytes {
    let mut bytes = vec![0; 16];
    bytes[12..].copy_from_slice(&2012i32.to_le_bytes());
    bytes.extend(op_code.to_le_bytes());
    bytes.extend(declared.to_le_bytes());
    bytes.push(compressor);
    bytes.extend_from_slice(data);
    with_length(bytes)
}

fn decode_kind(bytes: Bytes, limits: &Limits) -> &'static str {
    decode(Frame::from_bytes(bytes, MAX_MESSAGE_BYTES).unwrap(), limits).unwrap_err().kind()
}

#[test]
fn compressed_messages_that_ask_for_too_much_are_refused() {
    let limits = Limits::CLIENT.with_max_message(16 * 1024);
    let zstd_bomb = zstd::bulk::compress(&vec![0; 30_000_000], 3).unwrap();
    assert_eq!(decode_kind(compressed(2013, 30_000_000, 3, &zstd_bomb), &limits), "declared_size");
    assert_eq!(decode_kind(compressed(2013, 1000, 3, &zstd_bomb), &limits), "size_mismatch");
    assert_eq!(decode_kind(compressed(2013, i32::MAX, 1, &[0]), &Limits::CLIENT), "declared_size");
    assert_eq!(decode_kind(compressed(2013, -1, 1, &[0]), &Limits::CLIENT), "declared_size");
    assert_eq!(
        decode_kind(compressed(2013, 47_000_000, 1, &[0; 99]), &Limits::CLIENT),
        "size_mismatch"
    );
    assert_eq!(
        decode_kind(compressed(2013, 47_000_000, 2, &[0; 99]), &Limits::CLIENT),
        "size_mismatch"
    );
    assert_eq!(
        decode_kind(compressed(2013, 47_000_000, 0, &[0; 99]), &Limits::CLIENT),
        "size_mismatch"
    );
    assert_eq!(
        decode_kind(compressed(2013, 20, 4, &[0; 20]), &Limits::CLIENT),
        "unknown_compressor"
    );
    assert_eq!(
        decode_kind(compressed(2013, 20, 255, &[0; 20]), &Limits::CLIENT),
        "unknown_compressor"
    );
    assert_eq!(
        decode_kind(compressed(2012, 20, 0, &[0; 20]), &Limits::CLIENT),
        "nested_compression"
    );
    assert_eq!(
        decode_kind(compressed(2002, 20, 0, &[0; 20]), &Limits::CLIENT),
        "unsupported_opcode"
    );
    let inner = compressed(2013, 0, 0, &[]);
    assert_eq!(
        compress(&inner, Compressor::Zlib, &mut BytesMut::new()).unwrap_err().kind(),
        "nested_compression"
    );
    for end in 16..25 {
        let cut = with_length(compressed(2013, 20, 0, &[0; 20])[..end].to_vec());
        assert_eq!(decode_kind(cut, &Limits::CLIENT), "truncated");
    }
}

#[test]
fn large_messages_of_every_texture_survive_every_compressor() {
    // Random bytes grow under compression: the room that is made for them must be enough.
    let mut state = 1u64;
    let mut noise = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    let textures: [Vec<u8>; 3] = [
        vec![0; 3_000_000],
        (0..3_000_000).map(|_| noise()).collect(),
        (0..3_000_000).map(|at| if at % 100_000 < 50_000 { noise() } else { 7 }).collect(),
    ];
    for bytes in textures {
        let mut body = rawdoc! { "ping": 1 };
        body.append(cstring("data"), Binary { subtype: BinarySubtype::Generic, bytes });
        let plain = encode(&(MsgFlags::NONE, body, vec![]));
        for compressor in COMPRESSORS {
            let mut out = BytesMut::new();
            compress(&plain, compressor, &mut out).unwrap();
            let frame = Frame::from_bytes(out.freeze(), MAX_MESSAGE_BYTES).unwrap();
            let Message::Msg(msg) = decode(frame, &Limits::CLIENT).unwrap().message else {
                unreachable!()
            };
            assert!(msg.bytes() == &plain, "{compressor:?}");
        }
    }
}

#[test]
fn legacy_queries_that_do_not_add_up_are_refused() {
    let query = |namespace: &[u8], tail: &[u8]| {
        let mut bytes = vec![0; 20];
        bytes[12..16].copy_from_slice(&2004i32.to_le_bytes());
        bytes.extend_from_slice(namespace);
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(tail);
        with_length(bytes)
    };
    let doc = rawdoc! { "ismaster": 1 };
    let good = query(b"admin.$cmd\0", doc.as_bytes());
    assert!(read_everything(good.clone(), &Limits::CLIENT).is_ok());
    for end in 16..good.len() {
        assert!(read_everything(with_length(good[..end].to_vec()), &Limits::CLIENT).is_err());
    }
    let two = [doc.as_bytes(), doc.as_bytes()].concat();
    assert!(read_everything(query(b"admin.$cmd\0", &two), &Limits::CLIENT).is_ok());
    let three = [two.as_slice(), &[1, 2, 3]].concat();
    assert!(read_everything(query(b"admin.$cmd\0", &three), &Limits::CLIENT).is_err());
    assert!(read_everything(query(b"\xff.$cmd\0", doc.as_bytes()), &Limits::CLIENT).is_err());
    // A query of a collection is read, and is no command.
    let frame = Frame::from_bytes(query(b"shop.orders\0", doc.as_bytes()), 1000).unwrap();
    let Message::Query(query) = decode(frame, &Limits::CLIENT).unwrap().message else {
        unreachable!()
    };
    assert!(!query.is_handshake());
    assert_eq!(Command::parse_query(&query).unwrap_err(), WireError::MissingDatabase);
}
