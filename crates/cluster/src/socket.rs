//! One connection's bytes: a whole message out, a whole message in. Knows message lengths and ids,
//! nothing of commands, pools or authentication.

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use halocline_wire::{HEADER_BYTES, frame_length};
use mongodb::options::ServerAddress;
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::error::{ClusterError, NetworkError, Phase};
use crate::options::Tier;

/// Largest reply accepted: a server's own limit for messages, and room for the reply around a
/// document of full size.
const MAX_REPLY_BYTES: usize = 48_000_000 + 16 * 1024;

/// How much is read at once when the length is not known yet. Most replies fit, and are received
/// with one system call.
const READ_BYTES: usize = 16 * 1024;

/// The receive buffer is renewed when less than this is left of it.
const LEAST_READ_BYTES: usize = 4 * 1024;

/// A receive buffer that grew beyond this for one reply goes away with that reply instead of
/// staying with the connection.
const KEPT_BUFFER_BYTES: usize = 64 * 1024;

const FLAGS_END: usize = HEADER_BYTES + 4;
const MORE_TO_COME: u32 = 1 << 1;

/// Wakes a request that will get no answer.
#[derive(Default)]
pub(crate) struct Interrupt {
    raised: AtomicBool,
    waker: AtomicWaker,
}

impl Interrupt {
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// To be called when about to return `Pending`: true if raised meanwhile.
    fn register(&self, cx: &Context<'_>) -> bool {
        self.waker.register(cx.waker());
        self.is_raised()
    }

    fn error() -> io::Error {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "the server fell silent or lost its place as primary while this request waited",
        )
    }
}

/// TCP, bare or under TLS.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            // A TCP stream keeps nothing back.
            Stream::Plain(_) => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

/// A connection on which messages go back and forth, one request at a time.
pub(crate) struct Socket {
    tier: Tier,
    address: ServerAddress,
    stream: Stream,
    inbound: BytesMut,
    /// Kept for the commands built here, so that they allocate nothing.
    pub(crate) outbound: BytesMut,
    next_request_id: i32,
    /// The `responseTo` of the answer that is due; `None` when none is.
    due: Option<i32>,
    /// Something was left half done: the connection cannot be used again.
    broken: bool,
    pub(crate) interrupt: Arc<Interrupt>,
}

impl Socket {
    pub(crate) fn new(tier: Tier, address: ServerAddress, stream: Stream) -> Self {
        Self {
            tier,
            address,
            stream,
            inbound: BytesMut::new(),
            outbound: BytesMut::new(),
            next_request_id: 1,
            due: None,
            broken: false,
            interrupt: Arc::default(),
        }
    }

    pub(crate) fn next_request_id(&mut self) -> i32 {
        let id = self.next_request_id;
        self.next_request_id = id.wrapping_add(1);
        id
    }

    /// No answer is due, nothing is left over: another request can follow.
    pub(crate) fn is_clean(&self) -> bool {
        !self.broken && self.due.is_none() && self.inbound.is_empty()
    }

    /// Whether the peer has closed, or sent what nobody asked for, while nothing was under way.
    /// For a connection in order this reads no more than a flag of the reactor.
    pub(crate) fn is_dead(&mut self) -> bool {
        if self.interrupt.is_raised() {
            return true;
        }
        let mut byte = [0_u8; 1];
        match &mut self.stream {
            Stream::Plain(stream) => {
                !matches!(stream.try_read(&mut byte), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
            }
            // Under TLS there may be records that are no data (session tickets), so the decision
            // is TLS's own.
            Stream::Tls(stream) => {
                let mut cx = Context::from_waker(std::task::Waker::noop());
                let mut buf = ReadBuf::new(&mut byte);
                Pin::new(stream.as_mut()).poll_read(&mut cx, &mut buf).is_ready()
            }
        }
    }

    /// Sends one whole message and receives the answer to it.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<Bytes, ClusterError> {
        self.send(request).await?;
        self.receive().await
    }

