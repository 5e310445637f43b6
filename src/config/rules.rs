//! Judges how values fit together: what each key alone accepts is in the table of keys, and what the
//! replica sets are like is asked by `check`.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::keys::SAFE_RESIDENCY;
use super::values::{Age, is_loopback, same_host};
use super::{Assembly, Problem};

/// A window shorter than this is filled and emptied faster than it can pay; accepted for trials.
const SHORT_KEEP: Duration = Duration::from_secs(60 * 60);

/// Adds everything that does not fit together.
pub fn judge(assembly: &Assembly, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    addresses(assembly, problems, warnings);
    tiers(assembly, problems);
    collections(assembly, problems, warnings);
    residency(assembly, problems, warnings);
}

fn addresses(assembly: &Assembly, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let path = "listen.addresses";
    let mut seen = HashSet::new();
    for found in &assembly.listen {
        let address = found.value;
        if address.port() != 0 && !seen.insert(address) {
            let what = format!("`{address}` is listed twice");
            problems.push(Problem::new(path, &found.origin, what).allowed("each address once"));
        }
        if !assembly.allow_unauthenticated && !is_loopback(&address) {
            let what = format!(
                "`{address}` can be reached from other machines, and clients are not asked for \
                 credentials"
            );
            problems.push(
                Problem::new(path, &found.origin, what)
                    .allowed(
                        "a loopback address; or any, with allow_unauthenticated = true in \
                         [listen], if the network keeps strangers out",
                    )
                    .example(r#"addresses = ["127.0.0.1:27117"]"#),
            );
        }
        for (name, tier) in [("fast", &assembly.fast), ("archive", &assembly.archive)] {
            let Some(uri) = &tier.uri else { continue };
            let own = same_host(&address.to_string());
            if uri.value.1.hosts.iter().any(|host| same_host(host) == own) {
                let what = format!(
                    "`{address}` is also an address of [{name}]: the daemon would connect to itself"
                );
                problems.push(
                    Problem::new(path, &found.origin, what)
                        .allowed("an address that no replica set member uses"),
                );
            }
        }
    }
    let Some(admin) = &assembly.admin else { return };
    if !is_loopback(&admin.value) {
        let what = format!(
            "`{}` shows host names, namespaces and rates to whoever reaches it",
            admin.value
        );
        warnings.push(
            Problem::new("admin.listen", &admin.origin, what)
                .allowed("fine where only operators and Prometheus can reach it")
                .example(r#"listen = "127.0.0.1:27118""#),
        );
    }
    let clash = |other: &super::Found<std::net::SocketAddr>| {
        let (a, b) = (other.value, admin.value);
        a.port() == b.port()
            && a.port() != 0
            && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
    };
    if assembly.listen.iter().any(clash) {
        let what = format!("`{}` is also where clients connect", admin.value);
        problems.push(
            Problem::new("admin.listen", &admin.origin, what)
                .allowed("an address and port that [listen] does not use")
                .example(r#"listen = "127.0.0.1:27118""#),
        );
    }
}

fn tiers(assembly: &Assembly, problems: &mut Vec<Problem>) {
    let (Some(fast), Some(archive)) = (&assembly.fast.uri, &assembly.archive.uri) else { return };
    let of_fast: HashSet<String> = fast.value.1.hosts.iter().map(|host| same_host(host)).collect();
    let shared: Vec<&str> = archive
        .value
        .1
        .hosts
        .iter()
        .filter(|host| of_fast.contains(&same_host(host)))
        .map(String::as_str)
        .collect();
    if !shared.is_empty() {
        let what = format!(
            "names a host that [fast] names too ({}): both tiers would be one replica set",
            shared.join(", ")
        );
        problems.push(
            Problem::new("archive.uri", &archive.origin, what)
                .allowed("two replica sets that share no member"),
        );
    }
}

fn collections(assembly: &Assembly, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let mut first = HashMap::new();
    for entry in &assembly.collections {
        if let Some(ns) = &entry.ns {
            let path = format!("{}.namespace", entry.path);
            match first.get(&ns.value) {
                Some(other) => {
                    let what = format!("`{}` is listed before, in {other}", ns.value);
                    problems.push(
                        Problem::new(&path, &ns.origin, what)
                            .allowed("each namespace in one [[collection]] entry"),
                    );
                }
                None => {
                    first.insert(ns.value.clone(), entry.path.clone());
                }
            }
        }
        if let Some(keep) = &entry.keep
            && keep.value < SHORT_KEEP
        {
            let what = format!("`{}` is a very short window", Age(keep.value));
            warnings.push(
                Problem::new(&format!("{}.keep", entry.path), &keep.origin, what)
                    .allowed("fine for a trial; a window pays from hours or days on")
                    .example(r#"keep = "30d""#),
            );
        }
    }
}

fn residency(assembly: &Assembly, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let residency = assembly.moves.residency;
    if residency >= SAFE_RESIDENCY {
        return;
    }
    let what = format!(
        "`{}` is shorter than {}: a document could be evicted between the proof that an _id is \
         free and the insert that relies on it, and the _id be inserted twice",
        Age(residency),
        Age(SAFE_RESIDENCY)
    );
    let problem = Problem::new("moves.residency", &assembly.residency_origin, what)
        .allowed("1m or longer; shorter only in tests, with allow_short_residency = true")
        .example(r#"residency = "10m""#);
    if assembly.allow_short_residency { warnings.push(problem) } else { problems.push(problem) }
}
