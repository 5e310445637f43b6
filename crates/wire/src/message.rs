//! What is inside a frame: OP_MSG with its sections and checksum, the legacy OP_QUERY, and the
//! choice between them. Offsets only; the bytes stay where they arrived. The meaning of a command's
//! fields is read in `command`.

use std::ops::Range;
use std::sync::LazyLock;

use bson::raw::{RawDocument, RawDocumentBuf};
use bytes::{Buf, Bytes};
use smallvec::SmallVec;

use crate::compression::{self, Compressor};
use crate::error::WireError;
use crate::frame::{Frame, HEADER_BYTES, MAX_MESSAGE_BYTES, OP_COMPRESSED, OP_MSG, OP_QUERY};
use crate::query::LegacyQuery;
use crate::scan;

/// MongoDB's own default nesting limit (`maxBSONDepth`).
pub const DEFAULT_MAX_DEPTH: usize = 200;
/// No command has more than two document sequences (`bulkWrite`); this leaves room for the future
/// and none for a message made of a million empty ones.
pub const MAX_SEQUENCES: usize = 8;

const FLAG_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 4;
/// Where the sections of an OP_MSG begin.
pub(crate) const SECTIONS_AT: usize = HEADER_BYTES + FLAG_BYTES;

/// The flag bits of OP_MSG.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsgFlags(pub u32);

impl MsgFlags {
    /// No flag.
    pub const NONE: MsgFlags = MsgFlags(0);
    /// A CRC-32C follows the sections.
    pub const CHECKSUM_PRESENT: MsgFlags = MsgFlags(1);
    /// In a request: no reply is wanted. In a reply: another follows unasked.
    pub const MORE_TO_COME: MsgFlags = MsgFlags(1 << 1);
    /// In a request: the reply may be a stream of replies.
    pub const EXHAUST_ALLOWED: MsgFlags = MsgFlags(1 << 16);
    /// The bits a receiver must understand or refuse.
    const REQUIRED: u32 = 0xFFFF;

    /// Whether every bit of `other` is set.
    pub fn contains(self, other: MsgFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets of bits.
    #[must_use]
    pub fn union(self, other: MsgFlags) -> MsgFlags {
        MsgFlags(self.0 | other.0)
    }
}

/// How far into the documents of a message `decode` looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validation {
    /// Every level, up to the depth limit: for bytes from clients.
    Deep,
    /// The body's own elements and each sequence document's length: for bytes from our servers.
    TopLevel,
}

/// What `decode` accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest message, compressed or not, header included.
    pub max_message: usize,
    /// Deepest nesting of documents; the body itself is level 1.
    pub max_depth: usize,
    /// How far documents are checked.
    pub validation: Validation,
}

impl Limits {
    /// For messages of clients.
    pub const CLIENT: Limits = Limits {
        max_message: MAX_MESSAGE_BYTES,
        max_depth: DEFAULT_MAX_DEPTH,
        validation: Validation::Deep,
    };
    /// For messages of the tiers' own servers.
    pub const SERVER: Limits =
        Limits { max_message: MAX_MESSAGE_BYTES, max_depth: 250, validation: Validation::TopLevel };

    /// The same with another message size.
    #[must_use]
    pub fn with_max_message(self, max_message: usize) -> Limits {
        Limits { max_message, ..self }
    }

    pub(crate) fn check_document(&self, doc: &[u8]) -> Result<(), WireError> {
        match self.validation {
            Validation::Deep => scan::validate(doc, self.max_depth),
            Validation::TopLevel => scan::validate_top_level(doc),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits::CLIENT
    }
}

/// A message this daemon understands.
#[derive(Debug, Clone)]
pub enum Message {
    /// A command, or a reply to one.
    Msg(OpMsg),
    /// A legacy query; only handshakes are answered.
    Query(LegacyQuery),
}

/// A message with what its envelope said.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// The message, decompressed.
    pub message: Message,
    /// How it was compressed, so that the reply may be too.
    pub compressor: Option<Compressor>,
    /// The sender's number for it.
    pub request_id: i32,
    /// What it answers.
    pub response_to: i32,
}

/// Reads a frame, undoing OP_COMPRESSED.
pub fn decode(frame: Frame, limits: &Limits) -> Result<Decoded, WireError> {
    let (frame, compressor) = match frame.header.op_code {
        OP_COMPRESSED => {
            let (frame, compressor) = compression::decompress(&frame, limits.max_message)?;
            (frame, Some(compressor))
        }
        _ => (frame, None),
    };
    let header = frame.header;
    let message = match header.op_code {
        OP_MSG => Message::Msg(OpMsg::parse(frame, limits)?),
        OP_QUERY => Message::Query(LegacyQuery::parse(frame, limits)?),
        other => return Err(WireError::UnsupportedOpcode(other)),
    };
    Ok(Decoded {
        message,
        compressor,
        request_id: header.request_id,
        response_to: header.response_to,
    })
}

/// Where one document sequence lies in its message.
#[derive(Debug, Clone)]
pub(crate) struct SequenceSpan {
    pub(crate) identifier: Range<usize>,
    pub(crate) documents: Range<usize>,
    pub(crate) count: usize,
}

