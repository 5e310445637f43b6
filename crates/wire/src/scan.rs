//! A bounds-checked walk over the bytes of BSON documents: element positions and structural
//! checks, no values. Everything else in this crate trusts only what went through here.

use std::ops::Range;

use bson::raw::RawDocument;

use crate::error::WireError;

/// Shortest possible document: its length and its terminator.
pub(crate) const MIN_DOCUMENT_BYTES: usize = 5;
/// Deepest nesting a caller may ask for: bounds the stack of `validate`.
pub(crate) const DEPTH_CEILING: usize = 512;

pub(crate) const DOUBLE: u8 = 0x01;
pub(crate) const STRING: u8 = 0x02;
pub(crate) const DOCUMENT: u8 = 0x03;
pub(crate) const ARRAY: u8 = 0x04;
pub(crate) const BINARY: u8 = 0x05;
pub(crate) const UNDEFINED: u8 = 0x06;
pub(crate) const BOOL: u8 = 0x08;
pub(crate) const NULL: u8 = 0x0A;
pub(crate) const REGEX: u8 = 0x0B;
pub(crate) const DB_POINTER: u8 = 0x0C;
pub(crate) const CODE: u8 = 0x0D;
pub(crate) const SYMBOL: u8 = 0x0E;
pub(crate) const CODE_WITH_SCOPE: u8 = 0x0F;
pub(crate) const INT32: u8 = 0x10;
pub(crate) const TIMESTAMP: u8 = 0x11;
pub(crate) const INT64: u8 = 0x12;
pub(crate) const DECIMAL128: u8 = 0x13;

/// One element of a document: where it is and what it holds.
#[derive(Debug, Clone)]
pub(crate) struct Field<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) kind: u8,
    /// Offset of the type byte in the document.
    pub(crate) start: usize,
    /// The value's bytes.
    pub(crate) value: &'a [u8],
    /// Offset of the value in the document.
    pub(crate) value_at: usize,
}

impl<'a> Field<'a> {
    /// Offsets of the whole element in the document.
    pub(crate) fn span(&self) -> Range<usize> {
        self.start..self.end()
    }

    /// Offset of the byte after the element.
    pub(crate) fn end(&self) -> usize {
        self.value_at + self.value.len()
    }

    pub(crate) fn name_lossy(&self) -> String {
        String::from_utf8_lossy(self.name).into_owned()
    }

    /// A nested document or array as a document.
    pub(crate) fn as_document_or_array(&self) -> Option<&'a RawDocument> {
        matches!(self.kind, DOCUMENT | ARRAY).then(|| as_document(self.value).ok()).flatten()
    }

    pub(crate) fn as_document(&self) -> Option<&'a RawDocument> {
        (self.kind == DOCUMENT).then(|| as_document(self.value).ok()).flatten()
    }

    pub(crate) fn as_str(&self) -> Option<&'a str> {
        if self.kind != STRING {
            return None;
        }
        let text = self.value.get(4..)?;
        std::str::from_utf8(text.get(..text.len().checked_sub(1)?)?).ok()
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        (self.kind == BOOL).then(|| self.value.first().is_some_and(|byte| *byte != 0))
    }

    pub(crate) fn as_i64(&self) -> Option<i64> {
        (self.kind == INT64).then(|| le_i64(self.value)).flatten()
    }

    /// Any number that is a whole one; doubles are cut to their whole part.
    pub(crate) fn as_number(&self) -> Option<i64> {
        match self.kind {
            INT32 => le_i32(self.value).map(i64::from),
            INT64 => le_i64(self.value),
            // `as` saturates, and turns NaN into 0.
            DOUBLE => self.value.first_chunk().map(|b| f64::from_le_bytes(*b) as i64),
            DECIMAL128 => {
                let number = bson::Decimal128::from_bytes(*self.value.first_chunk()?);
                number.to_string().parse::<f64>().ok().map(|number| number as i64)
            }
            _ => None,
        }
    }

    pub(crate) fn is_nullish(&self) -> bool {
        matches!(self.kind, NULL | UNDEFINED)
    }
}

