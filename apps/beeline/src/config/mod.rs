//! Configuration: file < environment < flag, checked before work starts.
//!
//! Every knob is declared once, by [`knobs!`]: its name, type, default and help. From that come
//! the field of the typed struct, the flag (`--resp-address`), the environment variable
//! (`BEELINE_RESP_ADDRESS`) and the line of the `[serve]` table in the file (`resp-address`).
//! All three are read by the same parser, so an error reads the same wherever the value stood,
//! and names that place.

mod serve;
pub mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use serve::{ServeConfig, ServeFlags};

/// The file read when `--config` and `BEELINE_CONFIG` are absent, if it exists.
pub const DEFAULT_FILE: &str = "beeline.toml";

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
    /// Nobody set it.
    Default,
    /// The configuration file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// One line of `config show`.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// As in the file.
    pub name: String,
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

/// The lines of one table of a configuration file.
#[derive(Clone, Debug, Default)]
pub struct FileLayer {
    path: PathBuf,
    lines: BTreeMap<String, String>,
}

impl FileLayer {
    /// Reads `[section]` of the file at `path`, or of [`DEFAULT_FILE`] if that exists.
    ///
    /// Errors: the file cannot be read or parsed, or has a table nobody knows.
    pub fn read(path: Option<&Path>, section: &str) -> Result<Self, ConfigError> {
        let path = match path {
            Some(path) => path.to_owned(),
            None if Path::new(DEFAULT_FILE).exists() => PathBuf::from(DEFAULT_FILE),
            None => return Ok(Self::default()),
        };
        let text = std::fs::read_to_string(&path).map_err(|error| {
            format!("{}: cannot be read: {error}; check --config", path.display())
        })?;
        Self::from_text(path, &text, section)
    }

    fn from_text(path: PathBuf, text: &str, section: &str) -> Result<Self, ConfigError> {
        let document: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| format!("{}: {}", path.display(), error.message()))?;
        let mut problems = Vec::new();
        let mut lines = BTreeMap::new();
        for (name, value) in document {
            match value {
                toml::Value::Table(table) if name == section => {
                    for (name, value) in table {
                        match plain(&value) {
                            Some(text) => drop(lines.insert(name, text)),
                            None => problems.push(format!(
                                "{}: {section}.{name} is a {}; write a string, number or boolean",
                                path.display(),
                                value.type_str()
                            )),
                        }
                    }
                }
                _ => problems.push(format!(
                    "{}: {name:?} is not known here; settings go into the table [{section}]",
                    path.display()
                )),
            }
        }
        if problems.is_empty() { Ok(Self { path, lines }) } else { Err(ConfigError { problems }) }
    }
}

fn plain(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

/// Resolves the knobs of one struct; what [`knobs!`] expands to uses it.
pub struct Resolver<'a> {
    file: &'a FileLayer,
    environment: &'a dyn Fn(&str) -> Option<String>,
    known: Vec<String>,
    problems: Vec<String>,
    rows: Vec<Row>,
}

impl<'a> Resolver<'a> {
    /// A resolver over the two lower layers.
    pub fn new(file: &'a FileLayer, environment: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { file, environment, known: Vec::new(), problems: Vec::new(), rows: Vec::new() }
    }

    /// The value of one knob: its flag, else its variable, else its line, else its default.
    /// `None` after a problem, which [`Resolver::finish`] reports.
    pub fn take<K: Knob>(
        &mut self,
        field: &str,
        flag: Option<&String>,
        default: &str,
        help: &'static str,
    ) -> Option<K> {
        let name = field.replace('_', "-");
        let variable = format!("BEELINE_{}", field.to_uppercase());
        let from_environment = || (self.environment)(&variable).filter(|text| !text.is_empty());
        let (text, origin) = if let Some(text) = flag {
            (text.clone(), Origin::Flag(format!("--{name}")))
        } else if let Some(text) = from_environment() {
            (text, Origin::Environment(variable))
        } else if let Some(text) = self.file.lines.get(&name) {
            (text.clone(), Origin::File(self.file.path.clone()))
        } else {
            (default.to_owned(), Origin::Default)
        };
        self.known.push(name.clone());
        match K::parse(&text) {
            Ok(value) => {
                self.rows.push(Row { name, value: value.show(), origin, help });
                Some(value)
            }
            Err(problem) => {
                let place = match &origin {
                    Origin::Flag(name) => name.clone(),
                    Origin::Environment(name) => name.clone(),
                    Origin::File(path) => format!("{}: {name}", path.display()),
                    Origin::Default => format!("default of {name}"),
                };
                self.problems.push(format!("{place}: {problem}"));
                None
            }
        }
    }

