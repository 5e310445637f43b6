//! A client connection: the socket loop from frame to reply, and the actors that own it, one
//! `ConnectionHandler` a client and one `ConnectionThread` an arbiter. What a command means is the
//! executor's business, the handshake's content is in `hello`, who may connect is in `acceptor`.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use actix::dev::MessageResult;
use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message,
    ResponseActFuture, WrapFuture,
};
use actix_rt::ArbiterHandle;
use bson::raw::RawDocument;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt;
use halocline_wire::patch::set_response_to;
use halocline_wire::{
    Compressor, Frame, HEADER_BYTES, Header, LegacyQuery, Limits, MAX_UNAUTHENTICATED_BYTES,
    Message as WireMessage, MsgFlags, OP_COMPRESSED, OP_MSG, OP_QUERY, OpMsg, WireError, codes,
    compress, decode, encode_msg, encode_query_failure, encode_query_reply, error_document,
    take_frame,
};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::acceptor::ClientPermit;
use crate::hello::{ClientMetadata, HelloRequest, HelloState, is_hello};
use crate::panic_injection::checkpoint;
use crate::supervisor::{
    Child, ChildContext, ChildSpec, Drain, DrainStage, KindCounts, RestartPolicy, SupervisorHandle,
    UpGuard, panic_text,
};

/// The `actor` label of client connections.
pub const CONNECTION_HANDLER: &str = "connection_handler";
/// The `actor` label of the threads that serve them.
pub const CONNECTION_THREAD: &str = "connection_thread";

/// Read buffer of a connection that has something to read: most commands fit, and a burst of them
/// arrives in one read.
const BUFFER_BYTES: usize = 16 * 1024;
/// Buffers that grew beyond this for a large message are not kept.
const LARGEST_KEPT_BUFFER_BYTES: usize = 64 * 1024;
/// Buffers a thread keeps for the next readable connection; half a megabyte a thread.
const KEPT_BUFFERS: usize = 32;

/// Runs clients' commands. One executor a thread; it is shared by the thread's connections.
///
/// The future is stored inside every connection's own task, idle or not, so its size counts
/// against each of them: box what is rare and big. [`ConnectionHandler::task_bytes`] tells it.
pub trait Execute: 'static {
    /// Runs one command. The client's next command is read only after this one is answered. A
    /// panic ends this client alone.
    fn execute(
        &self,
        client: &mut ClientState,
        msg: OpMsg,
        request_id: i32,
    ) -> impl Future<Output = Outcome>;
}

/// What a command led to.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// A whole uncompressed OP_MSG, header included, whose `responseTo` is the request's id.
    /// Dropped if the client wanted no reply.
    Reply(Bytes),
    /// Several, written in this order.
    Replies(Vec<Bytes>),
    /// Nothing to send: the client wants no reply.
    None,
    /// End this connection without a reply; the reason is for the log and the `errors_total` label.
    Close(&'static str),
}

/// How connections are served; the same for all of them.
#[derive(Debug)]
pub struct ConnectionSettings {
    /// What `hello` answers from.
    pub hello: Arc<HelloState>,
    /// What is accepted from clients.
    pub limits: Limits,
    /// Whether clients must authenticate: until they have, only short messages are read.
    pub authentication: bool,
    /// A client that takes none of its reply's bytes for this long is cut off.
    pub write_timeout: Duration,
    /// A client that has begun a message and sends none of its bytes for this long is cut off.
    pub read_timeout: Duration,
}

impl ConnectionSettings {
    /// The usual limits and times.
    #[must_use]
    pub fn new(hello: Arc<HelloState>) -> Self {
        Self {
            hello,
            limits: Limits::CLIENT,
            authentication: false,
            // As long as drivers keep a socket that makes no progress, roughly.
            write_timeout: Duration::from_secs(60),
            read_timeout: Duration::from_secs(60),
        }
    }
}

/// What is known of a client, for the executor. Lives as long as the connection.
pub struct ClientState {
    /// Whether the client has authenticated. Set by the executor.
    pub authenticated: bool,
    /// Whatever the executor keeps for this client, such as an unfinished authentication.
    pub slot: Option<Box<dyn Any>>,
    shared: Rc<ClientShared>,
}

