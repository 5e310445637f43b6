//! Sending a command to a tier and making its reply fit for a client: safe repeats after a broken
//! connection or an election, cursor ids of our own, one clock.

use std::sync::Arc;
use std::time::Instant;

use bson::raw::RawDocument;
use bytes::{Bytes, BytesMut};
use halocline_cluster::{ClusterError, ServerAddress, Tier};
use halocline_tiering::time::ClusterTime;
use halocline_wire::patch::{Edit, ReplyView, rewrite, set_response_to};
use halocline_wire::{Command, MsgFlags, OpMsg, WireError, codes};

use crate::context::ThreadContext;
use crate::execute::cursors::Cursor;
use crate::execute::refusal::{RETRYABLE_WRITE, Refusal, TRANSIENT_TRANSACTION};
use crate::shared::Boundary;
use crate::stats::Answered;

/// Times a command that may be repeated is sent in all. An election takes one repeat; a second one
/// covers the election that follows a failed one.
const TRIES: u32 = 3;

/// Whether a command whose outcome is unknown may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// A read, or anything else that may run twice.
    Freely,
    /// A retryable write: the server's own record makes the second time harmless.
    ByRecord,
    /// Neither: the client is told that the outcome is unknown.
    Never,
}

/// A tier's reply, with its fields located.
pub struct TierReply {
    /// The whole message.
    pub message: Bytes,
    /// What it says.
    pub view: ReplyView,
    /// Who answered, if the reply opens a cursor there.
    pub server: Option<ServerAddress>,
    /// The tier.
    pub tier: Tier,
}

impl TierReply {
    /// `$clusterTime` of the reply: no older than what it reflects (rule 11).
    ///
    /// # Errors
    /// When the reply has none, without which no barrier can be passed.
    pub fn time(&self) -> Result<ClusterTime, Refusal> {
        self.view.cluster_time.map(ClusterTime::from).ok_or_else(|| no_clock(self.tier))
    }

    /// The documents of the reply's batch.
    pub fn rows(&self) -> impl Iterator<Item = &RawDocument> {
        self.view.cursor.iter().flat_map(|cursor| cursor.documents(&self.message))
    }

    /// The reply's document.
    #[must_use]
    pub fn body(&self) -> Option<&RawDocument> {
        self.message.get(self.view.body.clone()).and_then(|b| RawDocument::from_bytes(b).ok())
    }
}

/// A member of a replica set always tells its clock; without it nothing can be said about order.
#[must_use]
pub fn no_clock(tier: Tier) -> Refusal {
    Refusal::new(
        codes::INTERNAL_ERROR,
        format!("a reply of the {tier} carries no $clusterTime; is it a replica set?"),
    )
}

/// How a command may be repeated, from its own fields.
#[must_use]
pub fn repeat_of(command: &Command<'_>, reads_only: bool) -> Repeat {
    if command.in_transaction() {
        Repeat::Never
    } else if reads_only {
        Repeat::Freely
    } else if command.txn_number().is_some() && command.lsid().is_some() {
        Repeat::ByRecord
    } else {
        Repeat::Never
    }
}

/// Sends whole OP_MSG bytes to a tier's primary and waits for the reply.
///
/// # Errors
/// When the tier could not be reached, or the outcome is unknown and must not be repeated.
pub async fn exchange(
    context: &ThreadContext,
    tier: Tier,
    bytes: &[u8],
    repeat: Repeat,
) -> Result<TierReply, ClusterError> {
    let pool = context.pool(tier);
    let mut tries = 1;
    loop {
        let mut connection = pool.primary().await?;
        let begun = Instant::now();
        let result = connection.exchange(bytes).await;
        context.recorder.backend(answered_by(tier), begun.elapsed());
        let error = match result {
            Ok(message) => {
                let view = ReplyView::parse(&message).unwrap_or_default();
                let opens = view.cursor.as_ref().is_some_and(|cursor| cursor.id != 0);
                let server = opens.then(|| connection.address().clone());
                let reply = TierReply { message, view, server, tier };
                if reply.view.ok || !is_not_primary(&reply) {
                    context.note_time(&reply);
                    return Ok(reply);
                }
                pool.note_not_primary(connection.address());
                if tries >= TRIES || repeat == Repeat::Never {
                    return Ok(reply);
                }
                None
            }
            Err(error) => Some(error),
        };
        if let Some(error) = error
            && (tries >= TRIES || repeat == Repeat::Never || !error.is_network())
        {
            return Err(error);
        }
        tries += 1;
    }
}

/// Sends to one certain server: a cursor lives where it was opened.
///
/// # Errors
/// When that server cannot be reached.
pub async fn exchange_with(
    context: &ThreadContext,
    tier: Tier,
    server: &ServerAddress,
    bytes: &[u8],
) -> Result<TierReply, ClusterError> {
    let mut connection = context.pool(tier).server(server).await?;
    let begun = Instant::now();
    let message = connection.exchange(bytes).await?;
    context.recorder.backend(answered_by(tier), begun.elapsed());
    let view = ReplyView::parse(&message).unwrap_or_default();
    let reply = TierReply { message, view, server: Some(server.clone()), tier };
    context.note_time(&reply);
    Ok(reply)
}

fn answered_by(tier: Tier) -> Answered {
    match tier {
        Tier::Fast => Answered::Fast,
        Tier::Archive => Answered::Archive,
    }
}

/// Whether a reply says that its server is not (or no longer) the primary.
#[must_use]
pub fn is_not_primary(reply: &TierReply) -> bool {
    reply
        .body()
        .is_some_and(|body| halocline_cluster::ServerError::from_document(body).is_not_primary())
}

