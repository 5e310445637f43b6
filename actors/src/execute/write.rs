//! Writes to tiered collections. All run on the fast tier; a document that only the archive has is
//! brought there first (protocol rules 17 to 21, 25).

use std::sync::Arc;

use bson::raw::RawBsonRef;
use bytes::{Bytes, BytesMut};
use halocline_cluster::Tier;
use halocline_tiering::key::Key;
use halocline_tiering::route::{WriteTarget, keys_of, route_write_filter};
use halocline_wire::patch::{Edit, rewrite};
use halocline_wire::{Command, Limits, OpMsg, WireError, codes};

use crate::execute::commands::Write;
use crate::execute::deadline::Deadline;
use crate::execute::faultin::{Residence, fault_in, is_on_fast, settle};
use crate::execute::forward::{
    Repeat, TierReply, exchange, is_not_primary, repeat_of, request_for, stepped_down, to_client,
    unreachable,
};
use crate::execute::look::{Look, Seen};
use crate::execute::read::view_of;
use crate::execute::refusal::{RETRYABLE_WRITE, Refusal};
use crate::execute::statements::{Statement, statements_of};
use crate::execute::{Answer, Engine, Request};
use crate::shared::Collection;
use crate::stats::Answered;

/// What a write that matched nothing on the fast tier means.
enum Miss {
    /// There is nothing to match on either tier: the reply stands.
    Final,
    /// The document is on the fast tier now: send the command again.
    SendAgain,
}

impl Engine {
    /// One write command on a tiered collection.
    pub(crate) async fn write(
        &self,
        request: &Request<'_>,
        kind: Write,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        self.admit(request).await?;
        match kind {
            Write::Insert => self.insert(request, collection).await,
            Write::Update | Write::Delete => {
                let statements = statements_of(request.command, kind).filter(|s| !s.is_empty());
                let Some(statements) = statements else {
                    // The server refuses it, in its own words.
                    let bytes = self.bytes_for_fast(request)?;
                    let reply = self.send_write(request, &bytes, Repeat::Never).await?;
                    return Ok(self.written(request, reply, "write"));
                };
                match statements.as_slice() {
                    [only] => {
                        let bytes = self.bytes_for_fast(request)?;
                        let reply = self.statement(request, collection, only, &bytes).await?;
                        Ok(self.written(request, reply, "write"))
                    }
                    _ => self.many_statements(request, kind, collection, &statements).await,
                }
            }
            Write::FindAndModify => {
                let statement = Statement::of_find_and_modify(request.command)?;
                let bytes = self.bytes_for_fast(request)?;
                let reply = self.statement(request, collection, &statement, &bytes).await?;
                Ok(self.written(request, reply, "write"))
            }
        }
    }

    /// A write whose client wants no acknowledgement. The fast tier is asked for one all the same:
    /// what it matched decides whether a document must be brought there.
    pub(crate) async fn write_unacknowledged(
        &self,
        request: &Request<'_>,
        kind: Write,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let malformed = |e: WireError| Refusal::new(codes::FAILED_TO_PARSE, e.to_string());
        let mut out = BytesMut::new();
        rewrite(request.message, &[Edit::Drop("writeConcern")], &mut out).map_err(malformed)?;
        let message = OpMsg::from_bytes(out.freeze(), &Limits::CLIENT).map_err(malformed)?;
        let command = Command::parse(&message).map_err(malformed)?;
        let acknowledged = Request { message: &message, command: &command, ..*request };
        self.write(&acknowledged, kind, collection).await
    }

    /// Waits while the feeder is near its bounds (admission, in arrival order).
    async fn admit(&self, request: &Request<'_>) -> Result<(), Refusal> {
        let admission = &self.context.shared.admission;
        if !admission.is_limited() {
            return Ok(());
        }
        let begun = std::time::Instant::now();
        let admitted = request.deadline.within("the archive to catch up", admission.enter(1)).await;
        self.context.recorder.admission.record(begun.elapsed().as_secs_f64());
        admitted.map_err(|_| {
            Refusal::new(
                codes::EXCEEDED_TIME_LIMIT,
                "Halocline holds writes back because the archive is far behind the fast tier; nothing was written, try again later",
            )
            .labelled(RETRYABLE_WRITE)
        })
    }