    /// The rows of `config show`, or every problem found, unknown lines of the file included.
    pub fn finish(mut self) -> Result<Vec<Row>, ConfigError> {
        for name in self.file.lines.keys() {
            if !self.known.contains(name) {
                let near = self.known.iter().find(|k| k.replace('-', "_") == *name);
                let hint = near.map_or_else(
                    || "`beeline config show` lists the settings".to_owned(),
                    |known| format!("write {known}"),
                );
                self.problems
                    .push(format!("{}: {name} is not a setting; {hint}", self.file.path.display()));
            }
        }
        if self.problems.is_empty() {
            Ok(self.rows)
        } else {
            Err(ConfigError { problems: self.problems })
        }
    }
}

/// The help text of a knob.
pub(crate) fn help(text: &str, default: &str) -> String {
    if default.is_empty() { text.to_owned() } else { format!("{text} [default: {default}]") }
}

/// Declares a typed configuration struct and its flags.
macro_rules! knobs {
    (
        $(#[$meta:meta])*
        pub struct $config:ident, flags $flags:ident {
            $($field:ident: $type:ty = $default:literal, $help:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        pub struct $config {
            $(#[doc = $help] pub $field: $type,)*
        }

        /// The flags that set them; each is absent unless given.
        #[derive(Clone, Debug, Default, clap::Args)]
        pub struct $flags {
            $(
                #[arg(
                    long,
                    value_name = <$type as $crate::config::Knob>::PLACEHOLDER,
                    help = $crate::config::help($help, $default)
                )]
                pub $field: Option<String>,
            )*
        }

        impl $config {
            /// Resolves flags over environment over file over defaults.
            ///
            /// Errors: every value that does not parse, and where it stood.
            pub fn resolve(
                flags: &$flags,
                file: &$crate::config::FileLayer,
                environment: &dyn Fn(&str) -> Option<String>,
            ) -> Result<(Self, Vec<$crate::config::Row>), $crate::config::ConfigError> {
                let mut resolver = $crate::config::Resolver::new(file, environment);
                $(let $field = resolver.take::<$type>(stringify!($field), flags.$field.as_ref(), $default, $help);)*
                let rows = resolver.finish()?;
                match ($($field,)*) {
                    ($(Some($field),)*) => Ok((Self { $($field,)* }, rows)),
                    _ => unreachable!("finish reports every value that is missing"),
                }
            }
        }
    };
}
pub(crate) use knobs;

#[cfg(test)]
mod tests {
    use super::values::{Auto, Door, Size};
    use super::*;

    knobs! {
        /// Two knobs.
        pub struct Small, flags SmallFlags {
            size: Size = "64MiB", "Bytes.";
            resp_address: Door = "127.0.0.1:6379", "Where.";
        }
    }

    fn file(text: &str) -> Result<FileLayer, ConfigError> {
        FileLayer::from_text("test.toml".into(), text, "serve")
    }

    #[test]
    fn a_flag_wins_over_the_environment_which_wins_over_the_file() {
        let layer = file("[serve]\nsize = \"1KiB\"\nresp-address = \"off\"").unwrap();
        let environment = |name: &str| (name == "BEELINE_SIZE").then(|| "2KiB".to_owned());
        let (config, rows) = Small::resolve(&SmallFlags::default(), &layer, &environment).unwrap();
        assert_eq!(config.size.0, 2048);
        assert_eq!(config.resp_address.0, None);
        assert_eq!(rows[0].origin, Origin::Environment("BEELINE_SIZE".into()));
        assert_eq!(rows[1].origin, Origin::File("test.toml".into()));
        let flags = SmallFlags { size: Some("3KiB".into()), resp_address: None };
        let (config, rows) = Small::resolve(&flags, &layer, &environment).unwrap();
        assert_eq!(config.size.0, 3072);
        assert_eq!(rows[0].origin.to_string(), "flag --size");
    }

    #[test]
    fn every_problem_is_reported_with_its_place() {
        let layer = file("[serve]\nsize = \"many\"\nresp_address = \"x\"\nsizes = 3").unwrap();
        let environment = |name: &str| (name == "BEELINE_RESP_ADDRESS").then(|| "here".to_owned());
        let error = Small::resolve(&SmallFlags::default(), &layer, &environment).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.problems.len(), 4, "{text}");
        assert!(text.contains("test.toml: size: "), "{text}");
        assert!(text.contains("BEELINE_RESP_ADDRESS: "), "{text}");
        assert!(text.contains("resp_address is not a setting; write resp-address"), "{text}");
        assert!(text.contains("sizes is not a setting"), "{text}");
    }

    #[test]
    fn a_file_with_a_stray_table_or_broken_syntax_is_refused() {
        assert!(file("[server]\nsize = 1").unwrap_err().to_string().contains("[serve]"));
        assert!(file("[serve").unwrap_err().to_string().contains("test.toml"));
        assert!(file("[serve]\nsize = [1]").unwrap_err().to_string().contains("array"));
    }

    #[test]
    fn every_default_parses_and_shows_as_itself() {
        let (config, rows) =
            ServeConfig::resolve(&ServeFlags::default(), &FileLayer::default(), &|_| None).unwrap();
        assert!(rows.iter().all(|row| row.origin == Origin::Default));
        assert!(matches!(config.shards, Auto::Detect));
        config.validate().unwrap();
    }
}
