//! Who may connect: the listening sockets, the loop that accepts clients and that no error ends,
//! the limit on their number, and the choice of the thread that serves each. What clients say is
//! read in `connection`.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, AsyncContext, Context, Handler, WrapFuture};
use actix_rt::ArbiterHandle;
use parking_lot::Mutex;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::connection::{Accepted, ConnectionThread, Execute};
use crate::panic_injection::checkpoint;
use crate::supervisor::{Child, ChildSpec, Drain, DrainStage, RestartPolicy, SupervisorHandle};

/// The `actor` label of the acceptor.
pub const ACCEPTOR: &str = "acceptor";

/// Connections the kernel completes before we accept them; a fleet that restarts connects at once.
const BACKLOG: i32 = 4096;
/// Idle time before the kernel asks whether a client is still there; mongod's choice too. Without
/// it a client that lost its network would be kept for ever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(120);
/// Time between such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// First pause after the system refused to accept; doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// See [`FIRST_PAUSE`]. A new client waits in the backlog meanwhile.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a client waits for a thread that is being restarted.
const THREAD_PATIENCE: Duration = Duration::from_secs(2);
/// Least time between two warnings about the same thing.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// The sockets clients connect to. Bound once, so that a restart of the acceptor loses nobody.
#[derive(Debug, Clone)]
pub struct Listeners {
    sockets: Arc<Mutex<Vec<StdListener>>>,
    addresses: Arc<[SocketAddr]>,
}

/// Addresses that cannot be listened on, every one of them.
#[derive(Debug, thiserror::Error)]
pub struct BindError {
    refused: Vec<(SocketAddr, io::Error)>,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (address, error)) in self.refused.iter().enumerate() {
            if number > 0 {
                f.write_str("; ")?;
            }
            let advice = match error.kind() {
                io::ErrorKind::AddrInUse => {
                    "another process, perhaps a second Halocline, has that port: stop it or listen \
                     on another one"
                }
                io::ErrorKind::AddrNotAvailable => "no interface of this machine has that address",
                io::ErrorKind::PermissionDenied => {
                    "ports below 1024 need a privilege: choose a higher one"
                }
                _ => "check the address",
            };
            write!(f, "cannot listen on {address}: {error} ({advice})")?;
        }
        Ok(())
    }
}

impl Listeners {
    /// Binds all addresses, or none.
    ///
    /// # Errors
    /// Names every address that cannot be bound, and what to do.
    pub fn bind(addresses: &[SocketAddr]) -> Result<Self, BindError> {
        let mut sockets = Vec::new();
        let mut bound = Vec::new();
        let mut refused = Vec::new();
        for address in addresses {
            match listen(*address) {
                Ok((socket, address)) => {
                    sockets.push(socket);
                    bound.push(address);
                }
                Err(error) => refused.push((*address, error)),
            }
        }
        if !refused.is_empty() {
            return Err(BindError { refused });
        }
        Ok(Self { sockets: Arc::new(Mutex::new(sockets)), addresses: bound.into() })
    }

    /// The addresses bound; a port 0 that was asked for is the real one here.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    fn duplicate(&self) -> io::Result<Vec<StdListener>> {
        self.sockets.lock().iter().map(StdListener::try_clone).collect()
    }

    /// From now on the kernel refuses clients.
    fn close(&self) {
        self.sockets.lock().clear();
    }
}

/// No SO_REUSEPORT: two daemons on one port by accident must fail, not share the clients.
/// SO_REUSEADDR: a restart need not wait for the old connections' TIME_WAIT.
fn listen(address: SocketAddr) -> io::Result<(StdListener, SocketAddr)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        // As mongod does: `[::]` and `0.0.0.0` may both be given.
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    let listener = StdListener::from(socket);
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// The client connections of the whole daemon.
#[derive(Debug)]
pub struct Clients {
    limit: usize,
    open: AtomicUsize,
    next_connection: AtomicI32,
}

