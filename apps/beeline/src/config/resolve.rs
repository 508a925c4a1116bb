//! From three layers to typed values: which layer decides, what does not parse, what no setting is
//! called.

use std::collections::BTreeMap;

use super::{ConfigError, FileLayer, Knob, Origin, Row, ServeFlags, nearest};

/// Prefix of every variable.
const PREFIX: &str = "BEELINE_";

/// Variables with the prefix that another part of the program, or a test, reads. One that ends in
/// an underscore stands for all that begin with it.
const ELSEWHERE: [&str; 27] = [
    // The command itself, whatever it does.
    "CONFIG",
    "LOG",
    // Commands that ask a node.
    "CONNECT",
    "DOCUMENTS_PASSWORD",
    "DOCUMENTS_USER",
    // `beeline run` and the library in the programs it starts.
    "SOCKETS_",
    // Suites and tools of the source tree, which start nodes.
    "BLESS",
    "CONFORMANCE_",
    "CONNECTIONS",
    "DEEP",
    "EMBED_PRELOAD",
    "FAULTS",
    "FUZZ_SECONDS",
    "GROUPS",
    "LAB_",
    "LOG_DURABILITY",
    "LOUD",
    "NEEDS_RDMA",
    "NF_",
    "OBJECTS_LIMITS_SOCKET",
    "POOL_KIND",
    "PROGRAM",
    "ROUNDS",
    "SEED",
    "SEEDS",
    "TEST_",
    "WAKE_",
];

/// One setting: its names, its default, its help.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The table it stands in.
    pub table: &'static str,
    /// Its name there.
    pub key: String,
    /// The flag without its dashes; the key alone in `serve`, else the table and the key.
    pub flag: String,
    /// The environment variable.
    pub variable: String,
    /// The name under which `[serve]`, a flag and a variable gave it in earlier versions.
    pub earlier: Option<&'static str>,
    /// What stands for a value in the help.
    pub placeholder: &'static str,
    /// Under what the help lists the flag.
    pub heading: String,
    /// What holds when no layer says otherwise.
    pub default: &'static str,
    /// What it does.
    pub help: &'static str,
}

impl Setting {
    /// The setting of the field `field`; what [`super::knobs!`] expands to.
    pub fn new<K: Knob>(
        table: &'static str,
        field: &str,
        earlier: Option<&'static str>,
        default: &'static str,
        help: &'static str,
    ) -> Self {
        let key = field.replace('_', "-");
        let flag = if table == "serve" { key.clone() } else { format!("{table}-{key}") };
        let variable = variable(&flag);
        let heading = format!("[{table}]");
        let placeholder = K::PLACEHOLDER;
        Self { table, key, flag, variable, earlier, placeholder, heading, default, help }
    }
}

fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.to_uppercase().replace('-', "_"))
}

/// The settings of one service, as a typed struct. [`super::knobs!`] writes all of it but
/// `check`, which the struct has itself: `fn check(&self, rules: &mut Rules<'_>)`.
pub trait Table: Sized {
    /// The name in the file, which is the service's name.
    const NAME: &'static str;

    /// Appends its settings, and those of the tables it carries.
    fn settings(into: &mut Vec<Setting>);

    /// Takes its values; `None` after a problem.
    fn take(resolver: &mut Resolver<'_>) -> Option<Self>;

    /// Checks its rules and those of the tables it carries.
    fn check_all(&self, rules: &mut Rules<'_>);

    /// Resolves flags over environment over file over defaults.
    ///
    /// Errors: every value that does not parse, every name that is no setting, and where each
    /// stood.
    fn resolve(
        flags: &ServeFlags,
        file: &FileLayer,
        environment: &Environment,
    ) -> Result<(Self, Vec<Row>), ConfigError> {
        let mut settings = Vec::new();
        Self::settings(&mut settings);
        let mut resolver = Resolver::new(&settings, flags, file, environment);
        let taken = Self::take(&mut resolver);
        let rows = resolver.finish()?;
        match taken {
            Some(config) => Ok((config, rows)),
            None => unreachable!("finish reports every value that is missing"),
        }
    }
}

/// The variables of the process that begin with `BEELINE_`.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    problems: Vec<String>,
}

impl Environment {
    /// That of this process.
    pub fn of_process() -> Self {
        let mut environment = Self::default();
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
                continue;
            };
            match value.into_string() {
                Ok(value) => drop(environment.variables.insert(name.to_owned(), value)),
                Err(_) => environment.problems.push(format!("{name}: its value is not UTF-8")),
            }
        }
        environment
    }

    /// One with `variables`.
    #[cfg(test)]
    pub fn of(variables: &[(&str, &str)]) -> Self {
        let pair = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Self { variables: variables.iter().map(pair).collect(), problems: Vec::new() }
    }

    /// A variable that is set to nothing is not set.
    fn get(&self, name: &str) -> Option<&String> {
        self.variables.get(name).filter(|text| !text.is_empty())
    }

    /// Variables that name none of `settings`, each with what may have been meant.
    fn strangers(&self, settings: &[Setting]) -> Vec<String> {
        let known: Vec<String> = settings
            .iter()
            .flat_map(|setting| {
                let earlier = setting.earlier.map(variable);
                std::iter::once(setting.variable.clone()).chain(earlier)
            })
            .collect();
        let is_elsewhere = |name: &str| {
            let name = name.strip_prefix(PREFIX).unwrap_or(name);
            ELSEWHERE
                .iter()
                .any(|&other| name == other || (other.ends_with('_') && name.starts_with(other)))
        };
        self.variables
            .keys()
            .filter(|name| !known.contains(name) && !is_elsewhere(name))
            .map(|name| {
                let own = name.strip_prefix(PREFIX).unwrap_or(name);
                let candidates = known.iter().filter_map(|name| name.strip_prefix(PREFIX));
                let hint = nearest(own, candidates.chain(ELSEWHERE[..2].iter().copied()))
                    .map_or_else(
                        || "`beeline config show` lists the settings".to_owned(),
                        |near| format!("did you mean {PREFIX}{near}?"),
                    );
                format!("{name}: there is no setting of this name; {hint}")
            })
            .collect()
    }
}

