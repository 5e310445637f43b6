//! The commented default configuration, made from the table of keys.

use super::keys::{Default, Key, Kind, SECTIONS};
use super::reader::variable;

const HEAD: &str = "\
# Halocline's configuration: every key, what it is for, and its default.
# `#key = value`, without a space, shows a default, or an example where there is none; take the #
# away to change it. The keys without a # must be set.
#
# Every key outside [[collection]] can also be set by an environment variable, which wins:
# HALOCLINE__FAST__URI sets uri in [fast]. An empty variable counts as not set.
#
# Ages are written with a unit: 500ms, 30s, 90m, 36h, 30d, 2w.
# Relative paths start at this file's own directory.
#
# `halocline check --config <file>` finds mistakes here and in both replica sets and opens no port.
";

/// The whole file.
pub fn template() -> String {
    let mut text = HEAD.to_owned();
    for section in SECTIONS {
        text.push('\n');
        comment(&mut text, section.doc);
        text.push_str(&section.header());
        text.push('\n');
        for key in section.keys {
            text.push('\n');
            comment(&mut text, key.doc);
            let line = match key.default {
                _ if key.kind == Kind::Secret => {
                    comment(&mut text, &format!("{}=...", variable(section.name, key.name)));
                    continue;
                }
                Default::Value(default) => format!("#{} = {default}", key.name),
                _ if must_be_set(key) => format!("{} = {}", key.name, key.example),
                _ => format!("#{} = {}  # example; not set", key.name, key.example),
            };
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}

/// The tiers' connection string has no default, and something must stand there.
fn must_be_set(key: &Key) -> bool {
    key.default == Default::Required || key.kind == Kind::Uri
}

fn comment(text: &mut String, lines: &str) {
    for line in lines.lines() {
        text.push_str("# ");
        text.push_str(line);
        text.push('\n');
    }
}
