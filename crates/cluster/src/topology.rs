//! Which server of a replica set is primary, as told by the driver's monitoring events. Decides
//! nothing about connections: the pools watch what is published here.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bson::oid::ObjectId;
use mongodb::ServerType;
use mongodb::TopologyType;
use mongodb::error::ErrorKind;
use mongodb::event::sdam::{SdamEvent, TopologyDescription};
use mongodb::options::ServerAddress;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::options::Tier;

/// What a server last said it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    /// Takes writes.
    Primary,
    /// Follows the primary and answers reads.
    Secondary,
    /// Votes, holds no data.
    Arbiter,
    /// Starting, recovering, hidden.
    Other,
    /// Not a member of a replica set (standalone, router).
    NotReplicaSet,
    /// Not heard of, or not any more.
    Unknown,
}

impl ServerKind {
    /// Name for people and labels.
    pub const fn label(self) -> &'static str {
        match self {
            ServerKind::Primary => "primary",
            ServerKind::Secondary => "secondary",
            ServerKind::Arbiter => "arbiter",
            ServerKind::Other => "other",
            ServerKind::NotReplicaSet => "not_replica_set",
            ServerKind::Unknown => "unknown",
        }
    }

    fn of(server_type: ServerType) -> Self {
        match server_type {
            ServerType::RsPrimary => ServerKind::Primary,
            ServerType::RsSecondary => ServerKind::Secondary,
            ServerType::RsArbiter => ServerKind::Arbiter,
            ServerType::RsOther | ServerType::RsGhost => ServerKind::Other,
            ServerType::Standalone | ServerType::Mongos | ServerType::LoadBalancer => {
                ServerKind::NotReplicaSet
            }
            _ => ServerKind::Unknown,
        }
    }
}

/// One member as last seen.
#[derive(Debug, Clone)]
pub struct Server {
    /// Where it is reached.
    pub address: ServerAddress,
    /// What it is.
    pub kind: ServerKind,
    /// Average round trip time to it.
    pub rtt: Option<Duration>,
    /// Replica set tags.
    pub tags: HashMap<String, String>,
    /// Highest wire version it speaks.
    pub max_wire_version: Option<i32>,
    /// Why it is unknown.
    pub error: Option<String>,
    /// Rises whenever connections made earlier should not be used again: the server was lost, or
    /// ceased to be primary.
    pub generation: u64,
    /// Rises whenever requests waiting on this server will get no answer: it fell silent, or
    /// another primary took over while it had not stepped down itself.
    pub abandoned: u64,
}

/// A replica set as last seen.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    /// Rises with every published change.
    pub version: u64,
    /// Replica set name.
    pub set_name: Option<String>,
    /// The primary, if one is known.
    pub primary: Option<ServerAddress>,
    /// Rises whenever a server becomes primary, the same one again included.
    pub generation: u64,
    /// All members known.
    pub servers: Vec<Server>,
}

impl Topology {
    /// The member at this address.
    pub fn server(&self, address: &ServerAddress) -> Option<&Server> {
        self.servers.iter().find(|server| server.address == *address)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.servers.is_empty() {
            return f.write_str("no member has answered yet");
        }
        for (index, server) in self.servers.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{} is {}", server.address, server.kind.label())?;
            if let Some(error) = &server.error {
                write!(f, " ({error})")?;
            }
        }
        Ok(())
    }
}

/// Receives the driver's events and publishes [`Topology`].
pub(crate) struct TopologyKeeper {
    tier: Tier,
    state: Mutex<State>,
    sender: watch::Sender<Arc<Topology>>,
    /// [`Topology::version`] of what was published last: lets a pool see with one atomic load
    /// that nothing has changed.
    version: AtomicU64,
    up: metrics::Gauge,
    elections: metrics::Counter,
    clock_skew: metrics::Gauge,
}

#[derive(Default)]
struct State {
    /// As the driver described it, whatever is suspected.
    seen: Topology,
    /// A primary that has answered that it is not one, until a check or an event settles it.
    suspect: Option<ServerAddress>,
    /// The election that made the primary primary.
    election: Option<ObjectId>,
}