/// Resolves the settings of the tables; what [`super::knobs!`] expands to uses it.
#[derive(Debug)]
pub struct Resolver<'a> {
    settings: &'a [Setting],
    flags: &'a ServeFlags,
    file: &'a FileLayer,
    environment: &'a Environment,
    problems: Vec<String>,
    rows: Vec<Row>,
}

impl<'a> Resolver<'a> {
    /// A resolver of `settings` over the three layers.
    pub fn new(
        settings: &'a [Setting],
        flags: &'a ServeFlags,
        file: &'a FileLayer,
        environment: &'a Environment,
    ) -> Self {
        Self { settings, flags, file, environment, problems: Vec::new(), rows: Vec::new() }
    }

    /// The value of one setting: its flag, else its variable, else its line, else its default.
    /// `None` after a problem, which [`Resolver::finish`] reports.
    pub fn take<K: Knob>(&mut self, table: &str, field: &str) -> Option<K> {
        let key = field.replace('_', "-");
        let found = self.settings.iter().find(|known| known.table == table && known.key == key);
        let Some(setting) = found else { unreachable!("{table}.{key} is declared") };
        let (text, origin, place) = self.text_of(setting);
        match K::parse(&text) {
            Ok(value) => {
                self.rows.push(Row {
                    name: setting.flag.clone(),
                    table: setting.table,
                    key: setting.key.clone(),
                    value: value.show(),
                    origin,
                    help: setting.help,
                });
                Some(value)
            }
            Err(problem) => {
                self.problems.push(format!("{place}: {problem}"));
                None
            }
        }
    }

    /// What decides `setting`, the layer that says so, and the place for an error.
    fn text_of(&mut self, setting: &Setting) -> (String, Origin, String) {
        if let Some(text) = self.flags.get(&setting.flag) {
            let flag = format!("--{}", setting.flag);
            return (text.clone(), Origin::Flag(flag.clone()), flag);
        }
        let earlier = setting.earlier.map(variable).filter(|name| *name != setting.variable);
        let named = [Some(setting.variable.clone()), earlier];
        let mut set = named.into_iter().flatten().filter_map(|name| {
            let text = self.environment.get(&name)?.clone();
            Some((name, text))
        });
        let first = set.next();
        if let (Some((one, _)), Some((other, _))) = (&first, set.next()) {
            self.problems.push(format!("{one} and {other} are the same setting; keep {one}"));
        }
        if let Some((name, text)) = first {
            return (text, Origin::Environment(name.clone()), name);
        }
        let path = self.file.path.display();
        let now = self.file.get(setting.table, &setting.key);
        let before = setting.earlier.and_then(|key| self.file.get("serve", key));
        if let (Some(now), Some(before)) = (now, before) {
            self.problems.push(format!(
                "{path}:{}:{}: line {} says the same setting; keep {} under [{}]",
                before.line, before.column, now.line, setting.key, setting.table
            ));
        }
        if let Some(line) = now.or(before) {
            let place = format!("{path}:{}:{}: {}", line.line, line.column, setting.key);
            let origin = Origin::File(self.file.path.clone(), line.line);
            return (line.text.clone(), origin, place);
        }
        let place = format!("default of {}", setting.flag);
        (setting.default.to_owned(), Origin::Default, place)
    }

    /// The rows of `config show`, or every problem found, unknown names included.
    pub fn finish(mut self) -> Result<Vec<Row>, ConfigError> {
        self.problems.extend(self.environment.problems.iter().cloned());
        self.problems.extend(self.file.strangers(self.settings));
        self.problems.extend(self.environment.strangers(self.settings));
        if self.problems.is_empty() {
            Ok(self.rows)
        } else {
            Err(ConfigError { problems: self.problems })
        }
    }
}

/// Collects what one value alone cannot tell to be wrong.
#[derive(Debug)]
pub struct Rules<'a> {
    rows: &'a [Row],
    problems: Vec<String>,
}

impl<'a> Rules<'a> {
    /// Rules over the values that `rows` shows.
    pub fn new(rows: &'a [Row]) -> Self {
        Self { rows, problems: Vec::new() }
    }

    /// Unless `holds`, `problem` is reported of `setting`, a flag without its dashes, with the
    /// place of its value.
    pub fn rule(&mut self, setting: &str, holds: bool, problem: impl Into<String>) {
        if holds {
            return;
        }
        let origin = self.rows.iter().find(|row| row.name == setting).map(|row| &row.origin);
        let place = match origin {
            Some(Origin::File(path, line)) => format!("{}:{line}: ", path.display()),
            Some(Origin::Environment(name)) => format!("{name}: "),
            Some(Origin::Flag(_) | Origin::Default | Origin::Setting(_)) | None => String::new(),
        };
        self.problems.push(format!("{place}{setting}: {}", problem.into()));
    }

    /// Nothing, where all rules hold.
    ///
    /// Errors: every rule that is broken.
    pub fn finish(self) -> Result<(), ConfigError> {
        if self.problems.is_empty() { Ok(()) } else { Err(ConfigError { problems: self.problems }) }
    }
}
