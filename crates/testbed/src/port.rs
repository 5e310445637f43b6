//! Ports on loopback that stay ours from the first start of a member to the end of its replica set,
//! also while the member is down. Nothing listens here.

use std::fs::{self, File};
use std::net::{IpAddr, TcpListener};

use rand::Rng;

use crate::error::TestbedError;
use crate::mongod::cache_directory;

/// Below the range that systems take client ports from (Linux: 32768 and up): an outgoing
/// connection of somebody must not take the port of a member that is down and will come back.
const FIRST: u16 = 20_000;
/// How many ports are used; bounds the lock files left in the cache directory too.
const COUNT: u16 = 8_000;
/// Draws before giving up; with hundreds of members running at once a draw hits a taken port once
/// in twenty.
const DRAWS: usize = 200;

/// A port nobody else of this machine's testbeds uses until it is dropped.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) number: u16,
    /// Its lock is what keeps other processes' testbeds off; the system lifts it with the process.
    _lock: File,
}

impl Port {
    /// Takes a free port of `address`.
    pub(crate) fn reserve(address: IpAddr) -> Result<Self, TestbedError> {
        let directory = cache_directory().join("ports");
        fs::create_dir_all(&directory).map_err(|e| TestbedError::path("create", &directory, e))?;
        for _ in 0..DRAWS {
            let number = FIRST + rand::rng().random_range(0..COUNT);
            let path = directory.join(number.to_string());
            let lock = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .map_err(|e| TestbedError::path("open", &path, e))?;
            if lock.try_lock().is_ok() && TcpListener::bind((address, number)).is_ok() {
                return Ok(Self { number, _lock: lock });
            }
        }
        Err(TestbedError::Option(format!(
            "no free port found on {address} among {FIRST} to {} in {DRAWS} draws; is that address \
             one of this machine's?",
            FIRST + COUNT - 1
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ports_held_at_once_are_distinct() {
        let held: Vec<Port> =
            (0..200).map(|_| Port::reserve("127.0.0.1".parse().unwrap()).unwrap()).collect();
        assert_eq!(held.iter().map(|p| p.number).collect::<HashSet<_>>().len(), held.len());
    }
}
