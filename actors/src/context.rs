//! What one thread owns: its pools to both tiers, its reserved sessions for moves, its recorder.
//! Everything here is `!Send`; actors and tasks of one arbiter share it through an `Rc`.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use bson::Timestamp;
use bson::raw::{RawDocument, RawDocumentBuf};
use halocline_cluster::moves::MoveSessions;
use halocline_cluster::{Pool, Tier};
use halocline_wire::patch::ReplyView;

use crate::execute::forward::TierReply;

use crate::shared::Shared;
use crate::stats::Recorder;

/// See the module's description.
pub struct ThreadContext {
    /// What all threads share.
    pub shared: Arc<Shared>,
    /// Connections to the fast tier.
    pub fast: Pool,
    /// Connections to the archive.
    pub archive: Pool,
    /// Reserved session ids for moves.
    pub moves: MoveSessions,
    /// Counts and times.
    pub recorder: Recorder,
    /// Request ids of commands the daemon makes itself.
    next_request: Cell<i32>,
    /// The newest of the fast tier's clock this thread has seen: the one clock clients know.
    clock: RefCell<Option<ClientClock>>,
}

/// `$clusterTime` as the fast tier signed it, and its time.
struct ClientClock {
    time: Timestamp,
    signed: RawDocumentBuf,
}

thread_local! {
    // Weak: connections must close while their thread's runtime still stands, which is when the
    // last actor goes, and not when the thread's own variables are destroyed.
    static CURRENT: RefCell<Weak<ThreadContext>> = const { RefCell::new(Weak::new()) };
}

impl ThreadContext {
    /// The calling thread's context: made on first use, and again when nobody had kept it.
    #[must_use]
    pub fn current(shared: &Arc<Shared>) -> Rc<Self> {
        CURRENT.with_borrow_mut(|current| {
            if let Some(made) = current.upgrade()
                && Arc::ptr_eq(&made.shared, shared)
            {
                return made;
            }
            let made = Rc::new(Self::new(shared.clone()));
            *current = Rc::downgrade(&made);
            made
        })
    }

    fn new(shared: Arc<Shared>) -> Self {
        Self {
            fast: Pool::new(shared.fast.clone()),
            archive: Pool::new(shared.archive.clone()),
            moves: MoveSessions::default(),
            recorder: shared.stats.recorder(),
            next_request: Cell::new(1),
            clock: RefCell::new(None),
            shared,
        }
    }

    /// The pool of a tier.
    #[must_use]
    pub fn pool(&self, tier: Tier) -> &Pool {
        match tier {
            Tier::Fast => &self.fast,
            Tier::Archive => &self.archive,
        }
    }

    /// A request id for a command of the daemon's own.
    #[must_use]
    pub fn request_id(&self) -> i32 {
        let id = self.next_request.get();
        self.next_request.set(id.wrapping_add(1).max(1));
        id
    }

    /// Remembers the fast tier's clock from a reply of its.
    pub fn note_time(&self, reply: &TierReply) {
        let Some(time) = reply.view.cluster_time else { return };
        if reply.tier != Tier::Fast {
            return;
        }
        let mut clock = self.clock.borrow_mut();
        if clock.as_ref().is_some_and(|known| known.time >= time) {
            return;
        }
        let signed = reply.body().and_then(|body| body.get_document("$clusterTime").ok());
        if let Some(signed) = signed {
            *clock = Some(ClientClock { time, signed: signed.to_owned() });
        }
    }

    /// Whether this thread has seen the fast tier's clock.
    #[must_use]
    pub fn knows_client_clock(&self) -> bool {
        self.clock.borrow().is_some()
    }

    /// Replaces the archive's clock in a reply by the one clients know. Before this thread has
    /// seen the fast tier's, the archive's times are made harmless: the beginning of time.
    pub fn set_client_clock(&self, view: &mut ReplyView, message: &mut [u8]) {
        let clock = self.clock.borrow();
        let time = clock.as_ref().map_or(Timestamp { time: 0, increment: 1 }, |c| c.time);
        let signed: Option<&RawDocument> = clock.as_ref().map(|c| c.signed.as_ref());
        if view.operation_time.is_some() {
            // Both fields were found by the view itself, so they can be set.
            let _ = view.set_operation_time(message, time);
        }
        if let Some(signed) = signed {
            let _ = view.set_cluster_time(message, signed);
        }
    }
}
