//! Every key of the configuration: its section, what it accepts, its default and its meaning. The
//! parser, the messages and the commented default file are all made from this one table; no value
//! is read here.

use std::time::Duration;

/// What a key accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text that is not empty.
    Text,
    /// A MongoDB connection string. Never echoed: it may hold a password.
    Uri,
    /// A secret, taken from the environment only and never echoed.
    Secret,
    /// The path of a file; relative paths start at the configuration file's own directory.
    File,
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Count {
        /// Smallest accepted.
        min: u64,
        /// Largest accepted.
        max: u64,
    },
    /// A whole number, or `"auto"` for one per processor.
    CountOrAuto {
        /// Largest accepted.
        max: u64,
    },
    /// A length of time such as `30d`.
    Age {
        /// Shortest accepted.
        min: Duration,
        /// Longest accepted.
        max: Duration,
    },
    /// One of a few words.
    Choice(&'static [&'static str]),
    /// `address:port`.
    Socket,
    /// A list of `address:port`.
    Sockets,
    /// `database.collection`.
    Namespace,
    /// The path of a field, such as `created_at` or `meta.created_at`.
    FieldPath,
    /// A log filter, such as `info` or `info,halocline_actors=debug`.
    LogFilter,
}

/// What happens when a key is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
    /// It must be set.
    Required,
    /// It stays unset, which has a meaning of its own.
    Unset,
    /// This value, written as TOML.
    Value(&'static str),
}

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Its name in the section.
    pub name: &'static str,
    /// What it accepts.
    pub kind: Kind,
    /// What happens when it is not set.
    pub default: Default,
    /// A value that is accepted, written as TOML.
    pub example: &'static str,
    /// What it is for.
    pub doc: &'static str,
}

/// One section of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Its name.
    pub name: &'static str,
    /// Whether it is written `[[name]]`, once an entry.
    pub repeated: bool,
    /// What it is for.
    pub doc: &'static str,
    /// Its keys, in the order the default file shows them.
    pub keys: &'static [Key],
}

impl Section {
    /// The key of this name, if the section has it.
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// How the section's header is written.
    pub fn header(&self) -> String {
        if self.repeated { format!("[[{}]]", self.name) } else { format!("[{}]", self.name) }
    }
}

/// The section of this name.
pub fn section(name: &str) -> Option<&'static Section> {
    SECTIONS.iter().copied().find(|section| section.name == name)
}

/// All sections, in the order the default file shows them.
pub const SECTIONS: &[&Section] =
    &[&LISTEN, &FAST, &ARCHIVE, &COLLECTION, &ACTORS, &FEEDER, &MOVES, &LIMITS, &ADMIN, &LOG];

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A proof that a key is absent is used for up to 30 s (protocol rules 19 and 20); a residency below
/// twice that could let a key be evicted between the proof and the insert it allows.
pub const SAFE_RESIDENCY: Duration = MINUTE;

/// Lanes on the archive (protocol rule 7); more appliers than lanes would have nothing to do.
const LANES: u64 = 64;

