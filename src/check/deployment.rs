//! Checks of the two replica sets as deployments: who they are, their versions, members and default
//! write concern.

use bson::{Bson, doc};
use halocline_cluster::Tier;

use super::{Context, Finding, Outcome, Severity, Side, is_unauthorized, unseen};

/// What the fast tier needs: `collectionUUID` in writes and `showExpandedEvents` in change streams.
const OLDEST: Version = Version(6, 0);

/// Major and minor version of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl Version {
    fn of(text: &str) -> Option<Version> {
        let mut parts = text.split(['.', '-']).map(str::parse);
        Some(Version(parts.next()?.ok()?, parts.next()?.ok()?))
    }
}

/// The same replica set named twice would mirror into itself.
pub async fn two_sets(context: &Context<'_>) -> Outcome {
    let Some((fast, archive)) = context.both() else { return Ok(vec![]) };
    let process = |side: &Side| {
        let version = side.hello.get_document("topologyVersion").ok()?;
        version.get_object_id("processId").ok()
    };
    let same_set = fast.facts.set_id.is_some() && fast.facts.set_id == archive.facts.set_id;
    let same_process = process(fast).is_some() && process(fast) == process(archive);
    let shared: Vec<&str> =
        fast.members().into_iter().filter(|name| archive.members().contains(name)).collect();
    // Two sets of the same host names in different networks are two sets: their identities decide.
    let identified = fast.facts.set_id.is_some() && archive.facts.set_id.is_some();
    if same_set || same_process || (!identified && !shared.is_empty()) {
        return Ok(vec![Finding::error(
            Tier::Archive,
            format!(
                "is the fast tier itself: both connection strings lead to the replica set {:?} ({})",
                archive.facts.set_name,
                archive.members().join(", ")
            ),
            "name a replica set of its own for the fast tier",
        )]);
    }
    if fast.facts.set_name == archive.facts.set_name {
        return Ok(vec![Finding::note(
            "both tiers",
            format!("are two replica sets with one name, {:?}", fast.facts.set_name),
            "give the fast tier another name if you can: people will mistake one for the other",
        )]);
    }
    Ok(vec![])
}

/// Server versions: new enough, and equal or explained.
pub async fn version(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for side in context.sides() {
        let version = Version::of(&side.facts.version);
        if version.is_some_and(|version| version < OLDEST) {
            let severity =
                if side.tier == Tier::Fast { Severity::Error } else { Severity::Warning };
            let what = if side.tier == Tier::Fast {
                format!(
                    "runs MongoDB {}; moves and the change feed need {OLDEST} or later",
                    side.facts.version
                )
            } else {
                format!(
                    "runs MongoDB {}, older than any release this was tested on",
                    side.facts.version
                )
            };
            findings.push(Finding::new(severity, side.tier, what, "upgrade it to 6.0 or later"));
        }
    }
    let Some((fast, archive)) = context.both() else { return Ok(findings) };
    if fast.facts.version == archive.facts.version {
        return Ok(findings);
    }
    let (of_fast, of_archive) =
        (Version::of(&fast.facts.version), Version::of(&archive.facts.version));
    let versions = format!("{} (archive: {})", fast.facts.version, archive.facts.version);
    if of_fast == of_archive {
        findings.push(Finding::note(
            Tier::Fast,
            format!("runs another patch release than the archive, {versions}"),
            "harmless; bring them together at the next upgrade",
        ));
    } else {
        let what = if of_fast < of_archive {
            format!(
                "runs an older MongoDB, {versions}: clients are offered only what both understand, \
                 and newer operators that run on the archive today will fail on the fast tier"
            )
        } else {
            format!(
                "runs a newer MongoDB, {versions}: clients are offered only what both understand, \
                 and data or indexes of a newer kind could be refused by the archive"
            )
        };
        findings.push(Finding::warning(
            Tier::Fast,
            what,
            "run both tiers on one major and minor version, except during an upgrade",
        ));
    }
    Ok(findings)
}

