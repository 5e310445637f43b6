//! Opens a connection: TCP, TLS, `hello`, authentication. What happens on it afterwards is the
//! pool's affair.

use std::io;
use std::time::Duration;

use bson::raw::{RawBson, RawBsonRef, RawDocument, cstr};
use bson::spec::BinarySubtype;
use bson::{Binary, rawdoc};
use halocline_wire::scram::{ClientCredential, Mechanism};
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
    /// The SCRAM mechanisms it has for the user.
    mechanisms: Vec<Mechanism>,
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
            let hello = self.hello(&mut socket).await?;
            self.authenticate(&mut socket, &hello).await?;
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
        let mut hello = rawdoc! {
            "hello": 1,
            "client": {
                "application": { "name": APPLICATION_NAME },
                "driver": { "name": APPLICATION_NAME, "version": env!("CARGO_PKG_VERSION") },
                "os": { "type": std::env::consts::OS, "architecture": std::env::consts::ARCH },
            },
        };
        if let Login::Scram { source, username, .. } = &self.login {
            hello.append(cstr!("saslSupportedMechs"), format!("{source}.{username}"));
        }
        let reply = run(socket, "admin", &hello, &[]).await?;
        let mechanisms = match reply.get("saslSupportedMechs") {
            Some(RawBsonRef::Array(names)) => names
                .into_iter()
                .map_while(Result::ok)
                .filter_map(|name| Mechanism::from_name(name.as_str()?))
                .collect(),
            _ => Vec::new(),
        };
        Ok(Hello {
            is_writable_primary: reply
                .get("isWritablePrimary")
                .and_then(|value| value.as_bool())
                .unwrap_or(false),
            mechanisms,
        })
    }

    async fn authenticate(&self, socket: &mut Socket, hello: &Hello) -> Result<(), ClusterError> {
        match &self.login {
            Login::None => Ok(()),
            Login::Scram { source, credentials, .. } => {
                let known_to_server = |credential: &&ClientCredential| {
                    hello.mechanisms.contains(&credential.mechanism())
                };
                // Strongest first. A server that names none may not know the user, and says so
                // itself better than could be said here.
                let credential = credentials.iter().find(known_to_server).or(credentials.first());
                let Some(credential) = credential else { return Ok(()) };
                scram(socket, source, credential).await
            }
            Login::X509 { username } => {
                let mut command = rawdoc! { "authenticate": 1, "mechanism": "MONGODB-X509" };
                if let Some(username) = username {
                    command.append(cstr!("user"), username.as_str());
                }
                let result = run(socket, "$external", &command, &[]).await;
                result.map(drop).map_err(|error| refused(socket, error))
            }
        }
    }
}

/// The SASL conversation of SCRAM.
async fn scram(
    socket: &mut Socket,
    source: &str,
    credential: &ClientCredential,
) -> Result<(), ClusterError> {
    let payload = |bytes: Vec<u8>| Binary { subtype: BinarySubtype::Generic, bytes };
    let exchange = credential.start();
    let start = rawdoc! {
        "saslStart": 1,
        "mechanism": credential.mechanism().name(),
        "payload": payload(exchange.first_message()),
        "options": { "skipEmptyExchange": true },
    };
    let answer = sasl_step(socket, source, &start).await?;
    let (proof, verifier) =
        exchange.respond(&answer.payload).map_err(|error| socket.authentication(&error))?;
    let mut proven = rawdoc! { "saslContinue": 1 };
    proven.append(cstr!("conversationId"), answer.conversation);
    proven.append(cstr!("payload"), payload(proof));
    let answer = sasl_step(socket, source, &proven).await?;
    verifier.verify(&answer.payload).map_err(|error| socket.authentication(&error))?;
    if !answer.done {
        // A server that does not skip the empty exchange waits for it.
        let mut empty = rawdoc! { "saslContinue": 1 };
        empty.append(cstr!("conversationId"), answer.conversation);
        empty.append(cstr!("payload"), payload(Vec::new()));
        if !sasl_step(socket, source, &empty).await?.done {
            return Err(socket.authentication(&"the conversation does not end"));
        }
    }
    Ok(())
}

struct SaslAnswer {
    conversation: RawBson,
    payload: Vec<u8>,
    done: bool,
}

async fn sasl_step(
    socket: &mut Socket,
    source: &str,
    command: &RawDocument,
) -> Result<SaslAnswer, ClusterError> {
    let reply = match run(socket, source, command, &[]).await {
        Ok(reply) => reply,
        Err(error) => return Err(refused(socket, error)),
    };
    let (Some(conversation), Some(RawBsonRef::Binary(payload))) =
        (reply.get("conversationId"), reply.get("payload"))
    else {
        return Err(socket.protocol("a SASL answer without conversationId or payload".into()));
    };
    Ok(SaslAnswer {
        conversation: conversation.into(),
        payload: payload.bytes.to_vec(),
        done: reply.get("done").and_then(|done| done.as_bool()).unwrap_or(false),
    })
}

/// A server's refusal, unless it is a failure of another kind (a server that shuts down).
fn refused(socket: &Socket, error: ClusterError) -> ClusterError {
    match error.server() {
        Some(server) if !server.is_retryable() => socket.authentication(server),
        _ => error,
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
