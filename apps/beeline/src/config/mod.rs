//! Configuration: file < environment < flag, checked before work starts.
//!
//! Every setting is declared once, in the table of the service it belongs to, by [`knobs!`]: its
//! name, type, default and help. From that come the field of a typed struct and three names:
//!
//! | table | file | flag | environment |
//! |---|---|---|---|
//! | `serve` | `[serve]`, `shards = 2` | `--shards 2` | `BEELINE_SHARDS=2` |
//! | `resp` | `[resp]`, `address = "off"` | `--resp-address off` | `BEELINE_RESP_ADDRESS=off` |
//!
//! All three are read by the same parser, so an error reads the same wherever the value stood, and
//! names that place: file, line and column, variable, or flag. A table, a setting or a variable
//! that does not exist is an error that names the nearest one that does.
//!
//! A table is one file here ([`resp`]); [`ServeConfig`] carries them all.

mod direct;
mod documents;
mod file;
mod flags;
mod objects;
mod resolve;
mod resp;
mod serve;
pub mod values;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

pub use direct::DirectConfig;
pub use documents::{DocumentsConfig, SetMembers};
pub use file::FileLayer;
pub use flags::ServeFlags;
pub use objects::{Numa, ObjectsConfig};
pub use resolve::{Environment, Resolver, Rules, Setting, Table};
pub use resp::RespConfig;
pub use serve::ServeConfig;

/// A type a knob can have.
pub trait Knob: Sized {
    /// What stands for a value in help texts.
    const PLACEHOLDER: &'static str;

    /// Reads the text of a flag, variable or file line; the error says what would be right.
    fn parse(text: &str) -> Result<Self, String>;

    /// The text `config show` prints; parsing it gives the same value back, except for secrets.
    fn show(&self) -> String;
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No layer sets the value.
    Default,
    /// The configuration file, and the line there.
    File(PathBuf, usize),
    /// An environment variable.
    Environment(String),
    /// A flag.
    Flag(String),
    /// Another setting, named here, decides it.
    Setting(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, line) => write!(f, "file {}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Setting(name) => write!(f, "setting {name}"),
        }
    }
}

/// One line of `config show`.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The flag without its dashes, which no other setting has.
    pub name: String,
    /// The table of the file.
    pub table: &'static str,
    /// The name in that table.
    pub key: String,
    /// As it will be used; secrets are not shown.
    pub value: String,
    /// Where it came from.
    #[serde(serialize_with = "as_text")]
    pub origin: Origin,
    /// What it does.
    pub help: &'static str,
}

fn as_text<S: serde::Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(origin)
}

/// What is wrong with a configuration: everything found, not just the first.
#[derive(Debug)]
pub struct ConfigError {
    /// One sentence each.
    pub problems: Vec<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl std::error::Error for ConfigError {}

impl From<String> for ConfigError {
    fn from(problem: String) -> Self {
        Self { problems: vec![problem] }
    }
}

/// The name among `known` that a person who wrote `name` may have meant.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let tolerated = (name.len() / 3).max(2);
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|&(distance, _)| distance <= tolerated)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Declares the table of one service: a typed struct and its [`Table`].
///
/// `earlier "name"` after a default is a name under which `[serve]`, a flag and a variable gave the
/// setting in earlier versions; it is still read. `tables { .. }` at the end are tables that the
/// struct carries.
macro_rules! knobs {
    (
        $(#[$meta:meta])*
        pub struct $config:ident, table $table:literal {
            $($field:ident: $type:ty = $default:literal $(earlier $earlier:literal)?, $help:literal;)*
        }
        $(tables { $($(#[$inner_meta:meta])* $inner:ident: $inner_type:ty;)* })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        pub struct $config {
            $(#[doc = $help] pub $field: $type,)*
            $($($(#[$inner_meta])* pub $inner: $inner_type,)*)?
        }

        impl $crate::config::Table for $config {
            const NAME: &'static str = $table;

            fn settings(into: &mut Vec<$crate::config::Setting>) {
                $(into.push($crate::config::Setting::new::<$type>(
                    $table,
                    stringify!($field),
                    None$(.or(Some($earlier)))?,
                    $default,
                    $help,
                ));)*
                $($(<$inner_type as $crate::config::Table>::settings(into);)*)?
            }

            fn take(resolver: &mut $crate::config::Resolver<'_>) -> Option<Self> {
                $(let $field = resolver.take::<$type>($table, stringify!($field));)*
                $($(let $inner = <$inner_type as $crate::config::Table>::take(resolver);)*)?
                Some(Self { $($field: $field?,)* $($($inner: $inner?,)*)? })
            }

            fn check_all(&self, rules: &mut $crate::config::Rules<'_>) {
                self.check(rules);
                $($($crate::config::Table::check_all(&self.$inner, rules);)*)?
            }
        }
    };
}
pub(crate) use knobs;

#[cfg(test)]
mod tests;
