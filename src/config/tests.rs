//! What the configuration promises to the person who writes it.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SMALL: &str = r#"
[fast]
uri = "mongodb://fast1:27017/?replicaSet=fast"
[archive]
uri = "mongodb://archive1:27017/?replicaSet=archive"
[[collection]]
namespace = "shop.orders"
date_field = "created_at"
keep = "30d"
"#;

fn read_with(text: &str, environment: &[(&str, &str)]) -> Result<Config, Problems> {
    let environment = environment.iter().map(|(name, value)| (name.into(), value.into()));
    Config::parse(Path::new("h.toml"), text, environment)
}

fn read(text: &str) -> Result<Config, Problems> {
    read_with(text, &[])
}

/// The problems' paths and messages, for assertions on one of them.
fn problems(text: &str) -> Vec<Problem> {
    read(text).map_or_else(|problems| problems.0, |_| Vec::new())
}

fn only(text: &str) -> Problem {
    let found = problems(text);
    assert_eq!(found.len(), 1, "{found:#?}");
    found[0].clone()
}

#[test]
fn the_shipped_file_is_the_table_of_keys() {
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/config/halocline.toml");
    let shipped = std::fs::read_to_string(shipped).unwrap();
    assert_eq!(shipped, template(), "run: halocline config > config/halocline.toml");
}

#[test]
fn the_shipped_file_is_accepted_and_changes_no_default() {
    let shipped = read(&template()).unwrap();
    let small = read(SMALL).unwrap();
    assert_eq!(format!("{:?}", shipped.options), format!("{:?}", small.options));
    assert_eq!(
        format!("{:?}", (shipped.admin, shipped.log)),
        format!("{:?}", (small.admin, small.log))
    );
    assert!(shipped.warnings.is_empty());
}

