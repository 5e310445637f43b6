//! The server's side, towards clients: needs only what a deployment stores about a user, never the
//! password. Unknown users get a challenge like anyone else, and fail at the proof.

use std::fmt;

use base64::Engine;
use bson::raw::{RawBsonRef, RawDocument};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::{
    BASE64, Keys, Mechanism, ScramError, Secret, decode_base64, is_nonce, new_nonce, payload_text,
    take_attribute, xor,
};

/// What a deployment stores about a user's password, as `usersInfo` with `showCredentials` shows.
#[derive(Clone)]
pub struct StoredCredential {
    mechanism: Mechanism,
    salt: Vec<u8>,
    iterations: u32,
    stored_key: Secret,
    server_key: Secret,
    is_decoy: bool,
}

impl fmt::Debug for StoredCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredCredential")
            .field("mechanism", &self.mechanism)
            .field("iterations", &self.iterations)
            .finish_non_exhaustive()
    }
}

impl StoredCredential {
    /// Reads `credentials["SCRAM-SHA-…"]` of a `usersInfo` reply.
    pub fn from_document(
        mechanism: Mechanism,
        document: &RawDocument,
    ) -> Result<StoredCredential, ScramError> {
        let bytes = |name: &str, missing| {
            let text = document.get_str(name).map_err(|_| ScramError::StoredCredential(missing))?;
            BASE64.decode(text).map_err(|_| ScramError::StoredCredential(missing))
        };
        let iterations = match document.get("iterationCount") {
            Ok(Some(RawBsonRef::Int32(count))) => u32::try_from(count).ok(),
            Ok(Some(RawBsonRef::Int64(count))) => u32::try_from(count).ok(),
            Ok(Some(RawBsonRef::Double(count))) => Some(count as u32),
            _ => None,
        };
        let iterations = iterations
            .filter(|count| *count > 0)
            .ok_or(ScramError::StoredCredential("iterationCount"))?;
        let credential = StoredCredential {
            mechanism,
            salt: bytes("salt", "salt")?,
            iterations,
            stored_key: Zeroizing::new(bytes("storedKey", "storedKey")?),
            server_key: Zeroizing::new(bytes("serverKey", "serverKey")?),
            is_decoy: false,
        };
        for (key, name) in
            [(&credential.stored_key, "storedKey"), (&credential.server_key, "serverKey")]
        {
            if key.len() != mechanism.hash_bytes() {
                return Err(ScramError::StoredCredential(name));
            }
        }
        Ok(credential)
    }

    /// The credential of a password that is known here.
    pub fn derive(
        mechanism: Mechanism,
        user: &str,
        password: &str,
        salt: &[u8],
        iterations: u32,
    ) -> Result<StoredCredential, ScramError> {
        let password = mechanism.prepare_password(user, password)?;
        let keys = Keys::derive(mechanism, &password, salt, iterations)?;
        Ok(StoredCredential {
            mechanism,
            salt: salt.to_vec(),
            iterations,
            stored_key: keys.stored,
            server_key: keys.server,
            is_decoy: false,
        })
    }

    /// A credential for a user who does not exist: the same challenge every time (`secret` must
    /// stay the same while the process lives), and no proof fits it. So a stranger cannot tell
    /// which names exist.
    pub fn decoy(
        mechanism: Mechanism,
        user: &str,
        secret: &[u8],
    ) -> Result<StoredCredential, ScramError> {
        let part = |purpose: &str| mechanism.hmac(secret, format!("{purpose}:{user}").as_bytes());
        let mut salt = part("salt")?.to_vec();
        salt.truncate(mechanism.salt_bytes());
        Ok(StoredCredential {
            mechanism,
            salt,
            iterations: mechanism.default_iterations(),
            stored_key: part("stored")?,
            server_key: part("server")?,
            is_decoy: true,
        })
    }
}

/// A client's first message, read: says who wants in, so that the credential can be looked up.
#[derive(Debug, Clone)]
pub struct ServerStart {
    mechanism: Mechanism,
    user: String,
    nonce: String,
    gs2_header: String,
    bare: String,
}

