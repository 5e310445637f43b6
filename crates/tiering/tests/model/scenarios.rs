//! The scenarios: small ones in which every promise holds, and for every rule one in which a promise
//! breaks without it. `large` is for a machine with time and memory.

use crate::rules::Rule;
use crate::scenario::Operation::{Delete, Insert, InsertFresh, Range, Read, Scan, Update, Upsert};
use crate::scenario::{Scenario, any, client};
use crate::state::Date;

/// Documents 1 to 3 are old, the others new.
const DATES: [Date; 8] = [0, 0, 0, 1, 1, 1, 1, 1];

/// Together some seconds of a debug build.
pub fn small() -> Vec<Scenario> {
    vec![
        Scenario {
            keys: 1,
            clients: vec![any(2, &[Update(0, 2), Delete(0), Upsert(0, 3)]), client(&[Read(0)])],
            evictions: 1,
            crashes: 1,
            old_reads: true,
            ..Scenario::new("writes, eviction, crash")
        },
        Scenario {
            keys: 1,
            clients: vec![client(&[Update(0, 2), Delete(0)]), any(1, &[Read(0), Scan(0)])],
            evictions: 1,
            timeouts: 1,
            old_reads: true,
            ..Scenario::new("unknown outcomes")
        },
        Scenario {
            keys: 1,
            fast: [0, 0],
            archive: [0, 0],
            clients: vec![
                any(2, &[Insert(0, 2), Upsert(0, 3), Delete(0)]),
                any(1, &[Insert(0, 4), Upsert(0, 5)]),
            ],
            evictions: 1,
            ..Scenario::new("inserts")
        },
        Scenario {
            keys: 1,
            clients: vec![
                any(1, &[Update(0, 2), Delete(0), Insert(0, 4), Upsert(0, 4)]),
                any(1, &[Read(0), Update(0, 3), Upsert(0, 3)]).of_second(),
            ],
            evictions: 1,
            takeover: true,
            ..Scenario::new("takeover")
        },
        Scenario {
            fast: [1, 0],
            archive: [1, 3],
            clients: vec![client(&[Update(0, 2)]), client(&[Update(1, 2)]), client(&[Read(1)])],
            evictions: 1,
            crashes: 1,
            ..Scenario::new("two keys, crash")
        },
        Scenario {
            dates: DATES,
            clients: vec![client(&[Update(0, 2)]), client(&[Range]), client(&[Insert(1, 3)])],
            evictions: 1,
            warms: 1,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            ..Scenario::new("covered ranges")
        },
        Scenario {
            dates: DATES,
            fast: [0, 1],
            archive: [3, 1],
            complete_from: 2,
            clients: vec![client(&[Range])],
            evictions: 1,
            warms: 2,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            ..Scenario::new("warm-up from nothing")
        },
        Scenario {
            dates: DATES,
            fast: [1, 1],
            archive: [1, 1],
            complete_from: 0,
            clients: vec![client(&[Range]), client(&[Range]).of_second()],
            evictions: 1,
            takeover: true,
            ..Scenario::new("covered ranges, takeover")
        },
        Scenario {
            fast: [0, 1],
            archive: [0, 1],
            clients: vec![any(1, &[Insert(0, 2), Update(1, 3)]), any(1, &[Read(0), Read(1)])],
            first_start: true,
            crashes: 1,
            ..Scenario::new("first start")
        },
    ]
}

/// The bounds of a larger run.
pub struct Bounds {
    pub operations: usize,
    pub evictions: u8,
    pub warms: u8,
    pub crashes: u8,
    pub timeouts: u8,
    pub takeover: bool,
}

