//! The name of a collection: `db.coll`, checked by MongoDB's own naming rules.
//! What a namespace is tiered by lives in the configuration, not here.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};

/// Longest name of a database, in bytes (MongoDB's limit).
const MAX_DB_BYTES: usize = 63;

/// Longest full name `db.coll`, in bytes (MongoDB's limit since 4.4).
const MAX_FULL_BYTES: usize = 255;

/// A database and a collection of it. Cloning copies a pointer.
#[derive(Clone)]
pub struct Namespace {
    full: Arc<str>,
    dot: usize,
}

/// Why a text is not a namespace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// No dot, or nothing on one side of it.
    #[error("\"{0}\" does not name a collection; write it as \"database.collection\"")]
    Incomplete(String),
    /// A character that MongoDB allows in no database name.
    #[error("database name \"{db}\" contains {bad:?}, which MongoDB does not allow")]
    DatabaseCharacter {
        /// The database name.
        db: String,
        /// The first character that is not allowed.
        bad: char,
    },
    /// A character or a form that MongoDB allows in no collection name.
    #[error(
        "collection name \"{0}\" is not one MongoDB allows: it must not begin with a dot nor contain \"$\" or a NUL"
    )]
    Collection(String),
    /// Longer than MongoDB allows.
    #[error(
        "\"{0}\" is too long: MongoDB allows {MAX_DB_BYTES} bytes for a database and {MAX_FULL_BYTES} for database.collection"
    )]
    TooLong(String),
}

impl Namespace {
    /// Puts a namespace together from its two names.
    pub fn new(db: &str, coll: &str) -> Result<Self, NamespaceError> {
        let full = || format!("{db}.{coll}");
        if db.is_empty() || coll.is_empty() {
            return Err(NamespaceError::Incomplete(full()));
        }
        if let Some(bad) = db.chars().find(|c| "/\\. \"$*<>:|?\0".contains(*c)) {
            return Err(NamespaceError::DatabaseCharacter { db: db.to_owned(), bad });
        }
        if coll.starts_with('.') || coll.contains(['$', '\0']) {
            return Err(NamespaceError::Collection(coll.to_owned()));
        }
        if db.len() > MAX_DB_BYTES || db.len() + 1 + coll.len() > MAX_FULL_BYTES {
            return Err(NamespaceError::TooLong(full()));
        }
        Ok(Self { full: full().into(), dot: db.len() })
    }

    /// Splits `db.coll` at its first dot: collection names may contain dots, database names not.
    pub fn parse(text: &str) -> Result<Self, NamespaceError> {
        let (db, coll) =
            text.split_once('.').ok_or_else(|| NamespaceError::Incomplete(text.to_owned()))?;
        Self::new(db, coll)
    }

    /// The database.
    pub fn db(&self) -> &str {
        self.full.get(..self.dot).unwrap_or_default()
    }

    /// The collection.
    pub fn coll(&self) -> &str {
        self.full.get(self.dot + 1..).unwrap_or_default()
    }

    /// `db.coll`.
    pub fn as_str(&self) -> &str {
        &self.full
    }

    /// Whether this is the collection `coll` of `db`, without building a namespace of them.
    pub fn is(&self, db: &str, coll: &str) -> bool {
        self.db() == db && self.coll() == coll
    }
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Self) -> bool {
        self.full == other.full
    }
}

impl Eq for Namespace {}

impl PartialOrd for Namespace {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Namespace {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.full.cmp(&other.full)
    }
}

impl Hash for Namespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.full.hash(state);
    }
}

impl std::borrow::Borrow<str> for Namespace {
    fn borrow(&self) -> &str {
        &self.full
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl FromStr for Namespace {
    type Err = NamespaceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl Serialize for Namespace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.full)
    }
}

impl<'de> Deserialize<'de> for Namespace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_the_first_dot() {
        let ns = Namespace::parse("shop.orders.2024").unwrap();
        assert_eq!(
            (ns.db(), ns.coll(), ns.to_string().as_str()),
            ("shop", "orders.2024", "shop.orders.2024")
        );
        assert!(ns.is("shop", "orders.2024") && !ns.is("shop", "orders"));
        assert_eq!(ns, Namespace::new("shop", "orders.2024").unwrap());
    }

    #[test]
    fn refuses_what_mongod_refuses() {
        for bad in
            ["shop", "shop.", ".orders", "sh op.orders", "shop..orders", "shop.or$ders", "a\0.b"]
        {
            assert!(Namespace::parse(bad).is_err(), "{bad:?}");
        }
        assert!(Namespace::parse(&format!("{}.c", "d".repeat(64))).is_err());
        assert!(Namespace::parse(&format!("d.{}", "c".repeat(254))).is_err());
        assert!(Namespace::parse(&format!("d.{}", "c".repeat(253))).is_ok());
    }
}
