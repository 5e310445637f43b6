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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    /// Both ends of a connection: ours, and the server's.
    async fn pair() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ours = TcpStream::connect(address).await.unwrap();
        let (theirs, _) = listener.accept().await.unwrap();
        (Socket::new(Tier::Fast, address.into(), Stream::Plain(ours)), theirs)
    }

    fn message(length: usize, id: i32, response_to: i32, flags: u32) -> Vec<u8> {
        let mut message = vec![0x5a; length];
        let words = [length as u32, id as u32, response_to as u32, 2013, flags];
        for (place, word) in message.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        message
    }

    /// Sends a small request of this id and awaits the answer.
    async fn ask(socket: &mut Socket, id: i32) -> Result<Bytes, ClusterError> {
        socket.exchange(&message(21, id, 0, 0)).await
    }

    async fn take(theirs: &mut TcpStream, length: usize) -> Vec<u8> {
        let mut taken = vec![0; length];
        theirs.read_exact(&mut taken).await.unwrap();
        taken
    }

    #[tokio::test]
    async fn a_reply_comes_back_as_it_was_sent_whatever_its_size_and_pieces() {
        let (mut socket, mut theirs) = pair().await;
        for (size, piece) in [(21, 1), (100, 7), (16 * 1024, 16 * 1024), (5_000_000, 100_000)] {
            let request = message(60, 7, 0, 0);
            let reply = message(size, 1, 7, 0);
            let server = async {
                assert_eq!(take(&mut theirs, 60).await, request);
                for piece in reply.chunks(piece) {
                    theirs.write_all(piece).await.unwrap();
                    tokio::task::yield_now().await;
                }
            };
            let (answer, ()) = tokio::join!(socket.exchange(&request), server);
            assert_eq!(answer.unwrap(), reply);
            assert!(socket.is_clean());
        }
    }

    #[tokio::test]
    async fn a_request_in_pieces_arrives_whole_even_when_the_header_is_cut() {
        let (mut socket, mut theirs) = pair().await;
        let request = message(3_000_000, 9, 0, 0);
        let parts: Vec<&[u8]> =
            vec![&request[..3], &request[3..18], &[], &request[18..40], &request[40..]];
        let server = async {
            let taken = take(&mut theirs, request.len()).await;
            theirs.write_all(&message(21, 1, 9, 0)).await.unwrap();
            taken
        };
        let (sent, taken) = tokio::join!(
            async {
                socket.send_vectored(&parts).await?;
                socket.receive().await
            },
            server
        );
        sent.unwrap();
        assert!(taken == request);
    }

    #[tokio::test]
    async fn the_buffer_of_one_large_reply_does_not_stay_with_the_connection() {
        let (mut socket, mut theirs) = pair().await;
        let reply = message(8_000_000, 1, 7, 0);
        let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
            theirs.write_all(&reply).await.unwrap();
        });
        drop(answer.unwrap());
        assert!(socket.inbound.capacity() <= KEPT_BUFFER_BYTES);
    }

    #[tokio::test]
    async fn the_buffer_is_used_again_once_the_reply_is_dropped() {
        let (mut socket, mut theirs) = pair().await;
        let mut places = Vec::new();
        for _ in 0..100 {
            let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
                theirs.write_all(&message(1000, 1, 7, 0)).await.unwrap();
            });
            places.push(answer.unwrap().as_ptr() as usize);
        }
        let spread = places.iter().max().unwrap() - places.iter().min().unwrap();
        assert!(spread < READ_BYTES, "100 replies were spread over {spread} bytes");
    }

    #[tokio::test]
    async fn a_length_that_cannot_be_is_refused_before_memory_is_taken() {
        for length in [0, 15, u32::MAX as usize, 0x7fff_ffff, MAX_REPLY_BYTES + 1] {
            let (mut socket, mut theirs) = pair().await;
            let mut reply = message(21, 1, 7, 0);
            reply[..4].copy_from_slice(&(length as u32).to_le_bytes());
            let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
                theirs.write_all(&reply).await.unwrap();
            });
            assert!(matches!(answer, Err(ClusterError::Protocol { .. })), "{length}: {answer:?}");
            assert!(socket.inbound.capacity() <= KEPT_BUFFER_BYTES);
            assert!(!socket.is_clean());
        }
    }

    #[tokio::test]
    async fn an_answer_to_something_else_breaks_the_connection() {
        let (mut socket, mut theirs) = pair().await;
        let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
            theirs.write_all(&message(21, 1, 6, 0)).await.unwrap();
        });
        assert!(matches!(answer, Err(ClusterError::Protocol { .. })));
        assert!(!socket.is_clean());
    }

    #[tokio::test]
    async fn bytes_beyond_the_reply_make_the_connection_unfit() {
        let (mut socket, mut theirs) = pair().await;
        let mut reply = message(21, 1, 7, 0);
        reply.extend_from_slice(b"stray");
        let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
            theirs.write_all(&reply).await.unwrap();
        });
        answer.unwrap();
        assert!(!socket.is_clean());
    }

    #[tokio::test]
    async fn a_message_without_answer_leaves_the_connection_ready() {
        let (mut socket, mut theirs) = pair().await;
        socket.send(&message(21, 7, 0, MORE_TO_COME)).await.unwrap();
        assert!(socket.is_clean());
        let (answer, ()) = tokio::join!(ask(&mut socket, 8), async {
            take(&mut theirs, 42).await;
            theirs.write_all(&message(21, 1, 8, 0)).await.unwrap();
        });
        answer.unwrap();
    }

    #[tokio::test]
    async fn replies_follow_each_other_until_the_last() {
        let (mut socket, mut theirs) = pair().await;
        for reply in [
            message(30, 100, 7, MORE_TO_COME),
            message(40, 101, 100, MORE_TO_COME),
            message(50, 102, 101, 0),
        ] {
            theirs.write_all(&reply).await.unwrap();
        }
        assert_eq!(ask(&mut socket, 7).await.unwrap().len(), 30);
        assert!(!socket.is_clean());
        assert_eq!(socket.receive().await.unwrap().len(), 40);
        assert_eq!(socket.receive().await.unwrap().len(), 50);
        assert!(socket.is_clean());
        assert!(socket.receive().await.is_err());
    }

    #[tokio::test]
    async fn a_dropped_exchange_makes_the_connection_unfit() {
        let (mut socket, _theirs) = pair().await;
        let request = message(21, 7, 0, 0);
        {
            let mut exchange = pin!(socket.exchange(&request));
            poll_fn(|cx| {
                assert!(exchange.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
        }
        assert!(!socket.is_clean());
        assert!(socket.exchange(&request).await.is_err());
    }

    #[tokio::test]
    async fn a_peer_that_closes_is_noticed_before_and_during_use() {
        let (mut socket, theirs) = pair().await;
        assert!(!socket.is_dead());
        drop(theirs);
        // The reactor must have seen it: wait for the readiness that closing causes.
        if let Stream::Plain(stream) = &socket.stream {
            stream.readable().await.unwrap();
        }
        assert!(socket.is_dead());

        let (mut socket, theirs) = pair().await;
        let (answer, ()) = tokio::join!(ask(&mut socket, 7), async { drop(theirs) });
        let error = answer.unwrap_err();
        assert!(error.is_network(), "{error}");
    }

    #[tokio::test]
    async fn an_interrupt_ends_the_wait_for_an_answer() {
        let (mut socket, _theirs) = pair().await;
        let interrupt = socket.interrupt.clone();
        let (answer, ()) = tokio::join!(ask(&mut socket, 7), async {
            tokio::task::yield_now().await;
            interrupt.raise();
        });
        let error = answer.unwrap_err();
        assert!(error.is_network() && error.is_timeout() && error.outcome_unknown(), "{error}");
        assert!(socket.is_dead());
    }

    #[tokio::test]
    async fn an_interrupt_ends_a_send_that_nobody_reads() {
        let (mut socket, _theirs) = pair().await;
        let interrupt = socket.interrupt.clone();
        let request = message(40_000_000, 7, 0, 0);
        let (sent, ()) = tokio::join!(socket.send(&request), async {
            tokio::task::yield_now().await;
            interrupt.raise();
        });
        let error = sent.unwrap_err();
        assert!(error.is_network() && !error.outcome_unknown(), "{error}");
    }
}
