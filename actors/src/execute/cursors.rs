//! Cursors given to clients. Their ids are Halocline's own: each names the tier, the server and
//! the server's id, and holds the boundary version a covered cursor began under. A cursor outlives
//! the connection that opened it and never changes tier or server.

use std::collections::hash_map;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ahash::AHashMap;
use halocline_cluster::{ServerAddress, Tier};
use parking_lot::Mutex;

use crate::shared::Boundary;

/// Shards keep threads out of each other's way.
const SHARDS: usize = 16;

/// A cursor on one server.
#[derive(Debug, Clone)]
pub struct Cursor {
    /// The tier it lives on.
    pub tier: Tier,
    /// The server it lives on.
    pub server: ServerAddress,
    /// The server's own id.
    pub id: i64,
    /// `database.collection` it was opened on.
    pub ns: String,
    /// Whether the namespace is tiered.
    pub tiered: bool,
    /// The reason label its first batch was counted under.
    pub reason: &'static str,
    /// Protocol rule 30: documents below this boundary's successor stay until the cursor ends.
    pub hold: Option<Arc<Boundary>>,
    /// The session that opened it, as the client named it.
    pub lsid: Option<Vec<u8>>,
    /// Never reaped while idle (`noCursorTimeout`).
    pub immortal: bool,
}

#[derive(Debug)]
struct Slot {
    cursor: Cursor,
    used: Instant,
    busy: bool,
}

/// See the module's description.
#[derive(Debug)]
pub struct CursorTable {
    shards: [Mutex<AHashMap<i64, Slot>>; SHARDS],
    next: AtomicU64,
    seed: u64,
}

impl Default for CursorTable {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            next: AtomicU64::new(1),
            seed: rand::random(),
        }
    }
}

/// Why a cursor cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unusable {
    /// 43 `CursorNotFound`.
    NotFound,
    /// 12051 `CursorInUse`.
    InUse,
}

impl CursorTable {
    fn shard(&self, id: i64) -> &Mutex<AHashMap<i64, Slot>> {
        let [first, ..] = &self.shards;
        #[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation)]
        self.shards.get(id as u64 as usize % SHARDS).unwrap_or(first)
    }

    /// Takes a cursor in and names it. The names are hard to guess.
    pub fn insert(&self, cursor: Cursor, now: Instant) -> i64 {
        loop {
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            let id = positive(mix(n ^ self.seed));
            if let hash_map::Entry::Vacant(free) = self.shard(id).lock().entry(id) {
                free.insert(Slot { cursor, used: now, busy: false });
                return id;
            }
        }
    }

    /// Takes the cursor for one `getMore`. To be given back with [`give_back`](Self::give_back)
    /// or [`remove`](Self::remove).
    ///
    /// # Errors
    /// When there is no such cursor, or another `getMore` is running on it.
    pub fn take(&self, id: i64, now: Instant) -> Result<Cursor, Unusable> {
        let mut shard = self.shard(id).lock();
        let slot = shard.get_mut(&id).ok_or(Unusable::NotFound)?;
        if slot.busy {
            return Err(Unusable::InUse);
        }
        slot.busy = true;
        slot.used = now;
        Ok(slot.cursor.clone())
    }

    /// The cursor stays open after its `getMore`.
    pub fn give_back(&self, id: i64, now: Instant) {
        if let Some(slot) = self.shard(id).lock().get_mut(&id) {
            slot.busy = false;
            slot.used = now;
        }
    }

    /// Looks without taking.
    #[must_use]
    pub fn peek(&self, id: i64) -> Option<Cursor> {
        self.shard(id).lock().get(&id).map(|slot| slot.cursor.clone())
    }

    /// The cursor has ended.
    pub fn remove(&self, id: i64) -> Option<Cursor> {
        self.shard(id).lock().remove(&id).map(|slot| slot.cursor)
    }

    /// Takes out cursors that nobody has used for `idle`, to be killed on their servers.
    pub fn reap(&self, idle: Duration, now: Instant) -> Vec<Cursor> {
        let mut reaped = Vec::new();
        for shard in &self.shards {
            shard.lock().retain(|_, slot| {
                let keep = slot.busy
                    || slot.cursor.immortal
                    || now.saturating_duration_since(slot.used) < idle;
                if !keep {
                    reaped.push(slot.cursor.clone());
                }
                keep
            });
        }
        reaped
    }

    /// Takes out the cursors of one session (`endSessions`, `killSessions`).
    pub fn take_session(&self, lsid: &[u8]) -> Vec<Cursor> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            shard.lock().retain(|_, slot| {
                let theirs = slot.cursor.lsid.as_deref() == Some(lsid);
                if theirs {
                    taken.push(slot.cursor.clone());
                }
                !theirs
            });
        }
        taken
    }

    /// Open cursors of a tier.
    #[must_use]
    pub fn open(&self, tier: Tier) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.lock().values().filter(|slot| slot.cursor.tier == tier).count())
            .sum()
    }
}

/// A bijection of 64 bits (the finaliser of SplitMix64, <https://prng.di.unimi.it/splitmix64.c>):
/// distinct counters give distinct names.
fn mix(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// Cursor ids are positive in practice, and 0 means "no cursor".
fn positive(n: u64) -> i64 {
    i64::try_from(n >> 1).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(id: i64) -> Cursor {
        Cursor {
            tier: Tier::Fast,
            server: "127.0.0.1:1".parse().unwrap(),
            id,
            ns: "a.b".into(),
            tiered: true,
            reason: "covered",
            hold: None,
            lsid: None,
            immortal: false,
        }
    }

    /// Case 15: both tiers may use the same id.
    #[test]
    fn equal_server_ids_get_distinct_names() {
        let table = CursorTable::default();
        let now = Instant::now();
        let a = table.insert(cursor(7), now);
        let b = table.insert(Cursor { tier: Tier::Archive, ..cursor(7) }, now);
        assert_ne!(a, b);
        assert_eq!(table.take(a, now).unwrap().tier, Tier::Fast);
        assert_eq!(table.take(b, now).unwrap().tier, Tier::Archive);
    }

    /// Case 14: abandoned cursors are reaped, one in use is not.
    #[test]
    fn idle_cursors_are_reaped() {
        let table = CursorTable::default();
        let now = Instant::now();
        let idle = table.insert(cursor(1), now);
        let busy = table.insert(cursor(2), now);
        table.take(busy, now).unwrap();
        let later = now + Duration::from_secs(601);
        assert_eq!(table.reap(Duration::from_secs(600), later).len(), 1);
        assert_eq!(table.take(idle, later).unwrap_err(), Unusable::NotFound);
        assert_eq!(table.take(busy, later).unwrap_err(), Unusable::InUse);
    }
}