/// Point operations of one key, then covered ranges of two, with these bounds.
pub fn large(bounds: &Bounds) -> Vec<Scenario> {
    let Bounds { operations, evictions, warms, crashes, timeouts, takeover } = *bounds;
    let mut points = vec![
        any(operations, &[Update(0, 2), Delete(0), Insert(0, 3), Upsert(0, 4)]),
        any(operations, &[Read(0), Scan(0), Insert(0, 5)]),
    ];
    let mut ranges =
        vec![client(&vec![Update(0, 2); operations]), client(&vec![Range; operations])];
    if takeover {
        points[1] = any(1, &[Read(0), Update(0, 5)]).of_second();
        ranges[0] = client(&[Range]).of_second();
    }
    vec![
        Scenario {
            keys: 1,
            clients: points,
            evictions,
            crashes,
            timeouts,
            takeover,
            old_reads: !takeover,
            ..Scenario::new("large: points")
        },
        Scenario {
            dates: DATES,
            fast: [1, 4],
            archive: [1, 4],
            complete_from: 0,
            clients: ranges,
            evictions,
            warms,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            takeover,
            ..Scenario::new("large: covered ranges")
        },
    ]
}

/// Rules, the promise that breaks without them, and where. Two rules in a row: each stands behind
/// the other.
pub fn without() -> Vec<(&'static [Rule], &'static str, Scenario)> {
    let one = || Scenario { keys: 1, ..Scenario::new("") };
    let rows: Vec<(&'static [Rule], &'static str, Scenario)> = vec![
        (
            &[Rule::Dirty],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], ..one() },
        ),
        (
            &[Rule::Ticket],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], crashes: 1, ..one() },
        ),
        (
            &[Rule::AbsenceWaits],
            "linearizable reads",
            Scenario {
                clients: vec![client(&[Update(0, 2), Delete(0)]), client(&[Scan(0)])],
                ..one()
            },
        ),
        (
            &[Rule::Evicted],
            "no lost write",
            Scenario { clients: vec![client(&[Update(0, 2)])], crashes: 1, evictions: 1, ..one() },
        ),
        (
            &[Rule::ReadsNotOlder],
            "the archive converges",
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 3)])],
                crashes: 1,
                evictions: 1,
                old_reads: true,
                ..one()
            },
        ),
        (
            &[Rule::PositionBehindApplied],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2)])], crashes: 1, ..one() },
        ),
        (
            &[Rule::FirstPosition],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2)])], first_start: true, ..one() },
        ),
        (
            &[Rule::LaneNumbers],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], crashes: 1, ..one() },
        ),
        (
            &[Rule::HigherNumber],
            "the archive converges",
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], timeouts: 1, ..one() },
        ),
        (
            &[Rule::LanesClosedFirst],
            "the archive converges",
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 3)])],
                crashes: 1,
                takeover: true,
                ..one()
            },
        ),
        (
            &[Rule::MovesMarked],
            "no lost write",
            Scenario { clients: vec![client(&[Read(0)])], evictions: 1, ..one() },
        ),
        (
            &[Rule::AnswersTime],
            "linearizable reads",
            Scenario {
                clients: vec![client(&[Update(0, 2), Delete(0)]), client(&[Read(0)])],
                ..one()
            },
        ),
        (
            &[Rule::IngestedFirst],
            "linearizable reads",
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Read(0)])], ..one() },
        ),
        (
            &[Rule::OneIncarnation],
            "linearizable reads",
            Scenario {
                clients: vec![client(&[Delete(0)]), client(&[Read(0)])],
                crashes: 1,
                ..one()
            },
        ),
        (
            &[Rule::RangeBarrier],
            "linearizable reads",
            Scenario { clients: vec![client(&[Update(0, 2), Scan(0)])], ..one() },
        ),
        (
            &[Rule::ReadBarrier],
            "linearizable reads",
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Read(0)])], ..one() },
        ),
        (
            &[Rule::SnapshotFirst],
            "no resurrection",
            Scenario {
                fast: [0, 0],
                clients: vec![client(&[Update(0, 2)]), client(&[Delete(0)])],
                ..one()
            },
        ),
        (
            &[Rule::FaultInBarrier],
            "no resurrection",
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Update(0, 2)])], ..one() },
        ),
        (
            &[Rule::FaultInTransaction],
            "no resurrection",
            Scenario {
                fast: [0, 0],
                clients: vec![client(&[Update(0, 2)]), client(&[Delete(0)])],
                ..one()
            },
        ),
        (
            &[Rule::ProofOfAbsence],
            "no double insert",
            Scenario { fast: [0, 0], clients: vec![client(&[Insert(0, 2)])], ..one() },
        ),
        (
            &[Rule::Residency],
            "no double insert",
            Scenario {
                fast: [0, 0],
                archive: [0, 0],
                clients: vec![client(&[InsertFresh(0, 2), InsertFresh(0, 3)])],
                evictions: 1,
                ..one()
            },
        ),
        (
            &[Rule::Pin],
            "no double insert",
            Scenario { clients: vec![client(&[Upsert(0, 2)])], evictions: 1, ..one() },
        ),
        (
            &[Rule::Leaving],
            "no double insert",
            Scenario { clients: vec![client(&[Upsert(0, 2)])], evictions: 1, ..one() },
        ),
        (
            &[Rule::EvictionBarrier],
            "no lost write",
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 1)])],
                evictions: 1,
                ..one()
            },
        ),
        (
            &[Rule::EvictionTransaction],
            "no lost write",
            Scenario { clients: vec![client(&[Update(0, 2)])], evictions: 1, ..one() },
        ),
        (
            &[Rule::WarmBarrier],
            "no resurrection",
            Scenario { clients: vec![client(&[Delete(0)])], warms: 1, ..one() },
        ),
        (
            &[Rule::WarmTransaction],
            "no resurrection",
            Scenario {
                fast: [0, 0],
                clients: vec![client(&[Update(0, 2), Delete(0)])],
                warms: 1,
                ..one()
            },
        ),
        (
            &[Rule::NothingEvictedMeanwhile],
            "complete covered ranges",
            Scenario {
                fast: [0, 0],
                archive: [0, 0],
                clients: vec![client(&[Insert(0, 2)]), client(&[Range])],
                warms: 1,
                evictions: 1,
                ..one()
            },
        ),
        (
            &[Rule::MovesConflict],
            "complete covered ranges",
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..one() },
        ),
        (
            &[Rule::RaiseEpoch, Rule::NothingEvictedMeanwhile],
            "complete covered ranges",
            Scenario {
                dates: [1, 0, 0, 0, 0, 0, 0, 0],
                clients: vec![client(&[Range]).of_second()],
                takeover: true,
                horizons: vec![2],
                warms: 1,
                evictions: 1,
                ..one()
            },
        ),
        (
            &[Rule::OrderedNews],
            "complete covered ranges",
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..one() },
        ),
        (
            &[Rule::RaiseFirst, Rule::OnlyUncovered],
            "complete covered ranges",
            Scenario { complete_from: 0, clients: vec![client(&[Range])], evictions: 1, ..one() },
        ),
        (
            &[Rule::Holds],
            "complete covered ranges",
            Scenario {
                dates: DATES,
                keys: 2,
                fast: [1, 2],
                archive: [1, 2],
                complete_from: 0,
                clients: vec![client(&[Range])],
                evictions: 1,
                ..one()
            },
        ),
        (
            &[Rule::OnlyUncovered],
            "complete covered ranges",
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..one() },
        ),
        (
            &[Rule::LeaderAnswers],
            "complete covered ranges",
            Scenario {
                dates: DATES,
                keys: 2,
                fast: [1, 2],
                archive: [1, 2],
                complete_from: 0,
                clients: vec![client(&[Range])],
                evictions: 1,
                takeover: true,
                ..one()
            },
        ),
        (
            &[Rule::LeaderCommands],
            "no double insert",
            Scenario {
                clients: vec![client(&[Upsert(0, 2)])],
                evictions: 1,
                takeover: true,
                ..one()
            },
        ),
        (
            &[Rule::LeaderMoves],
            "complete covered ranges",
            Scenario {
                complete_from: 0,
                clients: vec![client(&[Range]).of_second()],
                evictions: 1,
                takeover: true,
                ..one()
            },
        ),
    ];
    rows.into_iter()
        .map(|(rules, promise, scenario)| (rules, promise, scenario.without(rules)))
        .collect()
}
