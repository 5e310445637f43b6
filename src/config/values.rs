//! Reading one value out of its text: ages, addresses, namespaces, field paths, connection strings.
//! Each function says what is wrong in words that fit after "`value`: "; where the value stands in
//! the file is the reader's business.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use halocline_tiering::Namespace;
use mongodb::options::{ConnectionString, HostInfo, ServerAddress};

/// Shows a length of time the way the configuration writes it, exactly: `30d`, `90m`, `1500ms`.
pub struct Age(pub Duration);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u128); 5] =
            [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
        let millis = self.0.as_millis();
        if millis == 0 {
            return f.write_str("0s");
        }
        match UNITS.iter().find(|(_, unit)| millis.is_multiple_of(*unit)) {
            Some((name, unit)) => write!(f, "{}{name}", millis / unit),
            None => write!(f, "{millis}ms"),
        }
    }
}

/// Reads `30d`, `90m`, `1h 30m`. Months and years are refused: they have no fixed length, and `M`
/// next to `m` invites the wrong one.
pub fn age(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("is empty".into());
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("is a number without a unit".into());
    }
    let words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    for word in words {
        match word {
            "M" => return Err("uses M; write m for minutes, or months as days".into()),
            "month" | "months" | "y" | "yr" | "year" | "years" => {
                return Err("uses months or years, which have no fixed length; write days".into());
            }
            _ => {}
        }
    }
    humantime::parse_duration(text).map_err(|_| "is not an age".to_owned())
}

/// Reads `127.0.0.1:27117` or `[::1]:27117`.
pub fn socket(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if text.parse::<IpAddr>().is_ok() {
        return Err("has no port".into());
    }
    match text.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => match host {
            "localhost" => Err("names localhost; write 127.0.0.1 or [::1]".into()),
            "" | "*" => Err("names no address; 0.0.0.0 means every interface".into()),
            _ if host.contains(':') => Err("needs brackets around an IPv6 address".into()),
            _ => Err("is not an IP address with a port (host names are not looked up here)".into()),
        },
        Some((_, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !port.is_empty() => {
            Err("has a port above 65535".into())
        }
        _ => Err("is not an IP address with a port".into()),
    }
}

/// Whether only this machine can reach the address.
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Databases that cannot hold a tiered collection: MongoDB's own, and the daemon's.
pub const RESERVED_DATABASES: &[&str] = &["admin", "local", "config", "halocline"];

/// Reads `database.collection`: MongoDB's own naming rules, and the names that cannot be tiered.
pub fn namespace(text: &str) -> Result<Namespace, String> {
    let ns = Namespace::parse(text).map_err(|error| error.to_string())?;
    if RESERVED_DATABASES.contains(&ns.db()) {
        return Err(format!("lies in the database {}, which cannot be tiered", ns.db()));
    }
    if ns.coll() == "system" || ns.coll().starts_with("system.") {
        return Err("is a system collection, which cannot be tiered".into());
    }
    Ok(ns)
}

/// What the configuration needs to know about a connection string. The string itself is kept by the
/// caller; nothing here shows its password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Every seed as `host:port`, in lower case.
    pub hosts: Vec<String>,
    /// `replicaSet=`.
    pub set_name: Option<String>,
    /// The user it names.
    pub username: Option<String>,
    /// Whether it carries a password.
    pub has_password: bool,
    /// Database in which it says the user is defined.
    pub auth_source: Option<String>,
}

/// Reads a connection string. The messages never contain any part of it.
pub fn uri(text: &str) -> Result<Uri, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("is empty".into());
    }
    // The driver's parser panics on some of these (3.9.1: a % followed by a character of several
    // bytes); percent-encoded they are what MongoDB's specification asks for.
    if !text.is_ascii() {
        return Err("holds characters beyond ASCII, which must be percent-encoded".into());
    }
    if text.starts_with("mongodb+srv://") {
        return Err("uses mongodb+srv, which is not supported; list the members instead".into());
    }
    if !text.starts_with("mongodb://") {
        return Err("does not begin with mongodb://".into());
    }
    let parsed = ConnectionString::parse(text)
        .map_err(|error| format!("is not a connection string: {}", refusal(text, &error)))?;
    let HostInfo::HostIdentifiers(addresses) = &parsed.host_info else {
        return Err("names no hosts".into());
    };
    if parsed.direct_connection == Some(true) {
        return Err("has directConnection=true; the daemon must see the whole replica set".into());
    }
    if parsed.load_balanced == Some(true) {
        return Err("has loadBalanced=true; the daemon must reach the replica set itself".into());
    }
    if parsed.replica_set.is_none() {
        return Err("does not name the replica set; add replicaSet=<its name>".into());
    }
    let credential = parsed.credential.as_ref();
    Ok(Uri {
        hosts: addresses.iter().map(host_and_port).collect(),
        set_name: parsed.replica_set.clone(),
        username: credential.and_then(|credential| credential.username.clone()),
        has_password: credential.is_some_and(|credential| credential.password.is_some()),
        auth_source: credential.and_then(|credential| credential.source.clone()),
    })
}

/// MongoDB's default port.
const DEFAULT_PORT: u16 = 27017;