/// `[listen]`.
pub const LISTEN: Section = Section {
    name: "listen",
    repeated: false,
    doc: "Where clients connect.",
    keys: &[
        Key {
            name: "addresses",
            kind: Kind::Sockets,
            default: Default::Value(r#"["127.0.0.1:27117"]"#),
            example: r#"["127.0.0.1:27117"]"#,
            doc: "IP addresses and ports to accept MongoDB clients on. IPv6 is written [::1]:27117.",
        },
        Key {
            name: "allow_unauthenticated",
            kind: Kind::Flag,
            default: Default::Value("false"),
            example: "true",
            doc: "Halocline does not ask clients for credentials yet: whoever reaches an address above\n\
                  reads and writes everything that the daemon's own user may. It therefore binds only\n\
                  loopback addresses unless this says, in so many words, that the network keeps\n\
                  strangers out.",
        },
    ],
};

/// Keys of `[fast]` and `[archive]`; the two differ only in the example addresses.
macro_rules! tier_keys {
    ($uri:literal) => {
        &[
            Key {
                name: "uri",
                kind: Kind::Uri,
                default: Default::Unset,
                example: $uri,
                doc: "Connection string of the replica set: several members, and replicaSet=. Without a\n\
                      password: see password_file. Exactly one of uri and uri_file must be set.",
            },
            Key {
                name: "uri_file",
                kind: Kind::File,
                default: Default::Unset,
                example: r#""/run/secrets/halocline-uri""#,
                doc: "File that holds the connection string, for one that carries a password.",
            },
            Key {
                name: "username",
                kind: Kind::Text,
                default: Default::Unset,
                example: r#""halocline""#,
                doc: "User to authenticate as, when the connection string names none.",
            },
            Key {
                name: "password_file",
                kind: Kind::File,
                default: Default::Unset,
                example: r#""/run/secrets/halocline-password""#,
                doc: "File that holds the user's password.",
            },
            Key {
                name: "password",
                kind: Kind::Secret,
                default: Default::Unset,
                example: "",
                doc: "The password itself, accepted from the environment only.",
            },
            Key {
                name: "auth_source",
                kind: Kind::Text,
                default: Default::Value(r#""admin""#),
                example: r#""admin""#,
                doc: "Database in which the user is defined.",
            },
            Key {
                name: "tls_ca_file",
                kind: Kind::File,
                default: Default::Unset,
                example: r#""/etc/halocline/ca.pem""#,
                doc: "Certificate authority (PEM) that signed the servers' certificates. Setting it turns TLS\n\
                      on, as does tls=true in the connection string.",
            },
            Key {
                name: "tls_certificate_key_file",
                kind: Kind::File,
                default: Default::Unset,
                example: r#""/etc/halocline/client.pem""#,
                doc: "Client certificate and its key (PEM, one file), if the servers ask for one.",
            },
            Key {
                name: "max_connections",
                kind: Kind::Count { min: 1, max: 10_000 },
                default: Default::Value("64"),
                example: "64",
                doc: "Connections to one server at most, for each connection thread.",
            },
            Key {
                name: "min_idle_connections",
                kind: Kind::Count { min: 0, max: 10_000 },
                default: Default::Value("2"),
                example: "2",
                doc: "Idle connections kept open to the primary, for each connection thread.",
            },
            Key {
                name: "checkout_timeout",
                kind: Kind::Age { min: MILLISECOND, max: HOUR },
                default: Default::Value(r#""10s""#),
                example: r#""10s""#,
                doc: "Longest wait for a free connection before an operation fails with a retryable error.",
            },
            Key {
                name: "idle_timeout",
                kind: Kind::Age { min: SECOND, max: DAY },
                default: Default::Value(r#""5m""#),
                example: r#""5m""#,
                doc: "Idle time after which a connection is closed.",
            },
            Key {
                name: "connect_timeout",
                kind: Kind::Age { min: MILLISECOND, max: HOUR },
                default: Default::Value(r#""5s""#),
                example: r#""5s""#,
                doc: "Longest time for a new connection: TCP, TLS and authentication together.",
            },
            Key {
                name: "server_selection_timeout",
                kind: Kind::Age { min: MILLISECOND, max: HOUR },
                default: Default::Value(r#""30s""#),
                example: r#""30s""#,
                doc: "Longest wait for a primary, for example during an election.",
            },
        ]
    };
}

/// `[fast]`.
pub const FAST: Section = Section {
    name: "fast",
    repeated: false,
    doc: "The fast tier: the small replica set that holds recent documents.",
    keys: tier_keys!(r#""mongodb://fast1:27017,fast2:27017,fast3:27017/?replicaSet=fast""#),
};

/// `[archive]`.
pub const ARCHIVE: Section = Section {
    name: "archive",
    repeated: false,
    doc: "The archive: the existing replica set that holds every document.",
    keys: tier_keys!(
        r#""mongodb://archive1:27017,archive2:27017,archive3:27017/?replicaSet=archive""#
    ),
};

/// `[[collection]]`.
pub const COLLECTION: Section = Section {
    name: "collection",
    repeated: true,
    doc: "A tiered collection; one entry each. Every other namespace passes straight to the archive.",
    keys: &[
        Key {
            name: "namespace",
            kind: Kind::Namespace,
            default: Default::Required,
            example: r#""shop.orders""#,
            doc: "Database and collection.",
        },
        Key {
            name: "date_field",
            kind: Kind::FieldPath,
            default: Default::Required,
            example: r#""created_at""#,
            doc: "Field whose value is a document's date. Both tiers need an index that begins with it.",
        },
        Key {
            name: "date_kind",
            kind: Kind::Choice(DATE_KINDS),
            default: Default::Value(r#""date""#),
            example: r#""date""#,
            doc: "What that field holds: a BSON date, an ObjectId (its time), or a number of seconds or\n\
                  milliseconds since 1970.",
        },
        Key {
            name: "keep",
            kind: Kind::Age { min: SECOND, max: CENTURY },
            default: Default::Required,
            example: r#""30d""#,
            doc: "Documents younger than this stay on the fast tier.",
        },
    ],
};

/// Values of `date_kind`, in the order of `halocline_tiering::DateKind`.
pub const DATE_KINDS: &[&str] = &["date", "objectid", "epoch-seconds", "epoch-millis"];

/// `[actors]`.
pub const ACTORS: Section = Section {
    name: "actors",
    repeated: false,
    doc: "How many of each actor run.",
    keys: &[
        Key {
            name: "connection_threads",
            kind: Kind::CountOrAuto { max: 1024 },
            default: Default::Value(r#""auto""#),
            example: "4",
            doc: "Threads that serve clients; \"auto\" is one per processor.",
        },
        Key {
            name: "appliers",
            kind: Kind::Count { min: 1, max: LANES },
            default: Default::Value("16"),
            example: "16",
            doc: "Lanes written to the archive at once.",
        },
        Key {
            name: "evictors",
            kind: Kind::Count { min: 1, max: 64 },
            default: Default::Value("2"),
            example: "2",
            doc: "Collections evicted at once.",
        },
        Key {
            name: "warmers",
            kind: Kind::Count { min: 1, max: 64 },
            default: Default::Value("2"),
            example: "2",
            doc: "Collections warmed at once.",
        },
        Key {
            name: "failure_limit",
            kind: Kind::Count { min: 1, max: 1_000_000 },
            default: Default::Value("5"),
            example: "5",
            doc: "Failures of one actor within failure_window after which the daemon drains and exits\n\
                  with an error instead of trying on.",
        },
        Key {
            name: "failure_window",
            kind: Kind::Age { min: SECOND, max: DAY },
            default: Default::Value(r#""5m""#),
            example: r#""5m""#,
            doc: "See failure_limit.",
        },
    ],
};

/// `[feeder]`.
pub const FEEDER: Section = Section {
    name: "feeder",
    repeated: false,
    doc: "The feeder copies changes from the fast tier to the archive.",
    keys: &[
        Key {
            name: "coalesce",
            kind: Kind::Age { min: Duration::ZERO, max: MINUTE },
            default: Default::Value(r#""100ms""#),
            example: r#""100ms""#,
            doc: "How long a change may wait for later ones of the same key, to save writes. Reads that\n\
                  need the archive wait for it at most this long; 0s turns it off.",
        },
        Key {
            name: "batch_keys",
            kind: Kind::Count { min: 1, max: 1000 },
            default: Default::Value("32"),
            example: "32",
            doc: "Keys that one write command to the archive carries at most.",
        },
        Key {
            name: "token_interval",
            kind: Kind::Age { min: MILLISECOND, max: MINUTE },
            default: Default::Value(r#""1s""#),
            example: r#""1s""#,
            doc: "How often the resume token is stored in the archive.",
        },
        Key {
            name: "max_pending_keys",
            kind: Kind::Count { min: 1, max: 100_000_000 },
            default: Default::Value("200000"),
            example: "200000",
            doc: "Keys waiting for the archive at which client writes slow down to the rate at which the\n\
                  archive takes them.",
        },
        Key {
            name: "max_lag",
            kind: Kind::Age { min: MILLISECOND, max: DAY },
            default: Default::Value(r#""10s""#),
            example: r#""10s""#,
            doc: "Age of the oldest waiting change at which client writes slow down likewise.",
        },
    ],
};

/// `[moves]`.
pub const MOVES: Section = Section {
    name: "moves",
    repeated: false,
    doc: "Warm-up (archive to fast tier) and eviction (off the fast tier).",
    keys: &[
        Key {
            name: "batch_documents",
            kind: Kind::Count { min: 1, max: 10_000 },
            default: Default::Value("500"),
            example: "500",
            doc: "Documents that one warm or evict transaction moves at most.",
        },
        Key {
            name: "batch_pause",
            kind: Kind::Age { min: Duration::ZERO, max: HOUR },
            default: Default::Value(r#""10ms""#),
            example: r#""10ms""#,
            doc: "Pause between two such transactions.",
        },
        Key {
            name: "evict_interval",
            kind: Kind::Age { min: MILLISECOND, max: DAY },
            default: Default::Value(r#""30s""#),
            example: r#""30s""#,
            doc: "How often the evictor looks for documents that have left the window.",
        },
        Key {
            name: "evict_grace",
            kind: Kind::Age { min: Duration::ZERO, max: CENTURY },
            default: Default::Value(r#""5m""#),
            example: r#""5m""#,
            doc: "How much older than keep a document must be to be evicted, so that queries for the\n\
                  last keep never wait for the evictor.",
        },
        Key {
            name: "residency",
            kind: Kind::Age { min: MILLISECOND, max: DAY },
            default: Default::Value(r#""10m""#),
            example: r#""10m""#,
            doc: "A document that a client changed within this time is never evicted.",
        },
        Key {
            name: "allow_short_residency",
            kind: Kind::Flag,
            default: Default::Value("false"),
            example: "true",
            doc: "A residency below 1m can let one _id be inserted twice. Tests that cannot wait say so\n\
                  here; nothing that holds real data should.",
        },
    ],
};

/// `[limits]`.
pub const LIMITS: Section = Section {
    name: "limits",
    repeated: false,
    doc: "Limits on clients.",
    keys: &[
        Key {
            name: "max_connections",
            kind: Kind::Count { min: 1, max: 1_000_000 },
            default: Default::Value("20000"),
            example: "20000",
            doc: "Client connections in all.",
        },
        Key {
            name: "cursor_idle",
            kind: Kind::Age { min: SECOND, max: DAY },
            default: Default::Value(r#""10m""#),
            example: r#""10m""#,
            doc: "Idle time after which a client's cursor is killed.",
        },
        Key {
            name: "operation_wait",
            kind: Kind::Age { min: MILLISECOND, max: HOUR },
            default: Default::Value(r#""30s""#),
            example: r#""30s""#,
            doc: "Longest wait of an operation without maxTimeMS for the other tier or the feeder.",
        },
        Key {
            name: "drain_deadline",
            kind: Kind::Age { min: MILLISECOND, max: HOUR },
            default: Default::Value(r#""30s""#),
            example: r#""30s""#,
            doc: "How long SIGTERM waits for operations in flight before the daemon stops.",
        },
    ],
};

/// `[admin]`.
pub const ADMIN: Section = Section {
    name: "admin",
    repeated: false,
    doc: "HTTP for operators: /metrics, /healthz, /readyz, /status, and a status page at /.",
    keys: &[Key {
        name: "listen",
        kind: Kind::Socket,
        default: Default::Value(r#""127.0.0.1:27118""#),
        example: r#""127.0.0.1:27118""#,
        doc: "Address and port. It shows host names, namespaces and rates, never documents.",
    }],
};

/// `[log]`.
pub const LOG: Section = Section {
    name: "log",
    repeated: false,
    doc: "Logging, to standard error.",
    keys: &[
        Key {
            name: "level",
            kind: Kind::LogFilter,
            default: Default::Value(r#""info""#),
            example: r#""info""#,
            doc: "error, warn, info, debug or trace; or a filter such as \"info,halocline_actors=debug\".",
        },
        Key {
            name: "format",
            kind: Kind::Choice(LOG_FORMATS),
            default: Default::Value(r#""human""#),
            example: r#""human""#,
            doc: "Lines for people, or one JSON object a line.",
        },
    ],
};

/// Values of `log.format`.
pub const LOG_FORMATS: &[&str] = &["human", "json"];

impl Kind {
    /// What is accepted, in words.
    pub fn allowed(&self) -> String {
        use super::values::Age;
        match self {
            Kind::Text => "text that is not empty".into(),
            Kind::Uri => "a connection string, mongodb://host:port,.../?replicaSet=name".into(),
            Kind::Secret => "a secret, from the environment only".into(),
            Kind::File => "the path of a file".into(),
            Kind::Flag => "true or false".into(),
            Kind::Count { min, max } => format!("a whole number from {min} to {max}"),
            Kind::CountOrAuto { max } => format!("\"auto\" or a whole number from 1 to {max}"),
            Kind::Age { min, max } if min.is_zero() && *max < CENTURY => {
                format!("a number and a unit (ms, s, m, h, d, w), up to {}", Age(*max))
            }
            Kind::Age { min, max } if *max >= CENTURY => {
                format!("a number and a unit (ms, s, m, h, d, w), {} or longer", Age(*min))
            }
            Kind::Age { min, max } => {
                format!("a number and a unit (ms, s, m, h, d, w), {} to {}", Age(*min), Age(*max))
            }
            Kind::Choice(words) => {
                let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
                format!("one of {}", words.join(", "))
            }
            Kind::Socket => "an IP address and a port, address:port or [address]:port".into(),
            Kind::Sockets => {
                "a list of IP addresses and ports, each address:port or [address]:port".into()
            }
            Kind::Namespace => "database.collection".into(),
            Kind::FieldPath => "the name of a field, or names joined by dots".into(),
            Kind::LogFilter => "error, warn, info, debug, trace, or a filter".into(),
        }
    }
}
