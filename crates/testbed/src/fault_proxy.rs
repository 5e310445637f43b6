//! A TCP proxy that misbehaves on demand: holds, loses, delays, cuts. It knows nothing of the
//! protocol that passes through it. It runs on a thread of its own, so that a test that blocks its
//! runtime does not stop the traffic.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::TestbedError;

/// What is read at once; a command of ordinary size arrives in one piece.
const CHUNK_BYTES: usize = 64 * 1024;
/// How much may be under way, delayed or held, in one direction of one connection before the
/// sender is made to wait.
const HELD_BYTES: usize = 1024 * 1024;

/// One of the two ways through the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client that connected to the proxy, to the target.
    ToServer,
    /// From the target, back to the client.
    ToClient,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flow {
    #[default]
    Forward,
    Hold,
    Lose,
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    flow: Flow,
    delay: Duration,
    /// Grows each time the lane forwards again: connections that lost bytes before cannot go on.
    healed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    to_server: Lane,
    to_client: Lane,
    refusing: bool,
    /// Grows with every cut.
    cuts: u64,
}

impl Faults {
    fn lane(&self, direction: Direction) -> &Lane {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToClient => &self.to_client,
        }
    }

    fn lane_mut(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::ToServer => &mut self.to_server,
            Direction::ToClient => &mut self.to_client,
        }
    }
}

type Matches = Box<dyn Fn(&[u8]) -> bool + Send>;

/// A reply that is going to be lost, see [`FaultProxy::lose_reply_to`].
#[derive(Clone, Debug)]
pub struct LostReply {
    lost: watch::Receiver<bool>,
}

impl LostReply {
    /// Whether it has been lost by now.
    pub fn has_happened(&self) -> bool {
        *self.lost.borrow()
    }

    /// Waits until it has been lost; for ever if the proxy ends first.
    pub async fn happened(&self) {
        if self.lost.clone().wait_for(|lost| *lost).await.is_err() {
            pending::<()>().await;
        }
    }
}

struct Trap {
    matches: Matches,
    lost: watch::Sender<bool>,
}

#[derive(Default)]
struct Shared {
    traps: Mutex<Vec<Trap>>,
    open: AtomicUsize,
    accepted: AtomicU64,
    to_server_bytes: AtomicU64,
    to_client_bytes: AtomicU64,
}

/// A proxy before one server. Without faults it forwards everything; dropping it closes it.
///
/// Faults act on open connections and on later ones, until [`heal`](Self::heal).
pub struct FaultProxy {
    address: SocketAddr,
    target: SocketAddr,
    faults: Arc<watch::Sender<Faults>>,
    shared: Arc<Shared>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl std::fmt::Debug for FaultProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultProxy")
            .field("address", &self.address)
            .field("target", &self.target)
            .field("faults", &*self.faults.borrow())
            .finish_non_exhaustive()
    }
}

impl FaultProxy {
    /// Listens on a free port of 127.0.0.1 and forwards to `target`.
    pub fn start(target: SocketAddr) -> Result<Self, TestbedError> {
        Self::start_on(IpAddr::V4(Ipv4Addr::LOCALHOST), target)
    }

