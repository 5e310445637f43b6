//! Moves whose daemon has died: ends them, so that the keys they hold are free at once. What a move
//! is, and how a living daemon ends its own, is in `moves.rs`.
//!
//! The server keeps an open transaction after its client's connection is gone, for
//! `transactionLifetimeLimitSeconds` (60). Until then every other write of its keys conflicts: clients
//! would be refused these documents, and all other moves of the collection, which write its boundary
//! document too, would stand still.

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf};
use bson::{Binary, rawdoc};

use crate::error::ClusterError;
use crate::pool::Pool;
use crate::reply::{Reply, number};
use crate::session::{ID_BYTES, SessionId};

/// More open moves than a daemon can have had.
const MOST: i32 = 100_000;

/// Aborts every move that is open on the fast tier, and returns how many there were. For a new leader,
/// before it moves anything itself: whatever is open then was its predecessor's, and a predecessor
/// that is not dead but slow finds its move aborted, which it is ready for at any moment.
pub async fn abort_abandoned_moves(pool: &Pool) -> Result<usize, ClusterError> {
    // Of other users too, where that is allowed; a daemon's own user may always see its own.
    let reply = match pool.run_idempotent("admin", &open_moves(true)).await {
        Err(error) if error.server().is_some_and(|server| server.is_unauthorized()) => {
            pool.run_idempotent("admin", &open_moves(false)).await?
        }
        reply => reply?,
    };
    let mut aborted = 0;
    for (session, txn_number) in found(&reply) {
        let mut abort = rawdoc! { "abortTransaction": 1, "autocommit": false };
        session.sign(&mut abort, txn_number);
        match pool.run_once("admin", &abort).await {
            Ok(_) => aborted += 1,
            // It ended by itself, or its daemon lives and ended it.
            Err(error) if error.server().is_some_and(|e| e.is_no_such_transaction()) => {}
            Err(error) => {
                tracing::warn!(tier = pool.tier().label(), %error, "an abandoned move is left to time out");
            }
        }
    }
    Ok(aborted)
}

fn open_moves(of_all_users: bool) -> RawDocumentBuf {
    let bound = |fill: u8| Binary::from(bson::Uuid::from_bytes(SessionId::reserved([fill; 8]).0));
    rawdoc! {
        "aggregate": 1,
        "pipeline": [
            { "$currentOp": { "allUsers": of_all_users, "idleSessions": true } },
            { "$match": {
                "lsid.id": { "$gte": bound(0), "$lte": bound(0xff) },
                "transaction.parameters.autocommit": false,
            } },
            { "$project": { "lsid": 1, "transaction.parameters.txnNumber": 1 } },
        ],
        "cursor": { "batchSize": MOST },
    }
}

fn found(reply: &Reply) -> Vec<(SessionId, i64)> {
    let cursor = reply.get("cursor").and_then(|cursor| cursor.as_document());
    let batch = cursor.and_then(|cursor| cursor.get_array("firstBatch").ok());
    let moves = batch.into_iter().flatten().map_while(Result::ok);
    moves.filter_map(|open| read(open.as_document()?)).collect()
}

fn read(open: &RawDocument) -> Option<(SessionId, i64)> {
    let RawBsonRef::Binary(id) = open.get_document("lsid").ok()?.get("id").ok()?? else {
        return None;
    };
    let id: [u8; ID_BYTES] = id.bytes.try_into().ok()?;
    let parameters = open.get_document("transaction").ok()?.get_document("parameters").ok()?;
    Some((SessionId(id), number(parameters.get("txnNumber").ok()??)?))
}