impl Clients {
    /// None yet, and at most `limit` at once.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, open: AtomicUsize::new(0), next_connection: AtomicI32::new(1) })
    }

    /// How many are open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// How many may be open at once.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// A place for one more client on the thread whose load is given, unless the limit is reached.
    fn admit(self: &Arc<Self>, load: &Arc<AtomicUsize>) -> Option<ClientPermit> {
        let admitted = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| {
            (open < self.limit).then_some(open + 1)
        });
        admitted.ok()?;
        metrics::gauge!("halocline_client_connections").increment(1.0);
        load.fetch_add(1, Ordering::Relaxed);
        let id = self.next_connection.fetch_add(1, Ordering::Relaxed);
        Some(ClientPermit { clients: self.clone(), load: load.clone(), connection_id: id })
    }
}

/// A client's place among the connections, given up when dropped.
#[derive(Debug)]
pub struct ClientPermit {
    clients: Arc<Clients>,
    load: Arc<AtomicUsize>,
    connection_id: i32,
}

impl ClientPermit {
    /// The number of the connection, told to the client and shown in logs.
    #[must_use]
    pub fn connection_id(&self) -> i32 {
        self.connection_id
    }

    /// Gives the place up because the client cannot be served.
    pub fn reject(self, reason: &'static str) {
        count_rejected(reason);
    }
}

impl Drop for ClientPermit {
    fn drop(&mut self) {
        self.load.fetch_sub(1, Ordering::Relaxed);
        self.clients.open.fetch_sub(1, Ordering::Relaxed);
        metrics::gauge!("halocline_client_connections").decrement(1.0);
    }
}

fn count_rejected(reason: &'static str) {
    metrics::counter!("halocline_clients_rejected_total", "reason" => reason).increment(1);
}

/// A connection thread and how many clients it has.
struct ThreadSlot<E: Execute> {
    thread: Child<ConnectionThread<E>>,
    load: Arc<AtomicUsize>,
}

impl<E: Execute> Clone for ThreadSlot<E> {
    fn clone(&self) -> Self {
        Self { thread: self.thread.clone(), load: self.load.clone() }
    }
}

/// Accepts clients and hands each to the connection thread that has the fewest.
pub struct Acceptor<E: Execute> {
    listeners: Listeners,
    threads: Rc<[ThreadSlot<E>]>,
    clients: Arc<Clients>,
}

impl<E: Execute> fmt::Debug for Acceptor<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}

impl<E: Execute> Acceptor<E> {
    /// Puts the acceptor on an arbiter.
    pub fn supervise(
        supervisor: &SupervisorHandle,
        arbiter: ArbiterHandle,
        listeners: Listeners,
        threads: Vec<Child<ConnectionThread<E>>>,
        clients: Arc<Clients>,
    ) -> Child<Self> {
        let spec = ChildSpec {
            name: ACCEPTOR.to_owned(),
            kind: ACCEPTOR,
            policy: RestartPolicy::Always,
            stage: DrainStage::Acceptor,
            arbiter,
        };
        metrics::gauge!("halocline_client_connections").set(0.0);
        let slots: Vec<ThreadSlot<E>> =
            threads.into_iter().map(|thread| ThreadSlot { thread, load: Arc::default() }).collect();
        supervisor.supervise(spec, move |_| Self {
            listeners: listeners.clone(),
            threads: slots.clone().into(),
            clients: clients.clone(),
        })
    }
}

impl<E: Execute> Actor for Acceptor<E> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let listeners = self.listeners.duplicate().and_then(|sockets| {
            sockets.into_iter().map(TcpListener::from_std).collect::<io::Result<Vec<_>>>()
        });
        match listeners {
            Ok(listeners) => {
                for listener in listeners {
                    let door = Door {
                        threads: self.threads.clone(),
                        clients: self.clients.clone(),
                        full: Warning::default(),
                        refused: Warning::default(),
                    };
                    ctx.spawn(door.accept(listener).into_actor(self));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept clients; trying again");
                ctx.stop();
            }
        }
    }
}

impl<E: Execute> Handler<Drain> for Acceptor<E> {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        self.listeners.close();
        ctx.stop();
    }
}

/// One listening socket's loop.
struct Door<E: Execute> {
    threads: Rc<[ThreadSlot<E>]>,
    clients: Arc<Clients>,
    full: Warning,
    refused: Warning,
}

