//! One operation's time: `maxTimeMS` is one budget over all steps, whichever tier they run on.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::execute::refusal::Refusal;

/// When an operation must have ended.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    began: Instant,
    ends: Instant,
    /// Whether the client set it.
    asked: bool,
}

impl Deadline {
    /// From the client's `maxTimeMS`, else the daemon's own limit on waiting.
    #[must_use]
    pub fn new(began: Instant, max_time_ms: Option<i64>, default: Duration) -> Self {
        let asked = max_time_ms.and_then(|ms| u64::try_from(ms).ok()).filter(|ms| *ms > 0);
        let length = asked.map_or(default, Duration::from_millis);
        Self { began, ends: began + length, asked: asked.is_some() }
    }

    /// When the operation began.
    #[must_use]
    pub fn began(&self) -> Instant {
        self.began
    }

    /// What is left of the client's own `maxTimeMS`, at least one millisecond.
    #[must_use]
    pub fn max_time_ms_left(&self) -> Option<i64> {
        let left = self.ends.saturating_duration_since(Instant::now()).as_millis();
        self.asked.then(|| i64::try_from(left).unwrap_or(i64::MAX).max(1))
    }

    /// Whether the time is used up.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        Instant::now() >= self.ends
    }

    /// Waits within the time that is left.
    ///
    /// # Errors
    /// 50 `MaxTimeMSExpired`, naming what was waited for.
    pub async fn within<T>(
        &self,
        waited_for: &str,
        work: impl Future<Output = T>,
    ) -> Result<T, Refusal> {
        tokio::time::timeout_at(self.ends.into(), work)
            .await
            .map_err(|_| Refusal::timed_out(waited_for))
    }
}
