//! Sessions and transactions: which tier a transaction is pinned to, and what ends where.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bson::raw::RawDocument;
use bson::rawdoc;
use halocline_cluster::Tier;
use halocline_tiering::key::Key;
use halocline_tiering::route::{WriteTarget, keys_of, route_write_filter};
use halocline_wire::codes;
use parking_lot::Mutex;

use crate::execute::commands::{Action, Entry, Write};
use crate::execute::cursor_commands::kill;
use crate::execute::faultin::{Residence, fault_in, settle};
use crate::execute::forward::{
    CursorTerms, Repeat, TierReply, exchange, is_not_primary, request_for, stepped_down, to_client,
    unreachable,
};
use crate::execute::read::view_of;
use crate::execute::refusal::{Refusal, TRANSIENT_TRANSACTION};
use crate::execute::statements::{Statement, statements_of};
use crate::execute::{Answer, Engine, Request};
use crate::shared::{Boundary, Collection};
use crate::stats::Answered;

/// A transaction's pin is forgotten this long after its last statement; servers end transactions
/// after `transactionLifetimeLimitSeconds`, 60 by default.
const PIN_AGE: Duration = Duration::from_secs(1800);

/// Transactions under way, by session.
#[derive(Debug, Default)]
pub struct Transactions {
    pinned: Mutex<HashMap<Vec<u8>, Pin>>,
}

#[derive(Debug, Clone)]
struct Pin {
    number: i64,
    tier: Tier,
    used: Instant,
    /// Boundaries its covered reads rely on (protocol rule 30).
    holds: Vec<Arc<Boundary>>,
}

impl Transactions {
    /// The tier of a running transaction.
    fn tier(&self, lsid: &RawDocument, number: i64) -> Option<Tier> {
        let mut pinned = self.pinned.lock();
        let pin = pinned.get_mut(lsid.as_bytes())?;
        pin.used = Instant::now();
        (pin.number == number).then_some(pin.tier)
    }

    fn begin(&self, lsid: &RawDocument, number: i64, tier: Tier, holds: Vec<Arc<Boundary>>) {
        let pin = Pin { number, tier, used: Instant::now(), holds };
        self.pinned.lock().insert(lsid.as_bytes().to_vec(), pin);
    }

    fn end(&self, lsid: &[u8]) {
        self.pinned.lock().remove(lsid);
    }

    /// Lets go of boundaries once a transaction has ended; its tier stays known, for a repeated commit.
    fn finish(&self, lsid: &RawDocument) {
        if let Some(pin) = self.pinned.lock().get_mut(lsid.as_bytes()) {
            pin.holds.clear();
        }
    }

    fn holds(&self, lsid: &RawDocument) -> Vec<Arc<Boundary>> {
        self.pinned.lock().get(lsid.as_bytes()).map(|pin| pin.holds.clone()).unwrap_or_default()
    }

    /// Forgets what nobody has used for long.
    pub fn reap(&self) {
        self.pinned.lock().retain(|_, pin| pin.used.elapsed() < PIN_AGE);
    }

    /// Transactions pinned to a tier.
    #[must_use]
    pub fn open(&self, tier: Tier) -> usize {
        self.pinned.lock().values().filter(|pin| pin.tier == tier).count()
    }
}

