//! What one tier's replica set needs to be told before it can be reached: address, pool sizes, TLS,
//! credentials. Everything is checked here, before a socket opens; reading configuration files is
//! the daemon's affair.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use halocline_wire::scram::{ClientCredential, Mechanism};
use mongodb::options::{AuthMechanism, ClientOptions, Credential, DriverInfo, ServerAddress, Tls};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use zeroize::Zeroizing;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::ClusterError;

/// Name under which connections appear in the servers' logs and in `currentOp`.
pub(crate) const APPLICATION_NAME: &str = "halocline";

/// Which of the two replica sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// The small set that holds recent documents and executes every client write to tiered
    /// collections.
    Fast,
    /// The existing deployment that holds every document.
    Archive,
}

impl Tier {
    /// The value of the `tier` label of metrics and of the `tier` field of log lines.
    pub const fn label(self) -> &'static str {
        match self {
            Tier::Fast => "fast",
            Tier::Archive => "archive",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Fast => "fast tier",
            Tier::Archive => "archive",
        })
    }
}

/// Sizes and times of the connection pools; each thread has its own pool for each tier.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Most connections, open and opening, to one server from one thread.
    pub max_size: usize,
    /// Connections to the primary kept open from one thread even when idle.
    pub min_idle: usize,
    /// Most connections being opened at once to one server from one thread: a handshake costs the
    /// server a password check, and a herd of them after an election slows the election itself.
    pub max_opening: usize,
    /// Longest wait for a free connection.
    pub checkout_timeout: Duration,
    /// A connection unused for so long is closed.
    pub idle_timeout: Duration,
    /// Longest time for name look-up, TCP, TLS, `hello` and authentication together.
    pub connect_timeout: Duration,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            max_size: 100,
            min_idle: 1,
            max_opening: 4,
            checkout_timeout: Duration::from_secs(10),
            // Below the ten minutes after which common firewalls and load balancers forget a
            // silent connection.
            idle_timeout: Duration::from_secs(300),
            connect_timeout: Duration::from_secs(5),
        }
    }
}

/// TLS towards the replica set. Setting this turns TLS on, whatever the connection string says.
#[derive(Debug, Clone, Default)]
pub struct TlsOptions {
    /// PEM file with the certificate authorities to trust; the Mozilla roots when absent.
    pub ca_file: Option<PathBuf>,
    /// PEM file with this client's certificate chain and private key.
    pub cert_key_file: Option<PathBuf>,
}

/// User and password given apart from the connection string (a file or the environment).
#[derive(Clone)]
pub struct Credentials {
    /// User name.
    pub username: String,
    /// Password; wiped from memory when dropped.
    pub password: Zeroizing<String>,
    /// Database that knows the user (`authSource`).
    pub source: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("username", &self.username)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

/// How to reach one tier's replica set.
#[derive(Clone)]
pub struct ClusterOptions {
    /// Which tier this is.
    pub tier: Tier,
    /// Connection string (`mongodb://` or `mongodb+srv://`).
    pub uri: String,
    /// Connection pools.
    pub pool: PoolOptions,
    /// Longest wait for a primary to be known.
    pub server_selection_timeout: Duration,
    /// How often a silent server is looked at. Changes are pushed by the servers at once; this is
    /// how soon a server that neither answers nor closes its connection is noticed (plus the
    /// connect timeout).
    pub heartbeat: Duration,
    /// TLS, if it is to be set apart from the connection string.
    pub tls: Option<TlsOptions>,
    /// Credentials, if they are to be set apart from the connection string.
    pub credentials: Option<Credentials>,
}

impl ClusterOptions {
    /// Options with the defaults for everything but the tier and the connection string.
    pub fn new(tier: Tier, uri: impl Into<String>) -> Self {
        Self {
            tier,
            uri: uri.into(),
            pool: PoolOptions::default(),
            server_selection_timeout: Duration::from_secs(15),
            heartbeat: Duration::from_secs(2),
            tls: None,
            credentials: None,
        }
    }
}

// The connection string can hold a password.
impl fmt::Debug for ClusterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterOptions")
            .field("tier", &self.tier)
            .field("pool", &self.pool)
            .field("server_selection_timeout", &self.server_selection_timeout)
            .field("heartbeat", &self.heartbeat)
            .field("tls", &self.tls)
            .field("credentials", &self.credentials)
            .finish_non_exhaustive()
    }
}

/// How a connection of the pools proves who it is.
pub(crate) enum Login {
    /// No authentication.
    None,
    /// SCRAM. Both mechanisms unless the connection string fixes one; which is used, the server
    /// decides.
    Scram { source: String, username: String, credentials: Vec<ClientCredential> },
    /// The TLS client certificate.
    X509 { username: Option<String> },
}

/// The checked form of [`ClusterOptions`].
pub(crate) struct Prepared {
    pub(crate) driver: ClientOptions,
    pub(crate) login: Login,
    pub(crate) tls: Option<TlsConnector>,
}