impl fmt::Debug for ClientState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientState")
            .field("connection_id", &self.shared.connection_id)
            .field("peer", &self.shared.peer)
            .field("authenticated", &self.authenticated)
            .finish_non_exhaustive()
    }
}

impl ClientState {
    /// The `connectionId` of its handshake.
    #[must_use]
    pub fn connection_id(&self) -> i32 {
        self.shared.connection_id
    }

    /// Its address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.shared.peer
    }

    /// What it said of itself in its handshake.
    #[must_use]
    pub fn metadata(&self) -> Option<&ClientMetadata> {
        self.shared.metadata.get().map(Box::as_ref)
    }

    /// Whether this connection closes after the present command.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.draining.get()
    }
}

/// What the socket loop and the actor's message handlers both see.
struct ClientShared {
    connection_id: i32,
    peer: SocketAddr,
    since: Instant,
    metadata: OnceCell<Box<ClientMetadata>>,
    commands: Cell<u64>,
    busy_since: Cell<Option<Instant>>,
    draining: Cell<bool>,
    /// Wakes the loop when draining begins.
    waiting: RefCell<Option<Waker>>,
}

impl ClientShared {
    fn begin_draining(&self) {
        self.draining.set(true);
        if let Some(waker) = self.waiting.borrow_mut().take() {
            waker.wake();
        }
    }

    fn poll_draining(&self, cx: &TaskContext<'_>) -> Poll<()> {
        if self.draining.get() {
            return Poll::Ready(());
        }
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *waiting = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    fn describe(&self) -> ClientDescription {
        let text = |text: &Option<Box<str>>| text.as_deref().map(str::to_owned);
        let metadata = self.metadata.get().map(Box::as_ref);
        ClientDescription {
            connection_id: self.connection_id,
            peer: self.peer,
            app_name: metadata.and_then(|m| text(&m.app_name)),
            driver: metadata.and_then(|m| text(&m.driver)),
            driver_version: metadata.and_then(|m| text(&m.driver_version)),
            connected_seconds: self.since.elapsed().as_secs(),
            commands: self.commands.get(),
            busy_seconds: self.busy_since.get().map(|since| since.elapsed().as_secs_f64()),
            draining: self.draining.get(),
        }
    }
}

/// Asks a connection what it is.
#[derive(Debug, Clone, Copy)]
pub struct Describe;

impl Message for Describe {
    type Result = ClientDescription;
}

/// A client connection at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClientDescription {
    /// The `connectionId` of its handshake.
    pub connection_id: i32,
    /// Its address.
    pub peer: SocketAddr,
    /// The driver's `appName` option.
    pub app_name: Option<String>,
    /// The driver's name.
    pub driver: Option<String>,
    /// The driver's version.
    pub driver_version: Option<String>,
    /// Age of the connection.
    pub connected_seconds: u64,
    /// Commands run for it, handshakes excepted.
    pub commands: u64,
    /// How long its present command has been running; `None` when idle.
    pub busy_seconds: Option<f64>,
    /// Whether it closes after its present command.
    pub draining: bool,
}

