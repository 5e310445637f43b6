//! The feeder's persisted position held against what both tiers have, while no daemon runs: whatever
//! a client changed before the position must be on the archive. That is the promise a restart relies
//! on, and the one that a skipped event breaks.

use std::collections::BTreeMap;

use futures_util::TryStreamExt;
use mongodb::bson::{Bson, Document, Timestamp, doc};

use super::deployment::{NS, Pair};
use super::truth::{Contents, Number, State, Truth, shown};

/// What earlier looks have shown.
#[derive(Default)]
pub struct Positions {
    /// The position never goes back.
    last: Option<Timestamp>,
    /// The last change of each document by a client, as far as the oplog was read.
    changes: BTreeMap<Number, Change>,
    read_to: Option<Timestamp>,
}

#[derive(Clone, Copy)]
struct Change {
    time: Timestamp,
    deletes: bool,
}

impl Positions {
    /// Looks. Returns how many documents were changed before the position, and how many after it.
    pub async fn check(&mut self, pair: &Pair, truth: &Truth) -> (usize, usize) {
        let Some(mark) = pair.own_document(&pair.archive_client, "feeder", "fast").await else {
            // Killed before it had one.
            assert!(self.last.is_none(), "the position is gone");
            return (0, 0);
        };
        let position = mark.get_timestamp("time").unwrap();
        if self.last.is_some_and(|last| last > position) {
            truth.violation(format!("the position went back from {:?} to {position:?}", self.last));
        }
        self.last = Some(position);

        // The documents before the oplog: a change after the position shows there.
        let fast = Contents::read(&pair.on_fast()).await;
        let archive = Contents::read(&pair.on_archive()).await;
        self.read_oplog(pair, truth).await;

        let (mut before, mut after) = (0, 0);
        for (n, change) in &self.changes {
            if change.time >= position {
                after += 1;
                continue;
            }
            before += 1;
            let on_fast: State = fast.numbered.get(n).cloned();
            let on_archive: State = archive.numbered.get(n).cloned();
            let kept = match (change.deletes, &on_fast) {
                (true, _) => on_archive.is_none(),
                (false, Some(_)) => on_archive == on_fast,
                // Evicted since.
                (false, None) => on_archive.is_some(),
            };
            if !kept {
                truth.violation(format!(
                    "document {n} was {} at {:?}, before the position {position:?}, and the archive has {}; the fast tier has {}",
                    if change.deletes { "deleted" } else { "written" },
                    change.time,
                    shown(&on_archive),
                    shown(&on_fast)
                ));
            }
        }
        (before, after)
    }

    async fn read_oplog(&mut self, pair: &Pair, truth: &Truth) {
        let from = self.read_to.unwrap_or(Timestamp { time: 0, increment: 0 });
        let oplog = pair.fast_client.database("local").collection::<Document>("oplog.rs");
        let entries = oplog.find(doc! { "ts": { "$gt": from }, "$or": [
            { "ns": NS, "op": { "$in": ["i", "u", "d"] } },
            { "o.applyOps.ns": NS },
        ] });
        let mut entries = entries.sort(doc! { "$natural": 1 }).await.unwrap();
        let numbers = truth.numbers();
        while let Some(entry) = entries.try_next().await.unwrap() {
            let time = entry.get_timestamp("ts").unwrap();
            self.read_to = Some(time);
            let operations = match entry.get_document("o").unwrap().get_array("applyOps") {
                // Of a transaction: a move, which changes no document, or a batch of a client's.
                Ok(operations) if !is_move(&entry) => {
                    operations.iter().map(|o| o.as_document().unwrap().clone()).collect()
                }
                Ok(_) => Vec::new(),
                Err(_) => vec![entry],
            };
            for operation in operations {
                let kind = operation.get_str("op").unwrap();
                let key = if kind == "u" { "o2" } else { "o" };
                let id = operation.get_document(key).unwrap().get("_id").unwrap();
                if let Some(n) = numbers.get(&id.to_string()) {
                    self.changes.insert(*n, Change { time, deletes: kind == "d" });
                }
            }
        }
    }
}

fn is_move(entry: &Document) -> bool {
    let lsid = entry.get_document("lsid").ok();
    matches!(lsid.and_then(|lsid| lsid.get("id")),
        Some(Bson::Binary(id)) if id.bytes.starts_with(b"haloclin"))
}