/// Where everything lies in an OP_MSG, checked to be inside it.
#[derive(Debug, Clone)]
pub(crate) struct Sections {
    pub(crate) flags: MsgFlags,
    pub(crate) body: Range<usize>,
    pub(crate) sequences: SmallVec<[SequenceSpan; 1]>,
}

impl Sections {
    /// Finds flags, body and sequences of a whole OP_MSG; verifies the checksum. The insides of
    /// documents are not looked at.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Sections, WireError> {
        let head = bytes.get(..SECTIONS_AT).ok_or(WireError::Truncated("the OP_MSG flags"))?;
        let mut flag_bytes = head.get(HEADER_BYTES..).unwrap_or_default();
        let flags = MsgFlags(flag_bytes.get_u32_le());
        let known = MsgFlags::CHECKSUM_PRESENT.union(MsgFlags::MORE_TO_COME);
        let unknown = flags.0 & MsgFlags::REQUIRED & !known.0;
        if unknown != 0 {
            return Err(WireError::UnknownFlags(unknown));
        }
        let end = if flags.contains(MsgFlags::CHECKSUM_PRESENT) {
            verify_checksum(bytes)?
        } else {
            bytes.len()
        };

        let mut at = SECTIONS_AT;
        let mut body = None;
        let mut sequences = SmallVec::new();
        while let Some((kind, rest)) = bytes.get(at..end).and_then(|rest| rest.split_first()) {
            let size = match kind {
                0 => {
                    let size = scan::leading_document(rest)?.as_bytes().len();
                    if body.replace(at + 1..at + 1 + size).is_some() {
                        return Err(WireError::SecondBody);
                    }
                    size
                }
                1 => {
                    if sequences.len() == MAX_SEQUENCES {
                        return Err(WireError::TooManySequences(MAX_SEQUENCES));
                    }
                    let sequence = parse_sequence(at, rest)?;
                    let size = sequence.documents.end - at - 1;
                    sequences.push(sequence);
                    size
                }
                other => return Err(WireError::UnknownSection(*other)),
            };
            at += 1 + size;
        }
        let sections = Sections { flags, body: body.ok_or(WireError::MissingBody)?, sequences };
        sections.refuse_duplicate_sequences(bytes)?;
        Ok(sections)
    }

    fn refuse_duplicate_sequences(&self, bytes: &[u8]) -> Result<(), WireError> {
        for (number, sequence) in self.sequences.iter().enumerate().skip(1) {
            let name = bytes.get(sequence.identifier.clone());
            let mut earlier = self.sequences.iter().take(number);
            if earlier.any(|other| bytes.get(other.identifier.clone()) == name) {
                let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
                return Err(WireError::DuplicateSequence(name));
            }
        }
        Ok(())
    }
}

/// Checks the CRC-32C at the end and returns where the sections end.
fn verify_checksum(bytes: &[u8]) -> Result<usize, WireError> {
    let end = bytes
        .len()
        .checked_sub(CHECKSUM_BYTES)
        .filter(|end| *end >= SECTIONS_AT)
        .ok_or(WireError::Truncated("the OP_MSG checksum"))?;
    let (data, mut checksum) = bytes.split_at(end);
    let declared = checksum.get_u32_le();
    let actual = crc32c::crc32c(data);
    if declared != actual {
        return Err(WireError::ChecksumMismatch { declared, actual });
    }
    Ok(end)
}

/// Reads the section whose kind byte is at `at`; `rest` follows that byte.
fn parse_sequence(at: usize, rest: &[u8]) -> Result<SequenceSpan, WireError> {
    let size = scan::le_i32(rest).ok_or(WireError::MalformedSequence("no size"))?;
    let section = usize::try_from(size)
        .ok()
        .and_then(|size| rest.get(..size))
        .ok_or(WireError::MalformedSequence("the size overruns the message"))?;
    let after_size =
        section.get(4..).ok_or(WireError::MalformedSequence("the size is too small"))?;
    let name_len = after_size
        .iter()
        .position(|byte| *byte == 0)
        .ok_or(WireError::MalformedSequence("the identifier does not end"))?;
    if after_size.get(..name_len).is_none_or(|name| std::str::from_utf8(name).is_err()) {
        return Err(WireError::InvalidUtf8("a document sequence's identifier"));
    }
    let mut documents = after_size.get(name_len + 1..).unwrap_or_default();
    let identifier_at = at + 1 + 4;
    let documents_at = identifier_at + name_len + 1;
    let end = documents_at + documents.len();
    let mut count = 0;
    while !documents.is_empty() {
        let document = scan::leading_document(documents)
            .map_err(|_| WireError::MalformedSequence("its documents do not fill it"))?;
        documents = documents.get(document.as_bytes().len()..).unwrap_or_default();
        count += 1;
    }
    Ok(SequenceSpan {
        identifier: identifier_at..identifier_at + name_len,
        documents: documents_at..end,
        count,
    })
}