impl Engine {
    /// One statement of a multi-document transaction.
    pub(crate) async fn in_transaction(
        &self,
        request: &Request<'_>,
        entry: &'static Entry,
        tiered: Option<&Arc<Collection>>,
    ) -> Result<Answer, Refusal> {
        if entry.action == Action::EndTransaction {
            return self.end_transaction(request).await;
        }
        let command = request.command;
        let (Some(lsid), Some(number)) = (command.lsid(), command.txn_number()) else {
            return Err(Refusal::new(codes::BAD_VALUE, "a transaction needs lsid and txnNumber"));
        };
        let transactions = &self.context.shared.transactions;
        let wanted = if tiered.is_some() { Tier::Fast } else { Tier::Archive };
        if command.start_transaction() {
            // Taken before the snapshot opens: whatever the boundary is then, the snapshot is newer.
            let holds = self.context.shared.collections.iter().map(|c| c.boundary.hold()).collect();
            transactions.begin(lsid, number, wanted, holds);
        }
        let pinned = transactions.tier(lsid, number).ok_or_else(|| {
            Refusal::new(
                codes::NO_SUCH_TRANSACTION,
                format!("transaction {number} is not known to Halocline; it may have been begun through another daemon or has ended"),
            )
            .labelled(TRANSIENT_TRANSACTION)
        })?;
        if entry.action == Action::GetMore {
            return self.get_more(request).await;
        }
        if pinned != wanted {
            self.abort_upstream(request, pinned).await;
            return Err(Refusal::new(
                codes::OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
                "a transaction touches either tiered collections or untiered ones, not both: they live on different replica sets; the transaction was aborted",
            ));
        }
        match (entry.action, tiered) {
            (Action::Read(_), Some(collection)) => {
                self.read_in_transaction(request, collection).await
            }
            (Action::Write(kind), Some(collection)) => {
                self.write_in_transaction(request, kind, collection).await
            }
            _ => self.archive(request).await,
        }
    }

    async fn read_in_transaction(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let command = request.command;
        let holds = command.lsid().map(|l| self.context.shared.transactions.holds(l));
        let hold = holds.and_then(|holds| holds.get(collection.id).cloned()).unwrap_or_default();
        match self.transaction_route(command.body(), collection, &hold) {
            TransactionRoute::Points(keys) => {
                // A statement of its own first: is the document in this snapshot at all?
                for key in &keys {
                    if !self.in_snapshot(request, collection, key).await? {
                        self.bring_for_transaction(request, collection, key).await?;
                    }
                }
                self.forward_in_transaction(request).await
            }
            TransactionRoute::Covered => self.forward_in_transaction(request).await,
            TransactionRoute::NotCovered => {
                self.abort_upstream(request, Tier::Fast).await;
                Err(Refusal::new(
                    codes::OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
                    format!(
                        "inside a transaction only reads that the fast tier can answer completely are possible on {}: by _id, or with {} no older than {}; run this read outside the transaction",
                        collection.name,
                        collection.date.path(),
                        match hold.complete_from {
                            Some(from) => format!("{:?}", collection.date.kind().to_bson(from)),
                            None => "the end of the warm-up, which is still running".into(),
                        }
                    ),
                ))
            }
        }
    }

    async fn write_in_transaction(
        &self,
        request: &Request<'_>,
        kind: Write,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let command = request.command;
        let keys = match kind {
            Write::Insert => self.inserted_keys(request)?,
            Write::Update | Write::Delete => {
                let Some(statements) = statements_of(command, kind) else {
                    return self.forward_in_transaction(request).await;
                };
                self.transaction_keys(request, collection, &statements).await?
            }
            Write::FindAndModify => {
                let statement = Statement::of_find_and_modify(command)?;
                self.transaction_keys(request, collection, &[statement]).await?
            }
        };
        // What only the archive has is brought in outside; the transaction's older snapshot then
        // conflicts or misses, and the driver runs it again.
        if kind == Write::Insert {
            settle(&self.context, collection, &keys, &request.deadline).await?;
        } else {
            for key in &keys {
                if !self.in_snapshot(request, collection, key).await? {
                    self.bring_for_transaction(request, collection, key).await?;
                }
            }
        }
        self.forward_in_transaction(request).await
    }

