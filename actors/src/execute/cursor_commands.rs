//! `getMore` and `killCursors`: they go where the cursor was opened, whoever asks.

use std::time::Instant;

use bson::raw::{RawArrayBuf, RawBsonRef};
use bson::rawdoc;
use halocline_cluster::Tier;
use halocline_wire::codes;
use halocline_wire::patch::Edit;

use crate::execute::cursors::{Cursor, Unusable};
use crate::execute::forward::{exchange_with, request_for, to_client, unreachable};
use crate::execute::refusal::Refusal;
use crate::execute::{Answer, Engine, Request, document_reply};
use crate::stats::Answered;

impl Engine {
    pub(crate) async fn get_more(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        let Some(id) = command.cursor_id() else {
            return Err(Refusal::new(codes::TYPE_MISMATCH, "getMore takes a cursor id (long)"));
        };
        let cursor = self.context.shared.cursors.take(id, Instant::now()).map_err(|e| match e {
            Unusable::NotFound => {
                Refusal::new(codes::CURSOR_NOT_FOUND, format!("cursor id {id} not found"))
            }
            Unusable::InUse => {
                Refusal::new(codes::CURSOR_IN_USE, format!("cursor id {id} is already in use"))
            }
        })?;
        let release = Release { engine: self, id, keep: true };
        let asked = command.collection().map(|coll| format!("{}.{coll}", command.db()));
        if asked.as_deref() != Some(cursor.ns.as_str()) {
            return Err(Refusal::new(
                codes::UNAUTHORIZED,
                format!(
                    "Requested getMore on namespace '{}', but cursor belongs to a different namespace {}",
                    asked.unwrap_or_default(),
                    cursor.ns
                ),
            ));
        }
        self.continue_cursor(request, cursor, id, release).await
    }

    async fn continue_cursor(
        &self,
        request: &Request<'_>,
        cursor: Cursor,
        id: i64,
        mut release: Release<'_>,
    ) -> Result<Answer, Refusal> {
        let edits = [Edit::Set("getMore", RawBsonRef::Int64(cursor.id))];
        let bytes = request_for(cursor.tier, request.message, request.command, &edits)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        // If this getMore fails or is given up, the server may have moved the cursor on: another
        // one could skip a batch without anybody noticing.
        release.keep = false;
        let mut reply = exchange_with(&self.context, cursor.tier, &cursor.server, &bytes)
            .await
            .map_err(|error| unreachable(cursor.tier, &error, request.command))?;
        if cursor.hold.is_some() {
            // Only a leader's evictor waits for this cursor (rules 30, 32).
            self.still_leading(request).await?;
        }
        let still_open = reply.view.cursor.as_ref().is_some_and(|c| c.id != 0);
        release.keep = if reply.view.ok {
            still_open
        } else {
            reply.view.code != Some(codes::CURSOR_NOT_FOUND)
        };
        let answered = match cursor.tier {
            Tier::Fast => Answered::Fast,
            Tier::Archive => Answered::Archive,
        };
        if still_open {
            let mut message = reply
                .message
                .try_into_mut()
                .unwrap_or_else(|shared| bytes::BytesMut::from(&shared[..]));
            let _ = reply.view.set_cursor_id(&mut message, id);
            reply.message = message.freeze();
        }
        drop(release);
        // The cursor has its name already, so no terms.
        let bytes = to_client(&self.context, reply, request.id, None);
        Ok(Answer { bytes, answered, reason: cursor.reason })
    }

    pub(crate) async fn kill_cursors(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let Some(RawBsonRef::Array(ids)) = request.command.get("cursors") else {
            return Err(Refusal::new(
                codes::TYPE_MISMATCH,
                "killCursors takes an array of cursor ids",
            ));
        };
        let (mut killed, mut unknown) = (RawArrayBuf::new(), RawArrayBuf::new());
        for id in ids.into_iter().map_while(Result::ok) {
            let RawBsonRef::Int64(id) = id else {
                return Err(Refusal::new(codes::TYPE_MISMATCH, "a cursor id is a long"));
            };
            match self.context.shared.cursors.remove(id) {
                Some(cursor) => {
                    kill(self, &cursor).await;
                    killed.push(id);
                }
                None => unknown.push(id),
            }
        }
        let reply = rawdoc! {
            "cursorsKilled": killed,
            "cursorsNotFound": unknown,
            "cursorsAlive": [],
            "cursorsUnknown": [],
            "ok": 1.0,
        };
        Ok(Answer {
            bytes: document_reply(&reply, request.id),
            answered: Answered::Local,
            reason: "cursors",
        })
    }
}

impl Engine {
    /// Ends a cursor on its server.
    pub async fn kill_cursor(&self, cursor: &Cursor) {
        kill(self, cursor).await;
    }
}

/// Ends a cursor on its server. One that is gone already, or whose server is, needs nothing more.
pub(crate) async fn kill(engine: &Engine, cursor: &Cursor) {
    let Some((db, coll)) = cursor.ns.split_once('.') else { return };
    let mut ids = RawArrayBuf::new();
    ids.push(cursor.id);
    let body = rawdoc! { "killCursors": coll, "cursors": ids };
    let bytes = engine.own_command(db, &body);
    if let Err(error) = exchange_with(engine.context(), cursor.tier, &cursor.server, &bytes).await {
        tracing::debug!(%error, ns = %cursor.ns, "a cursor could not be killed on its server");
    }
}

/// Gives a cursor back after its `getMore`, whatever happened to the operation.
struct Release<'a> {
    engine: &'a Engine,
    id: i64,
    keep: bool,
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        let cursors = &self.engine.context().shared.cursors;
        if self.keep {
            cursors.give_back(self.id, Instant::now());
        } else {
            cursors.remove(self.id);
        }
    }
}