/// The elements of one document, each checked to lie inside it. Stops after the first error.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    doc: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    /// `doc` must be exactly one document.
    pub(crate) fn new(doc: &'a [u8]) -> Result<Fields<'a>, WireError> {
        as_document(doc)?;
        Ok(Fields { doc, at: 4 })
    }

    /// As `new`, for bytes already known to be one document.
    pub(crate) fn of(doc: &'a RawDocument) -> Fields<'a> {
        Fields { doc: doc.as_bytes(), at: 4 }
    }

    fn read(&mut self) -> Result<Option<Field<'a>>, WireError> {
        let end = self.doc.len().saturating_sub(1);
        let Some(rest) = self.doc.get(self.at..end).filter(|rest| !rest.is_empty()) else {
            return Ok(None);
        };
        let (kind, rest) = rest.split_first().ok_or(MALFORMED_ELEMENT)?;
        let name_len = rest.iter().position(|byte| *byte == 0).ok_or(MALFORMED_NAME)?;
        let name = rest.get(..name_len).ok_or(MALFORMED_NAME)?;
        let rest = rest.get(name_len + 1..).ok_or(MALFORMED_NAME)?;
        let size = value_size(*kind, rest)?;
        let value = rest.get(..size).ok_or(OVERRUN)?;
        let start = self.at;
        let value_at = start + 1 + name_len + 1;
        self.at = value_at + size;
        Ok(Some(Field { name, kind: *kind, start, value, value_at }))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, WireError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let field = self.read().transpose();
        if matches!(field, Some(Err(_))) {
            self.at = self.doc.len();
        }
        field
    }
}

const MALFORMED_ELEMENT: WireError = WireError::MalformedDocument("an element is cut short");
const MALFORMED_NAME: WireError = WireError::MalformedDocument("a field name does not end");
const OVERRUN: WireError = WireError::MalformedDocument("a value overruns its document");

pub(crate) fn le_i32(bytes: &[u8]) -> Option<i32> {
    bytes.first_chunk().map(|chunk| i32::from_le_bytes(*chunk))
}

pub(crate) fn le_i64(bytes: &[u8]) -> Option<i64> {
    bytes.first_chunk().map(|chunk| i64::from_le_bytes(*chunk))
}

fn length_at(bytes: &[u8]) -> Result<usize, WireError> {
    let length = le_i32(bytes).ok_or(OVERRUN)?;
    usize::try_from(length).map_err(|_| WireError::MalformedDocument("a length is negative"))
}

/// Exactly one document, by its length and terminator.
pub(crate) fn as_document(bytes: &[u8]) -> Result<&RawDocument, WireError> {
    RawDocument::from_bytes(bytes)
        .map_err(|_| WireError::MalformedDocument("a document's length or terminator is wrong"))
}

/// The document at the start of `bytes`, which may go on after it.
pub(crate) fn leading_document(bytes: &[u8]) -> Result<&RawDocument, WireError> {
    let length = length_at(bytes)?;
    as_document(bytes.get(..length).ok_or(OVERRUN)?)
}

fn string_size(bytes: &[u8]) -> Result<usize, WireError> {
    let size = length_at(bytes)?.checked_add(4).ok_or(OVERRUN)?;
    match bytes.get(4..size) {
        None if size > bytes.len() => Err(OVERRUN),
        Some(text) if text.last() == Some(&0) => Ok(size),
        _ => Err(WireError::MalformedDocument("a string does not end with a zero byte")),
    }
}

fn cstring_size(bytes: &[u8]) -> Result<usize, WireError> {
    bytes.iter().position(|byte| *byte == 0).map(|at| at + 1).ok_or(OVERRUN)
}

