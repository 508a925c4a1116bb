//! The lowest layer: a TOML file, with the place of every value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::{ConfigError, Setting, nearest};

/// The file read when `--config` and `BEELINE_CONFIG` are absent, if it exists.
const DEFAULT_FILE: &str = "beeline.toml";

/// A value of the file.
#[derive(Clone, Debug)]
pub struct Line {
    /// As text, which the parser of its type reads.
    pub text: String,
    /// Line of the file, from 1.
    pub line: usize,
    /// Column, in characters, from 1.
    pub column: usize,
}

/// The lines of a configuration file, by table and name.
#[derive(Clone, Debug, Default)]
pub struct FileLayer {
    /// Where it is.
    pub path: PathBuf,
    lines: BTreeMap<(String, String), Line>,
    tables: BTreeMap<String, (usize, usize)>,
}

impl FileLayer {
    /// Reads the file at `path`, or [`DEFAULT_FILE`] if that exists.
    ///
    /// Errors: the file cannot be read or parsed, or has lines outside of a table.
    pub fn read(path: Option<&Path>) -> Result<Self, ConfigError> {
        let path = match path {
            Some(path) => path.to_owned(),
            None if Path::new(DEFAULT_FILE).exists() => PathBuf::from(DEFAULT_FILE),
            None => return Ok(Self::default()),
        };
        let text = std::fs::read_to_string(&path).map_err(|error| {
            format!("{}: cannot be read: {error}; check --config", path.display())
        })?;
        Self::from_text(path, &text)
    }

    /// Reads `text`, which stands at `path`.
    ///
    /// Errors: as for [`FileLayer::read`].
    pub fn from_text(path: PathBuf, text: &str) -> Result<Self, ConfigError> {
        let place = |offset: usize| {
            let before = text.get(..offset).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            (line, column)
        };
        let document = DeTable::parse(text).map_err(|error| {
            let (line, column) = place(error.span().map_or(text.len(), |span| span.start));
            format!("{}:{line}:{column}: {}", path.display(), error.message())
        })?;
        let mut problems = Vec::new();
        let mut layer = Self { path, ..Self::default() };
        for (name, value) in document.get_ref() {
            let (line, column) = place(name.span().start);
            let name = name.get_ref();
            let DeValue::Table(table) = value.get_ref() else {
                problems.push(format!(
                    "{}:{line}:{column}: {name} stands outside of a table; settings of the node go \
                     under [serve], those of a service under its name",
                    layer.path.display()
                ));
                continue;
            };
            layer.tables.insert(name.to_string(), (line, column));
            for (key, value) in table {
                let (line, column) = place(key.span().start);
                match plain(value.get_ref()) {
                    Some(text) => {
                        let place = (name.to_string(), key.get_ref().to_string());
                        layer.lines.insert(place, Line { text, line, column });
                    }
                    None => problems.push(format!(
                        "{}:{line}:{column}: {name}.{} is a {}; write a string, number or boolean",
                        layer.path.display(),
                        key.get_ref(),
                        value.get_ref().type_str()
                    )),
                }
            }
        }
        if problems.is_empty() { Ok(layer) } else { Err(ConfigError { problems }) }
    }

    /// What stands under `table` for `key`.
    pub fn get(&self, table: &str, key: &str) -> Option<&Line> {
        self.lines.get(&(table.to_owned(), key.to_owned()))
    }

    /// Tables and lines that name none of `settings`, each with what may have been meant.
    pub fn strangers(&self, settings: &[Setting]) -> Vec<String> {
        let knows_table = |table: &str| settings.iter().any(|setting| setting.table == table);
        let tables = self.tables.iter().filter(|(table, _)| !knows_table(table)).map(
            |(table, (line, column))| {
                let mut known: Vec<&str> = settings.iter().map(|setting| setting.table).collect();
                known.dedup();
                let hint = match nearest(table, known.iter().copied()) {
                    Some(near) => format!("did you mean [{near}]?"),
                    None => format!("the tables are [{}]", known.join("], [")),
                };
                let path = self.path.display();
                format!("{path}:{line}:{column}: there is no table [{table}]; {hint}")
            },
        );
        let is_setting = |table: &str, key: &str| {
            settings.iter().any(|setting| {
                (setting.table == table && setting.key == key)
                    || (table == "serve" && setting.earlier == Some(key))
            })
        };
        let lines = self
            .lines
            .iter()
            .filter(|((table, key), _)| knows_table(table) && !is_setting(table, key))
            .map(|((table, key), at)| {
                let path = self.path.display();
                let hint = hint(table, key, settings);
                format!("{path}:{}:{}: [{table}] has no setting {key}; {hint}", at.line, at.column)
            });
        tables.chain(lines).collect()
    }
}

/// What a person may have meant by `key` in `table`.
fn hint(table: &str, key: &str, settings: &[Setting]) -> String {
    let elsewhere = settings
        .iter()
        .find(|setting| setting.flag == key || (setting.table != table && setting.key == key));
    if let Some(setting) = elsewhere {
        return format!("write {} under [{}]", setting.key, setting.table);
    }
    let own = settings.iter().filter(|setting| setting.table == table);
    match nearest(key, own.map(|setting| setting.key.as_str())) {
        Some(near) => format!("did you mean {near}?"),
        None => "`beeline config show` lists the settings".to_owned(),
    }
}

fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => match number.radix() {
            10 => Some(number.as_str().to_owned()),
            radix => i64::from_str_radix(number.as_str(), radix).ok().map(|n| n.to_string()),
        },
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(truth) => Some(truth.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}