/// Reads the connection string, lays the separate settings over it, and builds what the pools need.
pub(crate) async fn prepare(options: &ClusterOptions) -> Result<Prepared, ClusterError> {
    let tier = options.tier;
    let config = |message: String| ClusterError::Config { tier, message };

    if options.pool.max_size == 0 {
        return Err(config(
            "pool size 0 leaves no connection to work with; set it to at least 1".into(),
        ));
    }
    let mut driver = ClientOptions::parse(&options.uri)
        .await
        .map_err(|e| config(format!("the connection string cannot be used: {e}")))?;
    for address in &driver.hosts {
        if !matches!(address, ServerAddress::Tcp { .. }) {
            return Err(config(format!(
                "{address} is not a TCP address; a replica set is reached by host and port"
            )));
        }
    }
    if driver.load_balanced == Some(true) {
        return Err(config(
            "loadBalanced=true is not supported: a tier must be a replica set that this process \
             reaches directly"
                .into(),
        ));
    }
    if let Some(credentials) = &options.credentials {
        driver.credential = Some(
            Credential::builder()
                .username(credentials.username.clone())
                .password(credentials.password.to_string())
                .source(credentials.source.clone())
                .build(),
        );
    }
    if let Some(tls) = &options.tls {
        let mut driver_tls = match driver.tls.take() {
            Some(Tls::Enabled(from_uri)) => from_uri,
            _ => mongodb::options::TlsOptions::default(),
        };
        if let Some(ca_file) = &tls.ca_file {
            driver_tls.ca_file_path = Some(ca_file.clone());
        }
        if let Some(cert_key_file) = &tls.cert_key_file {
            driver_tls.cert_key_file_path = Some(cert_key_file.clone());
        }
        driver.tls = Some(Tls::Enabled(driver_tls));
    }

    let login =
        login(driver.credential.as_ref(), driver.default_database.as_deref()).map_err(config)?;
    let tls = match &driver.tls {
        Some(Tls::Enabled(tls)) => Some(connector(tls).map_err(config)?),
        _ => None,
    };
    if matches!(login, Login::X509 { .. }) && tls.is_none() {
        return Err(config(
            "MONGODB-X509 needs TLS with a client certificate; set tls and the certificate key \
             file"
                .into(),
        ));
    }

    driver.app_name = Some(APPLICATION_NAME.into());
    driver.driver_info = Some(
        DriverInfo::builder()
            .name(APPLICATION_NAME)
            .version(env!("CARGO_PKG_VERSION").to_owned())
            .build(),
    );
    driver.connect_timeout = Some(options.pool.connect_timeout);
    driver.server_selection_timeout = Some(options.server_selection_timeout);
    driver.heartbeat_freq = Some(options.heartbeat);
    Ok(Prepared { driver, login, tls })
}

fn login(credential: Option<&Credential>, default_db: Option<&str>) -> Result<Login, String> {
    let Some(credential) = credential else { return Ok(Login::None) };
    let mechanisms: &[Mechanism] = match &credential.mechanism {
        None => &[Mechanism::Sha256, Mechanism::Sha1],
        Some(AuthMechanism::ScramSha1) => &[Mechanism::Sha1],
        Some(AuthMechanism::ScramSha256) => &[Mechanism::Sha256],
        Some(AuthMechanism::MongoDbX509) => {
            return Ok(Login::X509 { username: credential.username.clone() });
        }
        Some(other) => {
            return Err(format!(
                "authMechanism {} is not supported; use SCRAM-SHA-256, SCRAM-SHA-1 or \
                 MONGODB-X509",
                other.as_str()
            ));
        }
    };
    let (Some(username), Some(password)) = (&credential.username, &credential.password) else {
        return Err("SCRAM needs both a user name and a password".into());
    };
    let source = credential.source.as_deref().or(default_db).unwrap_or("admin").to_owned();
    let credentials = mechanisms
        .iter()
        .map(|mechanism| ClientCredential::new(*mechanism, username, password))
        .collect::<Result<_, _>>()
        .map_err(|e| format!("the user name or password cannot be used: {e}"))?;
    Ok(Login::Scram { source, username: username.clone(), credentials })
}

fn connector(tls: &mongodb::options::TlsOptions) -> Result<TlsConnector, String> {
    if tls.allow_invalid_certificates == Some(true) {
        return Err("tlsInsecure and tlsAllowInvalidCertificates are not supported; name the \
                    certificate authority with tlsCAFile instead"
            .into());
    }
    let mut roots = RootCertStore::empty();
    match &tls.ca_file_path {
        Some(path) => {
            let read = |e: &dyn fmt::Display| format!("CA file {}: {e}", path.display());
            for certificate in CertificateDer::pem_file_iter(path).map_err(|e| read(&e))? {
                let certificate = certificate.map_err(|e| read(&e))?;
                roots.add(certificate).map_err(|e| read(&e))?;
            }
            if roots.is_empty() {
                return Err(read(&"it holds no certificate"));
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS cannot be set up: {e}"))?
        .with_root_certificates(roots);
    let config = match &tls.cert_key_file_path {
        Some(path) => {
            let read =
                |e: &dyn fmt::Display| format!("certificate key file {}: {e}", path.display());
            let chain = CertificateDer::pem_file_iter(path)
                .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
                .map_err(|e| read(&e))?;
            let key = PrivateKeyDer::from_pem_file(path).map_err(|e| read(&e))?;
            builder.with_client_auth_cert(chain, key).map_err(|e| read(&e))?
        }
        None => builder.with_no_client_auth(),
    };
    Ok(TlsConnector::from(Arc::new(config)))
}