impl TopologyKeeper {
    pub(crate) fn new(tier: Tier) -> Self {
        Self {
            tier,
            state: Mutex::default(),
            sender: watch::Sender::new(Arc::default()),
            version: AtomicU64::new(0),
            up: metrics::gauge!("halocline_tier_up", "tier" => tier.label()),
            elections: metrics::counter!("halocline_tier_elections_total", "tier" => tier.label()),
            clock_skew: metrics::gauge!("halocline_clock_skew_seconds", "tier" => tier.label()),
        }
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Topology>> {
        self.sender.subscribe()
    }

    pub(crate) fn current(&self) -> Arc<Topology> {
        self.sender.borrow().clone()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Takes one event of the driver's monitors.
    pub(crate) fn observe(&self, event: SdamEvent) {
        match event {
            SdamEvent::TopologyDescriptionChanged(event) => {
                let mut state = self.state.lock();
                self.described(&mut state, Description::of(&event.new_description));
            }
            SdamEvent::ServerHeartbeatSucceeded(event) => {
                if event.reply.get_bool("isWritablePrimary").unwrap_or(false)
                    && let Ok(election) = event.reply.get_object_id("electionId")
                {
                    let mut state = self.state.lock();
                    self.elected(&mut state, &event.server_address, election);
                    if let Ok(theirs) = event.reply.get_datetime("localTime") {
                        let ours = bson::DateTime::now().timestamp_millis();
                        let skew = ours - theirs.timestamp_millis();
                        self.clock_skew.set(skew as f64 / 1000.0);
                    }
                }
            }
            _ => {}
        }
    }

    /// A server answered that it is not primary. Nobody is sent there until [`Self::confirm`] or
    /// an event. Returns whether this is news.
    pub(crate) fn suspect(&self, address: &ServerAddress) -> bool {
        let mut state = self.state.lock();
        if state.seen.primary.as_ref() != Some(address) || state.suspect.is_some() {
            return false;
        }
        state.suspect = Some(address.clone());
        self.publish(&mut state);
        true
    }

    /// Whether that server is still under suspicion.
    pub(crate) fn is_suspect(&self, address: &ServerAddress) -> bool {
        self.state.lock().suspect.as_ref() == Some(address)
    }

    /// The suspected server says that it is primary (again).
    pub(crate) fn confirm(&self, address: &ServerAddress) {
        let mut state = self.state.lock();
        if state.suspect.as_ref() == Some(address) {
            state.suspect = None;
            state.seen.generation += 1;
            self.publish(&mut state);
        }
    }

    fn elected(&self, state: &mut State, address: &ServerAddress, election: ObjectId) {
        // The description that names this primary may still be on its way; it compares elections
        // no more, so a change of election is noted only for the primary already known.
        if state.seen.primary.as_ref() == Some(address) {
            let known = state.election.replace(election);
            if known.is_some_and(|known| known != election) {
                state.suspect = None;
                state.seen.generation += 1;
                self.elections.increment(1);
                self.publish(state);
            }
        } else {
            state.election = None;
        }
    }

    fn described(&self, state: &mut State, description: Description) {
        let previous = std::mem::take(&mut state.seen.servers);
        let primary = description
            .servers
            .iter()
            .find(|server| server.kind == ServerKind::Primary)
            .map(|server| server.address.clone());
        let servers = description
            .servers
            .into_iter()
            .map(|new| {
                let old = previous.iter().find(|old| old.address == new.address);
                new.follow(old, primary.is_some())
            })
            .collect();
        state.seen.servers = servers;
        state.seen.set_name = description.set_name;
        if primary != state.seen.primary {
            // A suspicion is about one server's time as primary, which has now ended.
            state.suspect = None;
            state.election = None;
            if let Some(address) = &primary {
                state.seen.generation += 1;
                if state.seen.generation > 1 {
                    self.elections.increment(1);
                }
                tracing::info!(tier = self.tier.label(), %address, "primary found");
            } else {
                tracing::warn!(tier = self.tier.label(), "primary lost");
            }
            state.seen.primary = primary;
        }
        self.publish(state);
    }

    fn publish(&self, state: &mut State) {
        state.seen.version += 1;
        let mut topology = state.seen.clone();
        if topology.primary == state.suspect {
            topology.primary = None;
        }
        self.up.set(if topology.primary.is_some() { 1.0 } else { 0.0 });
        let version = topology.version;
        self.sender.send_replace(Arc::new(topology));
        self.version.store(version, Ordering::Release);
    }
}

/// The driver's description, reduced to what is used here.
struct Description {
    set_name: Option<String>,
    servers: Vec<Described>,
}

struct Described {
    address: ServerAddress,
    kind: ServerKind,
    rtt: Option<Duration>,
    tags: HashMap<String, String>,
    max_wire_version: Option<i32>,
    error: Option<String>,
    silent: bool,
}

impl Description {
    fn of(description: &TopologyDescription) -> Self {
        let servers = description
            .servers()
            .into_iter()
            .map(|(address, info)| Described {
                address: address.clone(),
                kind: ServerKind::of(info.server_type()),
                rtt: info.average_round_trip_time(),
                tags: info.tags().cloned().unwrap_or_default(),
                max_wire_version: info.max_wire_version(),
                error: info.error().map(ToString::to_string),
                silent: info.error().is_some_and(|error| match error.kind.as_ref() {
                    ErrorKind::Io(error) => error.kind() == io::ErrorKind::TimedOut,
                    _ => false,
                }),
            })
            .collect();
        let set_name = match description.topology_type() {
            TopologyType::Sharded | TopologyType::LoadBalanced => None,
            _ => description.set_name().cloned(),
        };
        Self { set_name, servers }
    }
}

impl Described {
    fn follow(self, old: Option<&Server>, primary_known: bool) -> Server {
        let mut generation = old.map_or(0, |old| old.generation);
        let mut abandoned = old.map_or(0, |old| old.abandoned);
        if let Some(old) = old {
            let was_primary = old.kind == ServerKind::Primary;
            let lost = self.kind == ServerKind::Unknown && old.kind != ServerKind::Unknown;
            let silent = self.silent && old.error != self.error;
            if lost || silent || (was_primary && self.kind != ServerKind::Primary) {
                generation += 1;
            }
            if silent || (lost && was_primary && primary_known) {
                abandoned += 1;
            }
        }
        Server {
            address: self.address,
            kind: self.kind,
            rtt: self.rtt,
            tags: self.tags,
            max_wire_version: self.max_wire_version,
            error: self.error,
            generation,
            abandoned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> ServerAddress {
        ServerAddress::Tcp { host: "127.0.0.1".into(), port: Some(port) }
    }

    fn described(port: u16, kind: ServerKind) -> Described {
        Described {
            address: address(port),
            kind,
            rtt: None,
            tags: HashMap::new(),
            max_wire_version: None,
            error: None,
            silent: false,
        }
    }

    fn description(servers: Vec<Described>) -> Description {
        Description { set_name: Some("rs".into()), servers }
    }

    fn keeper(servers: Vec<Described>) -> TopologyKeeper {
        let keeper = TopologyKeeper::new(Tier::Fast);
        keeper.described(&mut keeper.state.lock(), description(servers));
        keeper
    }

    fn describe(keeper: &TopologyKeeper, servers: Vec<Described>) -> Arc<Topology> {
        keeper.described(&mut keeper.state.lock(), description(servers));
        keeper.current()
    }

    #[test]
    fn the_same_server_elected_again_is_a_new_generation() {
        let keeper = keeper(vec![described(1, ServerKind::Primary)]);
        let first = keeper.current();
        assert_eq!(first.primary, Some(address(1)));
        let gone = describe(&keeper, vec![described(1, ServerKind::Secondary)]);
        assert_eq!(gone.primary, None);
        let again = describe(&keeper, vec![described(1, ServerKind::Primary)]);
        assert_eq!(again.primary, Some(address(1)));
        assert!(again.generation > first.generation);
        assert!(again.servers[0].generation > first.servers[0].generation);
        assert_eq!(keeper.version(), again.version);
    }

    #[test]
    fn an_election_seen_only_in_a_heartbeat_is_a_new_generation() {
        let keeper = keeper(vec![described(1, ServerKind::Primary)]);
        let elected = |election| {
            keeper.elected(&mut keeper.state.lock(), &address(1), election);
            keeper.current().generation
        };
        let (one, two) = (ObjectId::new(), ObjectId::new());
        let first = elected(one);
        assert_eq!(elected(one), first);
        assert!(elected(two) > first);
    }

    #[test]
    fn requests_are_abandoned_when_another_takes_over_but_not_on_an_orderly_step_down() {
        let both = |one, two| vec![described(1, one), described(2, two)];
        let keeper = keeper(both(ServerKind::Primary, ServerKind::Secondary));
        let orderly = describe(&keeper, both(ServerKind::Secondary, ServerKind::Primary));
        assert_eq!(orderly.server(&address(1)).unwrap().abandoned, 0);
        assert_eq!(orderly.server(&address(1)).unwrap().generation, 1);

        let usurped = describe(&keeper, both(ServerKind::Primary, ServerKind::Unknown));
        assert_eq!(usurped.server(&address(2)).unwrap().abandoned, 1);
        assert_eq!(usurped.server(&address(2)).unwrap().generation, 1);
    }

    #[test]
    fn requests_to_a_silent_server_are_abandoned() {
        let keeper = keeper(vec![described(1, ServerKind::Primary)]);
        let silent = || Described {
            error: Some("timed out".into()),
            silent: true,
            ..described(1, ServerKind::Unknown)
        };
        assert_eq!(describe(&keeper, vec![silent()]).servers[0].abandoned, 1);
        assert_eq!(describe(&keeper, vec![silent()]).servers[0].abandoned, 1);
    }

    #[test]
    fn a_suspected_primary_is_hidden_until_confirmed() {
        let keeper = keeper(vec![described(1, ServerKind::Primary)]);
        let before = keeper.current().generation;
        assert!(!keeper.suspect(&address(2)), "only the primary can be suspected");
        assert!(keeper.suspect(&address(1)));
        assert!(!keeper.suspect(&address(1)), "one check at a time");
        assert_eq!(keeper.current().primary, None);
        keeper.confirm(&address(1));
        assert_eq!(keeper.current().primary, Some(address(1)));
        assert!(keeper.current().generation > before);
    }

    #[test]
    fn a_change_seen_by_the_monitors_ends_the_suspicion() {
        let both = |one, two| vec![described(1, one), described(2, two)];
        let keeper = keeper(both(ServerKind::Primary, ServerKind::Secondary));
        assert!(keeper.suspect(&address(1)));
        let moved = describe(&keeper, both(ServerKind::Secondary, ServerKind::Primary));
        assert_eq!(moved.primary, Some(address(2)));
        assert!(!keeper.is_suspect(&address(1)));
    }
}
