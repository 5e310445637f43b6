//! OP_COMPRESSED, both ways. A declared size is believed only after it was checked against the
//! limit and against what the compressor can possibly do; output never grows beyond it.

use std::cell::RefCell;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::error::WireError;
use crate::frame::{Frame, HEADER_BYTES, Header, OP_COMPRESSED, wire_length};

/// Bytes of an OP_COMPRESSED between the header and the data: original opcode, uncompressed size,
/// compressor id.
const COMPRESSED_HEAD_BYTES: usize = 4 + 4 + 1;
/// zlib's own default.
const ZLIB_LEVEL: u32 = 6;
/// zstd's own default, and MongoDB's.
const ZSTD_LEVEL: i32 = 3;

/// A compressor of OP_COMPRESSED.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compressor {
    /// Bytes as they are; for tests of drivers.
    Noop,
    /// Snappy, raw format.
    Snappy,
    /// zlib.
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compressor {
    /// Those that `hello` offers, in the order of preference.
    pub const OFFERED: [Compressor; 3] = [Compressor::Snappy, Compressor::Zstd, Compressor::Zlib];

    /// Its number on the wire.
    pub fn id(self) -> u8 {
        match self {
            Compressor::Noop => 0,
            Compressor::Snappy => 1,
            Compressor::Zlib => 2,
            Compressor::Zstd => 3,
        }
    }

    /// The compressor of a number.
    pub fn from_id(id: u8) -> Option<Compressor> {
        [Compressor::Noop, Compressor::Snappy, Compressor::Zlib, Compressor::Zstd]
            .into_iter()
            .find(|compressor| compressor.id() == id)
    }

    /// Its name in `hello`'s `compression` list.
    pub fn name(self) -> &'static str {
        match self {
            Compressor::Noop => "noop",
            Compressor::Snappy => "snappy",
            Compressor::Zlib => "zlib",
            Compressor::Zstd => "zstd",
        }
    }

    /// The compressor of a name, `noop` excepted: it is never negotiated.
    pub fn from_name(name: &str) -> Option<Compressor> {
        Compressor::OFFERED.into_iter().find(|compressor| compressor.name() == name)
    }

    /// The most bytes that `compressed` bytes can hold, where the format has such a bound. A message
    /// that declares more is a lie, refused before its size is allocated.
    fn most_output(self, compressed: usize) -> usize {
        match self {
            Compressor::Noop => compressed,
            // A copy of up to 64 bytes takes three.
            Compressor::Snappy => compressed.saturating_mul(22),
            // deflate reaches 1032 to 1.
            Compressor::Zlib => compressed.saturating_mul(1040),
            Compressor::Zstd => usize::MAX,
        }
    }
}

/// Whether a command and its reply may be compressed; those of handshakes and credentials may not.
pub fn may_compress(command: &str) -> bool {
    const NEVER: [&str; 11] = [
        "hello",
        "isMaster",
        "ismaster",
        "saslStart",
        "saslContinue",
        "getnonce",
        "authenticate",
        "createUser",
        "updateUser",
        "copydbSaslStart",
        "copydb",
    ];
    !NEVER.contains(&command)
}

/// Undoes OP_COMPRESSED: the message that was compressed, header included.
pub(crate) fn decompress(
    frame: &Frame,
    max_message: usize,
) -> Result<(Frame, Compressor), WireError> {
    let mut head = frame.bytes.get(HEADER_BYTES..).unwrap_or_default();
    let data = head
        .get(COMPRESSED_HEAD_BYTES..)
        .ok_or(WireError::Truncated("the OP_COMPRESSED header"))?;
    let op_code = head.get_i32_le();
    let declared = head.get_i32_le();
    let id = head.get_u8();
    if op_code == OP_COMPRESSED {
        return Err(WireError::NestedCompression);
    }
    let max = max_message.saturating_sub(HEADER_BYTES);
    let size = usize::try_from(declared)
        .ok()
        .filter(|size| *size <= max)
        .ok_or(WireError::DeclaredSize { declared, max })?;
    let compressor = Compressor::from_id(id).ok_or(WireError::UnknownCompressor(id))?;
    if size > compressor.most_output(data.len()) {
        return Err(WireError::SizeMismatch { declared: size });
    }

    let length = HEADER_BYTES + size;
    let header = Header { length, op_code, ..frame.header };
    // Zeroed memory of this size comes untouched from the system, so a lie costs address space only.
    let mut out = vec![0; length];
    let (head, body) = out.split_at_mut(HEADER_BYTES);
    head.copy_from_slice(&header.encode());
    inflate(compressor, data, body)?;
    Ok((Frame { header, bytes: Bytes::from(out) }, compressor))
}

thread_local! {
    // Contexts are a hundred kilobytes and more; every connection thread reuses its own.
    static ZLIB_IN: RefCell<flate2::Decompress> = RefCell::new(flate2::Decompress::new(true));
    static ZLIB_OUT: RefCell<flate2::Compress> =
        RefCell::new(flate2::Compress::new(flate2::Compression::new(ZLIB_LEVEL), true));
    static ZSTD_IN: RefCell<Option<zstd::bulk::Decompressor<'static>>> =
        const { RefCell::new(None) };
    static ZSTD_OUT: RefCell<Option<zstd::bulk::Compressor<'static>>> =
        const { RefCell::new(None) };
    static SNAPPY_OUT: RefCell<snap::raw::Encoder> = RefCell::new(snap::raw::Encoder::new());
}

