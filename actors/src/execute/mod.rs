//! The data path: what a client's command becomes. Each thread has one engine; it decides with the
//! pure rules of the tiering crate and moves bytes between the client and the tiers.

pub mod commands;
pub mod cursors;
pub mod deadline;
pub mod faultin;
pub mod forward;
pub mod read;
pub mod refusal;
pub mod sessions;
pub mod write;

pub(crate) use archive::named_in_stage;

mod archive;
mod archived;
mod candidates;
mod cursor_commands;
mod insert;
mod look;
mod statements;

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bson::raw::RawDocument;
use bytes::{Bytes, BytesMut};
use halocline_cluster::moves::is_reserved;
use halocline_wire::{Command, MsgFlags, OpMsg, codes, encode_msg};

use crate::context::ThreadContext;
use crate::execute::commands::{Action, Entry};
use crate::execute::deadline::Deadline;
use crate::execute::forward::label;
use crate::execute::refusal::Refusal;
use crate::stats::Answered;

/// How often a command that waits for the lease to be renewed looks again.
const LEADERSHIP_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// A client's command on its way.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The message as it came.
    pub message: &'a OpMsg,
    /// The view over it.
    pub command: &'a Command<'a>,
    /// Its row in the command table; unknown commands have none.
    pub entry: Option<&'static Entry>,
    /// The client's id for it; replies name it.
    pub id: i32,
    /// When it must have ended.
    pub deadline: Deadline,
}

/// A reply, and what the metrics say of it.
pub struct Answer {
    /// A whole OP_MSG.
    pub bytes: Bytes,
    /// Who answered.
    pub answered: Answered,
    /// Why there: a label from a closed list.
    pub reason: &'static str,
}

/// See the module's description.
pub struct Engine {
    context: Rc<ThreadContext>,
}

impl Engine {
    /// An engine on the calling thread.
    #[must_use]
    pub fn new(context: Rc<ThreadContext>) -> Self {
        Self { context }
    }

    /// What the engine works with.
    #[must_use]
    pub fn context(&self) -> &Rc<ThreadContext> {
        &self.context
    }

    /// Runs one command. The reply is a whole message; a failure is an error reply.
    pub async fn answer(&self, message: &OpMsg, request_id: i32) -> Bytes {
        let began = Instant::now();
        let command = match Command::parse(message) {
            Ok(command) => command,
            Err(error) => {
                let refusal = Refusal::new(codes::FAILED_TO_PARSE, error.to_string());
                return self.refuse(&refusal, "invalid", "malformed", request_id, began);
            }
        };
        let entry = commands::lookup(command.name());
        let deadline = Deadline::new(
            began,
            command.max_time_ms(),
            self.context.shared.options.limits.operation_wait,
        );
        let request = Request { message, command: &command, entry, id: request_id, deadline };
        let label = entry.map_or("other", |entry| entry.name);
        match self.dispatch(&request).await {
            Ok(answer) => {
                self.context.recorder.request(
                    label,
                    answer.answered,
                    answer.reason,
                    began.elapsed(),
                );
                answer.bytes
            }
            Err(refusal) => self.refuse(&refusal, label, "refused", request_id, began),
        }
    }

    fn refuse(
        &self,
        refusal: &Refusal,
        label: &'static str,
        reason: &'static str,
        request_id: i32,
        began: Instant,
    ) -> Bytes {
        self.context.shared.stats.errors.fetch_add(1, Ordering::Relaxed);
        self.context.recorder.request(label, Answered::Local, reason, began.elapsed());
        document_reply(&refusal.document(), request_id)
    }

