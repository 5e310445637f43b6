//! Opens a connection: TCP, TLS, `hello`, authentication. What happens on it afterwards is the
//! pool's affair.

use std::io;
use std::time::Duration;

use bson::raw::{RawDocument, cstr};
use bson::rawdoc;
use halocline_wire::{MsgFlags, encode_msg};
use mongodb::options::ServerAddress;
use rustls_pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::{ClusterError, NetworkError, Phase};
use crate::options::{APPLICATION_NAME, Login, Tier};
use crate::reply::Reply;
use crate::socket::{Socket, Stream};

/// A silent connection is probed after this long, so that firewalls keep it and a vanished peer
/// is noticed.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Sent bytes that no one acknowledges for so long mean that the peer is gone. Without it a
/// dropped path is noticed after a quarter of an hour.
const UNACKNOWLEDGED_LIMIT: Duration = Duration::from_secs(20);

/// A send buffer that grew beyond this for one command is not kept.
const KEPT_OUTBOUND_BYTES: usize = 64 * 1024;

/// Opens connections to the members of one replica set.
pub(crate) struct Dialer {
    tier: Tier,
    connect_timeout: Duration,
    login: Login,
    tls: Option<TlsConnector>,
}

/// What a server says of itself when greeted.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    pub(crate) is_writable_primary: bool,
}

impl Dialer {
    pub(crate) fn new(
        tier: Tier,
        connect_timeout: Duration,
        login: Login,
        tls: Option<TlsConnector>,
    ) -> Self {
        Self { tier, connect_timeout, login, tls }
    }

    /// Opens a connection ready for commands.
    pub(crate) async fn dial(&self, address: &ServerAddress) -> Result<Socket, ClusterError> {
        self.limited(address, async {
            let mut socket = self.connect(address).await?;
            self.hello(&mut socket).await?;
            Ok(socket)
        })
        .await
    }

    /// Greets a server and hangs up; needs no authentication.
    pub(crate) async fn greet(&self, address: &ServerAddress) -> Result<Hello, ClusterError> {
        self.limited(address, async {
            let mut socket = self.connect(address).await?;
            self.hello(&mut socket).await
        })
        .await
    }

    async fn limited<T>(
        &self,
        address: &ServerAddress,
        work: impl Future<Output = Result<T, ClusterError>>,
    ) -> Result<T, ClusterError> {
        match tokio::time::timeout(self.connect_timeout, work).await {
            // Whatever broke while connecting, nothing of the caller's was sent yet.
            Ok(Err(ClusterError::Network(mut error))) => {
                error.phase = Phase::Connect;
                Err(ClusterError::Network(error))
            }
            Ok(done) => done,
            Err(_) => Err(self.failed(
                address,
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no connection within {:?}", self.connect_timeout),
                ),
            )),
        }
    }

    fn failed(&self, address: &ServerAddress, source: io::Error) -> ClusterError {
        ClusterError::Network(Box::new(NetworkError {
            tier: self.tier,
            address: address.clone(),
            phase: Phase::Connect,
            source,
        }))
    }

    async fn connect(&self, address: &ServerAddress) -> Result<Socket, ClusterError> {
        let failed = |error| self.failed(address, error);
        let ServerAddress::Tcp { host, port } = address else {
            return Err(failed(io::ErrorKind::Unsupported.into()));
        };
        let tcp =
            TcpStream::connect((host.as_str(), port.unwrap_or(27017))).await.map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        let options = SockRef::from(&tcp);
        options
            .set_tcp_keepalive(
                &TcpKeepalive::new()
                    .with_time(KEEPALIVE_IDLE)
                    .with_interval(KEEPALIVE_INTERVAL)
                    .with_retries(KEEPALIVE_PROBES),
            )
            .map_err(failed)?;
        #[cfg(target_os = "linux")]
        options.set_tcp_user_timeout(Some(UNACKNOWLEDGED_LIMIT)).map_err(failed)?;
        let stream = match &self.tls {
            None => Stream::Plain(tcp),
            Some(connector) => {
                let name = ServerName::try_from(host.clone())
                    .map_err(|e| failed(io::Error::new(io::ErrorKind::InvalidInput, e)))?;
                Stream::Tls(Box::new(connector.connect(name, tcp).await.map_err(failed)?))
            }
        };
        Ok(Socket::new(self.tier, address.clone(), stream))
    }

    async fn hello(&self, socket: &mut Socket) -> Result<Hello, ClusterError> {
        let hello = rawdoc! {
            "hello": 1,
            "client": {
                "application": { "name": APPLICATION_NAME },
                "driver": { "name": APPLICATION_NAME, "version": env!("CARGO_PKG_VERSION") },
                "os": { "type": std::env::consts::OS, "architecture": std::env::consts::ARCH },
            },
        };
        let reply = run(socket, "admin", &hello, &[]).await?;
        Ok(Hello {
            is_writable_primary: reply
                .get("isWritablePrimary")
                .and_then(|value| value.as_bool())
                .unwrap_or(false),
        })
    }
}

/// Runs a command; `ok: 0` is an error.
pub(crate) async fn run(
    socket: &mut Socket,
    db: &str,
    body: &RawDocument,
    sequences: &[(&str, &[&RawDocument])],
) -> Result<Reply, ClusterError> {
    let id = socket.next_request_id();
    let mut message = std::mem::take(&mut socket.outbound);
    let mut body = body.to_owned();
    body.append(cstr!("$db"), db);
    message.clear();
    encode_msg(id, 0, MsgFlags::default(), &body, sequences, &mut message);
    let answer = socket.exchange(&message).await;
    // One large insert must not pin its memory to the connection.
    if message.capacity() <= KEPT_OUTBOUND_BYTES {
        socket.outbound = message;
    }
    let reply = Reply::from_message(answer?)
        .ok_or_else(|| socket.protocol("a reply that is no OP_MSG document".into()))?;
    if reply.is_ok() { Ok(reply) } else { Err(ClusterError::server_error(reply.error())) }
}
