//! Typed values out of the merged layers, one section at a time. A value that cannot be used adds a
//! problem and gives the key's default, so that one pass finds every mistake. How values combine is
//! judged in `rules`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{Map, Value, ValueKind};
use halocline_tiering::{DateField, DateKind, Namespace};
use toml::de::DeValue;

use super::keys::{Default, Key, Kind, Section};
use super::{ENVIRONMENT_PREFIX, Problem, nearest, values};

/// Longest file that is read for a secret; a larger one is not what was meant.
const MAX_SECRET_BYTES: u64 = 64 * 1024;

/// One section's values.
pub struct SectionReader<'a> {
    section: &'static Section,
    /// `fast`, or `collection[2]`.
    path: String,
    /// Where the section is written.
    origin: String,
    directory: &'a Path,
    values: Map<String, Value>,
    problems: &'a mut Vec<Problem>,
}

/// A value and where it was written.
pub struct Found<T> {
    /// The value.
    pub value: T,
    /// `file:line`, the variable's name, or the file alone for a default.
    pub origin: String,
}

/// Takes a section's values out of the merged layers and reports keys that it does not have.
pub fn sections(
    section: &'static Section,
    merged: &mut Map<String, Value>,
    file_name: &str,
    problems: &mut Vec<Problem>,
) -> Vec<(String, String, Map<String, Value>)> {
    let Some(value) = merged.remove(section.name) else {
        return if section.repeated {
            Vec::new()
        } else {
            vec![(section.name.to_owned(), file_name.to_owned(), Map::new())]
        };
    };
    let origin = value.origin().unwrap_or(file_name).to_owned();
    match (value.kind, section.repeated) {
        (ValueKind::Table(table), false) => vec![(section.name.to_owned(), origin, table)],
        (ValueKind::Array(items), true) => {
            let mut entries = Vec::new();
            for (index, item) in items.into_iter().enumerate() {
                let path = format!("{}[{index}]", section.name);
                let origin = item.origin().unwrap_or(file_name).to_owned();
                match item.kind {
                    ValueKind::Table(table) => entries.push((path, origin, table)),
                    _ => problems.push(not_a_section(section, &path, &origin)),
                }
            }
            entries
        }
        (_, repeated) => {
            problems.push(not_a_section(section, section.name, &origin));
            if repeated { Vec::new() } else { vec![(section.name.to_owned(), origin, Map::new())] }
        }
    }
}

fn not_a_section(section: &Section, path: &str, origin: &str) -> Problem {
    Problem::new(path, origin, "is not a section of its own".into())
        .allowed(format!("a section, {}", section.header()))
        .example(section.header())
}

impl<'a> SectionReader<'a> {
    /// Starts reading a section.
    pub fn new(
        section: &'static Section,
        (path, origin, values): (String, String, Map<String, Value>),
        directory: &'a Path,
        problems: &'a mut Vec<Problem>,
    ) -> Self {
        for (name, value) in &values {
            if section.key(name).is_none() {
                let origin = value.origin().unwrap_or(&origin);
                problems.push(unknown_key(section, &path, name, origin));
            }
        }
        SectionReader { section, path, origin, directory, values, problems }
    }

