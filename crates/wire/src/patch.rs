//! Changing messages without decoding their documents: replies in place, commands by copying every
//! byte that stays. Which changes are wanted is the caller's business.
//!
//! Every function here keeps an OP_MSG's checksum right if it has one.

use std::ops::Range;

use bson::Timestamp;
use bson::raw::{CStr, RawBsonRef, RawDocument, RawDocumentBuf};
use bytes::{BufMut, BytesMut};

use crate::encode::finish_msg;
use crate::error::WireError;
use crate::frame::{HEADER_BYTES, Header, MAX_MESSAGE_BYTES, OP_MSG};
use crate::message::{MsgFlags, OpMsg, Sections};
use crate::scan::{self, Fields};

/// What a proxy needs to know of a reply, from one pass over its top-level fields. Offsets count
/// from the start of the message.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReplyView {
    /// Whether the command succeeded.
    pub ok: bool,
    /// `code`, in a reply that is not ok.
    pub code: Option<i32>,
    /// `n`: documents matched, inserted or deleted.
    pub n: Option<i64>,
    /// `nModified`.
    pub n_modified: Option<i64>,
    /// Whether there are `writeErrors`.
    pub has_write_errors: bool,
    /// Whether there is a `writeConcernError`.
    pub has_write_concern_error: bool,
    /// Whether anything was upserted.
    pub has_upserted: bool,
    /// Whether there are `errorLabels`.
    pub has_error_labels: bool,
    /// `operationTime`.
    pub operation_time: Option<Timestamp>,
    /// `$clusterTime.clusterTime`.
    pub cluster_time: Option<Timestamp>,
    /// `cursor`.
    pub cursor: Option<CursorView>,
    /// Where the body lies.
    pub body: Range<usize>,
    operation_time_at: Option<usize>,
    cluster_time_at: Option<Range<usize>>,
}

/// The `cursor` of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CursorView {
    /// Its id; 0 when there is no more.
    pub id: i64,
    /// Where the batch's array lies, if there is one.
    pub batch: Option<Range<usize>>,
    /// Whether the batch is `firstBatch` rather than `nextBatch`.
    pub is_first: bool,
    /// Whether the batch has no document.
    pub is_empty: bool,
    id_at: usize,
}

impl ReplyView {
    /// Reads a whole OP_MSG reply. Documents in it are not looked into, but for `cursor`'s own
    /// fields.
    pub fn parse(message: &[u8]) -> Result<ReplyView, WireError> {
        check_op_msg(message)?;
        let body = Sections::parse(message)?.body;
        let doc = message.get(body.clone()).ok_or(WireError::PatchOutOfRange)?;
        let base = body.start;
        let mut view = ReplyView { body, ..ReplyView::default() };
        for field in Fields::new(doc)? {
            let field = field?;
            match field.name {
                b"ok" => {
                    view.ok = field.as_number().is_some_and(|ok| ok != 0)
                        || field.as_bool() == Some(true);
                }
                b"code" => {
                    view.code = field.as_number().and_then(|code| i32::try_from(code).ok());
                }
                b"n" => view.n = field.as_number(),
                b"nModified" => view.n_modified = field.as_number(),
                b"writeErrors" => view.has_write_errors = has_elements(&field),
                b"writeConcernError" => view.has_write_concern_error = !field.is_nullish(),
                b"upserted" => view.has_upserted = has_elements(&field),
                b"errorLabels" => view.has_error_labels = has_elements(&field),
                b"operationTime" if field.kind == scan::TIMESTAMP => {
                    view.operation_time = timestamp(field.value);
                    view.operation_time_at = Some(base + field.value_at);
                }
                b"$clusterTime" => {
                    if let Some(time) = field.as_document() {
                        view.cluster_time = time.get_timestamp("clusterTime").ok();
                        view.cluster_time_at = Some(base + field.value_at..base + field.end());
                    }
                }
                b"cursor" if field.kind == scan::DOCUMENT => {
                    view.cursor = CursorView::read(field.value, base + field.value_at)?;
                }
                _ => {}
            }
        }
        Ok(view)
    }

    /// Overwrites `operationTime`; false if the reply has none.
    pub fn set_operation_time(
        &mut self,
        message: &mut [u8],
        time: Timestamp,
    ) -> Result<bool, WireError> {
        let Some(at) = self.operation_time_at else {
            return Ok(false);
        };
        overwrite(message, at, &time_bytes(time))?;
        self.operation_time = Some(time);
        Ok(true)
    }