    /// The keys that the statements name. A statement that is neither by key nor covered is refused.
    async fn transaction_keys(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statements: &[Statement<'_>],
    ) -> Result<Vec<Key>, Refusal> {
        let holds = request.command.lsid().map(|l| self.context.shared.transactions.holds(l));
        let hold = holds.and_then(|holds| holds.get(collection.id).cloned()).unwrap_or_default();
        let mut keys = Vec::new();
        for statement in statements {
            let definitions = collection.definitions.load();
            let view = view_of(collection, &definitions, hold.complete_from);
            match route_write_filter(statement.filter, statement.collation, &view) {
                WriteTarget::Id { id, .. } => keys
                    .push(Key::new(id).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?),
                WriteTarget::Covered => {
                    keys.extend(statement.upserted_key()?);
                }
                WriteTarget::Ids { ids, .. } if !statement.upsert => {
                    keys.extend(
                        keys_of(ids).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?,
                    );
                }
                WriteTarget::Ids { .. } | WriteTarget::Unique { .. } | WriteTarget::Other => {
                    self.abort_upstream(request, Tier::Fast).await;
                    return Err(Refusal::new(
                        codes::OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
                        format!(
                            "inside a transaction only writes by _id, or with {} inside the warm window, are possible on {}; the transaction was aborted",
                            collection.date.path(),
                            collection.name
                        ),
                    ));
                }
            }
        }
        Ok(keys)
    }

    /// Whether the transaction's snapshot has the key. Opens the snapshot if this is the first
    /// statement, in which case the client's own command goes on as a later one.
    async fn in_snapshot(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        key: &Key,
    ) -> Result<bool, Refusal> {
        let command = request.command;
        if command.start_transaction() {
            // The snapshot is not open yet: whatever is on the fast tier now, and pinned there, will
            // be in it.
            let pinned = self.context.shared.recent.pin(collection.id, key, Instant::now());
            request.deadline.within("an eviction to end", pinned).await?;
            return Ok(crate::execute::faultin::is_on_fast(&self.context, collection, key)
                .await?
                .0);
        }
        let (Some(lsid), Some(number)) = (command.lsid(), command.txn_number()) else {
            return Ok(false);
        };
        let look = rawdoc! {
            "find": collection.ns.coll(),
            "filter": key.filter(),
            "limit": 1,
            "singleBatch": true,
            "projection": { "_id": 1 },
            "lsid": lsid.to_owned(),
            "txnNumber": number,
            "autocommit": false,
        };
        let bytes = self.own_command(collection.ns.db(), &look);
        let reply = self.exchange_in_transaction(request, &bytes).await?;
        if !reply.view.ok {
            let error = reply.body().map(ToOwned::to_owned).unwrap_or_default();
            return Err(Refusal {
                verbatim: Some(error),
                ..Refusal::new(reply.view.code.unwrap_or(codes::INTERNAL_ERROR), "")
            });
        }
        Ok(reply.view.cursor.as_ref().is_some_and(|c| !c.is_empty))
    }

    /// Rule 22: the document is brought in outside; a transaction whose snapshot is already open
    /// cannot see it and must run again. Absent on both tiers is a final answer.
    async fn bring_for_transaction(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        key: &Key,
    ) -> Result<(), Refusal> {
        let residence = fault_in(&self.context, collection, key, &request.deadline).await?;
        if residence == Residence::Nowhere || request.command.start_transaction() {
            return Ok(());
        }
        self.abort_upstream(request, Tier::Fast).await;
        Err(Refusal::new(
            codes::WRITE_CONFLICT,
            "a document of this transaction was on the archive only; Halocline has brought it to the fast tier, please run the transaction again",
        )
        .labelled(TRANSIENT_TRANSACTION))
    }

    async fn exchange_in_transaction(
        &self,
        request: &Request<'_>,
        bytes: &[u8],
    ) -> Result<TierReply, Refusal> {
        let reply = exchange(&self.context, Tier::Fast, bytes, Repeat::Never)
            .await
            .map_err(|error| unreachable(Tier::Fast, &error, request.command))?;
        if !reply.view.ok && is_not_primary(&reply) {
            return Err(stepped_down(Tier::Fast, request.command));
        }
        Ok(reply)
    }

    async fn forward_in_transaction(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let bytes = self.bytes_for_fast(request)?;
        let reply = self.exchange_in_transaction(request, &bytes).await?;
        let terms = CursorTerms {
            tiered: true,
            reason: "transaction",
            hold: None,
            command: request.command,
        };
        Ok(Answer {
            bytes: to_client(&self.context, reply, request.id, Some(terms)),
            answered: Answered::Fast,
            reason: "transaction",
        })
    }

    async fn abort_upstream(&self, request: &Request<'_>, tier: Tier) {
        let command = request.command;
        let (Some(lsid), Some(number)) = (command.lsid(), command.txn_number()) else { return };
        let abort = rawdoc! {
            "abortTransaction": 1,
            "lsid": lsid.to_owned(),
            "txnNumber": number,
            "autocommit": false,
        };
        let bytes = self.own_command("admin", &abort);
        // One that was never begun there, or has ended, needs no abort.
        if let Err(error) = exchange(&self.context, tier, &bytes, Repeat::Never).await {
            tracing::debug!(%error, "a transaction could not be aborted; its tier will by itself");
        }
        self.context.shared.transactions.finish(lsid);
    }

    /// `commitTransaction` and `abortTransaction` go where the transaction is pinned.
    pub(crate) async fn end_transaction(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        let (Some(lsid), Some(number)) = (command.lsid(), command.txn_number()) else {
            return Err(Refusal::new(codes::BAD_VALUE, "a transaction needs lsid and txnNumber"));
        };
        let token = command
            .get("recoveryToken")
            .and_then(|t| t.as_document())
            .and_then(|t| t.get_str("haloclineTier").ok())
            .and_then(|label| [Tier::Fast, Tier::Archive].into_iter().find(|t| t.label() == label));
        let tier = self.context.shared.transactions.tier(lsid, number).or(token).ok_or_else(|| {
            Refusal::new(
                codes::NO_SUCH_TRANSACTION,
                format!("transaction {number} is not known to Halocline and the command carries no recovery token"),
            )
            .labelled(TRANSIENT_TRANSACTION)
        })?;
        let edits = [halocline_wire::patch::Edit::Drop("recoveryToken")];
        let bytes = request_for(tier, request.message, command, &edits)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        // Both may be repeated: the server remembers how a transaction ended.
        let reply = exchange(&self.context, tier, &bytes, Repeat::ByRecord)
            .await
            .map_err(|error| unreachable(tier, &error, command))?;
        if !reply.view.ok && is_not_primary(&reply) {
            return Err(stepped_down(tier, command));
        }
        self.context.shared.transactions.finish(lsid);
        Ok(Answer {
            bytes: to_client(&self.context, reply, request.id, None),
            answered: match tier {
                Tier::Fast => Answered::Fast,
                Tier::Archive => Answered::Archive,
            },
            reason: "transaction",
        })
    }

    /// `endSessions`, `killSessions`, `refreshSessions` reach both tiers, and the session's cursors.
    pub(crate) async fn sessions(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        if matches!(command.name(), "endSessions" | "killSessions")
            && let bson::raw::RawBsonRef::Array(sessions) = command.target()
        {
            for session in sessions.into_iter().map_while(Result::ok) {
                let Some(lsid) = session.as_document() else { continue };
                for cursor in self.context.shared.cursors.take_session(lsid.as_bytes()) {
                    kill(self, &cursor).await;
                }
                self.context.shared.transactions.end(lsid.as_bytes());
            }
        }
        let fast = self.bytes_for_fast(request)?;
        let reply = exchange(&self.context, Tier::Fast, &fast, Repeat::Freely).await;
        let archive = self.archive(request).await;
        match reply {
            Ok(reply) if !reply.view.ok => Ok(Answer {
                bytes: to_client(&self.context, reply, request.id, None),
                answered: Answered::Fast,
                reason: "sessions",
            }),
            Ok(_) => archive.map(|answer| Answer { reason: "sessions", ..answer }),
            Err(error) => Err(unreachable(Tier::Fast, &error, command)),
        }
    }
}

/// How a read inside a transaction can be answered.
pub(crate) enum TransactionRoute {
    /// By these keys, each looked for in the snapshot first.
    Points(Vec<Key>),
    /// The fast tier has everything, under the boundary the transaction holds.
    Covered,
    /// Only the archive could answer.
    NotCovered,
}
