//! Reaching a tier, and finding out why it cannot be reached: each seed is asked on its own, because
//! "no primary" has a dozen causes and each its own remedy.

use std::time::Duration;

use bson::{Document, doc};
use futures_util::future::join_all;
use halocline_cluster::{Cluster, ClusterError, ClusterOptions, Tier};
use mongodb::Client;
use mongodb::options::{ClientOptions, ServerAddress, Tls};

use super::{Finding, Side};

/// Longest wait for a primary: an election takes less, and a person is waiting.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for one seed when looking for the cause.
const SEED_PATIENCE: Duration = Duration::from_secs(3);

/// Connects to a tier and asks what it is.
pub async fn reach(options: &ClusterOptions) -> Result<Side, Finding> {
    let mut patient = options.clone();
    patient.server_selection_timeout = options.server_selection_timeout.min(PATIENCE);
    let cluster = match Cluster::connect(patient).await {
        Ok(cluster) => cluster,
        Err(error) => return Err(explain(options, &error).await),
    };
    Side::of(cluster).await.map_err(|message| {
        let credentials = ["uthentic", "uthoriz"].iter().any(|word| message.contains(word));
        let remedy = if credentials {
            "give the user, password_file and auth_source of a user that exists on this tier"
        } else {
            "mend what the server says, then check again"
        };
        Finding::error(options.tier, format!("is there, and does not answer: {message}"), remedy)
    })
}

async fn explain(options: &ClusterOptions, error: &ClusterError) -> Finding {
    let tier = options.tier;
    let section = tier.label();
    if !matches!(error, ClusterError::NoPrimary { .. }) {
        let what = match error {
            ClusterError::Config { message, .. } => message.clone(),
            other => other.to_string(),
        };
        let remedy = format!("correct [{section}] in the configuration, or the servers it names");
        return Finding::error(tier, what, &remedy);
    }
    let Ok(driver) = ClientOptions::parse(&options.uri).await else {
        return Finding::error(tier, error.to_string(), "correct its connection string");
    };
    let wanted = driver.repl_set_name.clone().unwrap_or_default();
    let seeds = driver.hosts.clone();
    let asked = join_all(seeds.iter().map(|seed| ask(options, &driver, seed))).await;
    let replies: Vec<(String, Reply)> =
        seeds.iter().map(ServerAddress::to_string).zip(asked).collect();
    let seen: Vec<String> =
        replies.iter().map(|(seed, reply)| format!("{seed} {}", reply.words(&wanted))).collect();
    let what = format!("has no primary that can be reached: {}", seen.join("; "));
    Finding::error(tier, what, &remedy(tier, &wanted, &replies))
}

/// What one seed said.
enum Reply {
    Silent(String),
    Mongos,
    Standalone,
    Uninitiated,
    Member { set: String, primary: Option<String> },
}

impl Reply {
    fn of(hello: &Document) -> Reply {
        if hello.get_str("msg").ok() == Some("isdbgrid") {
            return Reply::Mongos;
        }
        match hello.get_str("setName") {
            Ok(set) => Reply::Member {
                set: set.to_owned(),
                primary: hello.get_str("primary").ok().map(str::to_owned),
            },
            Err(_) if hello.get_bool("isreplicaset").ok() == Some(true) => Reply::Uninitiated,
            Err(_) => Reply::Standalone,
        }
    }

    fn words(&self, wanted: &str) -> String {
        match self {
            Reply::Silent(why) => format!("does not answer ({why})"),
            Reply::Mongos => "is a mongos, a router of a sharded cluster".into(),
            Reply::Standalone => "is a standalone server".into(),
            Reply::Uninitiated => "belongs to a replica set that was never initiated".into(),
            Reply::Member { set, .. } if set != wanted => {
                format!("belongs to the replica set {set:?}")
            }
            Reply::Member { primary: Some(primary), .. } => {
                format!("answers and names {primary} as primary")
            }
            Reply::Member { primary: None, .. } => "answers and knows no primary".into(),
        }
    }
}