/// How many of `rest`'s bytes the value takes. The result may exceed `rest` for fixed-size types;
/// the caller checks.
#[inline]
fn value_size(kind: u8, rest: &[u8]) -> Result<usize, WireError> {
    Ok(match kind {
        // double, date, timestamp, int64
        DOUBLE | 0x09 | TIMESTAMP | INT64 => 8,
        STRING | CODE | SYMBOL => string_size(rest)?,
        DOCUMENT | ARRAY => leading_document(rest)?.as_bytes().len(),
        BINARY => length_at(rest)?.checked_add(5).ok_or(OVERRUN)?,
        // undefined, null, max key, min key
        UNDEFINED | NULL | 0x7F | 0xFF => 0,
        // object id
        0x07 => 12,
        BOOL => match rest.first() {
            Some(0 | 1) => 1,
            Some(_) => return Err(WireError::MalformedDocument("a boolean is neither 0 nor 1")),
            None => return Err(OVERRUN),
        },
        REGEX => {
            let pattern = cstring_size(rest)?;
            pattern + cstring_size(rest.get(pattern..).ok_or(OVERRUN)?)?
        }
        DB_POINTER => string_size(rest)?.checked_add(12).ok_or(OVERRUN)?,
        CODE_WITH_SCOPE => {
            let size = length_at(rest)?;
            let inner = rest.get(4..size).ok_or(OVERRUN)?;
            let code = string_size(inner)?;
            as_document(inner.get(code..).ok_or(OVERRUN)?)?;
            size
        }
        INT32 => 4,
        DECIMAL128 => 16,
        _ => return Err(WireError::MalformedDocument("a value has an unknown type")),
    })
}

/// Walks a whole document: every element in its bounds, names and regular expressions UTF-8, nesting
/// within `max_depth` (the document itself is level 1). Texts of other kinds are not looked at:
/// servers store strings that are not UTF-8, so they pass through.
pub(crate) fn validate(doc: &[u8], max_depth: usize) -> Result<(), WireError> {
    let limit = max_depth.min(DEPTH_CEILING);
    validate_level(doc, limit, limit)
}

fn validate_level(doc: &[u8], left: usize, limit: usize) -> Result<(), WireError> {
    let left = left.checked_sub(1).ok_or(WireError::TooDeep { limit })?;
    for field in Fields::new(doc)? {
        let field = field?;
        if std::str::from_utf8(field.name).is_err() {
            return Err(WireError::InvalidUtf8("a field name"));
        }
        match field.kind {
            DOCUMENT | ARRAY => validate_level(field.value, left, limit)?,
            CODE_WITH_SCOPE => {
                let inner = field.value.get(4..).ok_or(OVERRUN)?;
                let scope = inner.get(string_size(inner)?..).ok_or(OVERRUN)?;
                validate_level(scope, left, limit)?;
            }
            // Like a name it is a cstring, and `bson` stops a walk at one that it cannot read. Any
            // other text it only refuses to show.
            REGEX if std::str::from_utf8(field.value).is_err() => {
                return Err(WireError::InvalidUtf8("a regular expression"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks one document's own elements and nothing below them.
pub(crate) fn validate_top_level(doc: &[u8]) -> Result<(), WireError> {
    for field in Fields::new(doc)? {
        if std::str::from_utf8(field?.name).is_err() {
            return Err(WireError::InvalidUtf8("a field name"));
        }
    }
    Ok(())
}

/// Whether `bson` can represent the value: its texts are UTF-8, an old-style binary's two lengths
/// agree. Nested documents are not looked into.
pub(crate) fn is_representable(field: &Field<'_>) -> bool {
    let utf8 = |bytes: Option<&[u8]>| bytes.is_some_and(|b| std::str::from_utf8(b).is_ok());
    match field.kind {
        STRING | CODE | SYMBOL | REGEX => {
            utf8(field.value.get(if field.kind == REGEX { 0 } else { 4 }..))
        }
        DB_POINTER => {
            utf8(field.value.len().checked_sub(12).and_then(|end| field.value.get(4..end)))
        }
        CODE_WITH_SCOPE => {
            let inner = field.value.get(4..).unwrap_or_default();
            utf8(string_size(inner).ok().and_then(|end| inner.get(4..end)))
        }
        BINARY if field.value.get(4) == Some(&2) => {
            let inner = field.value.get(5..).unwrap_or_default();
            length_at(inner).is_ok_and(|length| length.checked_add(4) == Some(inner.len()))
        }
        _ => true,
    }
}