fn host_and_port(address: &ServerAddress) -> String {
    match address {
        ServerAddress::Tcp { host, port } => {
            format!("{}:{}", host.to_lowercase(), port.unwrap_or(DEFAULT_PORT))
        }
        other => other.to_string(),
    }
}

/// One spelling for every name of this machine, so that two addresses can be compared. "Every
/// interface" includes the loopback one.
pub fn same_host(host_and_port: &str) -> String {
    let (host, port) = host_and_port.rsplit_once(':').unwrap_or((host_and_port, ""));
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let local = bare == "localhost"
        || bare
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.to_canonical().is_loopback() || ip.is_unspecified());
    if local { format!("{}:{port}", Ipv4Addr::LOCALHOST) } else { host_and_port.to_lowercase() }
}

/// Why the driver refuses a connection string, without its user name and password: what stands
/// before the last `@` is replaced, and if the rest is accepted the fault lay in there.
fn refusal(text: &str, error: &mongodb::error::Error) -> String {
    let Some((_, rest)) = text.rsplit_once('@') else { return error.kind.to_string() };
    match ConnectionString::parse(format!("mongodb://user:password@{rest}")) {
        Err(error) => error.kind.to_string(),
        Ok(_) => "the user name or the password needs percent-encoding".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ages_are_shown_as_they_are_written() {
        for text in ["30d", "90m", "36h", "1500ms", "45s", "0s"] {
            assert_eq!(Age(age(text).unwrap()).to_string(), text);
        }
        assert_eq!(age("1h 30m").unwrap(), Duration::from_secs(5400));
        assert_eq!(age("2w").unwrap(), Duration::from_secs(14 * 86_400));
    }

    #[test]
    fn ages_that_could_mean_two_things_are_refused() {
        assert!(age("30").unwrap_err().contains("without a unit"));
        assert!(age("30M").unwrap_err().contains("minutes"));
        assert!(age("1y").unwrap_err().contains("days"));
        assert!(age("").is_err() && age("d").is_err() && age("-3d").is_err());
    }

    #[test]
    fn addresses_say_what_is_missing() {
        assert!(socket("[::1]:27117").is_ok());
        assert!(socket("127.0.0.1").unwrap_err().contains("no port"));
        assert!(socket("localhost:27117").unwrap_err().contains("127.0.0.1"));
        assert!(socket(":27117").unwrap_err().contains("0.0.0.0"));
        assert!(socket("127.0.0.1:99999").unwrap_err().contains("65535"));
        assert!(socket("::1:2:27117x").is_err());
    }

    #[test]
    fn namespaces_follow_mongodbs_rules() {
        assert_eq!(namespace("shop.orders.eu").unwrap().coll(), "orders.eu");
        for bad in [
            "orders",
            ".orders",
            "shop.",
            "shop.a$b",
            "sh op.orders",
            "shop.system.views",
            "admin.x",
            "local.x",
            "config.x",
            "halocline.x",
            "shop..x",
        ] {
            assert!(namespace(bad).is_err(), "{bad}");
        }
        assert!(namespace(&format!("shop.{}", "x".repeat(300))).is_err());
    }

    #[test]
    fn a_connection_strings_password_never_shows() {
        let bad = "mongodb://app:s3cr:et/@host:27017/?replicaSet=rs";
        let message = uri(bad).unwrap_err();
        assert!(!message.contains("s3cr") && !message.contains("app:"), "{message}");
        for password in ["s3cr?et", "s3cr@et", "s3cr#et", "s3cr%et", "s3cr et"] {
            let message = uri(&format!("mongodb://app:{password}@host/?replicaSet=rs"));
            if let Err(message) = message {
                assert!(!message.contains("s3cr") && !message.contains("et"), "{message}");
            }
        }
        let good = uri("mongodb://app:s3cret@h1,H2:27018/?replicaSet=rs").unwrap();
        assert_eq!(good.hosts, ["h1:27017", "h2:27018"]);
        assert!(good.has_password && !format!("{good:?}").contains("s3cret"));
    }

    #[test]
    fn a_connection_string_must_let_the_daemon_see_the_set() {
        for (text, word) in [
            ("mongodb://h/", "replicaSet"),
            ("mongodb://h/?replicaSet=r&directConnection=true", "directConnection"),
            ("mongodb+srv://h/", "srv"),
            ("http://h/", "mongodb://"),
        ] {
            assert!(uri(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn a_connection_string_beyond_ascii_is_refused_before_the_driver_panics_on_it() {
        assert!(uri("mongodb://u:%\u{6c792}@h/?replicaSet=r").unwrap_err().contains("ASCII"));
        assert!(uri("mongodb://u:p%C3%A4ss@h/?replicaSet=r").is_ok());
    }

    #[test]
    fn one_machine_has_one_spelling() {
        assert_eq!(same_host("localhost:27017"), same_host("127.0.0.1:27017"));
        assert_eq!(same_host("[::1]:27017"), same_host("localhost:27017"));
        assert_ne!(same_host("localhost:27017"), same_host("localhost:27018"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,60}") {
            let _ = (age(&text), socket(&text), namespace(&text), uri(&text));
            let _ = uri(&format!("mongodb://{text}"));
            let _ = same_host(&text);
        }
    }
}