    /// Overwrites `$clusterTime` with another document of the same size; false if the reply has
    /// none or the sizes differ (use `rewrite` then).
    pub fn set_cluster_time(
        &mut self,
        message: &mut [u8],
        time: &RawDocument,
    ) -> Result<bool, WireError> {
        let Some(place) = self.cluster_time_at.clone() else {
            return Ok(false);
        };
        if place.len() != time.as_bytes().len() {
            return Ok(false);
        }
        overwrite(message, place.start, time.as_bytes())?;
        self.cluster_time = time.get_timestamp("clusterTime").ok();
        Ok(true)
    }

    /// Overwrites `cursor.id`; false if the reply has no cursor.
    pub fn set_cursor_id(&mut self, message: &mut [u8], id: i64) -> Result<bool, WireError> {
        let Some(cursor) = &mut self.cursor else {
            return Ok(false);
        };
        overwrite(message, cursor.id_at, &id.to_le_bytes())?;
        cursor.id = id;
        Ok(true)
    }
}

impl CursorView {
    /// Reads the fields of a `cursor` document that begins at `base`; `None` if it has no id (some
    /// command's own field of that name).
    fn read(doc: &[u8], base: usize) -> Result<Option<CursorView>, WireError> {
        let mut id = None;
        let mut batch = None;
        for field in Fields::new(doc)? {
            let field = field?;
            match field.name {
                b"id" => id = field.as_i64().map(|id| (id, base + field.value_at)),
                b"firstBatch" | b"nextBatch" if field.kind == scan::ARRAY => {
                    let place = base + field.value_at..base + field.end();
                    batch = Some((place, field.name == b"firstBatch", !has_elements(&field)));
                }
                _ => {}
            }
        }
        Ok(id.map(|(id, id_at)| match batch {
            Some((place, is_first, is_empty)) => {
                CursorView { id, batch: Some(place), is_first, is_empty, id_at }
            }
            None => CursorView { id, batch: None, is_first: false, is_empty: true, id_at },
        }))
    }

    /// The batch's documents, as they lie in the message. Ends at the first that is not one.
    pub fn documents<'m>(
        &self,
        message: &'m [u8],
    ) -> impl Iterator<Item = &'m RawDocument> + use<'m> {
        let array = self.batch.clone().and_then(|place| message.get(place));
        array
            .and_then(|array| Fields::new(array).ok())
            .into_iter()
            .flatten()
            .map_while(|field| field.ok()?.as_document())
    }
}

fn has_elements(field: &scan::Field<'_>) -> bool {
    field.as_document_or_array().is_some() && field.value.len() > scan::MIN_DOCUMENT_BYTES
}

fn timestamp(value: &[u8]) -> Option<Timestamp> {
    let raw = u64::from_le_bytes(*value.first_chunk()?);
    Some(Timestamp { time: (raw >> 32) as u32, increment: raw as u32 })
}

fn time_bytes(time: Timestamp) -> [u8; 8] {
    (u64::from(time.time) << 32 | u64::from(time.increment)).to_le_bytes()
}

/// Overwrites `cursor.id` of a reply and returns the id it had; `None` if it has no cursor.
pub fn set_cursor_id(message: &mut [u8], id: i64) -> Result<Option<i64>, WireError> {
    let mut view = ReplyView::parse(message)?;
    let old = view.cursor.as_ref().map(|cursor| cursor.id);
    view.set_cursor_id(message, id)?;
    Ok(old)
}

fn check_op_msg(message: &[u8]) -> Result<(), WireError> {
    let header =
        Header::parse(message, MAX_MESSAGE_BYTES)?.ok_or(WireError::Truncated("the header"))?;
    if header.length != message.len() {
        return Err(WireError::LengthMismatch { declared: header.length, actual: message.len() });
    }
    if header.op_code != OP_MSG {
        return Err(WireError::UnsupportedOpcode(header.op_code));
    }
    Ok(())
}

fn overwrite(message: &mut [u8], at: usize, bytes: &[u8]) -> Result<(), WireError> {
    let end = at.checked_add(bytes.len()).ok_or(WireError::PatchOutOfRange)?;
    message.get_mut(at..end).ok_or(WireError::PatchOutOfRange)?.copy_from_slice(bytes);
    refresh_checksum(message);
    Ok(())
}