impl<E: Execute> Door<E> {
    /// Accepts until it is dropped; no error ends it.
    async fn accept(self, listener: TcpListener) {
        let mut pause = FIRST_PAUSE;
        loop {
            match listener.accept().await {
                Ok((socket, peer)) => {
                    pause = FIRST_PAUSE;
                    checkpoint(ACCEPTOR);
                    self.admit(socket, peer).await;
                }
                Err(error) if concerns_one_client(&error) => {
                    tracing::debug!(%error, "a client left before it was accepted");
                }
                Err(error) => {
                    // Most likely out of file descriptors: the client stays in the backlog.
                    count_rejected("accept_failed");
                    if self.refused.is_due() {
                        tracing::warn!(
                            %error,
                            open = self.clients.open(),
                            "cannot accept clients; raise the limit on open files, or lower \
                             max_connections below it"
                        );
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn admit(&self, socket: TcpStream, peer: SocketAddr) {
        let Some(slot) = self.emptiest() else { return };
        let Some(permit) = self.clients.admit(&slot.load) else {
            count_rejected("max_connections");
            if self.full.is_due() {
                tracing::warn!(
                    limit = self.clients.limit(),
                    "turning clients away: max_connections is reached"
                );
            }
            return;
        };
        let socket = match prepare(socket) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::debug!(%peer, %error, "a client left as it was accepted");
                return;
            }
        };
        match timeout(THREAD_PATIENCE, slot.thread.addr()).await {
            Ok(Ok(thread)) => thread.do_send(Accepted { socket, peer, permit }),
            Ok(Err(_)) | Err(_) => permit.reject("no_thread"),
        }
    }

    /// The thread with the fewest connections; one that is being restarted only if all are.
    fn emptiest(&self) -> Option<&ThreadSlot<E>> {
        let load = |slot: &&ThreadSlot<E>| slot.load.load(Ordering::Relaxed);
        let up =
            self.threads.iter().filter(|slot| slot.thread.current().is_some()).min_by_key(load);
        up.or_else(|| self.threads.iter().min_by_key(load))
    }
}

/// Errors that say nothing about the listening socket.
fn concerns_one_client(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
            | io::ErrorKind::TimedOut
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
    )
}

/// Sets a client's socket up and takes it off this thread.
fn prepare(socket: TcpStream) -> io::Result<std::net::TcpStream> {
    // Replies are written whole; waiting to fill a packet only delays them.
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
    socket.into_std()
}

/// A warning that is not repeated for every client.
#[derive(Debug, Default)]
struct Warning {
    last: Cell<Option<Instant>>,
}

impl Warning {
    fn is_due(&self) -> bool {
        let now = Instant::now();
        let due = self.last.get().is_none_or(|last| now.duration_since(last) >= WARNING_INTERVAL);
        if due {
            self.last.set(Some(now));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_listener_on_the_same_port_is_told_why_and_what_to_do() {
        let first = Listeners::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let taken = first.addresses()[0];
        assert_ne!(taken.port(), 0);
        // Another wish is refused too: both are named, nothing stays bound.
        let elsewhere: SocketAddr = "192.0.2.1:27017".parse().unwrap();
        let error = Listeners::bind(&[taken, elsewhere]).unwrap_err().to_string();
        assert!(error.contains(&format!("cannot listen on {taken}")), "{error}");
        assert!(error.contains("second Halocline"), "{error}");
        assert!(error.contains("cannot listen on 192.0.2.1:27017"), "{error}");

        first.close();
        Listeners::bind(&[taken]).unwrap();
    }

    #[test]
    fn the_limit_holds_and_a_place_that_is_given_up_can_be_taken() {
        let clients = Clients::new(2);
        let load = Arc::new(AtomicUsize::new(0));
        let first = clients.admit(&load).unwrap();
        let second = clients.admit(&load).unwrap();
        assert_ne!(first.connection_id(), second.connection_id());
        assert!(clients.admit(&load).is_none());
        assert_eq!((clients.open(), load.load(Ordering::Relaxed)), (2, 2));
        drop(first);
        second.reject("test");
        assert_eq!((clients.open(), load.load(Ordering::Relaxed)), (0, 0));
        assert!(clients.admit(&load).is_some());
    }
}