    async fn dispatch(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        if !self.context.shared.is_leader() {
            Box::pin(self.still_leading(request)).await?;
        }
        if command.lsid().is_some_and(is_reserved) {
            return Err(Refusal::new(
                codes::UNAUTHORIZED,
                "session ids that begin with \"haloclin\" are reserved for Halocline's own transactions; use another lsid",
            ));
        }
        if command.db() == "halocline" {
            return Err(Refusal::new(
                codes::UNAUTHORIZED,
                "the database \"halocline\" holds the daemon's own state on both tiers and is not served to clients",
            ));
        }
        let Some(entry) = request.entry else {
            return self.unknown(request).await;
        };
        let tiered = match entry.action {
            Action::Read(_) | Action::Write(_) | Action::ArchiveUnlessTiered(_) => command
                .collection()
                .and_then(|coll| self.context.shared.collection(command.db(), coll)),
            _ => None,
        };
        if command.in_transaction() {
            return Box::pin(self.in_transaction(request, entry, tiered)).await;
        }
        if let Action::Write(kind) = entry.action
            && archived::is_asked_for(command)
        {
            return Box::pin(self.write_archived(request, kind, tiered)).await;
        }
        if let (Action::Write(kind), Some(collection)) = (entry.action, tiered)
            && write::is_unacknowledged(command)
        {
            return Box::pin(self.write_unacknowledged(request, kind, collection)).await;
        }
        match (entry.action, tiered) {
            (Action::Read(kind), Some(collection)) => self.read(request, kind, collection).await,
            (Action::Write(kind), Some(collection)) => {
                Box::pin(self.write(request, kind, collection)).await
            }
            (Action::Read(_), None) => self.read_untiered(request).await,
            (Action::Write(_), None) | (Action::Archive, _) => self.archive(request).await,
            (Action::ArchiveUnlessTiered(why), named) => {
                Box::pin(self.definition(request, named.is_some(), why)).await
            }
            (Action::GetMore, _) => self.get_more(request).await,
            (Action::KillCursors, _) => Box::pin(self.kill_cursors(request)).await,
            (Action::Sessions, _) => Box::pin(self.sessions(request)).await,
            (Action::EndTransaction, _) => Box::pin(self.end_transaction(request)).await,
            (Action::Explain, _) => Box::pin(self.explain(request)).await,
            (Action::Local, _) => Err(Refusal::new(
                codes::INTERNAL_ERROR,
                "the handshake was not answered where it should have been",
            )),
            (Action::Refused(why), _) => Err(Refusal::unsupported(format!(
                "{} is not run through Halocline: {why}",
                command.name()
            ))),
        }
    }

    /// Passes while this daemon leads (protocol rule 32). A lease that could not be renewed in time
    /// is waited for: if it is renewed after all, nobody else has led in between, and what was read
    /// under it is still true.
    async fn still_leading(&self, request: &Request<'_>) -> Result<(), Refusal> {
        let shared = &self.context.shared;
        while !shared.is_leader() {
            if request.deadline.has_passed() || shared.draining.load(Ordering::Relaxed) {
                let refusal = Refusal::new(
                    codes::SHUTDOWN_IN_PROGRESS,
                    "this Halocline daemon does not lead its tiers (any more); connect to the one that does",
                );
                // Nothing has been done: a driver that knows the other daemon may repeat it there.
                return Err(label(refusal, request.command));
            }
            tokio::time::sleep(LEADERSHIP_PAUSE).await;
        }
        Ok(())
    }

    /// Unknown commands pass to the archive, unless they name a tiered collection: running them on
    /// one tier could be wrong, so they are refused.
    async fn unknown(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        if commands::is_member_command(command.name()) {
            return Err(Refusal::unsupported(format!(
                "{} concerns one member of a replica set; connect to that member directly",
                command.name()
            )));
        }
        let named = command
            .collection()
            .is_some_and(|coll| self.context.shared.collection(command.db(), coll).is_some());
        if named {
            return Err(Refusal::unsupported(format!(
                "Halocline does not know the command {} and will not run it on one tier of a tiered collection",
                command.name()
            )));
        }
        self.archive(request).await
    }
}

/// A whole OP_MSG reply with the given document.
#[must_use]
pub fn document_reply(document: &RawDocument, response_to: i32) -> Bytes {
    let mut out = BytesMut::new();
    encode_msg(0, response_to, MsgFlags::NONE, document, &[], &mut out);
    out.freeze()
}