/// Computes the checksum of an OP_MSG again, if it has one.
fn refresh_checksum(message: &mut [u8]) {
    let int_at = |at: usize| message.get(at..).and_then(scan::le_i32);
    let flags = MsgFlags(int_at(HEADER_BYTES).unwrap_or(0).cast_unsigned());
    if int_at(12) != Some(OP_MSG) || !flags.contains(MsgFlags::CHECKSUM_PRESENT) {
        return;
    }
    if let Some((data, checksum)) = message.split_last_chunk_mut::<4>() {
        *checksum = crc32c::crc32c(data).to_le_bytes();
    }
}

/// Sets a message's request id.
pub fn set_request_id(message: &mut [u8], request_id: i32) -> Result<(), WireError> {
    overwrite(message, 4, &request_id.to_le_bytes())
}

/// Sets which request a message answers.
pub fn set_response_to(message: &mut [u8], response_to: i32) -> Result<(), WireError> {
    overwrite(message, 8, &response_to.to_le_bytes())
}

/// One change to a document's own fields, or to the fields of a document in it.
#[derive(Debug, Clone, Copy)]
pub enum Edit<'e> {
    /// Leave the field out.
    Drop(&'e str),
    /// Leave a field of the named document out: `DropIn("readConcern", "afterClusterTime")`.
    DropIn(&'e str, &'e str),
    /// Give the field this value, where it stands; at the end if it is not there.
    Set(&'e str, RawBsonRef<'e>),
    /// Give a field of the named document this value; the document is made if it is not there.
    SetIn(&'e str, &'e str, RawBsonRef<'e>),
}

impl<'e> Edit<'e> {
    fn outer(&self) -> &'e str {
        match self {
            Edit::Drop(name)
            | Edit::DropIn(name, _)
            | Edit::Set(name, _)
            | Edit::SetIn(name, _, _) => name,
        }
    }

    /// What the edit of an embedded document is on that document itself.
    fn inner(&self) -> Option<Edit<'e>> {
        match self {
            Edit::DropIn(_, name) => Some(Edit::Drop(name)),
            Edit::SetIn(_, name, value) => Some(Edit::Set(name, *value)),
            _ => None,
        }
    }
}

