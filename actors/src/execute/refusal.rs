//! Errors the daemon answers with. A client sees MongoDB's own codes and labels, so that its driver
//! does the right thing, and a message that says what happened, why, and what to do.

use bson::raw::RawDocumentBuf;
use halocline_cluster::{ClusterError, Tier};
use halocline_wire::codes;
use halocline_wire::error_document;

/// Makes drivers repeat a write that may not have happened, under the same transaction number.
pub const RETRYABLE_WRITE: &str = "RetryableWriteError";
/// Makes drivers run a whole transaction again.
pub const TRANSIENT_TRANSACTION: &str = "TransientTransactionError";

/// An error reply in the making.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// MongoDB's code.
    pub code: i32,
    /// What happened, why, and what to do.
    pub message: String,
    /// Error labels.
    pub labels: Vec<&'static str>,
    /// A server's own error document, passed on as it came.
    pub verbatim: Option<RawDocumentBuf>,
}

impl Refusal {
    /// An error without labels.
    #[must_use]
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), labels: Vec::new(), verbatim: None }
    }

    /// 115: Halocline cannot keep its promise for this command.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(codes::COMMAND_NOT_SUPPORTED, message)
    }

    /// 50: the operation's time is used up.
    #[must_use]
    pub fn timed_out(waited_for: &str) -> Self {
        Self::new(
            codes::MAX_TIME_MS_EXPIRED,
            format!("operation exceeded its time limit while Halocline waited for {waited_for}"),
        )
    }

    /// Adds a label.
    #[must_use]
    pub fn labelled(mut self, label: &'static str) -> Self {
        if !self.labels.contains(&label) {
            self.labels.push(label);
        }
        self
    }

    /// A tier did not answer. Drivers repeat reads and retryable writes on this code once, after
    /// selecting a server again; unlike a "not primary" code it does not make them forget Halocline.
    #[must_use]
    pub fn unreachable(tier: Tier, error: &ClusterError) -> Self {
        Self::new(
            codes::HOST_UNREACHABLE,
            format!("Halocline could not reach a primary of the {tier}: {error}"),
        )
    }

    /// The reply document.
    #[must_use]
    pub fn document(&self) -> RawDocumentBuf {
        match &self.verbatim {
            Some(document) => document.clone(),
            None => {
                error_document(self.code, codes::code_name(self.code), &self.message, &self.labels)
            }
        }
    }
}
