//! Panics on demand, for tests of supervision: an actor calls `checkpoint` with its kind, or with
//! `kind/place`, where a bug would hurt most. Compiled to nothing without the feature `test-hooks`;
//! no production code lives here.

/// Where an actor of this kind may be made to panic. Does nothing unless a test armed it.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub fn checkpoint(_kind: &str) {}

#[cfg(feature = "test-hooks")]
pub use armed::{PANIC_AT, PANIC_FILE, arm, checkpoint, disarm, remaining};

#[cfg(feature = "test-hooks")]
mod armed {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    /// Environment variable read at the first checkpoint: `kind` or `kind:times`, comma separated,
    /// such as `feeder,router:3`.
    pub const PANIC_AT: &str = "HALOCLINE_PANIC_AT";

    /// Environment variable that names a file. Whatever is put there later, in the form of
    /// [`PANIC_AT`], arms the running process; the file is gone once that has happened. It must
    /// appear whole, by a rename.
    pub const PANIC_FILE: &str = "HALOCLINE_PANIC_FILE";

    /// How often checkpoints look for that file: a look is a system call, and a busy daemon passes
    /// ten thousand checkpoints a second.
    const LOOK_EVERY: Duration = Duration::from_millis(20);

    static ARMED: LazyLock<Mutex<BTreeMap<String, u32>>> = LazyLock::new(|| {
        let armed = std::env::var(PANIC_AT).map(|value| parse(&value)).unwrap_or_default();
        Mutex::new(armed)
    });

    /// The next `times` checkpoints of this kind panic.
    pub fn arm(kind: &str, times: u32) {
        ARMED.lock().insert(kind.to_owned(), times);
    }

    /// Checkpoints of this kind do nothing from now on.
    pub fn disarm(kind: &str) {
        ARMED.lock().remove(kind);
    }

    /// How many checkpoints of this kind are still going to panic.
    pub fn remaining(kind: &str) -> u32 {
        ARMED.lock().get(kind).copied().unwrap_or(0)
    }

    /// Where an actor of this kind may be made to panic. Does nothing unless a test armed it.
    #[expect(clippy::panic, reason = "panicking is what the hook is for")]
    pub fn checkpoint(kind: &str) {
        take_orders();
        let fires = match ARMED.lock().get_mut(kind) {
            Some(times) if *times > 0 => {
                *times -= 1;
                true
            }
            _ => false,
        };
        if fires {
            panic!("injected at a checkpoint of {kind}");
        }
    }

    /// Arms what has been written to the file of [`PANIC_FILE`] since the last look.
    fn take_orders() {
        static ORDERS: LazyLock<Option<(PathBuf, Instant)>> = LazyLock::new(|| {
            let file = std::env::var_os(PANIC_FILE)?;
            tracing::warn!(?file, "this build can be told to panic; it is for tests only");
            Some((file.into(), Instant::now()))
        });
        /// Milliseconds after the first checkpoint.
        static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);
        let Some((file, began)) = ORDERS.as_ref() else { return };
        let now = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let due = NEXT_LOOK.load(Ordering::Relaxed);
        let next = now.saturating_add(LOOK_EVERY.as_millis() as u64);
        let mine = now >= due
            && NEXT_LOOK.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine {
            arm_from(file);
        }
    }

    fn arm_from(file: &Path) {
        // Not there is the ordinary case.
        let Ok(orders) = std::fs::read_to_string(file) else { return };
        ARMED.lock().extend(parse(&orders));
        if let Err(error) = std::fs::remove_file(file) {
            tracing::error!(?file, %error, "the file would arm the hook again and again");
        }
    }

    fn parse(value: &str) -> BTreeMap<String, u32> {
        let mut armed = BTreeMap::new();
        for entry in value.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (kind, times) = match entry.split_once(':') {
                None => (entry, Ok(1)),
                Some((kind, times)) => (kind, times.parse()),
            };
            match times {
                Ok(times) => {
                    armed.insert(kind.to_owned(), times);
                }
                Err(_) => tracing::error!(entry, "{PANIC_AT} wants 'kind' or 'kind:times'"),
            }
        }
        armed
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn entries_are_kinds_with_an_optional_count() {
            let armed = parse("feeder, router:3,,applier:x");
            assert_eq!(armed, BTreeMap::from([("feeder".to_owned(), 1), ("router".to_owned(), 3)]));
        }

        #[test]
        fn a_file_arms_once_and_is_gone_then() {
            let file = std::env::temp_dir().join(format!("panic-at-{}", std::process::id()));
            std::fs::write(&file, "kind-from-a-file:2\n").unwrap();
            arm_from(&file);
            assert_eq!(remaining("kind-from-a-file"), 2);
            disarm("kind-from-a-file");
            arm_from(&file);
            assert_eq!(remaining("kind-from-a-file"), 0);
        }

        #[test]
        fn an_armed_kind_panics_as_often_as_told_and_no_other_kind_does() {
            arm("armed-kind", 2);
            checkpoint("another-kind");
            for left in [1, 0] {
                assert!(std::panic::catch_unwind(|| checkpoint("armed-kind")).is_err());
                assert_eq!(remaining("armed-kind"), left);
            }
            checkpoint("armed-kind");
            arm("armed-kind", 1);
            disarm("armed-kind");
            checkpoint("armed-kind");
        }
    }
}