/// Why a connection ended.
#[derive(Debug)]
enum End {
    /// The client closed it between messages.
    Disconnected,
    /// It was asked to close.
    Drained,
    /// The client's bytes are no valid message.
    Protocol { kind: &'static str, what: String },
    /// The network failed, or the client went away inside a message.
    Io(io::Error),
    /// The client stopped reading its reply.
    WriteTimeout,
    /// The client stopped inside a message.
    ReadTimeout,
    /// The executor wants it closed.
    Closed(&'static str),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What a reply must look like, from the request's envelope.
#[derive(Debug, Clone, Copy)]
struct Envelope {
    request_id: i32,
    compressor: Option<Compressor>,
    checksum: bool,
    wants_reply: bool,
}

/// The socket and its loop.
struct Connection<E: Execute> {
    socket: TcpStream,
    executor: Rc<E>,
    client: ClientState,
    settings: Arc<ConnectionSettings>,
}

impl<E: Execute> Connection<E> {
    /// Serves the client until either side ends it.
    async fn serve(mut self) -> End {
        loop {
            // Between messages a connection holds no buffer.
            if !self.readable().await {
                return End::Drained;
            }
            let mut buffer = buffers::take();
            let served = self.serve_arrived(&mut buffer).await;
            buffers::give(buffer);
            if let Err(end) = served {
                return end;
            }
        }
    }

    /// Waits for bytes, or for the end of the stream. False if the connection is to close instead;
    /// what has arrived by then is still served.
    async fn readable(&self) -> bool {
        poll_fn(|cx| {
            // An error shows itself when the bytes are read.
            if self.socket.poll_read_ready(cx).is_ready() {
                return Poll::Ready(true);
            }
            self.client.shared.poll_draining(cx).map(|()| false)
        })
        .await
    }

    /// Serves every message that is there, until nothing is left of them.
    async fn serve_arrived(&mut self, buffer: &mut BytesMut) -> Result<(), End> {
        loop {
            match take_frame(buffer, self.limits().max_message) {
                Ok(Some(frame)) => {
                    self.serve_frame(frame, buffer).await?;
                    continue;
                }
                Ok(None) => {}
                Err(error) => return Err(malformed(&error)),
            }
            match self.read_some(buffer).await? {
                Some(0) if buffer.is_empty() => return Err(End::Disconnected),
                Some(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Some(_) => {}
                None if buffer.is_empty() => return Ok(()),
                None => Box::pin(self.rest_arrives()).await?,
            }
        }
    }

    /// Reads what is there. `None`: nothing is; the task will be woken.
    async fn read_some(&mut self, buffer: &mut BytesMut) -> io::Result<Option<usize>> {
        if buffer.capacity() == buffer.len() {
            buffer.reserve(BUFFER_BYTES);
        }
        // Not `try_read`: only this way a short read tells tokio that the socket is drained, which
        // saves a system call a command.
        let mut read = pin!(self.socket.read_buf(buffer));
        poll_fn(|cx| match read.as_mut().poll(cx) {
            Poll::Ready(read) => Poll::Ready(read.map(Some)),
            Poll::Pending => Poll::Ready(Ok(None)),
        })
        .await
    }

    /// Waits for more of a message that has begun to arrive.
    async fn rest_arrives(&self) -> Result<(), End> {
        let ready = poll_fn(|cx| self.socket.poll_read_ready(cx));
        match timeout(self.settings.read_timeout, ready).await {
            Ok(ready) => Ok(ready?),
            Err(_) => Err(End::ReadTimeout),
        }
    }

    fn limits(&self) -> Limits {
        let limits = self.settings.limits;
        if self.settings.authentication && !self.client.authenticated {
            limits.with_max_message(limits.max_message.min(MAX_UNAUTHENTICATED_BYTES))
        } else {
            limits
        }
    }

    async fn serve_frame(&mut self, frame: Frame, buffer: &mut BytesMut) -> Result<(), End> {
        let header = frame.header;
        let answerable = answerable(&frame);
        let decoded = match decode(frame, &self.limits()) {
            Ok(decoded) => decoded,
            Err(error) => return Err(Box::pin(self.refuse(header, answerable, error)).await),
        };
        let request_id = decoded.request_id;
        match decoded.message {
            WireMessage::Msg(msg) => {
                let envelope = Envelope {
                    request_id,
                    compressor: decoded.compressor,
                    checksum: msg.has_checksum(),
                    wants_reply: !msg.more_to_come(),
                };
                if is_hello(msg.body()) {
                    return Box::pin(self.hello(msg, envelope, buffer)).await;
                }
                let outcome = self.run(msg, request_id).await;
                self.deliver(outcome, envelope).await
            }
            WireMessage::Query(query) => Box::pin(self.legacy_query(query, request_id)).await,
        }
    }

    async fn run(&mut self, msg: OpMsg, request_id: i32) -> Outcome {
        let Self { executor, client, .. } = self;
        let shared = client.shared.clone();
        shared.commands.set(shared.commands.get() + 1);
        shared.busy_since.set(Some(Instant::now()));
        checkpoint(CONNECTION_HANDLER);
        let outcome = executor.execute(client, msg, request_id).await;
        shared.busy_since.set(None);
        checkpoint("connection_handler/executed");
        outcome
    }

    async fn deliver(&mut self, outcome: Outcome, envelope: Envelope) -> Result<(), End> {
        match outcome {
            Outcome::Close(reason) => return Err(End::Closed(reason)),
            Outcome::None => {}
            Outcome::Reply(_) | Outcome::Replies(_) if !envelope.wants_reply => {}
            Outcome::Reply(reply) => self.reply(reply, envelope).await?,
            Outcome::Replies(replies) => {
                for reply in replies {
                    self.reply(reply, envelope).await?;
                }
            }
        }
        // Commands without a reply may stand before one that has one, in the same burst.
        if envelope.wants_reply && self.client.is_draining() {
            return Err(End::Drained);
        }
        Ok(())
    }

    /// Writes one reply in the form the request had.
    async fn reply(&self, reply: Bytes, envelope: Envelope) -> Result<(), End> {
        if envelope.compressor.is_none() && !envelope.checksum {
            return self.write(reply).await;
        }
        let mut dressed = BytesMut::from(reply);
        if envelope.checksum {
            add_checksum(&mut dressed, envelope.request_id);
        }
        if let Some(compressor) = envelope.compressor {
            let mut compressed = BytesMut::new();
            // A reply that cannot be compressed goes as it is: the client reads either.
            if compress(&dressed, compressor, &mut compressed).is_ok() {
                dressed = compressed;
            }
        }
        self.write(dressed.freeze()).await
    }

    /// Writes all of it; in one system call if the socket has room.
    async fn write(&self, mut bytes: Bytes) -> Result<(), End> {
        match self.socket.try_write(&bytes) {
            Ok(written) if written == bytes.len() => return Ok(()),
            Ok(written) => drop(bytes.split_to(written)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Box::pin(self.write_rest(bytes)).await
    }

    /// Writes to a client that is slower than we are.
    async fn write_rest(&self, mut bytes: Bytes) -> Result<(), End> {
        while !bytes.is_empty() {
            match timeout(self.settings.write_timeout, self.socket.writable()).await {
                Ok(writable) => writable?,
                Err(_) => return Err(End::WriteTimeout),
            }
            match self.socket.try_write(&bytes) {
                Ok(written) => drop(bytes.split_to(written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Ends the connection over a malformed message; where a command was there to be answered, an
    /// error reply goes first.
    async fn refuse(&self, header: Header, answerable: bool, error: WireError) -> End {
        let mut out = BytesMut::new();
        let reply_id = next_request_id();
        match (&error, header.op_code) {
            (WireError::UnsupportedOpcode(_), OP_GET_MORE) => {
                let code = codes::UNSUPPORTED_OP_QUERY_COMMAND;
                encode_query_failure(
                    reply_id,
                    header.request_id,
                    code,
                    &error.to_string(),
                    &mut out,
                );
            }
            (_, OP_QUERY) => {
                let code = error.answer_code().unwrap_or(codes::PROTOCOL_ERROR);
                encode_query_failure(
                    reply_id,
                    header.request_id,
                    code,
                    &error.to_string(),
                    &mut out,
                );
            }
            (_, OP_MSG) if answerable => {
                if let Some(code) = error.answer_code() {
                    let document =
                        error_document(code, codes::code_name(code), &error.to_string(), &[]);
                    let flags = MsgFlags::NONE;
                    encode_msg(reply_id, header.request_id, flags, &document, &[], &mut out);
                }
            }
            _ => {}
        }
        if !out.is_empty() {
            // The connection ends either way.
            let _ = self.write(out.freeze()).await;
        }
        malformed(&error)
    }

    /// A handshake over OP_MSG: one reply, or a stream of them.
    async fn hello(
        &mut self,
        msg: OpMsg,
        envelope: Envelope,
        buffer: &mut BytesMut,
    ) -> Result<(), End> {
        let mut request = match HelloRequest::parse(msg.body()) {
            Ok(request) => request,
            Err(error) => {
                let reply = self.encode(&error.document(), envelope.request_id, MsgFlags::NONE).1;
                return self.deliver(Outcome::Reply(reply), envelope).await;
            }
        };
        self.note_metadata(&mut request);
        let streams = envelope.wants_reply && msg.exhaust_allowed() && request.is_awaitable();
        drop(msg);
        if buffer.is_empty() {
            // A monitor waits here for all of its life, as idle as any other connection.
            buffers::give(std::mem::take(buffer));
        }

        let mut response_to = envelope.request_id;
        loop {
            self.await_news(&request).await?;
            let answer = self.settings.hello.answer(&request, self.client.connection_id());
            let goes_on = streams && answer.ok && !self.client.is_draining();
            let flags = if goes_on { MsgFlags::MORE_TO_COME } else { MsgFlags::NONE };
            let (reply_id, reply) = self.encode(&answer.document, response_to, flags);
            let envelope = Envelope { request_id: response_to, ..envelope };
            if !goes_on {
                self.deliver(Outcome::Reply(reply), envelope).await?;
                if self.settings.hello.is_draining() {
                    return Err(End::Drained);
                }
                return Ok(());
            }
            self.reply(reply, envelope).await?;
            // Each reply of a stream answers the one before it.
            response_to = reply_id;
            request.advance(answer.version);
        }
    }

    /// Waits until there is something to tell this client, it goes away, or the connection is to
    /// close.
    async fn await_news(&self, request: &HelloRequest) -> Result<(), End> {
        let interrupted = poll_fn(|cx| {
            if self.client.shared.poll_draining(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut byte = [0; 1];
            match self.socket.poll_peek(cx, &mut tokio::io::ReadBuf::new(&mut byte)) {
                Poll::Ready(Ok(0)) => Poll::Ready(Err(End::Disconnected)),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
                // Its next message has come already; it is read after this one is answered.
                Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
            }
        });
        tokio::select! {
            () = self.settings.hello.wait_for_change(request) => Ok(()),
            end = interrupted => end,
        }
    }

    fn note_metadata(&self, request: &mut HelloRequest) {
        // Said once a connection; later handshakes of it are a monitor's.
        if let Some(metadata) = request.take_metadata()
            && self.client.shared.metadata.set(Box::new(metadata)).is_ok()
        {
            let metadata = self.client.metadata();
            tracing::debug!(
                connection = self.client.connection_id(),
                app = metadata.and_then(|m| m.app_name.as_deref()),
                driver = metadata.and_then(|m| m.driver.as_deref()),
                "a client introduced itself"
            );
        }
    }

    fn encode(&self, document: &RawDocument, response_to: i32, flags: MsgFlags) -> (i32, Bytes) {
        let reply_id = next_request_id();
        let mut out = BytesMut::new();
        encode_msg(reply_id, response_to, flags, document, &[], &mut out);
        (reply_id, out.freeze())
    }

    /// OP_QUERY: the handshake of drivers that do not know yet whom they talk to.
    async fn legacy_query(&mut self, query: LegacyQuery, request_id: i32) -> Result<(), End> {
        let mut out = BytesMut::new();
        let reply_id = next_request_id();
        if !query.is_handshake() {
            let what = "OP_QUERY is supported for the handshake only; use a driver that speaks \
                        OP_MSG (MongoDB 3.6 or later)";
            let code = codes::UNSUPPORTED_OP_QUERY_COMMAND;
            encode_query_failure(reply_id, request_id, code, what, &mut out);
            self.write(out.freeze()).await?;
            return Err(End::Protocol { kind: "unsupported_op_query", what: what.to_owned() });
        }
        let document = match HelloRequest::parse(query.command()) {
            Ok(mut request) => {
                self.note_metadata(&mut request);
                self.await_news(&request).await?;
                self.settings.hello.answer(&request, self.client.connection_id()).document
            }
            Err(error) => error.document(),
        };
        encode_query_reply(reply_id, request_id, &document, &mut out);
        self.write(out.freeze()).await?;
        if self.client.is_draining() || self.settings.hello.is_draining() {
            return Err(End::Drained);
        }
        Ok(())
    }
}

/// The one legacy opcode besides OP_QUERY whose sender waits for an OP_REPLY.
const OP_GET_MORE: i32 = 2005;

/// Whether the sender of an OP_MSG waits for a reply; said by its flags, which come before
/// anything that can be malformed. Of a compressed message it is not known.
fn answerable(frame: &Frame) -> bool {
    let flags = frame.bytes.get(HEADER_BYTES..).and_then(|rest| rest.first_chunk::<4>());
    let flags = flags.map(|flags| MsgFlags(u32::from_le_bytes(*flags)));
    frame.header.op_code != OP_COMPRESSED
        && flags.is_some_and(|flags| !flags.contains(MsgFlags::MORE_TO_COME))
}

fn malformed(error: &WireError) -> End {
    End::Protocol { kind: error.kind(), what: error.to_string() }
}

/// Sets the checksum flag of an OP_MSG and appends its CRC-32C.
fn add_checksum(message: &mut BytesMut, response_to: i32) {
    let length = message.first_chunk::<4>().map(|length| i32::from_le_bytes(*length));
    let flags = message.get_mut(HEADER_BYTES..).and_then(|rest| rest.first_chunk_mut::<4>());
    let (Some(length), Some(flag_bytes)) = (length, flags) else { return };
    let flags = MsgFlags(u32::from_le_bytes(*flag_bytes));
    if flags.contains(MsgFlags::CHECKSUM_PRESENT) {
        return;
    }
    *flag_bytes = flags.union(MsgFlags::CHECKSUM_PRESENT).0.to_le_bytes();
    message.put_u32_le(0);
    if let Some(length_bytes) = message.first_chunk_mut::<4>() {
        *length_bytes = (length + 4).to_le_bytes();
    }
    // Computes the checksum too.
    let _ = set_response_to(message, response_to);
}

/// The id of a message the daemon makes itself.
fn next_request_id() -> i32 {
    static NEXT: AtomicI32 = AtomicI32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Read buffers of one thread: lent to connections that have something to read.
mod buffers {
    use super::{BUFFER_BYTES, BytesMut, KEPT_BUFFERS, LARGEST_KEPT_BUFFER_BYTES, RefCell};

    thread_local! {
        static KEPT: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn take() -> BytesMut {
        KEPT.with_borrow_mut(Vec::pop).unwrap_or_else(|| BytesMut::with_capacity(BUFFER_BYTES))
    }

    pub(super) fn give(mut buffer: BytesMut) {
        buffer.clear();
        // False while somebody still holds a message that was cut from it.
        let reusable =
            !buffer.try_reclaim(LARGEST_KEPT_BUFFER_BYTES + 1) && buffer.try_reclaim(BUFFER_BYTES);
        if reusable {
            KEPT.with_borrow_mut(|kept| {
                if kept.len() < KEPT_BUFFERS {
                    kept.push(buffer);
                }
            });
        }
    }
}

/// One client: owns its socket through the loop it spawns, and hears of drains and questions while
/// that runs. Never restarted: the client connects again.
pub struct ConnectionHandler<E: Execute> {
    connection: Option<Connection<E>>,
    shared: Rc<ClientShared>,
    thread: Arc<ThreadClients<E>>,
    counts: Arc<KindCounts>,
    _up: UpGuard,
    _permit: ClientPermit,
}

impl<E: Execute> fmt::Debug for ConnectionHandler<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionHandler").finish_non_exhaustive()
    }
}

impl<E: Execute> ConnectionHandler<E> {
    /// Size of a connection's loop, the executor's future included: what an idle connection costs
    /// beside its socket and its actor.
    #[must_use]
    pub fn task_bytes() -> usize {
        fn output_bytes<A, F>(_: impl FnOnce(A) -> F) -> usize {
            size_of::<F>()
        }
        output_bytes(Connection::<E>::serve)
    }

    /// Starts the actor of a new client on the current thread.
    fn start(
        socket: TcpStream,
        peer: SocketAddr,
        permit: ClientPermit,
        executor: Rc<E>,
        settings: Arc<ConnectionSettings>,
        thread: Arc<ThreadClients<E>>,
        counts: Arc<KindCounts>,
    ) {
        let connection_id = permit.connection_id();
        let shared = Rc::new(ClientShared {
            connection_id,
            peer,
            since: Instant::now(),
            metadata: OnceCell::new(),
            commands: Cell::new(0),
            busy_since: Cell::new(None),
            draining: Cell::new(false),
            waiting: RefCell::new(None),
        });
        let client = ClientState { authenticated: false, slot: None, shared: shared.clone() };
        let handler = Self {
            connection: Some(Connection { socket, executor, client, settings }),
            shared,
            thread: thread.clone(),
            _up: counts.up(),
            counts,
            _permit: permit,
        };
        let context = Context::new();
        thread.open.lock().insert(connection_id, context.address());
        tracing::debug!(connection = connection_id, %peer, "a client connected");
        actix_rt::spawn(context.into_future(handler));
    }

    fn ended(&self, end: Result<End, Box<dyn Any + Send>>) {
        let connection = self.shared.connection_id;
        let peer = self.shared.peer;
        let count = |kind: &'static str| {
            metrics::counter!("halocline_errors_total", "kind" => kind).increment(1);
        };
        match end {
            Ok(End::Disconnected) => tracing::debug!(connection, "a client disconnected"),
            Ok(End::Drained) => tracing::debug!(connection, "closed a connection: draining"),
            Ok(End::Io(error)) => tracing::debug!(connection, %error, "lost a client"),
            Ok(End::Protocol { kind, what }) => {
                metrics::counter!("halocline_protocol_errors_total", "kind" => kind).increment(1);
                tracing::debug!(connection, %peer, what, "closed a connection: protocol error");
            }
            Ok(End::WriteTimeout) => {
                count("client_write_timeout");
                tracing::warn!(connection, %peer, "cut off a client that does not read its reply");
            }
            Ok(End::ReadTimeout) => {
                count("client_read_timeout");
                tracing::debug!(connection, %peer, "cut off a client that stopped in a message");
            }
            Ok(End::Closed(reason)) => {
                count(reason);
                tracing::debug!(connection, %peer, reason, "closed a connection");
            }
            Err(panic) => {
                self.counts.panicked();
                count("panic");
                let why = panic_text(panic.as_ref());
                tracing::error!(connection, %peer, why, "a client's command panicked");
            }
        }
    }
}

impl<E: Execute> Actor for ConnectionHandler<E> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let Some(connection) = self.connection.take() else { return };
        // Caught here and not by the task, so that whoever watches 10,000 connections need not
        // keep a second task for each. Nothing of the client outlives its panic.
        let serving = AssertUnwindSafe(connection.serve()).catch_unwind();
        ctx.spawn(serving.into_actor(self).map(|end, handler, ctx| {
            handler.ended(end);
            ctx.stop();
        }));
    }
}

impl<E: Execute> Drop for ConnectionHandler<E> {
    fn drop(&mut self) {
        self.thread.closed(self.shared.connection_id);
    }
}

impl<E: Execute> Handler<Drain> for ConnectionHandler<E> {
    type Result = ();

    fn handle(&mut self, _: Drain, _: &mut Self::Context) {
        self.shared.begin_draining();
    }
}

impl<E: Execute> Handler<Describe> for ConnectionHandler<E> {
    type Result = MessageResult<Describe>;

    fn handle(&mut self, _: Describe, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.shared.describe())
    }
}

/// The open connections of one thread. Outlives the thread's actor, so that its successor still
/// reaches them.
struct ThreadClients<E: Execute> {
    open: Mutex<HashMap<i32, Addr<ConnectionHandler<E>>>>,
    /// Told when the last one has closed.
    empty: Notify,
}

impl<E: Execute> ThreadClients<E> {
    fn closed(&self, connection_id: i32) {
        let mut open = self.open.lock();
        // Dropped after the lock: the last address of an actor may end it.
        let _address = open.remove(&connection_id);
        if open.is_empty() {
            self.empty.notify_one();
        }
        drop(open);
    }

    fn addresses(&self) -> Vec<Addr<ConnectionHandler<E>>> {
        self.open.lock().values().cloned().collect()
    }

    async fn all_closed(&self) {
        while !self.open.lock().is_empty() {
            self.empty.notified().await;
        }
    }
}

/// A client the acceptor let in.
#[derive(Debug)]
pub struct Accepted {
    /// Its socket, non-blocking.
    pub socket: std::net::TcpStream,
    /// Its address.
    pub peer: SocketAddr,
    /// Its place among the connections.
    pub permit: ClientPermit,
}

impl Message for Accepted {
    type Result = ();
}

/// Asks a thread about all its connections.
#[derive(Debug, Clone, Copy)]
pub struct DescribeAll;

impl Message for DescribeAll {
    type Result = Vec<ClientDescription>;
}

/// Starts the connections of one arbiter, and drains them. Holds the arbiter's executor.
pub struct ConnectionThread<E: Execute> {
    executor: Rc<E>,
    settings: Arc<ConnectionSettings>,
    clients: Arc<ThreadClients<E>>,
    counts: Arc<KindCounts>,
    draining: bool,
}

impl<E: Execute> fmt::Debug for ConnectionThread<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionThread").field("draining", &self.draining).finish_non_exhaustive()
    }
}

impl<E: Execute> ConnectionThread<E> {
    /// Puts a connection thread on an arbiter. The executor is built there.
    pub fn supervise(
        supervisor: &SupervisorHandle,
        name: &str,
        arbiter: ArbiterHandle,
        settings: Arc<ConnectionSettings>,
        executor: impl Fn(&ChildContext) -> Rc<E> + Send + 'static,
    ) -> Child<Self> {
        let clients = Arc::new(ThreadClients { open: Mutex::default(), empty: Notify::new() });
        let counts = supervisor.kind(CONNECTION_HANDLER);
        let spec = ChildSpec {
            name: name.to_owned(),
            kind: CONNECTION_THREAD,
            policy: RestartPolicy::Always,
            stage: DrainStage::Connections,
            arbiter,
        };
        supervisor.supervise(spec, move |context| {
            tracing::debug!(
                thread = context.name,
                task_bytes = ConnectionHandler::<E>::task_bytes(),
                "serving clients"
            );
            Self {
                executor: executor(context),
                settings: settings.clone(),
                clients: clients.clone(),
                counts: counts.clone(),
                draining: false,
            }
        })
    }
}

impl<E: Execute> Actor for ConnectionThread<E> {
    type Context = Context<Self>;
}

impl<E: Execute> Handler<Accepted> for ConnectionThread<E> {
    type Result = ();

    fn handle(&mut self, accepted: Accepted, _: &mut Self::Context) {
        checkpoint(CONNECTION_THREAD);
        if self.draining {
            accepted.permit.reject("draining");
            return;
        }
        match TcpStream::from_std(accepted.socket) {
            Ok(socket) => ConnectionHandler::start(
                socket,
                accepted.peer,
                accepted.permit,
                self.executor.clone(),
                self.settings.clone(),
                self.clients.clone(),
                self.counts.clone(),
            ),
            Err(error) => {
                tracing::warn!(peer = %accepted.peer, %error, "cannot watch a client's socket");
                accepted.permit.reject("socket");
            }
        }
    }
}

impl<E: Execute> Handler<DescribeAll> for ConnectionThread<E> {
    type Result = ResponseActFuture<Self, Vec<ClientDescription>>;

    fn handle(&mut self, _: DescribeAll, _: &mut Self::Context) -> Self::Result {
        let addresses = self.clients.addresses();
        let describe = async move {
            let mut descriptions = Vec::with_capacity(addresses.len());
            for address in addresses {
                // One that has closed meanwhile is left out.
                descriptions.extend(address.send(Describe).await.ok());
            }
            descriptions
        };
        Box::pin(describe.into_actor(self))
    }
}

impl<E: Execute> Handler<Drain> for ConnectionThread<E> {
    type Result = ();

    fn handle(&mut self, drain: Drain, ctx: &mut Self::Context) {
        self.draining = true;
        // First, so that a hello which is about to close says why.
        self.settings.hello.begin_draining(drain.until);
        for address in self.clients.addresses() {
            address.do_send(drain);
        }
        let clients = self.clients.clone();
        let all_closed = async move { clients.all_closed().await };
        ctx.spawn(all_closed.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}
