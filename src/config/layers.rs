//! Where configuration values come from: the TOML file, then the environment over it. Every value
//! keeps where it was written (`file:line`, or the variable's name). What the values mean is the
//! reader's business.

use std::ffi::OsString;

use config::{Map, Source, Value, ValueKind};
use toml::de::{DeTable, DeValue};

use super::{ENVIRONMENT_PREFIX, Problem, keys};

/// One set of values with their origins, ready to be laid over another.
#[derive(Debug, Clone, Default)]
struct Layer(Map<String, Value>);

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

/// All values, later sources over earlier ones.
pub fn merged(
    file_name: &str,
    text: &str,
    environment: impl Iterator<Item = (OsString, OsString)>,
    problems: &mut Vec<Problem>,
) -> Map<String, Value> {
    let file = file_layer(file_name, text, problems);
    let environment = environment_layer(environment, problems);
    let merged = config::Config::builder()
        .add_source(file)
        .add_source(environment)
        .build()
        .and_then(|merged| merged.cache.into_table());
    merged.unwrap_or_else(|error| {
        problems.push(Problem::new("", file_name, error.to_string()));
        Map::new()
    })
}

fn file_layer(file_name: &str, text: &str, problems: &mut Vec<Problem>) -> Layer {
    let lines = Lines::of(file_name, text);
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = lines.origin(error.span().map_or(0, |span| span.start));
        problems.push(Problem::new("", &at, format!("not TOML: {}", error.message())));
    }
    let mut layer = Map::new();
    for (name, value) in table.get_ref() {
        let at = lines.origin(name.span().start);
        if keys::section(name.get_ref()).is_none() {
            problems.push(unknown_section(name.get_ref(), &at));
            continue;
        }
        layer.insert(name.get_ref().to_string(), lines.value(&at, value.get_ref()));
    }
    Layer(layer)
}

/// Offsets of a text's line starts, to name the line a value stands on.
struct Lines<'a> {
    file_name: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn of(file_name: &'a str, text: &str) -> Self {
        let starts = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        Lines { file_name, starts }
    }

    fn origin(&self, offset: usize) -> String {
        let line = 1 + self.starts.partition_point(|start| *start <= offset);
        format!("{}:{line}", self.file_name)
    }

    fn value(&self, origin: &String, value: &DeValue<'_>) -> Value {
        let kind = match value {
            DeValue::String(text) => ValueKind::String(text.to_string()),
            DeValue::Integer(number) => {
                match i64::from_str_radix(number.as_str(), number.radix()) {
                    Ok(number) => ValueKind::I64(number),
                    // Too large for any key; kept as a number so that the range is what is reported.
                    Err(_) => ValueKind::I128(i128::MAX),
                }
            }
            DeValue::Float(number) => ValueKind::Float(number.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Boolean(flag) => ValueKind::Boolean(*flag),
            DeValue::Datetime(date) => ValueKind::String(date.to_string()),
            DeValue::Array(items) => ValueKind::Array(
                items
                    .iter()
                    .map(|item| self.value(&self.origin(item.span().start), item.get_ref()))
                    .collect(),
            ),
            DeValue::Table(table) => ValueKind::Table(
                table
                    .iter()
                    .map(|(name, value)| {
                        let at = self.origin(name.span().start);
                        (name.get_ref().to_string(), self.value(&at, value.get_ref()))
                    })
                    .collect(),
            ),
        };
        Value::new(Some(origin), kind)
    }
}

/// `HALOCLINE__FAST__URI` sets `fast.uri`. An empty variable counts as not set.
fn environment_layer(
    environment: impl Iterator<Item = (OsString, OsString)>,
    problems: &mut Vec<Problem>,
) -> Layer {
    let mut layer: Map<String, Value> = Map::new();
    for (variable, value) in environment {
        let Some(variable) = variable.to_str() else { continue };
        let Some(rest) = variable.strip_prefix(ENVIRONMENT_PREFIX) else { continue };
        if value.is_empty() {
            continue;
        }
        let origin = variable.to_owned();
        let Some(value) = value.to_str() else {
            problems.push(Problem::new("", &origin, "is not UTF-8".into()));
            continue;
        };
        let path = rest.to_lowercase();
        let Some((section_name, key)) = path.split_once("__") else {
            problems.push(
                Problem::new(&path, &origin, "names a section without a key".into())
                    .allowed(format!("{ENVIRONMENT_PREFIX}<SECTION>__<KEY>"))
                    .example(format!("{ENVIRONMENT_PREFIX}LOG__LEVEL=debug")),
            );
            continue;
        };
        match keys::section(section_name) {
            None => {
                problems.push(unknown_section(section_name, &origin));
                continue;
            }
            Some(section) if section.repeated => {
                problems.push(
                    Problem::new(&path, &origin, "collections are set in the file only".into())
                        .example("[[collection]]"),
                );
                continue;
            }
            Some(_) => {}
        }
        let entry = layer
            .entry(section_name.to_owned())
            .or_insert_with(|| Value::new(None, ValueKind::Table(Map::new())));
        if let ValueKind::Table(table) = &mut entry.kind {
            table.insert(
                key.to_owned(),
                Value::new(Some(&origin), ValueKind::String(value.to_owned())),
            );
        }
    }
    Layer(layer)
}

fn unknown_section(name: &str, origin: &str) -> Problem {
    let headers: Vec<String> = keys::SECTIONS.iter().map(|section| section.header()).collect();
    let problem =
        Problem::new(name, origin, "there is no such section".into()).allowed(headers.join(", "));
    let nearest = super::nearest(name, keys::SECTIONS.iter().map(|section| section.name))
        .and_then(keys::section)
        .map(|section| section.header());
    let home = keys::SECTIONS
        .iter()
        .find(|section| section.key(name).is_some())
        .map(|section| format!("{name} under {}", section.header()));
    match nearest.or(home) {
        Some(suggestion) => problem.suggestion(suggestion),
        None => problem,
    }
}
