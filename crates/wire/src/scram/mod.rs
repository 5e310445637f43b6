//! SCRAM-SHA-1 and SCRAM-SHA-256 as MongoDB speaks them, over payload bytes: what both sides share.
//! The `saslStart` and `saslContinue` commands around the payloads belong to the callers.

mod client;
mod server;

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use md5::Md5;
use rand::RngCore;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

pub use client::{ClientCredential, ClientExchange, ClientVerifier};
pub use server::{ServerExchange, ServerStart, StoredCredential};

/// Fewest iterations a client accepts: RFC 7677 and the driver specification; fewer would hand a
/// false server a password hash that is cheap to break.
pub const MIN_ITERATIONS: u32 = 4096;
/// Most iterations a client computes: about half a second; a false server must not burn a core.
pub const MAX_ITERATIONS: u32 = 1_000_000;
/// Random bytes of a nonce, as drivers use.
const NONCE_BYTES: usize = 24;
/// Payloads longer than this are no SCRAM messages.
const MAX_PAYLOAD_BYTES: usize = 8 * 1024;

/// A SCRAM mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// SCRAM-SHA-1, over MongoDB's MD5 password digest.
    Sha1,
    /// SCRAM-SHA-256, over the SASLprep'd password.
    Sha256,
}

impl Mechanism {
    /// Its SASL name.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Sha1 => "SCRAM-SHA-1",
            Mechanism::Sha256 => "SCRAM-SHA-256",
        }
    }

    /// The mechanism of a SASL name.
    pub fn from_name(name: &str) -> Option<Mechanism> {
        [Mechanism::Sha1, Mechanism::Sha256].into_iter().find(|known| known.name() == name)
    }

    /// Size of its hash.
    pub fn hash_bytes(self) -> usize {
        match self {
            Mechanism::Sha1 => 20,
            Mechanism::Sha256 => 32,
        }
    }

    /// Size of the salts MongoDB stores: one block less than the hash.
    fn salt_bytes(self) -> usize {
        self.hash_bytes() - 4
    }

    /// MongoDB's default iteration count for new users.
    fn default_iterations(self) -> u32 {
        match self {
            Mechanism::Sha1 => 10_000,
            Mechanism::Sha256 => 15_000,
        }
    }

    fn hash(self, data: &[u8]) -> Secret {
        Zeroizing::new(match self {
            Mechanism::Sha1 => Sha1::digest(data).to_vec(),
            Mechanism::Sha256 => Sha256::digest(data).to_vec(),
        })
    }

    fn hmac(self, key: &[u8], data: &[u8]) -> Result<Secret, ScramError> {
        fn run<M: Mac + KeyInit>(key: &[u8], data: &[u8]) -> Result<Secret, ScramError> {
            let mut mac = <M as KeyInit>::new_from_slice(key).map_err(|_| ScramError::Key)?;
            mac.update(data);
            Ok(Zeroizing::new(mac.finalize().into_bytes().to_vec()))
        }
        match self {
            Mechanism::Sha1 => run::<Hmac<Sha1>>(key, data),
            Mechanism::Sha256 => run::<Hmac<Sha256>>(key, data),
        }
    }

    /// The slow step, `Hi` of RFC 5802.
    fn salted_password(self, password: &[u8], salt: &[u8], iterations: u32) -> Secret {
        let mut out = Zeroizing::new(vec![0; self.hash_bytes()]);
        match self {
            Mechanism::Sha1 => pbkdf2::pbkdf2_hmac::<Sha1>(password, salt, iterations, &mut out),
            Mechanism::Sha256 => {
                pbkdf2::pbkdf2_hmac::<Sha256>(password, salt, iterations, &mut out);
            }
        }
        out
    }

    /// What the mechanism takes for the password.
    fn prepare_password(self, user: &str, password: &str) -> Result<Secret, ScramError> {
        match self {
            Mechanism::Sha1 => {
                let text = Zeroizing::new(format!("{user}:mongo:{password}"));
                let digest = Md5::digest(text.as_bytes());
                Ok(Zeroizing::new(hex(&digest).into_bytes()))
            }
            Mechanism::Sha256 => {
                let prepared =
                    stringprep::saslprep(password).map_err(|_| ScramError::UnusablePassword)?;
                Ok(Zeroizing::new(prepared.into_owned().into_bytes()))
            }
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes that are wiped when dropped.
type Secret = Zeroizing<Vec<u8>>;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a password comes down to for one salt and iteration count.
#[derive(Clone)]
struct Keys {
    client: Secret,
    stored: Secret,
    server: Secret,
}

impl Keys {
    fn derive(
        mechanism: Mechanism,
        prepared_password: &[u8],
        salt: &[u8],
        iterations: u32,
    ) -> Result<Keys, ScramError> {
        let salted = mechanism.salted_password(prepared_password, salt, iterations);
        let client = mechanism.hmac(&salted, b"Client Key")?;
        let server = mechanism.hmac(&salted, b"Server Key")?;
        let stored = mechanism.hash(&client);
        Ok(Keys { client, stored, server })
    }
}

/// Why an exchange ended without success.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScramError {
    /// A payload that is not the message expected here.
    #[error("malformed SCRAM message: {0}")]
    Malformed(&'static str),
    /// The peer demands an extension, or channel binding.
    #[error("the SCRAM peer asks for {0}, which is not supported")]
    Unsupported(&'static str),
    /// The nonce of a message is not the one of this exchange.
    #[error("the SCRAM nonce does not belong to this exchange")]
    WrongNonce,
    /// A server asks for too few or too many iterations.
    #[error(
        "the server asks for {0} SCRAM iterations; between {MIN_ITERATIONS} and {MAX_ITERATIONS} \
         are accepted"
    )]
    Iterations(u64),
    /// A password that SASLprep forbids.
    #[error("the password holds characters that SCRAM-SHA-256 (SASLprep) does not allow")]
    UnusablePassword,
    /// A stored credential that is not one.
    #[error("the stored SCRAM credential is malformed: {0}")]
    StoredCredential(&'static str),
    /// The client does not know the password (or the user does not exist).
    #[error("SCRAM authentication failed")]
    WrongProof,
    /// The server does not know the stored key: it is not the server it claims to be.
    #[error("the server could not prove that it knows the user's credential")]
    WrongServer,
    /// The server said no.
    #[error("the server refused SCRAM authentication: {0}")]
    Refused(String),
    /// A hash refused its key. Cannot happen with HMAC.
    #[error("a SCRAM key is unusable")]
    Key,
}

impl ScramError {
    /// A stable label, for metrics and logs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Unsupported(_) => "unsupported",
            Self::WrongNonce => "wrong_nonce",
            Self::Iterations(_) => "iterations",
            Self::UnusablePassword => "unusable_password",
            Self::StoredCredential(_) => "stored_credential",
            Self::WrongProof => "wrong_proof",
            Self::WrongServer => "wrong_server",
            Self::Refused(_) => "refused",
            Self::Key => "key",
        }
    }
}