fn remedy(tier: Tier, wanted: &str, replies: &[(String, Reply)]) -> String {
    let section = tier.label();
    let any = |is: fn(&Reply) -> bool| replies.iter().any(|(_, reply)| is(reply));
    if any(|reply| matches!(reply, Reply::Mongos)) {
        return "name the members of one replica set; sharded clusters cannot be tiered".into();
    }
    if any(|reply| matches!(reply, Reply::Standalone)) {
        return "start the server with --replSet <name> and run rs.initiate(); one member is enough"
            .into();
    }
    if any(|reply| matches!(reply, Reply::Uninitiated)) {
        return "run rs.initiate() on it".into();
    }
    let other = replies.iter().find_map(|(_, reply)| match reply {
        Reply::Member { set, .. } if set != wanted => Some(set),
        _ => None,
    });
    if let Some(set) = other {
        return format!(
            "if that is the right set, write replicaSet={set} in [{section}]; else correct the hosts"
        );
    }
    let primary = replies.iter().find_map(|(_, reply)| match reply {
        Reply::Member { primary, .. } => primary.as_ref(),
        _ => None,
    });
    if let Some(primary) = primary {
        return format!(
            "make {primary} reachable from here under that very name: drivers use the names in \
             rs.conf(), not those in the connection string"
        );
    }
    if any(|reply| matches!(reply, Reply::Member { .. })) {
        return "bring back a majority of the set's members, then look at rs.status()".into();
    }
    format!(
        "start the servers, or correct the hosts and ports in [{section}]; a firewall or TLS on one \
         side only looks the same"
    )
}

async fn ask(options: &ClusterOptions, driver: &ClientOptions, seed: &ServerAddress) -> Reply {
    let mut direct = driver.clone();
    direct.hosts = vec![seed.clone()];
    direct.repl_set_name = None;
    direct.direct_connection = Some(true);
    // `hello` needs no user, and a wrong password must not hide what the server is.
    direct.credential = None;
    direct.server_selection_timeout = Some(SEED_PATIENCE);
    direct.connect_timeout = Some(SEED_PATIENCE);
    if let Some(tls) = &options.tls {
        let mut files = mongodb::options::TlsOptions::default();
        files.ca_file_path = tls.ca_file.clone();
        files.cert_key_file_path = tls.cert_key_file.clone();
        direct.tls = Some(Tls::Enabled(files));
    }
    let asked = async {
        let client = Client::with_options(direct)?;
        client.database("admin").run_command(doc! { "hello": 1 }).await
    };
    match tokio::time::timeout(SEED_PATIENCE * 2, asked).await {
        Ok(Ok(hello)) => Reply::of(&hello),
        Ok(Err(error)) => Reply::Silent(cause(&error)),
        Err(_) => Reply::Silent("no answer in time".into()),
    }
}

/// The driver wraps the cause in a description of the whole topology; only the cause helps here.
fn cause(error: &mongodb::error::Error) -> String {
    let text = error.kind.to_string();
    for known in ["Connection refused", "timed out", "failed to lookup", "Connection reset"] {
        if text.contains(known) {
            return known.to_lowercase();
        }
    }
    if text.contains("certificate") || text.contains("Certificate") {
        return "its TLS certificate is not accepted".into();
    }
    // A server that wants TLS hangs up on plain bytes; one without TLS on a TLS greeting.
    if ["unexpected end of file", "early eof", "tls handshake eof", "InvalidContentType"]
        .iter()
        .any(|sign| text.contains(sign))
    {
        return "it hangs up at once, as if TLS were on at one end only".into();
    }
    match text.split_once("Error: ") {
        Some((_, cause)) => cause.trim_end_matches(['}', ' ', '>', ']']).to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(hello: Document) -> Vec<(String, Reply)> {
        vec![("h:1".into(), Reply::of(&hello))]
    }

    #[test]
    fn each_cause_has_its_own_remedy() {
        let of = |hello| remedy(Tier::Fast, "fast", &reply(hello));
        assert!(of(doc! { "msg": "isdbgrid" }).contains("sharded"));
        assert!(of(doc! {}).contains("--replSet"));
        assert!(of(doc! { "isreplicaset": true }).contains("rs.initiate()"));
        assert!(of(doc! { "setName": "other" }).contains("replicaSet=other"));
        assert!(of(doc! { "setName": "fast", "primary": "db9:1" }).contains("db9:1"));
        assert!(of(doc! { "setName": "fast" }).contains("majority"));
        let silent = vec![("h:1".to_owned(), Reply::Silent("connection refused".into()))];
        assert!(remedy(Tier::Fast, "fast", &silent).contains("[fast]"));
    }
}