    /// Sends one whole message.
    pub(crate) async fn send(&mut self, request: &[u8]) -> Result<(), ClusterError> {
        self.begin(request)?;
        let Self { stream, interrupt, .. } = self;
        let mut rest = request;
        let sent = poll_fn(|cx| {
            loop {
                if rest.is_empty() {
                    return Pin::new(&mut *stream).poll_flush(cx);
                }
                match Pin::new(&mut *stream).poll_write(cx, rest) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    Poll::Ready(Ok(n)) => rest = rest.get(n..).unwrap_or_default(),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending if interrupt.register(cx) => {
                        return Poll::Ready(Err(Interrupt::error()));
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
        self.sent(sent)
    }

    /// Sends one whole message given in pieces.
    pub(crate) async fn send_vectored(&mut self, parts: &[&[u8]]) -> Result<(), ClusterError> {
        let mut head: SmallVec<[u8; FLAGS_END]> = SmallVec::new();
        for part in parts {
            let wanted = FLAGS_END - head.len();
            head.extend_from_slice(part.get(..wanted).unwrap_or(part));
        }
        self.begin(&head)?;
        let Self { stream, interrupt, .. } = self;
        let mut slices: SmallVec<[IoSlice<'_>; 8]> =
            parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest: &mut [IoSlice<'_>] = &mut slices;
        IoSlice::advance_slices(&mut rest, 0);
        let sent = poll_fn(|cx| {
            loop {
                if rest.is_empty() {
                    return Pin::new(&mut *stream).poll_flush(cx);
                }
                match Pin::new(&mut *stream).poll_write_vectored(cx, rest) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    Poll::Ready(Ok(n)) => IoSlice::advance_slices(&mut rest, n),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending if interrupt.register(cx) => {
                        return Poll::Ready(Err(Interrupt::error()));
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
        self.sent(sent)
    }

    /// Notes what answer the message is due, before any of it is sent.
    fn begin(&mut self, head: &[u8]) -> Result<(), ClusterError> {
        if !self.is_clean() {
            self.broken = true;
            return Err(self
                .protocol("a request was sent before the answer to the last one was read".into()));
        }
        let (Some(id), Some(flags)) = (word(head, 4), word(head, HEADER_BYTES)) else {
            return Err(self.protocol("a request shorter than its header was to be sent".into()));
        };
        self.broken = true;
        self.due = (flags & MORE_TO_COME == 0).then_some(id as i32);
        Ok(())
    }

    fn sent(&mut self, result: io::Result<()>) -> Result<(), ClusterError> {
        result.map_err(|error| self.network(Phase::Send, error))?;
        self.broken = false;
        Ok(())
    }

    /// Receives the message that is due. One that announces more to come leaves the next due.
    pub(crate) async fn receive(&mut self) -> Result<Bytes, ClusterError> {
        let Some(due) = self.due else {
            self.broken = true;
            return Err(self.protocol("an answer was awaited where none is due".into()));
        };
        self.broken = true;
        let length = loop {
            let announced = frame_length(&self.inbound, MAX_REPLY_BYTES)
                .map_err(|error| self.protocol(error.to_string()))?;
            let wanted = match announced {
                None => 0,
                Some(length) if self.inbound.len() >= length => break length,
                Some(length) => length - self.inbound.len(),
            };
            let spare = self.inbound.capacity() - self.inbound.len();
            if wanted > spare {
                self.inbound.reserve(wanted);
            } else if wanted == 0 && spare < LEAST_READ_BYTES {
                self.inbound.reserve(READ_BYTES);
            }
            self.fill().await?;
        };
        let message = if length > KEPT_BUFFER_BYTES && self.inbound.len() == length {
            std::mem::take(&mut self.inbound).freeze()
        } else {
            self.inbound.split_to(length).freeze()
        };
        let answers = word(&message, 8).unwrap_or_default() as i32;
        if answers != due {
            return Err(self.protocol(format!("it answered request {answers} instead of {due}")));
        }
        let flags = word(&message, HEADER_BYTES).unwrap_or_default();
        self.due =
            (flags & MORE_TO_COME != 0).then(|| word(&message, 4).unwrap_or_default() as i32);
        self.broken = false;
        Ok(message)
    }

    async fn fill(&mut self) -> Result<(), ClusterError> {
        let Self { stream, inbound, interrupt, .. } = self;
        let read = {
            let mut read = pin!(stream.read_buf(inbound));
            poll_fn(|cx| match read.as_mut().poll(cx) {
                Poll::Pending if interrupt.register(cx) => Poll::Ready(Err(Interrupt::error())),
                polled => polled,
            })
            .await
        };
        match read {
            Ok(0) => Err(self.network(Phase::Receive, io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) => Err(self.network(Phase::Receive, error)),
        }
    }

    fn network(&self, phase: Phase, source: io::Error) -> ClusterError {
        ClusterError::Network(Box::new(NetworkError {
            tier: self.tier,
            address: self.address.clone(),
            phase,
            source,
        }))
    }

    pub(crate) fn authentication(&self, reason: &dyn fmt::Display) -> ClusterError {
        ClusterError::Authentication {
            tier: self.tier,
            address: self.address.clone(),
            message: reason.to_string(),
        }
    }

    pub(crate) fn protocol(&self, message: String) -> ClusterError {
        ClusterError::Protocol { tier: self.tier, address: self.address.clone(), message }
    }
}

/// The little-endian 32-bit word at an offset.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}
