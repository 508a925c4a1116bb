//! The highest layer: one flag per setting of every table, made from the declarations.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use super::{ServeConfig, Setting, Table as _};

/// The flags that were given, by name without dashes.
#[derive(Clone, Debug, Default)]
pub struct ServeFlags(BTreeMap<String, String>);

impl ServeFlags {
    /// The text given for `flag`.
    pub fn get(&self, flag: &str) -> Option<&String> {
        self.0.get(flag)
    }

    /// These flags and one more.
    #[cfg(test)]
    #[must_use]
    pub fn with(mut self, flag: &str, text: impl Into<String>) -> Self {
        self.0.insert(flag.to_owned(), text.into());
        self
    }
}

/// The settings of a node and of all its services.
pub fn settings() -> &'static [Setting] {
    static SETTINGS: OnceLock<Vec<Setting>> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let mut settings = Vec::new();
        ServeConfig::settings(&mut settings);
        settings
    })
}

impl Args for ServeFlags {
    fn augment_args(mut command: Command) -> Command {
        for setting in settings() {
            let help = if setting.default.is_empty() {
                setting.help.to_owned()
            } else {
                format!("{} [default: {}]", setting.help, setting.default)
            };
            let mut flag = Arg::new(setting.flag.as_str())
                .long(setting.flag.as_str())
                .value_name(setting.placeholder)
                .help(help);
            if let Some(earlier) = setting.earlier.filter(|&earlier| earlier != setting.flag) {
                flag = flag.alias(earlier);
            }
            if setting.table != ServeConfig::NAME {
                flag = flag.help_heading(setting.heading.as_str());
            }
            command = command.arg(flag);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServeFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in settings() {
            if let Some(text) = matches.get_one::<String>(&setting.flag) {
                self.0.insert(setting.flag.clone(), text.clone());
            }
        }
        Ok(())
    }
}