    /// Where the section is written.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// `fast`, or `collection[2]`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether a key is set, rightly or not.
    pub fn is_set(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// A problem of one key of this section, to be completed and reported.
    pub fn problem(&self, key: &str, origin: &str, what: impl Into<String>) -> Problem {
        Problem::new(&format!("{}.{key}", self.path), origin, what.into())
    }

    /// Adds a problem.
    pub fn report(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// A line that sets a key to a value that is accepted.
    pub fn example(&self, name: &str) -> String {
        format!("{name} = {}", self.key(name).example)
    }

    fn key(&self, name: &str) -> &'static Key {
        debug_assert!(self.section.key(name).is_some(), "{name} is not in the table of keys");
        self.section.key(name).unwrap_or(&NO_KEY)
    }

    /// Text, a choice, a log filter or a path as written.
    pub fn text(&mut self, name: &str) -> Option<Found<String>> {
        self.read(name, |key, value| {
            let ValueKind::String(text) = &value.kind else { return Err(wrong_type(value)) };
            if text.is_empty() {
                return Err("is empty".into());
            }
            match key.kind {
                Kind::Choice(words) if !words.contains(&text.as_str()) => {
                    Err(match nearest(text, words.iter().copied()) {
                        Some(word) => format!("is not one of the choices; did you mean {word:?}?"),
                        None => "is not one of the choices".into(),
                    })
                }
                Kind::LogFilter => tracing_subscriber::EnvFilter::try_new(text)
                    .map(|_| text.clone())
                    .map_err(|error| format!("is not a log filter ({error})")),
                _ => Ok(text.clone()),
            }
        })
    }

    /// A whole number. `"auto"` gives the number of processors where the key accepts it.
    pub fn count(&mut self, name: &str) -> Found<u64> {
        let found = self.read(name, |key, value| {
            let number: i128 = match &value.kind {
                ValueKind::I64(number) => i128::from(*number),
                ValueKind::I128(number) => *number,
                ValueKind::String(text)
                    if text == "auto" && matches!(key.kind, Kind::CountOrAuto { .. }) =>
                {
                    return Ok(processors());
                }
                ValueKind::String(text) if is_environment(value) => {
                    text.trim().parse().map_err(|_| "is not a whole number".to_owned())?
                }
                _ => return Err(wrong_type(value)),
            };
            let (min, max) = match key.kind {
                Kind::Count { min, max } => (min, max),
                Kind::CountOrAuto { max } => (1, max),
                _ => (0, u64::MAX),
            };
            match u64::try_from(number) {
                Ok(number) if number < min => Err(format!("is below {min}")),
                Ok(number) if number <= max => Ok(number),
                Err(_) if number < 0 => Err("is negative".into()),
                _ => Err(format!("is above {max}")),
            }
        });
        found.unwrap_or(Found { value: 1, origin: self.origin.clone() })
    }

    /// A count of things held in memory.
    pub fn size(&mut self, name: &str) -> usize {
        usize::try_from(self.count(name).value).unwrap_or(usize::MAX)
    }

    /// `true` or `false`.
    pub fn flag(&mut self, name: &str) -> bool {
        let found = self.read(name, |_, value| match &value.kind {
            ValueKind::Boolean(flag) => Ok(*flag),
            ValueKind::String(text) if is_environment(value) => {
                text.trim().parse().map_err(|_| "is neither true nor false".to_owned())
            }
            _ => Err(wrong_type(value)),
        });
        found.is_some_and(|found| found.value)
    }

    /// A length of time.
    pub fn age(&mut self, name: &str) -> Found<Duration> {
        let found = self.optional_age(name);
        found.unwrap_or(Found { value: Duration::from_secs(1), origin: self.origin.clone() })
    }

    /// A length of time that has no default.
    pub fn optional_age(&mut self, name: &str) -> Option<Found<Duration>> {
        self.read(name, |key, value| {
            let age = match &value.kind {
                ValueKind::String(text) => values::age(text)?,
                ValueKind::I64(_) => return Err("is a number without a unit".into()),
                _ => return Err(wrong_type(value)),
            };
            match key.kind {
                Kind::Age { min, .. } if age < min => {
                    Err(format!("is shorter than {}", values::Age(min)))
                }
                Kind::Age { max, .. } if age > max => {
                    Err(format!("is longer than {}", values::Age(max)))
                }
                _ => Ok(age),
            }
        })
    }

    /// One address.
    pub fn socket(&mut self, name: &str) -> Option<Found<SocketAddr>> {
        self.read(name, |_, value| match &value.kind {
            ValueKind::String(text) => values::socket(text),
            _ => Err(wrong_type(value)),
        })
    }

    /// A list of addresses, each with where it was written. From the environment: separated by
    /// commas. Each address that cannot be used is a problem of its own.
    pub fn sockets(&mut self, name: &str) -> Vec<Found<SocketAddr>> {
        let Some(found) = self.read(name, |_, value| match &value.kind {
            ValueKind::Array(items) if items.is_empty() => Err("is an empty list".into()),
            ValueKind::Array(items) => Ok(items.clone()),
            ValueKind::String(text) if is_environment(value) => {
                let origin = value.origin().map(str::to_owned);
                let item = |text: &str| Value::new(origin.as_ref(), text.trim().to_owned());
                Ok(text.split(',').map(item).collect())
            }
            _ => Err(wrong_type(value)),
        }) else {
            return Vec::new();
        };
        let mut addresses = Vec::new();
        for item in found.value {
            let origin = item.origin().unwrap_or(&found.origin).to_owned();
            let read = match &item.kind {
                ValueKind::String(text) => values::socket(text),
                _ => Err(wrong_type(&item)),
            };
            match read {
                Ok(value) => addresses.push(Found { value, origin }),
                Err(what) => self.refuse(self.key(name), &origin, Some(&item), what),
            }
        }
        addresses
    }

    /// `database.collection`.
    pub fn namespace(&mut self, name: &str) -> Option<Found<Namespace>> {
        self.read(name, |_, value| match &value.kind {
            ValueKind::String(text) => values::namespace(text),
            _ => Err(wrong_type(value)),
        })
    }

    /// The path of a date field.
    pub fn date_field(&mut self, name: &str, kind: DateKind) -> Option<DateField> {
        let found = self.read(name, |_, value| match &value.kind {
            ValueKind::String(text) => {
                DateField::new(text, kind).map_err(|error| error.to_string())
            }
            _ => Err(wrong_type(value)),
        });
        found.map(|found| found.value)
    }

    /// A path; a relative one starts at the configuration file's directory.
    pub fn file(&mut self, name: &str) -> Option<Found<PathBuf>> {
        let found = self.text(name)?;
        Some(Found { value: self.directory.join(found.value), origin: found.origin })
    }

    /// The contents of the file that a key names, without surrounding white space.
    pub fn secret_file(&mut self, name: &str) -> Option<Found<String>> {
        let found = self.file(name)?;
        match read_secret(&found.value) {
            Ok(value) => Some(Found { value, origin: found.origin }),
            Err(what) => {
                let what = format!("the file {} {what}", found.value.display());
                let problem = self.problem(name, &found.origin, what);
                self.report(problem.allowed("a readable file with nothing but the secret"));
                None
            }
        }
    }

    /// A secret that only the environment may hold.
    pub fn environment_secret(&mut self, name: &str) -> Option<Found<String>> {
        let key = self.key(name);
        let value = self.values.get(name)?;
        let origin = value.origin().unwrap_or(&self.origin).to_owned();
        match &value.kind {
            ValueKind::String(text) if is_environment(value) => {
                Some(Found { value: text.clone(), origin })
            }
            _ => {
                let variable = variable(self.section.name, key.name);
                let problem = self
                    .problem(name, &origin, "a password does not belong in this file")
                    .allowed(format!("password_file, or the environment variable {variable}"))
                    .example(self.example("password_file"));
                self.report(problem);
                None
            }
        }
    }

    /// Reads one key with `parse`: the value as set, else the default, else nothing.
    fn read<T>(
        &mut self,
        name: &str,
        parse: impl Fn(&Key, &Value) -> Result<T, String>,
    ) -> Option<Found<T>> {
        let key = self.key(name);
        let set = self.values.get(name).cloned();
        if let Some(value) = &set {
            let origin = value.origin().unwrap_or(&self.origin).to_owned();
            match parse(key, value) {
                Ok(value) => return Some(Found { value, origin }),
                Err(what) => self.refuse(key, &origin, Some(value), what),
            }
        }
        match key.default {
            Default::Value(text) => {
                let value = default_value(text);
                let origin = self.origin.clone();
                parse(key, &value).ok().map(|value| Found { value, origin })
            }
            Default::Required if set.is_none() => {
                let origin = self.origin.clone();
                self.refuse(key, &origin, None, "is missing".into());
                None
            }
            Default::Required | Default::Unset => None,
        }
    }

    fn refuse(&mut self, key: &Key, origin: &str, value: Option<&Value>, what: String) {
        let written = value.and_then(|value| shown(key, value));
        let what = match written {
            // Some messages quote the value themselves.
            Some(written) if !what.contains(&format!("\"{written}\"")) => {
                format!("`{written}` {what}")
            }
            _ => what,
        };
        let problem = self
            .problem(key.name, origin, what)
            .allowed(key.kind.allowed())
            .example(self.example(key.name));
        self.report(problem);
    }
}

/// Stands in for a key that is missing from the table, which a test rules out.
const NO_KEY: Key =
    Key { name: "", kind: Kind::Text, default: Default::Unset, example: "", doc: "" };

/// The environment variable that sets a key.
pub fn variable(section: &str, key: &str) -> String {
    format!("{ENVIRONMENT_PREFIX}{}__{}", section.to_uppercase(), key.to_uppercase())
}

fn processors() -> u64 {
    std::thread::available_parallelism().map_or(1, |n| u64::try_from(n.get()).unwrap_or(1))
}

fn is_environment(value: &Value) -> bool {
    value.origin().is_some_and(|origin| origin.starts_with(ENVIRONMENT_PREFIX))
}

fn wrong_type(value: &Value) -> String {
    let kind = match &value.kind {
        ValueKind::Nil => "nothing",
        ValueKind::Boolean(_) => "true or false",
        ValueKind::I64(_) | ValueKind::I128(_) | ValueKind::U64(_) | ValueKind::U128(_) => {
            "a whole number"
        }
        ValueKind::Float(_) => "a fraction",
        ValueKind::String(_) => "text",
        ValueKind::Table(_) => "a section",
        ValueKind::Array(_) => "a list",
    };
    format!("is {kind}, which does not fit here")
}

/// The value as a message may show it: shortened, and never one that can hold a secret.
fn shown(key: &Key, value: &Value) -> Option<String> {
    const LONGEST: usize = 60;
    if matches!(key.kind, Kind::Uri | Kind::Secret) {
        return None;
    }
    let text = match &value.kind {
        ValueKind::String(text) => text.clone(),
        ValueKind::Boolean(flag) => flag.to_string(),
        ValueKind::I64(number) => number.to_string(),
        ValueKind::Float(number) => number.to_string(),
        _ => return None,
    };
    let mut text: String = text.chars().take(LONGEST + 1).flat_map(char::escape_debug).collect();
    if text.chars().count() > LONGEST {
        text = text.chars().take(LONGEST).chain(['…']).collect();
    }
    Some(text)
}

/// A default of the table of keys as a value.
fn default_value(text: &str) -> Value {
    fn convert(value: &DeValue<'_>) -> ValueKind {
        match value {
            DeValue::String(text) => ValueKind::String(text.to_string()),
            DeValue::Integer(number) => ValueKind::I64(number.as_str().parse().unwrap_or_default()),
            DeValue::Boolean(flag) => ValueKind::Boolean(*flag),
            DeValue::Array(items) => ValueKind::Array(
                items.iter().map(|item| Value::new(None, convert(item.get_ref()))).collect(),
            ),
            _ => ValueKind::Nil,
        }
    }
    let kind = DeValue::parse(text).map_or(ValueKind::Nil, |value| convert(value.get_ref()));
    Value::new(None, kind)
}

fn read_secret(path: &Path) -> Result<String, String> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(|error| format!("cannot be read: {error}"))?;
    let mut text = String::new();
    let read = file.take(MAX_SECRET_BYTES + 1).read_to_string(&mut text);
    let read = read.map_err(|error| format!("cannot be read as text: {error}"))?;
    if read as u64 > MAX_SECRET_BYTES {
        return Err(format!("is larger than {MAX_SECRET_BYTES} bytes"));
    }
    let text = text.trim();
    if text.is_empty() { Err("is empty".into()) } else { Ok(text.to_owned()) }
}

fn unknown_key(section: &'static Section, path: &str, name: &str, origin: &str) -> Problem {
    let names = || section.keys.iter().map(|key| key.name);
    let known: Vec<&str> = names().collect();
    let problem =
        Problem::new(&format!("{path}.{name}"), origin, "there is no such key".to_owned())
            .allowed(format!("keys of {}: {}", section.header(), known.join(", ")));
    if let Some(key) = nearest(name, names()) {
        return problem.suggestion(key.to_owned());
    }
    let home = super::keys::SECTIONS.iter().find(|other| other.key(name).is_some());
    match home {
        Some(home) => problem.suggestion(format!("{name} under {}", home.header())),
        None => problem,
    }
}