/// An OP_MSG: the whole uncompressed frame, and where its parts are.
#[derive(Debug, Clone)]
pub struct OpMsg {
    bytes: Bytes,
    pub(crate) sections: Sections,
}

impl OpMsg {
    /// Reads an uncompressed OP_MSG frame.
    pub fn parse(frame: Frame, limits: &Limits) -> Result<OpMsg, WireError> {
        let Frame { header, bytes } = frame;
        if header.op_code != OP_MSG {
            return Err(WireError::UnsupportedOpcode(header.op_code));
        }
        if header.length != bytes.len() {
            return Err(WireError::LengthMismatch { declared: header.length, actual: bytes.len() });
        }
        let sections = Sections::parse(&bytes)?;
        let msg = OpMsg { bytes, sections };
        limits.check_document(msg.body().as_bytes())?;
        if limits.validation == Validation::Deep {
            for document in msg.sequences().flat_map(|sequence| sequence.documents()) {
                limits.check_document(document.as_bytes())?;
            }
        }
        Ok(msg)
    }

    /// Reads bytes that are one whole uncompressed OP_MSG.
    pub fn from_bytes(bytes: Bytes, limits: &Limits) -> Result<OpMsg, WireError> {
        OpMsg::parse(Frame::from_bytes(bytes, limits.max_message)?, limits)
    }

    /// The whole message, header included.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The whole message, given back.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }

    /// Its flag bits.
    pub fn flags(&self) -> MsgFlags {
        self.sections.flags
    }

    /// Whether the sender wants no reply (request) or sends more (reply).
    pub fn more_to_come(&self) -> bool {
        self.flags().contains(MsgFlags::MORE_TO_COME)
    }

    /// Whether the sender accepts a stream of replies.
    pub fn exhaust_allowed(&self) -> bool {
        self.flags().contains(MsgFlags::EXHAUST_ALLOWED)
    }

    /// Whether a (verified) checksum ends the message.
    pub fn has_checksum(&self) -> bool {
        self.flags().contains(MsgFlags::CHECKSUM_PRESENT)
    }

    /// The body.
    pub fn body(&self) -> &RawDocument {
        document_at(&self.bytes, &self.sections.body)
    }

    /// Where the body lies in `bytes`.
    pub fn body_range(&self) -> Range<usize> {
        self.sections.body.clone()
    }

    /// The document sequences, in their order.
    pub fn sequences(&self) -> Sequences<'_> {
        Sequences::new(&self.bytes, &self.sections.sequences)
    }
}

/// A document that was found at `range` before; an empty one if the range was not from this message.
pub(crate) fn document_at<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a RawDocument {
    static EMPTY: LazyLock<RawDocumentBuf> = LazyLock::new(RawDocumentBuf::new);
    bytes
        .get(range.clone())
        .and_then(|document| scan::as_document(document).ok())
        .unwrap_or_else(|| &EMPTY)
}

/// The document sequences of an OP_MSG.
#[derive(Debug, Clone)]
pub struct Sequences<'a> {
    bytes: &'a [u8],
    spans: std::slice::Iter<'a, SequenceSpan>,
}

impl<'a> Sequences<'a> {
    pub(crate) fn new(bytes: &'a [u8], spans: &'a [SequenceSpan]) -> Sequences<'a> {
        Sequences { bytes, spans: spans.iter() }
    }
}

impl<'a> Iterator for Sequences<'a> {
    type Item = Sequence<'a>;

    fn next(&mut self) -> Option<Sequence<'a>> {
        self.spans.next().map(|span| Sequence { bytes: self.bytes, span })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.spans.size_hint()
    }
}

impl ExactSizeIterator for Sequences<'_> {}

/// One document sequence of an OP_MSG.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    bytes: &'a [u8],
    span: &'a SequenceSpan,
}

impl<'a> Sequence<'a> {
    /// Its name: the body field it stands for.
    pub fn identifier(&self) -> &'a str {
        let name = self.bytes.get(self.span.identifier.clone()).unwrap_or_default();
        // Checked when the section was read.
        std::str::from_utf8(name).unwrap_or_default()
    }

    /// Its documents.
    pub fn documents(&self) -> SequenceDocuments<'a> {
        SequenceDocuments { rest: self.document_bytes(), left: self.span.count }
    }

    /// Its documents' bytes, one after the other.
    pub fn document_bytes(&self) -> &'a [u8] {
        self.bytes.get(self.span.documents.clone()).unwrap_or_default()
    }

    /// How many documents it has.
    pub fn len(&self) -> usize {
        self.span.count
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.span.count == 0
    }
}

/// The documents of one sequence.
#[derive(Debug, Clone)]
pub struct SequenceDocuments<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for SequenceDocuments<'a> {
    type Item = &'a RawDocument;

    fn next(&mut self) -> Option<&'a RawDocument> {
        let document = scan::leading_document(self.rest).ok()?;
        self.rest = self.rest.get(document.as_bytes().len()..).unwrap_or_default();
        self.left = self.left.saturating_sub(1);
        Some(document)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for SequenceDocuments<'_> {}