impl ServerStart {
    /// Reads the payload of `saslStart`.
    pub fn parse(mechanism: Mechanism, payload: &[u8]) -> Result<ServerStart, ScramError> {
        let text = payload_text(payload)?;
        let gs2_end = text
            .match_indices(',')
            .nth(1)
            .map(|(at, _)| at + 1)
            .ok_or(ScramError::Malformed("no GS2 header"))?;
        let (gs2_header, bare) =
            text.split_at_checked(gs2_end).ok_or(ScramError::Malformed("no GS2 header"))?;
        let (binding, authzid) =
            gs2_header.split_once(',').ok_or(ScramError::Malformed("no GS2 header"))?;
        match binding {
            "n" | "y" => {}
            other if other.starts_with("p=") => {
                return Err(ScramError::Unsupported("channel binding"));
            }
            _ => return Err(ScramError::Malformed("unknown GS2 header")),
        }

        let mut rest = Some(bare);
        let user = decode_name(take_attribute(&mut rest, 'n', "no user name")?)?;
        let nonce = take_attribute(&mut rest, 'r', "no nonce in the client's first message")?;
        if !is_nonce(nonce) {
            return Err(ScramError::Malformed("the nonce is not printable"));
        }
        let authzid = authzid.strip_suffix(',').unwrap_or(authzid);
        if !authzid.is_empty() {
            let name = authzid.strip_prefix("a=").ok_or(ScramError::Malformed("authzid"))?;
            if decode_name(name)? != user {
                return Err(ScramError::Unsupported("to act as another user"));
            }
        }
        Ok(ServerStart {
            mechanism,
            user,
            nonce: nonce.to_owned(),
            gs2_header: gs2_header.to_owned(),
            bare: bare.to_owned(),
        })
    }

    /// Who wants in.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The mechanism.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The server's first message, with a fresh nonce.
    pub fn challenge(
        self,
        credential: StoredCredential,
    ) -> Result<(Vec<u8>, ServerExchange), ScramError> {
        self.challenge_with_nonce(credential, &new_nonce())
    }

    /// The server's first message, with a nonce of the caller's; it must never be used twice.
    pub fn challenge_with_nonce(
        self,
        credential: StoredCredential,
        nonce: &str,
    ) -> Result<(Vec<u8>, ServerExchange), ScramError> {
        if credential.mechanism != self.mechanism {
            return Err(ScramError::StoredCredential("it belongs to another mechanism"));
        }
        let nonce = format!("{}{nonce}", self.nonce);
        let salt = BASE64.encode(&credential.salt);
        let message = format!("r={nonce},s={salt},i={}", credential.iterations);
        let exchange = ServerExchange {
            user: self.user,
            nonce,
            gs2_header: self.gs2_header,
            so_far: format!("{},{message}", self.bare),
            credential,
        };
        Ok((message.into_bytes(), exchange))
    }
}

/// `=2C` is a comma, `=3D` an equals sign, anything else after `=` is an error.
fn decode_name(text: &str) -> Result<String, ScramError> {
    let mut parts = text.split('=');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(rest) = part.strip_prefix("2C") {
            name.push(',');
            name.push_str(rest);
        } else if let Some(rest) = part.strip_prefix("3D") {
            name.push('=');
            name.push_str(rest);
        } else {
            return Err(ScramError::Malformed("the user name is escaped wrongly"));
        }
    }
    if name.is_empty() {
        return Err(ScramError::Malformed("the user name is empty"));
    }
    Ok(name)
}

/// An exchange that waits for the client's proof.
#[derive(Debug, Clone)]
pub struct ServerExchange {
    user: String,
    nonce: String,
    gs2_header: String,
    so_far: String,
    credential: StoredCredential,
}

impl ServerExchange {
    /// Who wants in.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Checks the payload of the first `saslContinue`. Success: the user is who they say; the bytes
    /// are the server's last message.
    pub fn finish(self, payload: &[u8]) -> Result<Vec<u8>, ScramError> {
        let text = payload_text(payload)?;
        let (without_proof, proof) =
            text.rsplit_once(",p=").ok_or(ScramError::Malformed("no proof"))?;
        let mut rest = Some(without_proof);
        let binding = take_attribute(&mut rest, 'c', "no channel binding data")?;
        let nonce = take_attribute(&mut rest, 'r', "no nonce in the client's last message")?;
        let binding = decode_base64(binding, "the channel binding data is not base64")?;
        if binding != self.gs2_header.as_bytes() {
            return Err(ScramError::Malformed("the channel binding data changed"));
        }
        if nonce != self.nonce {
            return Err(ScramError::WrongNonce);
        }
        let proof = Zeroizing::new(decode_base64(proof, "the proof is not base64")?);

        let mechanism = self.credential.mechanism;
        let auth_message = format!("{},{without_proof}", self.so_far);
        let signature = mechanism.hmac(&self.credential.stored_key, auth_message.as_bytes())?;
        // A proof of another length gives a key of another length or hash, which does not fit.
        let client_key = xor(&proof, &signature);
        let fits = mechanism.hash(&client_key).ct_eq(&self.credential.stored_key);
        let right_length = proof.len() == mechanism.hash_bytes();
        if !bool::from(fits) || !right_length || self.credential.is_decoy {
            return Err(ScramError::WrongProof);
        }
        let answer = mechanism.hmac(&self.credential.server_key, auth_message.as_bytes())?;
        Ok(format!("v={}", BASE64.encode(&*answer)).into_bytes())
    }
}