/// Decompresses `data` into `out`, which it must fill exactly.
fn inflate(compressor: Compressor, data: &[u8], out: &mut [u8]) -> Result<(), WireError> {
    let corrupt = WireError::CorruptCompression(compressor.name());
    let mismatch = WireError::SizeMismatch { declared: out.len() };
    match compressor {
        Compressor::Noop => {
            if data.len() != out.len() {
                return Err(mismatch);
            }
            out.copy_from_slice(data);
        }
        Compressor::Snappy => {
            if snap::raw::decompress_len(data).map_err(|_| corrupt.clone())? != out.len() {
                return Err(mismatch);
            }
            let written = snap::raw::Decoder::new().decompress(data, out).map_err(|_| corrupt)?;
            if written != out.len() {
                return Err(mismatch);
            }
        }
        Compressor::Zlib => ZLIB_IN.with_borrow_mut(|context| {
            context.reset(true);
            let expected = out.len() as u64;
            let status = context
                .decompress(data, out, flate2::FlushDecompress::Finish)
                .map_err(|_| corrupt.clone())?;
            match status {
                flate2::Status::StreamEnd if context.total_in() != data.len() as u64 => {
                    Err(corrupt)
                }
                flate2::Status::StreamEnd if context.total_out() == expected => Ok(()),
                flate2::Status::StreamEnd => Err(mismatch),
                // Either the output is full and more would come, or the input ended early.
                _ if context.total_out() == expected => Err(mismatch),
                _ => Err(corrupt),
            }
        })?,
        Compressor::Zstd => ZSTD_IN.with_borrow_mut(|slot| {
            if slot.is_none() {
                *slot = zstd::bulk::Decompressor::new().ok();
            }
            let context = slot.as_mut().ok_or_else(|| corrupt.clone())?;
            match zstd::zstd_safe::get_frame_content_size(data) {
                Ok(Some(size)) if size > out.len() as u64 => return Err(mismatch),
                Ok(_) => {}
                Err(_) => return Err(corrupt),
            }
            let written = context.decompress_to_buffer(data, &mut *out).map_err(|_| corrupt)?;
            if written == out.len() { Ok(()) } else { Err(mismatch) }
        })?,
    }
    Ok(())
}

/// Appends `message` (a whole uncompressed message) to `out` as an OP_COMPRESSED.
pub fn compress(
    message: &[u8],
    compressor: Compressor,
    out: &mut BytesMut,
) -> Result<(), WireError> {
    let header =
        Header::parse(message, i32::MAX as usize)?.ok_or(WireError::Truncated("the header"))?;
    if header.length != message.len() {
        return Err(WireError::LengthMismatch { declared: header.length, actual: message.len() });
    }
    if header.op_code == OP_COMPRESSED {
        return Err(WireError::NestedCompression);
    }
    let body = message.get(HEADER_BYTES..).unwrap_or_default();
    let start = out.len();
    out.put_slice(&Header { op_code: OP_COMPRESSED, ..header }.encode());
    out.put_i32_le(header.op_code);
    out.put_i32_le(wire_length(body.len()));
    out.put_u8(compressor.id());

    let data_at = out.len();
    let most = most_compressed(compressor, body.len());
    out.resize(data_at + most, 0);
    let room = out.get_mut(data_at..).unwrap_or_default();
    let written = deflate(compressor, body, room).inspect_err(|_| out.truncate(start))?;
    out.truncate(data_at + written);
    let length = wire_length(out.len() - start);
    if let Some(slot) = out.get_mut(start..start + 4) {
        slot.copy_from_slice(&length.to_le_bytes());
    }
    Ok(())
}

/// Room that is enough for the compressed form of `size` bytes.
fn most_compressed(compressor: Compressor, size: usize) -> usize {
    match compressor {
        Compressor::Noop => size,
        Compressor::Snappy => snap::raw::max_compress_len(size),
        // zlib's own bound: stored blocks of 16 KiB cost 5 bytes each, plus head and checksum.
        Compressor::Zlib => size + (size >> 12) + (size >> 14) + (size >> 25) + 64,
        Compressor::Zstd => zstd::zstd_safe::compress_bound(size),
    }
}

fn deflate(compressor: Compressor, body: &[u8], room: &mut [u8]) -> Result<usize, WireError> {
    let failed = WireError::CompressionFailed(compressor.name());
    match compressor {
        Compressor::Noop => {
            room.copy_from_slice(body);
            Ok(body.len())
        }
        Compressor::Snappy => {
            SNAPPY_OUT.with_borrow_mut(|encoder| encoder.compress(body, room)).map_err(|_| failed)
        }
        Compressor::Zlib => ZLIB_OUT.with_borrow_mut(|context| {
            context.reset();
            match context.compress(body, room, flate2::FlushCompress::Finish) {
                Ok(flate2::Status::StreamEnd) => {
                    usize::try_from(context.total_out()).map_err(|_| failed)
                }
                _ => Err(failed),
            }
        }),
        Compressor::Zstd => ZSTD_OUT.with_borrow_mut(|slot| {
            if slot.is_none() {
                *slot = zstd::bulk::Compressor::new(ZSTD_LEVEL).ok();
            }
            let context = slot.as_mut().ok_or_else(|| failed.clone())?;
            context.compress_to_buffer(body, room).map_err(|_| failed)
        }),
    }
}