/// The client's command as it goes to a tier. The archive has a clock of its own: times of the
/// fast tier's clock are left out there and `after` stands in for them.
///
/// # Errors
/// When the message cannot be rewritten, which a parsed message always can.
pub fn request_for(
    tier: Tier,
    message: &OpMsg,
    command: &Command<'_>,
    edits: &[Edit<'_>],
) -> Result<Bytes, WireError> {
    let mut all: smallvec::SmallVec<[Edit<'_>; 6]> = edits.into();
    if tier == Tier::Archive {
        if command.cluster_time().is_some() {
            all.push(Edit::Drop("$clusterTime"));
        }
        let sets_time = edits
            .iter()
            .any(|edit| matches!(edit, Edit::SetIn("readConcern", "afterClusterTime", _)));
        if command.after_cluster_time().is_some() && !sets_time {
            all.push(Edit::DropIn("readConcern", "afterClusterTime"));
        }
    }
    if all.is_empty() && !message.more_to_come() {
        return Ok(message.bytes().clone());
    }
    let mut out = BytesMut::with_capacity(message.bytes().len() + 64);
    rewrite(message, &all, &mut out)?;
    clear_more_to_come(message, &mut out);
    Ok(out.freeze())
}

/// Even a command that wants no reply is answered to Halocline, which must see what became of it.
fn clear_more_to_come(message: &OpMsg, out: &mut BytesMut) {
    if !message.more_to_come() {
        return;
    }
    if let Some(flags) = out.get_mut(16..20) {
        let kept = message.flags().0 & !MsgFlags::MORE_TO_COME.0;
        flags.copy_from_slice(&kept.to_le_bytes());
    }
    // Setting an id again makes the checksum right, if there is one.
    let _ = set_response_to(out, 0);
}

/// What becomes of a cursor that a reply opens.
pub struct CursorTerms<'a> {
    /// Whether the namespace is tiered.
    pub tiered: bool,
    /// The reason label of its first batch.
    pub reason: &'static str,
    /// Held while the cursor is open (rule 30).
    pub hold: Option<Arc<Boundary>>,
    /// The command that opened it.
    pub command: &'a Command<'a>,
}

/// Makes a tier's reply the client's: names an open cursor, sets the clock.
#[must_use]
pub fn to_client(
    context: &ThreadContext,
    reply: TierReply,
    response_to: i32,
    terms: Option<CursorTerms<'_>>,
) -> Bytes {
    let TierReply { message, mut view, server, tier } = reply;
    let opens = view.cursor.as_ref().map(|c| c.id).filter(|id| *id != 0);
    let foreign_clock =
        tier == Tier::Archive && (view.cluster_time.is_some() || view.operation_time.is_some());
    let answers = message.get(8..12).and_then(|b| b.first_chunk()).map(|b| i32::from_le_bytes(*b));
    if opens.is_none() && !foreign_clock && answers == Some(response_to) {
        return message;
    }
    let mut message = message.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
    if let (Some(id), Some(terms), Some(server)) = (opens, terms, server) {
        let ns = cursor_namespace(&message, &view).unwrap_or_default();
        let lsid = terms.command.lsid().map(|l| l.as_bytes().to_vec());
        let immortal = matches!(
            terms.command.get("noCursorTimeout"),
            Some(bson::raw::RawBsonRef::Boolean(true))
        );
        let cursor = Cursor {
            tier,
            server,
            id,
            ns,
            tiered: terms.tiered,
            reason: terms.reason,
            hold: terms.hold,
            lsid,
            immortal,
        };
        let ours = context.shared.cursors.insert(cursor, Instant::now());
        let _ = view.set_cursor_id(&mut message, ours);
    }
    if foreign_clock {
        context.set_client_clock(&mut view, &mut message);
    }
    let _ = set_response_to(&mut message, response_to);
    message.freeze()
}

/// The namespace a reply's cursor belongs to, as its `getMore` must name it.
fn cursor_namespace(message: &[u8], view: &ReplyView) -> Option<String> {
    let body = RawDocument::from_bytes(message.get(view.body.clone())?).ok()?;
    body.get_document("cursor").ok()?.get_str("ns").ok().map(ToOwned::to_owned)
}

/// What a client is told when a tier did not answer, with the labels that make its driver do the
/// right thing.
#[must_use]
pub fn unreachable(tier: Tier, error: &ClusterError, command: &Command<'_>) -> Refusal {
    let refusal = match error.server() {
        // Nothing the tier said may make a driver take Halocline itself for a stepped-down primary.
        Some(server) if !server.is_not_primary() => Refusal {
            verbatim: Some(server.document.clone()),
            ..Refusal::new(server.code, server.message.clone())
        },
        _ => Refusal::unreachable(tier, error),
    };
    label(refusal, command)
}

/// A tier's reply that says "not primary", as a refusal drivers repeat without forgetting Halocline.
#[must_use]
pub fn stepped_down(tier: Tier, command: &Command<'_>) -> Refusal {
    let refusal = Refusal::new(
        codes::HOST_UNREACHABLE,
        format!("the primary of the {tier} stepped down while Halocline waited for its answer"),
    );
    label(refusal, command)
}

/// The label that makes a driver run a command, or its whole transaction, once more.
pub(crate) fn label(refusal: Refusal, command: &Command<'_>) -> Refusal {
    if command.in_transaction() && command.name() != "commitTransaction" {
        refusal.labelled(TRANSIENT_TRANSACTION)
    } else if command.txn_number().is_some() {
        refusal.labelled(RETRYABLE_WRITE)
    } else {
        refusal
    }
}
