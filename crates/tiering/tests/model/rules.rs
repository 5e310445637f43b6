//! The rules of the tiering protocol that the model can do without, one at a time: a rule whose
//! absence breaks nothing is not needed, or not modelled.

/// A rule, or a part of one. Numbers are those of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// 2: a key that changed during its flush stays pending.
    Dirty,
    /// 2: the end of an earlier incarnation's flush ends nothing.
    Ticket,
    /// 4: an absence is judged when everything up to that read is ingested.
    AbsenceWaits,
    /// 4: a key that is absent after an upsert was evicted.
    Evicted,
    /// 5: flush reads are no older than what is ingested, or than the lanes' closing.
    ReadsNotOlder,
    /// 6: the persisted position does not pass `applied`.
    PositionBehindApplied,
    /// 6: the first position is persisted before clients are served.
    FirstPosition,
    /// 7: the archive refuses a lane's older numbers.
    LaneNumbers,
    /// 7: after an unknown outcome a lane goes on with a higher number.
    HigherNumber,
    /// 8: lanes are closed before the first flush read.
    LanesClosedFirst,
    /// 9: a move's delete is no client's delete.
    MovesMarked,
    /// 11: a barrier's time is no older than the answer it is for.
    AnswersTime,
    /// 12: ingested first, pending second.
    IngestedFirst,
    /// 12: both in one incarnation.
    OneIncarnation,
    /// 14: a read that the archive answers waits until it reflects that moment.
    RangeBarrier,
    /// 16: a point read of the archive waits for its barrier.
    ReadBarrier,
    /// 18: the archive is read after the snapshot has opened.
    SnapshotFirst,
    /// 18: behind a barrier.
    FaultInBarrier,
    /// 18: a fault-in is a transaction.
    FaultInTransaction,
    /// 19: an insert or upsert proves absence on the archive.
    ProofOfAbsence,
    /// 19: behind a barrier.
    ProofBarrier,
    /// 20: what changed lately is not evicted.
    Residency,
    /// 20: nor what an insert or upsert under way has pinned.
    Pin,
    /// 20: an insert or upsert of a key that is past an eviction's last look waits for that to end.
    Leaving,
    /// 26: an eviction waits for its barrier.
    EvictionBarrier,
    /// 26: an eviction is a transaction.
    EvictionTransaction,
    /// 27: a warm-up waits for its barrier.
    WarmBarrier,
    /// 27: a warm-up is a transaction.
    WarmTransaction,
    /// 27: a range is not declared complete if any of it was evicted meanwhile.
    NothingEvictedMeanwhile,
    /// 28: moves write the boundary document, so that they conflict with each other.
    MovesConflict,
    /// 28: a move does not commit under another raise epoch than it began under.
    RaiseEpoch,
    /// 28: late news of a lower boundary does not undo a raise.
    OrderedNews,
    /// 30: the boundary rises before what is below it goes.
    RaiseFirst,
    /// 30: whoever relies on the old boundary is waited for.
    Holds,
    /// 30: nothing goes that the stored boundary covers, however high it was at the round's start.
    OnlyUncovered,
    /// 30, 32: who does not lead does not answer from what it believes covered.
    LeaderAnswers,
    /// 19, 32: a command that relies on a proof or a pin is sent by a leader.
    LeaderCommands,
    /// 30, 32: who does not lead does not raise or evict.
    LeaderMoves,
}

impl Rule {
    /// The number on the protocol page.
    pub fn number(self) -> &'static str {
        match self {
            Self::Dirty | Self::Ticket => "2",
            Self::AbsenceWaits | Self::Evicted => "4",
            Self::ReadsNotOlder => "5",
            Self::PositionBehindApplied | Self::FirstPosition => "6",
            Self::LaneNumbers | Self::HigherNumber => "7",
            Self::LanesClosedFirst => "8",
            Self::MovesMarked => "9",
            Self::AnswersTime => "11",
            Self::IngestedFirst | Self::OneIncarnation => "12",
            Self::RangeBarrier => "14",
            Self::ReadBarrier => "16",
            Self::SnapshotFirst | Self::FaultInBarrier | Self::FaultInTransaction => "18",
            Self::ProofOfAbsence | Self::ProofBarrier => "19",
            Self::Residency | Self::Pin | Self::Leaving => "20",
            Self::EvictionBarrier | Self::EvictionTransaction => "26",
            Self::WarmBarrier | Self::WarmTransaction | Self::NothingEvictedMeanwhile => "27",
            Self::MovesConflict | Self::RaiseEpoch | Self::OrderedNews => "28",
            Self::RaiseFirst | Self::Holds | Self::OnlyUncovered => "30",
            Self::LeaderAnswers | Self::LeaderCommands | Self::LeaderMoves => "32",
        }
    }
}