    /// Listens on a free port of `address` and forwards to `target`.
    pub fn start_on(address: IpAddr, target: SocketAddr) -> Result<Self, TestbedError> {
        let failed =
            |source| TestbedError::io(format!("cannot start a proxy on {address}"), source);
        let listener = std::net::TcpListener::bind((address, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let faults = Arc::new(watch::Sender::new(Faults::default()));
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("fault-proxy".into())
            .spawn({
                let (faults, shared) = (faults.clone(), shared.clone());
                move || {
                    runtime.block_on(async {
                        tokio::select! {
                            _ = stopped => {}
                            () = accept(listener, target, faults, shared) => {}
                        }
                    });
                }
            })
            .map_err(failed)?;
        Ok(Self { address, target, faults, shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Where the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port the proxy listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where it forwards to.
    pub fn target(&self) -> SocketAddr {
        self.target
    }

    /// Holds what comes in one direction. Nothing is lost: it arrives when the direction
    /// [forwards](Self::forward) again, and a sender that sends more than about a megabyte waits.
    pub fn pause(&self, direction: Direction) {
        self.faults.send_modify(|faults| faults.lane_mut(direction).flow = Flow::Hold);
    }

    /// Loses what comes in one direction, closes included, as a network does that drops packets
    /// without a word.
    pub fn blackhole(&self, direction: Direction) {
        self.faults.send_modify(|faults| faults.lane_mut(direction).flow = Flow::Lose);
    }

    /// Ends a pause or a blackhole. Connections that lost something are reset, for what would come
    /// next on them is not what was sent next.
    pub fn forward(&self, direction: Direction) {
        self.faults.send_modify(|faults| heal_lane(faults.lane_mut(direction)));
    }

    /// Everything that comes in one direction from now on arrives this much later.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.faults.send_modify(|faults| faults.lane_mut(direction).delay = delay);
    }

    /// Resets every open connection, on both sides; new ones are welcome.
    pub fn cut(&self) {
        self.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Resets every open connection, and each new one at once.
    pub fn refuse(&self) {
        self.faults.send_modify(|faults| {
            faults.refusing = true;
            faults.cuts += 1;
        });
    }

    /// Ends all faults, those armed by [`lose_reply_to`](Self::lose_reply_to) included.
    pub fn heal(&self) {
        self.shared.traps.lock().clear();
        self.faults.send_modify(|faults| {
            faults.refusing = false;
            for direction in [Direction::ToServer, Direction::ToClient] {
                let lane = faults.lane_mut(direction);
                lane.delay = Duration::ZERO;
                heal_lane(lane);
            }
        });
    }

    /// Arms a fault for one request: the next bytes from a client that `matches` says yes to reach
    /// the server, and its connection is reset instead of bringing the reply. `matches` sees what
    /// one read brought, at most 64 KB, which for an ordinary command is the whole message.
    ///
    /// ```no_run
    /// # async fn example(proxy: halocline_testbed::FaultProxy) {
    /// let lost = proxy.lose_reply_to(|bytes| bytes.windows(7).any(|w| w == b"insert\0"));
    /// // ... insert something through the proxy: the client sees a network error ...
    /// lost.happened().await;
    /// # }
    /// ```
    pub fn lose_reply_to(&self, matches: impl Fn(&[u8]) -> bool + Send + 'static) -> LostReply {
        let (sender, lost) = watch::channel(false);
        self.shared.traps.lock().push(Trap { matches: Box::new(matches), lost: sender });
        LostReply { lost }
    }

    /// How many connections are open now.
    pub fn open_connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// How many connections were accepted so far, refused ones included.
    pub fn accepted_connections(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// How many bytes were handed on in one direction so far.
    pub fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.shared.bytes(direction).load(Ordering::SeqCst)
    }
}

fn heal_lane(lane: &mut Lane) {
    if lane.flow != Flow::Forward {
        lane.flow = Flow::Forward;
        lane.healed += 1;
    }
}

impl Shared {
    fn bytes(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::ToServer => &self.to_server_bytes,
            Direction::ToClient => &self.to_client_bytes,
        }
    }

    /// Takes the first armed fault that is meant for these bytes.
    fn spring(&self, bytes: &[u8]) -> Option<watch::Sender<bool>> {
        let mut traps = self.traps.lock();
        let position = traps.iter().position(|trap| (trap.matches)(bytes))?;
        Some(traps.remove(position).lost)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            // It fails only if the proxy panicked, which its own thread has reported.
            let _ = thread.join();
        }
    }
}

async fn accept(
    listener: std::net::TcpListener,
    target: SocketAddr,
    faults: Arc<watch::Sender<Faults>>,
    shared: Arc<Shared>,
) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "the proxy cannot listen");
            return;
        }
    };
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                // Subscribed here, so that a cut after this moment is seen.
                let faults = faults.subscribe();
                let shared = shared.clone();
                tokio::spawn(async move {
                    shared.open.fetch_add(1, Ordering::SeqCst);
                    carry(client, target, faults, &shared).await;
                    shared.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
            Err(error) => {
                // Out of file descriptors, mostly: give others time to close some.
                tracing::warn!(%error, "the proxy could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// How a connection came to its end.
enum End {
    /// Both sides closed theirs.
    Closed,
    /// One side failed or a fault struck: both sides see a reset.
    Reset,
}

async fn carry(
    mut client: TcpStream,
    target: SocketAddr,
    mut faults: watch::Receiver<Faults>,
    shared: &Shared,
) {
    let born = *faults.borrow_and_update();
    if born.refusing {
        reset(&client);
        return;
    }
    let mut watched = faults.clone();
    let cut = async move {
        // An error means that the proxy has ended, which ends its connections too.
        let _ = watched.wait_for(|now| now.cuts != born.cuts).await;
    };
    tokio::pin!(cut);
    let connected = tokio::select! {
        () = &mut cut => None,
        connected = TcpStream::connect(target) => connected.ok(),
    };
    let Some(mut server) = connected else {
        reset(&client);
        return;
    };
    // As the real ends do: a proxy that collects small packets would add its own delays.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);

    let doom = Mutex::new(None);
    let end = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let there =
            pump(Direction::ToServer, from_client, to_server, faults.clone(), shared, &doom);
        let back = pump(Direction::ToClient, from_server, to_client, faults.clone(), shared, &doom);
        tokio::select! {
            () = &mut cut => End::Reset,
            ends = async { tokio::try_join!(there, back) } => match ends {
                Ok(_) => End::Closed,
                Err(_) => End::Reset,
            },
        }
    };
    if let End::Reset = end {
        reset(&client);
        reset(&server);
    }
    if let Some(lost) = doom.into_inner() {
        // Also when the connection ended before the reply came.
        lost.send_replace(true);
    }
}

/// Closing the socket will send a reset instead of an orderly end.
fn reset(socket: &TcpStream) {
    let _ = socket.set_zero_linger();
}

/// What a read brought and when it may go on.
struct Chunk {
    due: Instant,
    news: News,
}

/// Ends queue like bytes do: a network that holds or loses packets does so with those too.
enum News {
    Bytes(Vec<u8>),
    Closed,
    Failed(io::Error),
}

impl News {
    fn new(read: io::Result<usize>, buffer: &[u8]) -> Self {
        match read {
            Ok(0) => Self::Closed,
            Ok(length) => Self::Bytes(buffer.get(..length).unwrap_or_default().to_vec()),
            Err(error) => Self::Failed(error),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Closed | Self::Failed(_) => 0,
        }
    }
}

/// Moves one direction of one connection until its sender closes it. An error ends the connection.
async fn pump(
    direction: Direction,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut faults: watch::Receiver<Faults>,
    shared: &Shared,
    doom: &Mutex<Option<watch::Sender<bool>>>,
) -> io::Result<()> {
    let mut queue: VecDeque<Chunk> = VecDeque::new();
    let mut queued_bytes = 0;
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut ended = false;
    let mut lost_at: Option<u64> = None;
    loop {
        let lane = *faults.borrow_and_update().lane(direction);
        if lost_at.is_some_and(|healed| healed != lane.healed) {
            return Err(io::Error::other("bytes of this connection were lost"));
        }
        let due = queue.front().map(|chunk| chunk.due);
        tokio::select! {
            changed = faults.changed() => {
                if changed.is_err() {
                    return Err(io::Error::other("the proxy has ended"));
                }
            }
            read = from.read(&mut buffer), if !ended && queued_bytes < HELD_BYTES => {
                let news = News::new(read, &buffer);
                ended = !matches!(news, News::Bytes(_));
                if let (Direction::ToServer, News::Bytes(bytes)) = (direction, &news)
                    && let Some(lost) = shared.spring(bytes)
                {
                    *doom.lock() = Some(lost);
                }
                if direction == Direction::ToClient && doom.lock().is_some() {
                    return Err(io::Error::other("this reply is to be lost"));
                }
                queued_bytes += news.len();
                queue.push_back(Chunk { due: Instant::now() + lane.delay, news });
            }
            () = sleep_until(due), if lane.flow != Flow::Hold && due.is_some() => {
                let Some(Chunk { news, .. }) = queue.pop_front() else { continue };
                queued_bytes -= news.len();
                match news {
                    _ if lane.flow == Flow::Lose => lost_at = Some(lane.healed),
                    News::Bytes(bytes) => {
                        to.write_all(&bytes).await?;
                        let forwarded = shared.bytes(direction);
                        forwarded.fetch_add(bytes.len() as u64, Ordering::SeqCst);
                    }
                    News::Closed => return to.shutdown().await,
                    News::Failed(error) => return Err(error),
                }
            }
        }
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => pending().await,
    }
}
