//! Which lanes carry a command now, and which have carried none for so long that they need one of
//! their own. What is written on them is the feeder's and the appliers' business.

use std::time::{Duration, Instant};

/// The lanes of one incarnation of the feeder.
#[derive(Debug)]
pub struct LaneUse(Vec<Use>);

#[derive(Debug, Clone, Copy)]
struct Use {
    /// A command is under way; no second one may be sent (protocol rule 7).
    busy: bool,
    written: Instant,
}

impl LaneUse {
    /// All free, and written on just now.
    #[must_use]
    pub fn new(lanes: usize, now: Instant) -> Self {
        Self(vec![Use { busy: false, written: now }; lanes])
    }

    /// Whether a command may be sent on the lane.
    #[must_use]
    pub fn is_free(&self, lane: usize) -> bool {
        self.0.get(lane).is_some_and(|lane| !lane.busy)
    }

    /// A command is sent on the lane.
    pub fn begin(&mut self, lane: usize) {
        if let Some(lane) = self.0.get_mut(lane) {
            lane.busy = true;
        }
    }

    /// The command has ended; whether it is known to have written anything.
    pub fn end(&mut self, lane: usize, wrote: bool, now: Instant) {
        if let Some(lane) = self.0.get_mut(lane) {
            lane.busy = false;
            if wrote {
                lane.written = now;
            }
        }
    }

    /// Begins a command on every free lane that nothing has been written on for that long, and says
    /// which they are.
    pub fn begin_idle(&mut self, idle_for: Duration, now: Instant) -> Vec<usize> {
        let mut idle = Vec::new();
        for (number, lane) in self.0.iter_mut().enumerate() {
            if !lane.busy && now.saturating_duration_since(lane.written) >= idle_for {
                lane.busy = true;
                idle.push(number);
            }
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Holds: one command at a time on a lane. A refresh that did not occupy its lanes met the
    /// batches sent meanwhile, which ended the feeder's incarnation once a minute under load.
    #[test]
    fn a_lane_that_is_being_refreshed_carries_nothing_else() {
        let start = Instant::now();
        let mut lanes = LaneUse::new(3, start);
        lanes.begin(1);
        assert_eq!(lanes.begin_idle(MINUTE, start + MINUTE), [0, 2]);
        assert!((0..3).all(|lane| !lanes.is_free(lane)));
        assert!(lanes.begin_idle(MINUTE, start + 2 * MINUTE).is_empty());
        lanes.end(0, true, start + MINUTE);
        assert!(lanes.is_free(0) && !lanes.is_free(1) && !lanes.is_free(2));
    }

    #[test]
    fn lanes_that_are_written_on_need_no_refresh() {
        let start = Instant::now();
        let mut lanes = LaneUse::new(2, start);
        for lane in [0, 1] {
            lanes.begin(lane);
            // A batch may turn out to have nothing to write.
            lanes.end(lane, lane == 0, start + MINUTE);
        }
        assert_eq!(lanes.begin_idle(MINUTE, start + MINUTE), [1]);
    }
}
