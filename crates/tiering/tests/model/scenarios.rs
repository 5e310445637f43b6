//! scenarios
use crate::rules::Rule;
use crate::scenario::{Operation::*, Scenario, any, client};

pub fn small() -> Vec<Scenario> {
    let dates = [0, 0, 0, 1, 1, 1, 1, 1];
    vec![
        Scenario {
            clients: vec![
                any(2, &[Update(0, 2), Delete(0), Upsert(0, 3), Insert(0, 4)]),
                any(2, &[Read(0), Scan(0)]),
            ],
            evictions: 1,
            keys: 1,
            fast: [1, 0],
            crashes: 1,
            timeouts: 1,
            old_reads: true,
            ..Scenario::new("one key, old reads")
        },
        Scenario {
            clients: vec![
                any(2, &[Update(0, 2), Delete(0), Insert(0, 4)]),
                any(1, &[Read(0), Update(0, 3)]).of_second(),
            ],
            evictions: 1,
            keys: 1,
            fast: [1, 0],
            takeover: true,
            ..Scenario::new("one key, takeover")
        },
        Scenario {
            clients: vec![any(2, &[Update(0, 2), Delete(0)]), any(1, &[Update(0, 3)]).of_second()],
            evictions: 1,
            keys: 1,
            fast: [1, 0],
            takeover: true,
            crashes: 1,
            ..Scenario::new("one key, takeover, crash")
        },
        Scenario {
            clients: vec![
                any(2, &[Insert(0, 2), Upsert(0, 3), Delete(0)]),
                any(2, &[Insert(0, 4), Upsert(0, 5)]),
            ],
            evictions: 2,
            keys: 1,
            fast: [0, 0],
            archive: [0, 0],
            ..Scenario::new("inserts")
        },
        Scenario {
            clients: vec![
                client(&[Update(0, 2)]),
                client(&[Range, Range]),
                client(&[Insert(1, 3)]),
            ],
            dates,
            evictions: 1,
            warms: 1,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            ..Scenario::new("ranges")
        },
        Scenario {
            clients: vec![client(&[Update(0, 2)]), client(&[Range])],
            dates,
            fast: [0, 1],
            archive: [3, 1],
            complete_from: 2,
            evictions: 2,
            warms: 2,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            ..Scenario::new("ranges, from nothing")
        },
        Scenario {
            clients: vec![client(&[Range]), client(&[Range, Range]).of_second()],
            dates,
            fast: [1, 1],
            archive: [1, 1],
            complete_from: 0,
            evictions: 1,
            warms: 1,
            horizons: vec![1, 2],
            targets: vec![0, 1],
            takeover: true,
            ..Scenario::new("ranges, takeover")
        },
        Scenario {
            clients: vec![any(1, &[Insert(0, 2), Update(1, 3)]), any(1, &[Read(0), Read(1)])],
            fast: [0, 1],
            archive: [0, 1],
            first_start: true,
            crashes: 1,
            ..Scenario::new("first start")
        },
    ]
}