/// Feature compatibility versions: settled, new enough, equal or explained.
pub async fn fcv(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    let mut known = Vec::new();
    for side in context.sides() {
        let asked = side.admin(doc! { "getParameter": 1, "featureCompatibilityVersion": 1 }).await;
        let reply = match asked {
            Ok(reply) => reply,
            Err(error) if is_unauthorized(&error) => {
                findings.push(unseen(side, "feature compatibility version", &error));
                continue;
            }
            Err(error) => return Err(error),
        };
        let Ok(fcv) = reply.get_document("featureCompatibilityVersion") else { continue };
        let version = fcv.get_str("version").unwrap_or_default().to_owned();
        if let Ok(target) = fcv.get_str("targetVersion") {
            findings.push(Finding::warning(
                side.tier,
                format!("is on its way from FCV {version} to {target}"),
                "finish or undo setFeatureCompatibilityVersion before starting",
            ));
        }
        if side.tier == Tier::Fast && Version::of(&version).is_some_and(|fcv| fcv < OLDEST) {
            findings.push(Finding::error(
                side.tier,
                format!("has FCV {version}; moves and the change feed need {OLDEST} or later"),
                r#"db.adminCommand({ setFeatureCompatibilityVersion: "6.0" }) on the fast tier"#,
            ));
        }
        known.push(version);
    }
    if let [fast, archive] = known.as_slice()
        && fast != archive
    {
        findings.push(Finding::warning(
            Tier::Fast,
            format!(
                "has FCV {fast} and the archive has {archive}: the two accept different index \
                 options, validators and operators, so a write that one takes the other may refuse"
            ),
            "set the same FCV on both, the lower of the two",
        ));
    }
    Ok(findings)
}

/// Who can vote and who can take over.
pub async fn members(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for side in context.sides() {
        let arbiters = side.names("arbiters");
        if !arbiters.is_empty() {
            findings.push(Finding::warning(
                side.tier,
                format!(
                    "has an arbiter ({}): when one member with data is down, majority writes wait, \
                     and with them {}",
                    arbiters.join(", "),
                    match side.tier {
                        Tier::Fast => "moves and the change feed",
                        Tier::Archive => "the feeder",
                    }
                ),
                "replace the arbiter by a member that holds data",
            ));
        }
        let with_data = side.members().len();
        if with_data == 1 && side.tier == Tier::Fast {
            findings.push(Finding::note(
                side.tier,
                "has one member with data: nothing takes over when it fails, and what it has not \
                 mirrored is lost with its disk",
                "three members for anything that matters",
            ));
        } else if with_data == 2 && arbiters.is_empty() {
            findings.push(Finding::warning(
                side.tier,
                "has two members: when either is down there is no majority and no primary",
                "add a third member",
            ));
        }
    }
    Ok(findings)
}

/// What clients get who do not ask for a write concern.
pub async fn write_concern(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    if let Some(side) = &context.fast {
        let reply = side.admin(doc! { "getDefaultRWConcern": 1 }).await?;
        let default = reply.get_document("defaultWriteConcern").ok();
        let acknowledged_by = default.and_then(|concern| concern.get("w"));
        if !is_majority(acknowledged_by) {
            let words = acknowledged_by.map_or("1".to_owned(), shown);
            findings.push(Finding::warning(
                side.tier,
                format!(
                    "acknowledges writes with w: {words} by default: such a write can be rolled \
                     back by an election before the archive ever hears of it"
                ),
                r#"db.adminCommand({ setDefaultRWConcern: 1, defaultWriteConcern: { w: "majority" } })"#,
            ));
        }
    }
    if let Some(side) = &context.archive {
        let config = side.admin(doc! { "replSetGetConfig": 1 }).await?;
        let journal = config
            .get_document("config")
            .and_then(|config| config.get_bool("writeConcernMajorityJournalDefault"));
        if journal.ok() == Some(false) {
            findings.push(Finding::warning(
                side.tier,
                "acknowledges majority writes before they are on disk \
                 (writeConcernMajorityJournalDefault: false): a power cut can lose what the feeder \
                 was told is safe",
                "set writeConcernMajorityJournalDefault: true with rs.reconfig()",
            ));
        }
    }
    Ok(findings)
}

fn is_majority(w: Option<&Bson>) -> bool {
    matches!(w, Some(Bson::String(word)) if word == "majority")
}

fn shown(value: &Bson) -> String {
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert_eq!(Version::of("6.0.5"), Some(Version(6, 0)));
        assert_eq!(Version::of("8.0.0-rc1"), Some(Version(8, 0)));
        assert!(Version::of("10.0").unwrap() > Version::of("6.3").unwrap());
        assert_eq!(Version::of(""), None);
    }
}
