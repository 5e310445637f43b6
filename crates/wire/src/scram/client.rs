//! The client's side, towards the tiers' servers.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use base64::Engine;
use subtle::ConstantTimeEq;

use super::{
    BASE64, Keys, MAX_ITERATIONS, MIN_ITERATIONS, Mechanism, ScramError, Secret, decode_base64,
    is_nonce, new_nonce, payload_text, take_attribute, xor,
};

/// A user's name and password, and the keys they gave last time: deriving them takes milliseconds,
/// and a pool opens many connections with one credential.
pub struct ClientCredential {
    mechanism: Mechanism,
    user: String,
    password: Secret,
    derived: Mutex<Option<Derived>>,
}

struct Derived {
    salt: Vec<u8>,
    iterations: u32,
    keys: Keys,
}

impl fmt::Debug for ClientCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCredential")
            .field("mechanism", &self.mechanism)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

impl ClientCredential {
    /// Prepares a name and password for a mechanism.
    pub fn new(
        mechanism: Mechanism,
        user: &str,
        password: &str,
    ) -> Result<ClientCredential, ScramError> {
        Ok(ClientCredential {
            mechanism,
            user: user.to_owned(),
            password: mechanism.prepare_password(user, password)?,
            derived: Mutex::new(None),
        })
    }

    /// The mechanism.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The user's name.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Begins an exchange with a fresh nonce.
    pub fn start(&self) -> ClientExchange<'_> {
        self.start_with_nonce(new_nonce())
    }

    /// Begins an exchange with a nonce of the caller's; it must never be used twice.
    pub fn start_with_nonce(&self, nonce: String) -> ClientExchange<'_> {
        let user = self.user.replace('=', "=3D").replace(',', "=2C");
        let bare = format!("n={user},r={nonce}");
        ClientExchange { credential: self, nonce, bare }
    }

    fn keys(&self, salt: &[u8], iterations: u32) -> Result<Keys, ScramError> {
        let mut derived = self.derived.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = derived.as_ref()
            && known.salt == salt
            && known.iterations == iterations
        {
            return Ok(known.keys.clone());
        }
        // The lock is held meanwhile: the connections that a pool opens together wait for one
        // derivation instead of making it once each.
        let keys = Keys::derive(self.mechanism, &self.password, salt, iterations)?;
        *derived = Some(Derived { salt: salt.to_vec(), iterations, keys: keys.clone() });
        Ok(keys)
    }
}

/// An exchange whose first message is under way.
#[derive(Debug)]
pub struct ClientExchange<'c> {
    credential: &'c ClientCredential,
    nonce: String,
    bare: String,
}

impl ClientExchange<'_> {
    /// The payload of `saslStart`.
    pub fn first_message(&self) -> Vec<u8> {
        format!("n,,{}", self.bare).into_bytes()
    }

    /// Answers the server's first message: the payload of `saslContinue`, and what checks the
    /// server's last message.
    pub fn respond(self, server_first: &[u8]) -> Result<(Vec<u8>, ClientVerifier), ScramError> {
        let server_first = payload_text(server_first)?;
        if let Some(reason) = server_first.strip_prefix("e=") {
            return Err(ScramError::Refused(reason.to_owned()));
        }
        let mut rest = Some(server_first);
        let nonce = take_attribute(&mut rest, 'r', "no nonce in the server's first message")?;
        let salt = take_attribute(&mut rest, 's', "no salt in the server's first message")?;
        let count = take_attribute(&mut rest, 'i', "no iteration count")?;

        if !is_nonce(nonce) || nonce.len() <= self.nonce.len() || !nonce.starts_with(&self.nonce) {
            return Err(ScramError::WrongNonce);
        }
        let salt = decode_base64(salt, "the salt is not base64")?;
        if salt.is_empty() {
            return Err(ScramError::Malformed("the salt is empty"));
        }
        let count: u64 =
            count.parse().map_err(|_| ScramError::Malformed("the iteration count is no number"))?;
        let iterations = u32::try_from(count)
            .ok()
            .filter(|count| (MIN_ITERATIONS..=MAX_ITERATIONS).contains(count))
            .ok_or(ScramError::Iterations(count))?;

        let keys = self.credential.keys(&salt, iterations)?;
        let mechanism = self.credential.mechanism;
        // "biws" is the base64 of "n,,": no channel binding.
        let without_proof = format!("c=biws,r={nonce}");
        let auth_message = format!("{},{server_first},{without_proof}", self.bare);
        let signature = mechanism.hmac(&keys.stored, auth_message.as_bytes())?;
        let proof = BASE64.encode(&*xor(&keys.client, &signature));
        let expected = mechanism.hmac(&keys.server, auth_message.as_bytes())?;
        Ok((format!("{without_proof},p={proof}").into_bytes(), ClientVerifier { expected }))
    }
}

/// Knows what the true server answers.
pub struct ClientVerifier {
    expected: Secret,
}

impl fmt::Debug for ClientVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientVerifier")
    }
}

impl ClientVerifier {
    /// Checks the server's last message. Until this has succeeded the server is a stranger.
    pub fn verify(&self, server_final: &[u8]) -> Result<(), ScramError> {
        let text = payload_text(server_final)?;
        if let Some(reason) = text.strip_prefix("e=") {
            return Err(ScramError::Refused(reason.to_owned()));
        }
        let mut rest = Some(text);
        let signature =
            take_attribute(&mut rest, 'v', "no signature in the server's last message")?;
        let signature = decode_base64(signature, "the server's signature is not base64")?;
        if bool::from(signature.as_slice().ct_eq(&self.expected)) {
            Ok(())
        } else {
            Err(ScramError::WrongServer)
        }
    }
}