#[test]
fn every_commented_default_can_be_uncommented() {
    let text: String = template()
        .lines()
        .filter(|line| !line.ends_with("# example; not set"))
        .map(|line| match line.strip_prefix("#") {
            Some(rest) if rest.split_once(" = ").is_some_and(|(key, _)| is_a_key(key)) => rest,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let all_set = read(&text).unwrap();
    assert_eq!(format!("{:?}", all_set.options), format!("{:?}", read(SMALL).unwrap().options));
}

fn is_a_key(name: &str) -> bool {
    keys::SECTIONS.iter().any(|section| section.key(name).is_some())
}

#[test]
fn every_key_of_the_table_is_read() {
    for section in keys::SECTIONS {
        for key in section.keys {
            let text = format!("{}\n{} = {{}}\n", section.header(), key.name);
            let path =
                if section.repeated { format!("{}[0]", section.name) } else { section.name.into() };
            let path = format!("{path}.{}", key.name);
            let found = problems(&text);
            assert!(
                found.iter().any(|p| p.path == path && !p.what.contains("is missing")),
                "{path} is not read: {found:#?}"
            );
        }
    }
}

#[test]
fn every_example_is_accepted() {
    for section in keys::SECTIONS {
        for key in section.keys.iter().filter(|key| key.kind != keys::Kind::Secret) {
            let text = format!("{}\n{} = {}\n", section.header(), key.name, key.example);
            let path = format!(".{}", key.name);
            // Files of examples do not exist, and a lone user has no password: everything else fits.
            let refused = problems(&text).into_iter().find(|p| {
                p.path.ends_with(&path)
                    && !p.what.contains("No such file")
                    && !p.what.contains("no password")
                    && p.path.starts_with(section.name)
            });
            assert_eq!(refused, None);
        }
    }
}

#[test]
fn five_mistakes_are_five_problems_in_the_order_of_the_file() {
    let found = problems(
        r#"
[fast]
url = "mongodb://fast1:27017/?replicaSet=fast"
uri = "mongodb://fast1:27017/?replicaSet=fast"
[archive]
uri = "mongodb://archive1:27017/"
[[collection]]
namespace = "orders"
date_field = "created_at"
keep = "30"
[feeder]
batch_keys = 0
"#,
    );
    let lines: Vec<(&str, &str)> =
        found.iter().map(|p| (p.origin.as_str(), p.path.as_str())).collect();
    assert_eq!(
        lines,
        [
            ("h.toml:3", "fast.url"),
            ("h.toml:6", "archive.uri"),
            ("h.toml:8", "collection[0].namespace"),
            ("h.toml:10", "collection[0].keep"),
            ("h.toml:12", "feeder.batch_keys"),
        ]
    );
    assert_eq!(found[0].suggestion.as_deref(), Some("uri"));
    assert!(found[0].allowed.as_deref().unwrap().contains("uri_file"));
    assert!(found[1].what.contains("replicaSet"), "{}", found[1]);
    assert!(found[2].what.starts_with("\"orders\" does not"), "{}", found[2]);
    assert!(found[3].what.contains("without a unit"), "{}", found[3]);
    assert_eq!(found[3].example.as_deref(), Some(r#"keep = "30d""#));
    assert!(found[4].what.contains("below 1"), "{}", found[4]);
}

#[test]
fn text_that_is_not_toml_is_reported_beside_the_rest() {
    let found = problems(&format!("{SMALL}\n[feeder]\nmax_lag = \n[moves]\nbatch = 3\n"));
    assert!(found.iter().any(|p| p.what.starts_with("not TOML")), "{found:#?}");
    assert!(found.iter().any(|p| p.path == "moves.batch"), "{found:#?}");
}

#[test]
fn a_misplaced_or_misspelt_name_is_pointed_home() {
    assert_eq!(
        only(&format!("{SMALL}[limits]\nmax_lag = \"1s\"")).suggestion.as_deref(),
        Some("max_lag under [feeder]")
    );
    assert_eq!(
        only(&format!("keep = \"3d\"\n{SMALL}")).suggestion.as_deref(),
        Some("keep under [[collection]]")
    );
    assert_eq!(only(&format!("{SMALL}[feedr]\n")).suggestion.as_deref(), Some("[feeder]"));
    assert_eq!(
        only(&format!("{SMALL}[[collections]]\n")).suggestion.as_deref(),
        Some("[[collection]]")
    );
    assert_eq!(
        only(&format!("{SMALL}[actors]\nconnection-threads = 2")).suggestion.as_deref(),
        Some("connection_threads")
    );
    assert_eq!(only(&format!("{SMALL}[actors]\nzzz = 2")).suggestion, None);
    assert!(only(&format!("{SMALL}[log]\nformat = \"jsn\"")).what.contains("\"json\""));
}

#[test]
fn a_section_of_the_wrong_shape_is_one_problem() {
    let single = SMALL.replace("[[collection]]", "[collection]");
    assert!(only(&single).allowed.unwrap().contains("[[collection]]"));
    assert_eq!(only(&format!("log = 3\n{SMALL}")).path, "log");
    assert_eq!(
        only(&format!("collection = [1]\n{}", &SMALL[..SMALL.find("[[").unwrap()])).path,
        "collection[0]"
    );
}

#[test]
fn the_environment_wins_and_names_itself() {
    let config = read_with(
        &format!("{SMALL}[feeder]\nbatch_keys = 8\n"),
        &[
            ("HALOCLINE__FEEDER__BATCH_KEYS", "16"),
            ("HALOCLINE__FEEDER__MAX_LAG", "3s"),
            ("HALOCLINE__LISTEN__ADDRESSES", "127.0.0.1:1, [::1]:2"),
            ("HALOCLINE__LOG__LEVEL", ""),
            ("HALOCLINE_CONFIG", "elsewhere"),
            ("PATH", "/bin"),
        ],
    )
    .unwrap();
    assert_eq!(config.options.feeder.batch_keys, 16);
    assert_eq!(config.options.feeder.max_lag.as_secs(), 3);
    assert_eq!(config.options.listen.len(), 2);
    assert_eq!(config.log.level, "info");

    let refused =
        |name: &str, value: &str| read_with(SMALL, &[(name, value)]).unwrap_err().0[0].clone();
    let problem = refused("HALOCLINE__FAST__URL", "x");
    assert_eq!(
        (problem.origin.as_str(), problem.suggestion.as_deref()),
        ("HALOCLINE__FAST__URL", Some("uri"))
    );
    assert!(refused("HALOCLINE__FEEDER__BATCH_KEYS", "many").what.contains("`many`"));
    assert!(refused("HALOCLINE__COLLECTION__0__KEEP", "3d").what.contains("file only"));
    assert!(refused("HALOCLINE__FAST", "x").what.contains("without a key"));
    assert_eq!(refused("HALOCLINE__FEDER__MAX_LAG", "3s").suggestion.as_deref(), Some("[feeder]"));
}

#[test]
fn only_the_environment_may_write_a_number_as_text() {
    assert!(only(&format!("{SMALL}[feeder]\nbatch_keys = \"8\"")).what.contains("text"));
    assert!(
        only(&format!("{SMALL}[feeder]\nbatch_keys = 99999999999999999999"))
            .what
            .contains("above 1000")
    );
    assert!(only(&format!("{SMALL}[feeder]\nbatch_keys = -1")).what.contains("negative"));
    assert!(only(&format!("{SMALL}[feeder]\nbatch_keys = 1.5")).what.contains("fraction"));
}

#[test]
fn a_secret_is_never_shown() {
    const SECRET: &str = "hunter2";
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("password"), format!("{SECRET}\n")).unwrap();
    std::fs::write(
        directory.path().join("uri"),
        format!("mongodb://app:{SECRET}@archive1/?replicaSet=archive"),
    )
    .unwrap();
    let path = directory.path().join("h.toml");
    let text = r#"
[fast]
uri = "mongodb://fast1/?replicaSet=fast"
username = "app"
password_file = "password"
[archive]
uri_file = "uri"
"#;
    let config = Config::parse(&path, text, std::iter::empty()).unwrap();
    assert_eq!(config.options.fast.credentials.as_ref().unwrap().password.as_str(), SECRET);
    assert!(config.options.archive.uri.contains(SECRET));
    assert!(!format!("{config:?}").contains(SECRET));

    for mistaken in [
        SMALL.replace("fast1", &format!("app:{SECRET}@fast1")),
        SMALL.replace("fast1", &format!("app:{SECRET}:@fast1")),
        SMALL.replace("mongodb://fast1", &format!("mongo://app:{SECRET}@fast1")),
        SMALL.replace("[archive]", &format!("password = \"{SECRET}\"\n[archive]")),
    ] {
        let problem = only(&mistaken);
        assert!(!format!("{problem} {problem:?}").contains(SECRET), "{problem}");
    }
    let password = [("HALOCLINE__FAST__PASSWORD", SECRET), ("HALOCLINE__FAST__URI", SECRET)];
    let found = read_with(SMALL, &password).unwrap_err();
    assert!(!found.to_string().contains(SECRET), "{found}");
}

#[test]
fn credentials_must_be_whole() {
    let fast = |lines: &str| SMALL.replace("[archive]", &format!("{lines}\n[archive]"));
    assert_eq!(only(&fast("username = \"app\"")).path, "fast.username");
    assert!(only(&fast("password_file = \"/nonexistent\"")).what.contains("/nonexistent"));
    assert!(only(&fast("uri_file = \"/nonexistent\"")).what.contains("beside uri"));
    assert!(only(&SMALL.replace("[archive]\nuri", "[archive]\n#uri")).what.contains("missing"));
    let named = SMALL.replace("fast1", "app@fast1");
    let environment = [("HALOCLINE__FAST__PASSWORD", "x")];
    let config = read_with(&named, &environment).unwrap();
    assert_eq!(config.options.fast.credentials.unwrap().username, "app");
    assert_eq!(read_with(SMALL, &environment).unwrap_err().0[0].path, "fast.username");
}

#[test]
fn two_tiers_are_two_replica_sets() {
    let same = SMALL.replace("archive1", "FAST1");
    assert!(only(&same).what.contains("fast1:27017"));
    let local =
        SMALL.replace("archive1:27017", "localhost:1").replace("fast1:27017", "127.0.0.1:1");
    assert_eq!(only(&local).path, "archive.uri");
}

#[test]
fn strangers_are_let_in_only_in_so_many_words() {
    let open = format!("{SMALL}[listen]\naddresses = [\"0.0.0.0:27117\"]\n");
    assert!(only(&open).allowed.unwrap().contains("allow_unauthenticated = true"));
    assert!(read(&format!("{open}allow_unauthenticated = true\n")).is_ok());
    assert!(only(&format!("{SMALL}[listen]\naddresses = []")).what.contains("empty list"));
}

#[test]
fn addresses_do_not_collide() {
    let listen = |list: &str| format!("{SMALL}[listen]\naddresses = {list}\n");
    assert!(only(&listen(r#"["127.0.0.1:1", "127.0.0.1:1"]"#)).what.contains("twice"));
    assert_eq!(only(&listen(r#"["127.0.0.1:27118"]"#)).path, "admin.listen");
    assert!(read(&listen(r#"["127.0.0.1:0", "127.0.0.1:0"]"#)).is_ok(), "port 0 is any free port");
    let own = listen(r#"["127.0.0.1:5"]"#).replace("fast1:27017", "localhost:5");
    assert!(only(&own).what.contains("connect to itself"));
    let everywhere = own.replace("127.0.0.1:5\"]", "0.0.0.0:5\"]\nallow_unauthenticated = true");
    assert!(only(&everywhere).what.contains("connect to itself"));
}

#[test]
fn an_admin_port_for_everybody_is_remarked_on() {
    let open = read(&format!("{SMALL}[admin]\nlisten = \"0.0.0.0:27118\"\n")).unwrap();
    assert_eq!(open.warnings[0].path, "admin.listen");
}

#[test]
fn collections_are_named_once_and_not_in_mongodbs_own_databases() {
    let twice = format!("{SMALL}{}", &SMALL[SMALL.find("[[").unwrap()..]);
    assert_eq!(only(&twice).path, "collection[1].namespace");
    for db in ["admin", "local", "config", "halocline"] {
        let reserved = SMALL.replace("shop.", &format!("{db}."));
        assert!(only(&reserved).what.contains("cannot be tiered"), "{db}");
    }
    assert!(only(&SMALL.replace("created_at", "a..b")).path.ends_with("date_field"));
}

#[test]
fn a_window_too_small_is_refused_or_remarked_on() {
    assert!(only(&SMALL.replace("30d", "0s")).what.contains("shorter than 1s"));
    let trial = read(&SMALL.replace("30d", "20s")).unwrap();
    assert_eq!(trial.warnings.len(), 1);
}

#[test]
fn a_residency_that_could_insert_twice_needs_saying_so() {
    let short = format!("{SMALL}[moves]\nresidency = \"2s\"\n");
    assert_eq!(only(&short).path, "moves.residency");
    let said = read(&format!("{short}allow_short_residency = true\n")).unwrap();
    assert_eq!(said.options.moves.residency.as_secs(), 2);
    assert_eq!(said.warnings.len(), 1);
}

#[test]
fn names_in_the_table_are_unique_within_a_section() {
    for section in keys::SECTIONS {
        let names: BTreeSet<&str> = section.keys.iter().map(|key| key.name).collect();
        assert_eq!(names.len(), section.keys.len(), "{}", section.name);
    }
}

proptest! {
    #[test]
    fn no_file_panics(text in ".{0,200}") {
        let _ = read(&text);
    }

    /// The shipped file with one piece cut out or doubled: still an answer, never a panic.
    #[test]
    fn no_damaged_file_panics(from in 0usize..9000, length in 0usize..40, double in any::<bool>()) {
        let text: Vec<char> = template().replace("\n# ", "\n").chars().collect();
        let from = from.min(text.len());
        let until = (from + length).min(text.len());
        let keep = if double { from } else { until };
        let damaged: String = text[..until.min(text.len())].iter().take(until).chain(&text[keep..]).collect();
        let _ = read(&damaged);
    }
}
