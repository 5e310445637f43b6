//! The write concern `{w: "archived"}`: acknowledged only when the archive has the write, durable at
//! majority. The fast tier is asked for majority; then the archive is waited for, within `wtimeout`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bson::raw::{RawBsonRef, RawDocument};
use bson::rawdoc;
use bytes::BytesMut;
use halocline_tiering::time::ClusterTime;
use halocline_wire::patch::{Edit, ReplyView, rewrite};
use halocline_wire::{Command, Limits, OpMsg, WireError, codes};

use crate::execute::commands::Write;
use crate::execute::refusal::Refusal;
use crate::execute::{Answer, Engine, Request, document_reply};
use crate::shared::Collection;

/// The name of the write concern.
const ARCHIVED: &str = "archived";

/// Whether a command asks for it.
pub(crate) fn is_asked_for(command: &Command<'_>) -> bool {
    command.write_concern().is_some_and(|concern| concern.get_str("w").ok() == Some(ARCHIVED))
}

impl Engine {
    /// Runs a write and waits until the archive has it. An untiered write runs on the archive, so
    /// its majority is all there is to wait for.
    pub(crate) async fn write_archived(
        &self,
        request: &Request<'_>,
        kind: Write,
        collection: Option<&Arc<Collection>>,
    ) -> Result<Answer, Refusal> {
        let patience = request.command.write_concern().and_then(wtimeout);
        let message = with_majority(request.message)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        let command = Command::parse(&message)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        let majority = Request { message: &message, command: &command, ..*request };
        let Some(collection) = collection else { return self.archive(&majority).await };

        let begun = Instant::now();
        let answer = self.write(&majority, kind, collection).await?;
        let view = ReplyView::parse(&answer.bytes).unwrap_or_default();
        if !view.ok || view.has_write_concern_error {
            return Ok(answer);
        }
        let Some(at) = view.cluster_time.map(ClusterTime::from) else {
            return Err(crate::execute::forward::no_clock(halocline_cluster::Tier::Fast));
        };
        let barrier = self.context().shared.progress.range_barrier(collection.id, at);
        let waited = match patience {
            Some(patience) => {
                tokio::time::timeout(patience.saturating_sub(begun.elapsed()), barrier)
                    .await
                    .is_ok()
            }
            None => {
                barrier.await;
                true
            }
        };
        if waited {
            return Ok(answer);
        }
        let body =
            answer.bytes.get(view.body.clone()).and_then(|b| RawDocument::from_bytes(b).ok());
        let mut reply = body.map(ToOwned::to_owned).unwrap_or_default();
        reply.append(bson::cstr!("writeConcernError"), timed_out());
        Ok(Answer { bytes: document_reply(&reply, request.id), ..answer })
    }
}

/// `wtimeout`: absent or 0 waits without limit, as on a server.
fn wtimeout(concern: &RawDocument) -> Option<Duration> {
    let millis = match concern.get("wtimeout").ok()?? {
        RawBsonRef::Int32(n) => u64::try_from(n).ok()?,
        RawBsonRef::Int64(n) => u64::try_from(n).ok()?,
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        RawBsonRef::Double(n) if n > 0.0 => n as u64,
        _ => return None,
    };
    (millis > 0).then(|| Duration::from_millis(millis))
}

/// The message with `w: "majority"` in place of `w: "archived"`.
fn with_majority(message: &OpMsg) -> Result<OpMsg, WireError> {
    let mut out = BytesMut::new();
    let edit = Edit::SetIn("writeConcern", "w", RawBsonRef::String("majority"));
    rewrite(message, &[edit], &mut out)?;
    OpMsg::from_bytes(out.freeze(), &Limits::CLIENT)
}

/// What a server says when `wtimeout` has passed.
fn timed_out() -> bson::RawDocumentBuf {
    rawdoc! {
        "code": codes::WRITE_CONCERN_TIMEOUT,
        // Its name up to release 8.0.
        "codeName": "WriteConcernFailed",
        "errmsg": "waiting for replication timed out",
        "errInfo": { "wtimeout": true, "writeConcern": { "w": ARCHIVED } },
    }
}
