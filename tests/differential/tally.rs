//! Counts of what was sent and what was refused by design, by command: a proxy that refuses too much
//! must show here.

use std::collections::BTreeMap;
use std::fmt;

/// See the module's description.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    commands: BTreeMap<String, Counts>,
    refusals: BTreeMap<(String, i32), u64>,
    /// Transactions run again because a document had to be brought in, or moved meanwhile.
    pub rerun: u64,
    /// Statements whose choice among several documents the plain set followed.
    pub followed: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    sent: u64,
    errors: u64,
    refused: u64,
    /// Refused as the case meant it to be.
    meant: u64,
}

impl Tally {
    /// A reply that was compared.
    pub fn answered(&mut self, command: &str, error: bool) {
        let counts = self.commands.entry(command.to_owned()).or_default();
        counts.sent += 1;
        counts.errors += u64::from(error);
    }

    /// A refusal by design.
    pub fn refused(&mut self, command: &str, code: i32, meant: bool) {
        let counts = self.commands.entry(command.to_owned()).or_default();
        counts.sent += 1;
        counts.refused += 1;
        counts.meant += u64::from(meant);
        *self.refusals.entry((command.to_owned(), code)).or_default() += 1;
    }

    /// All commands.
    pub fn sent(&self) -> u64 {
        self.commands.values().map(|counts| counts.sent).sum()
    }

    /// Refusals that the command did not ask for.
    pub fn refused_unasked(&self) -> u64 {
        self.commands.values().map(|counts| counts.refused - counts.meant).sum()
    }

    pub fn add(&mut self, other: &Self) {
        for (command, counts) in &other.commands {
            let sum = self.commands.entry(command.clone()).or_default();
            sum.sent += counts.sent;
            sum.errors += counts.errors;
            sum.refused += counts.refused;
            sum.meant += counts.meant;
        }
        for (which, count) in &other.refusals {
            *self.refusals.entry(which.clone()).or_default() += count;
        }
        self.rerun += other.rerun;
        self.followed += other.followed;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<20} {:>7} {:>7} {:>8} {:>7}",
            "command", "sent", "errors", "refused", "meant"
        )?;
        for (command, Counts { sent, errors, refused, meant }) in &self.commands {
            writeln!(f, "{command:<20} {sent:>7} {errors:>7} {refused:>8} {meant:>7}")?;
        }
        for ((command, code), count) in &self.refusals {
            writeln!(f, "  {command} refused with {code}: {count}")?;
        }
        write!(f, "transactions run again {}, choices followed {}", self.rerun, self.followed)
    }
}