/// A fresh nonce.
fn new_nonce() -> String {
    let mut bytes = [0; NONCE_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    BASE64.encode(bytes)
}

/// RFC 5802's `printable`: visible ASCII without the comma.
fn is_nonce(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',')
}

fn payload_text(payload: &[u8]) -> Result<&str, ScramError> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(ScramError::Malformed("too long"));
    }
    std::str::from_utf8(payload).map_err(|_| ScramError::Malformed("not UTF-8"))
}

/// Takes `<name>=<value>` off the front of a comma-separated list.
fn take_attribute<'t>(
    rest: &mut Option<&'t str>,
    name: char,
    missing: &'static str,
) -> Result<&'t str, ScramError> {
    let text = rest.ok_or(ScramError::Malformed(missing))?;
    let (first, after) = match text.split_once(',') {
        Some((first, after)) => (first, Some(after)),
        None => (text, None),
    };
    if first.starts_with("m=") {
        return Err(ScramError::Unsupported("a mandatory extension"));
    }
    let value = first
        .strip_prefix(name)
        .and_then(|value| value.strip_prefix('='))
        .ok_or(ScramError::Malformed(missing))?;
    *rest = after;
    Ok(value)
}

fn decode_base64(text: &str, what: &'static str) -> Result<Vec<u8>, ScramError> {
    BASE64.decode(text).map_err(|_| ScramError::Malformed(what))
}

fn xor(left: &[u8], right: &[u8]) -> Secret {
    Zeroizing::new(left.iter().zip(right).map(|(a, b)| a ^ b).collect())
}