/// Appends `message` to `out` with its body edited; ids, flags, document sequences and every byte
/// of the fields that stay are copied as they are.
pub fn rewrite(message: &OpMsg, edits: &[Edit<'_>], out: &mut BytesMut) -> Result<(), WireError> {
    let bytes = message.bytes();
    let body = message.body_range();
    let end = bytes.len() - if message.has_checksum() { 4 } else { 0 };
    let start = out.len();
    out.reserve(bytes.len());
    out.put_slice(bytes.get(..body.start).ok_or(WireError::PatchOutOfRange)?);
    edit_document(message.body(), edits, out)?;
    out.put_slice(bytes.get(body.end..end).ok_or(WireError::PatchOutOfRange)?);
    finish_msg(start, message.flags(), out);
    Ok(())
}

/// `rewrite` that only drops top-level fields.
pub fn strip_fields(message: &OpMsg, names: &[&str], out: &mut BytesMut) -> Result<(), WireError> {
    let edits: smallvec::SmallVec<[Edit<'_>; 4]> =
        names.iter().map(|name| Edit::Drop(name)).collect();
    rewrite(message, &edits, out)
}

/// One document, edited.
pub fn edited(doc: &RawDocument, edits: &[Edit<'_>]) -> Result<RawDocumentBuf, WireError> {
    let mut out = BytesMut::with_capacity(doc.as_bytes().len());
    edit_document(doc, edits, &mut out)?;
    RawDocumentBuf::from_bytes(out.to_vec())
        .map_err(|_| WireError::MalformedDocument("an edited document is malformed"))
}

/// Appends `doc` to `out` with `edits` made. Of several edits of one field a `Drop` wins, then the
/// last `Set`; else those of its embedded fields are made together.
pub fn edit_document(
    doc: &RawDocument,
    edits: &[Edit<'_>],
    out: &mut BytesMut,
) -> Result<(), WireError> {
    let bytes = doc.as_bytes();
    let start = out.len();
    out.put_i32_le(0);
    // Fields that stay are copied a run at a time.
    let mut run = 4;
    for field in Fields::of(doc) {
        let field = field?;
        if edits.iter().any(|edit| edit.outer().as_bytes() == field.name) {
            out.put_slice(bytes.get(run..field.start).ok_or(WireError::PatchOutOfRange)?);
            run = field.end();
            edit_field(bytes, &field, edits, out)?;
        }
    }
    let end = bytes.len().saturating_sub(1);
    out.put_slice(bytes.get(run..end).ok_or(WireError::PatchOutOfRange)?);
    append_missing(doc, edits, out)?;
    out.put_u8(0);
    close_document(start, out);
    Ok(())
}

fn close_document(start: usize, out: &mut BytesMut) {
    let length = crate::frame::wire_length(out.len() - start);
    if let Some(slot) = out.get_mut(start..start + 4) {
        slot.copy_from_slice(&length.to_le_bytes());
    }
}

/// Writes what `edits` make of a field that is there.
fn edit_field(
    doc: &[u8],
    field: &scan::Field<'_>,
    edits: &[Edit<'_>],
    out: &mut BytesMut,
) -> Result<(), WireError> {
    let mine = || edits.iter().filter(|edit| edit.outer().as_bytes() == field.name);
    if mine().any(|edit| matches!(edit, Edit::Drop(_))) {
        return Ok(());
    }
    if let Some(Edit::Set(name, value)) = mine().rfind(|edit| matches!(edit, Edit::Set(..))) {
        return put_element(name, *value, out);
    }
    let inner: smallvec::SmallVec<[Edit<'_>; 4]> = mine().filter_map(Edit::inner).collect();
    match field.as_document() {
        Some(nested) => {
            let head = doc.get(field.start..field.value_at).ok_or(WireError::PatchOutOfRange)?;
            out.put_slice(head);
            edit_document(nested, &inner, out)
        }
        // Not a document: nothing to drop in it; something to set makes it one.
        None if inner.iter().any(|edit| matches!(edit, Edit::Set(..))) => {
            let name = mine().map(|edit| edit.outer()).next().unwrap_or_default();
            let made = edited(RawDocumentBuf::new().as_ref(), &inner)?;
            put_element(name, RawBsonRef::Document(&made), out)
        }
        None => {
            out.put_slice(doc.get(field.span()).ok_or(WireError::PatchOutOfRange)?);
            Ok(())
        }
    }
}

/// Appends what `edits` set and the document does not have.
fn append_missing(
    doc: &RawDocument,
    edits: &[Edit<'_>],
    out: &mut BytesMut,
) -> Result<(), WireError> {
    for (number, edit) in edits.iter().enumerate() {
        let name = edit.outer();
        let earlier = edits.get(..number).unwrap_or_default();
        let sets = |edit: &Edit<'_>| matches!(edit, Edit::Set(..) | Edit::SetIn(..));
        let drops = |other: &Edit<'_>| matches!(other, Edit::Drop(dropped) if *dropped == name);
        if !sets(edit)
            || edits.iter().any(drops)
            || earlier.iter().any(|other| sets(other) && other.outer() == name)
            || Fields::of(doc).map_while(Result::ok).any(|field| field.name == name.as_bytes())
        {
            continue;
        }
        let mine = || edits.iter().filter(|other| other.outer() == name);
        match mine().rfind(|other| matches!(other, Edit::Set(..))) {
            Some(Edit::Set(name, value)) => put_element(name, *value, out)?,
            _ => {
                let inner: smallvec::SmallVec<[Edit<'_>; 4]> =
                    mine().filter_map(Edit::inner).collect();
                let made = edited(RawDocumentBuf::new().as_ref(), &inner)?;
                put_element(name, RawBsonRef::Document(&made), out)?;
            }
        }
    }
    Ok(())
}

fn put_element(name: &str, value: RawBsonRef<'_>, out: &mut BytesMut) -> Result<(), WireError> {
    let name: &CStr = name
        .try_into()
        .map_err(|_| WireError::MalformedDocument("a field name holds a zero byte"))?;
    let mut element = RawDocumentBuf::new();
    element.append(name, value);
    let bytes = element.as_bytes();
    out.put_slice(bytes.get(4..bytes.len().saturating_sub(1)).unwrap_or_default());
    Ok(())
}