    pub(crate) fn bytes_for_fast(&self, request: &Request<'_>) -> Result<Bytes, Refusal> {
        request_for(Tier::Fast, request.message, request.command, &[])
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))
    }

    /// Passes a write's reply to the client.
    pub(crate) fn written(
        &self,
        request: &Request<'_>,
        reply: TierReply,
        reason: &'static str,
    ) -> Answer {
        Answer {
            bytes: to_client(&self.context, reply, request.id, None),
            answered: Answered::Fast,
            reason,
        }
    }

    /// Sends a write to the fast tier's primary.
    pub(crate) async fn send_write(
        &self,
        request: &Request<'_>,
        bytes: &[u8],
        repeat: Repeat,
    ) -> Result<TierReply, Refusal> {
        let reply = exchange(&self.context, Tier::Fast, bytes, repeat)
            .await
            .map_err(|error| unreachable(Tier::Fast, &error, request.command))?;
        if !reply.view.ok && is_not_primary(&reply) {
            return Err(stepped_down(Tier::Fast, request.command));
        }
        Ok(reply)
    }

    /// Runs one statement until its answer is true of both tiers. `bytes` is the whole command
    /// with this statement alone.
    pub(crate) async fn statement(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statement: &Statement<'_>,
        bytes: &Bytes,
    ) -> Result<TierReply, Refusal> {
        let repeat = repeat_of(request.command, false);
        // Held until the reply is in (rule 30).
        let hold = collection.boundary.hold();
        let definitions = collection.definitions.load();
        let view = view_of(collection, &definitions, hold.complete_from);
        match route_write_filter(statement.filter, statement.collation, &view) {
            WriteTarget::Id { id, only_id } => {
                let key =
                    Key::new(id).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?;
                if statement.upsert {
                    // Afterwards the fast tier alone gives the right answer (rule 19).
                    settle(&self.context, collection, &[key], &request.deadline).await?;
                    if statement.update_may_set_id() {
                        self.settle_upserted_id(request, collection, statement).await?;
                    }
                    return self.send_write(request, bytes, repeat).await;
                }
                loop {
                    let reply = self.send_write(request, bytes, repeat).await?;
                    if !matched_nothing(&reply) {
                        return Ok(reply);
                    }
                    let miss = self
                        .after_miss(collection, &key, statement, only_id, &request.deadline)
                        .await?;
                    if matches!(miss, Miss::Final) {
                        return Ok(reply);
                    }
                }
            }
            WriteTarget::Covered => {
                self.settle_upserted_id(request, collection, statement).await?;
                self.send_write(request, bytes, repeat).await
            }
            WriteTarget::Ids { ids, .. } if !statement.single && !statement.upsert => {
                drop(hold);
                let reply = self.refused_by_fast(request, statement).await?;
                if !matched_nothing(&reply) {
                    return Ok(reply);
                }
                let keys =
                    keys_of(ids).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?;
                self.each_key(request, collection, statement, &keys, bytes).await
            }
            WriteTarget::Ids { .. } | WriteTarget::Unique { .. } | WriteTarget::Other => {
                drop(hold);
                self.by_candidates(request, collection, statement, bytes).await
            }
        }
    }

    /// An upsert may give the new document an `_id`: its absence must then be proved like an
    /// insert's (rule 19). Where the command does not tell which, nothing can be proved.
    pub(crate) async fn settle_upserted_id(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        statement: &Statement<'_>,
    ) -> Result<(), Refusal> {
        let key = match statement.upserted_key()? {
            Some(key) => key,
            None => return Ok(()),
        };
        settle(&self.context, collection, &[key], &request.deadline).await
    }

    /// Rule 17: what it means that the fast tier matched nothing for a key, and the fault-in if the
    /// document is elsewhere.
    async fn after_miss(
        &self,
        collection: &Collection,
        key: &Key,
        statement: &Statement<'_>,
        only_id: bool,
        deadline: &Deadline,
    ) -> Result<Miss, Refusal> {
        if deadline.has_passed() {
            return Err(Refusal::timed_out("a document to stay on the fast tier"));
        }
        let seen = if only_id {
            match is_on_fast(&self.context, collection, key).await? {
                (true, _) => Seen::ThereAndHolds,
                (false, _) => Seen::NotThere,
            }
        } else {
            let look = Look {
                filter: statement.filter,
                collation: statement.collation,
                variables: statement.variables,
            };
            self.look_once(collection, key, &look).await?.0
        };
        match seen {
            Seen::ThereAndHolds => Ok(Miss::SendAgain),
            Seen::ThereAndFails => Ok(Miss::Final),
            Seen::NotThere => match fault_in(&self.context, collection, key, deadline).await? {
                Residence::Fast => Ok(Miss::SendAgain),
                Residence::Nowhere => Ok(Miss::Final),
            },
        }
    }
}

/// Whether a command asks for no acknowledgement: `{w: 0}`.
pub(crate) fn is_unacknowledged(command: &Command<'_>) -> bool {
    let w = command.write_concern().and_then(|concern| concern.get("w").ok().flatten());
    w.is_some_and(is_zero)
}

/// Whether a write reply says that no document matched. Errors are answers, not misses.
pub(crate) fn matched_nothing(reply: &TierReply) -> bool {
    if !reply.view.ok || reply.view.has_write_errors || reply.view.has_upserted {
        return false;
    }
    match reply.view.n {
        Some(n) => n == 0,
        // findAndModify says it in `lastErrorObject`.
        None => reply
            .body()
            .and_then(|body| body.get_document("lastErrorObject").ok())
            .and_then(|last| last.get("n").ok().flatten())
            .is_some_and(is_zero),
    }
}

fn is_zero(value: RawBsonRef<'_>) -> bool {
    match value {
        RawBsonRef::Int32(n) => n == 0,
        RawBsonRef::Int64(n) => n == 0,
        RawBsonRef::Double(n) => n == 0.0,
        _ => false,
    }
}