pub fn without() -> Vec<(Rule, Scenario)> {
    let base = || Scenario { keys: 1, ..Scenario::new("") };
    let dated = || Scenario { keys: 2, dates: [0, 0, 0, 1, 1, 1, 1, 1], ..Scenario::new("") };
    let all = vec![
        (Rule::Dirty, Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], ..base() }),
        (
            Rule::Ticket,
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], crashes: 1, ..base() },
        ),
        (
            Rule::AbsenceWaits,
            Scenario {
                clients: vec![client(&[Update(0, 2), Delete(0)]), client(&[Scan(0)])],
                ..base()
            },
        ),
        (
            Rule::Evicted,
            Scenario { clients: vec![client(&[Update(0, 2)])], crashes: 1, evictions: 1, ..base() },
        ),
        (
            Rule::ReadsNotOlder,
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 3)])],
                crashes: 1,
                evictions: 1,
                old_reads: true,
                ..base()
            },
        ),
        (
            Rule::PositionBehindApplied,
            Scenario { clients: vec![client(&[Update(0, 2)])], crashes: 1, ..base() },
        ),
        (
            Rule::FirstPosition,
            Scenario { clients: vec![client(&[Update(0, 2)])], first_start: true, ..base() },
        ),
        (
            Rule::LaneNumbers,
            Scenario { clients: vec![client(&[Update(0, 2), Update(0, 3)])], crashes: 1, ..base() },
        ),
        (
            Rule::HigherNumber,
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 3)])],
                timeouts: 1,
                ..base()
            },
        ),
        (
            Rule::LanesClosedFirst,
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 3)])],
                crashes: 1,
                takeover: true,
                ..base()
            },
        ),
        (Rule::MovesMarked, Scenario { clients: vec![client(&[Read(0)])], evictions: 1, ..base() }),
        (
            Rule::AnswersTime,
            Scenario {
                clients: vec![client(&[Update(0, 2), Delete(0)]), client(&[Read(0)])],
                ..base()
            },
        ),
        (
            Rule::IngestedFirst,
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Read(0)])], ..base() },
        ),
        (
            Rule::OneIncarnation,
            Scenario {
                clients: vec![client(&[Delete(0)]), client(&[Read(0)])],
                crashes: 1,
                ..base()
            },
        ),
        (
            Rule::RangeBarrier,
            Scenario { clients: vec![client(&[Update(0, 2), Scan(0)])], ..base() },
        ),
        (
            Rule::ReadBarrier,
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Read(0)])], ..base() },
        ),
        (
            Rule::SnapshotFirst,
            Scenario {
                clients: vec![client(&[Update(0, 2)]), client(&[Delete(0)])],
                fast: [0, 0],
                ..base()
            },
        ),
        (
            Rule::FaultInBarrier,
            Scenario { clients: vec![client(&[Delete(0)]), client(&[Update(0, 2)])], ..base() },
        ),
        (
            Rule::FaultInTransaction,
            Scenario {
                clients: vec![client(&[Update(0, 2)]), client(&[Delete(0)])],
                fast: [0, 0],
                ..base()
            },
        ),
        (
            Rule::ProofOfAbsence,
            Scenario { clients: vec![client(&[Insert(0, 2)])], fast: [0, 0], ..base() },
        ),
        (
            Rule::ProofBarrier,
            Scenario {
                clients: vec![client(&[Insert(0, 2)]), client(&[Insert(0, 3)])],
                evictions: 1,
                fast: [0, 0],
                archive: [0, 0],
                ..base()
            },
        ),
        (
            Rule::Residency,
            Scenario {
                clients: vec![client(&[InsertFresh(0, 2), InsertFresh(0, 3)])],
                evictions: 1,
                fast: [0, 0],
                archive: [0, 0],
                ..base()
            },
        ),
        (Rule::Pin, Scenario { clients: vec![client(&[Upsert(0, 2)])], evictions: 1, ..base() }),
        (
            Rule::LeaderCommands,
            Scenario {
                clients: vec![client(&[Upsert(0, 2)])],
                evictions: 1,
                takeover: true,
                ..base()
            },
        ),
        (
            Rule::Leaving,
            Scenario { clients: vec![client(&[Upsert(0, 2)])], evictions: 1, ..base() },
        ),
        (
            Rule::EvictionBarrier,
            Scenario {
                clients: vec![client(&[Update(0, 2), Update(0, 1)])],
                evictions: 1,
                ..base()
            },
        ),
        (
            Rule::EvictionTransaction,
            Scenario { clients: vec![client(&[Update(0, 2)])], evictions: 1, ..base() },
        ),
        (Rule::WarmBarrier, Scenario { clients: vec![client(&[Delete(0)])], warms: 1, ..base() }),
        (
            Rule::WarmTransaction,
            Scenario {
                clients: vec![client(&[Update(0, 2), Delete(0)])],
                fast: [0, 0],
                warms: 1,
                ..base()
            },
        ),
        (
            Rule::NothingEvictedMeanwhile,
            Scenario {
                clients: vec![client(&[Insert(0, 2)]), client(&[Range])],
                fast: [0, 0],
                archive: [0, 0],
                warms: 1,
                evictions: 1,
                ..base()
            },
        ),
        (
            Rule::MovesConflict,
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..base() },
        ),
        (
            Rule::RaiseEpoch,
            Scenario {
                clients: vec![client(&[Range])],
                dates: [1, 0, 0, 0, 0, 0, 0, 0],
                horizons: vec![2],
                warms: 1,
                evictions: 1,
                ..base()
            },
        ),
        (
            Rule::OrderedNews,
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..base() },
        ),
        (
            Rule::RaiseFirst,
            Scenario { clients: vec![client(&[Range])], complete_from: 0, evictions: 1, ..base() },
        ),
        (
            Rule::Holds,
            Scenario {
                clients: vec![client(&[Range])],
                complete_from: 0,
                fast: [1, 2],
                archive: [1, 2],
                evictions: 1,
                ..dated()
            },
        ),
        (
            Rule::OnlyUncovered,
            Scenario { clients: vec![client(&[Range])], warms: 1, evictions: 1, ..base() },
        ),
        (
            Rule::LeaderAnswers,
            Scenario {
                clients: vec![client(&[Range])],
                complete_from: 0,
                evictions: 1,
                takeover: true,
                fast: [1, 2],
                archive: [1, 2],
                ..dated()
            },
        ),
        (
            Rule::LeaderMoves,
            Scenario {
                clients: vec![client(&[Range]).of_second()],
                complete_from: 0,
                evictions: 1,
                takeover: true,
                ..base()
            },
        ),
    ];
    all.into_iter().map(|(rule, scenario)| (rule, scenario.without(&[rule]))).collect()
}
