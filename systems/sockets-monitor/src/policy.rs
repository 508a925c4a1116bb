//! Which connections may be accelerated: rules over the asker's user and the connection's ports.
//!
//! ```toml
//! accelerate = true          # what no rule says
//!
//! [[rules]]                  # the first rule that fits decides
//! ports = "5432"             # of either end: one, or a range as in "8000-8099"
//! uid = 1000                 # of the asking process; left out: any
//! accelerate = false
//! ```
//!
//! A refused connection stays with the kernel, like one without a monitor. The ports are those the
//! kernel tells of the socket in question, and the user is the one it tells of the asker.

use std::ops::RangeInclusive;

use serde::Deserialize;

use crate::file::{self, FileError};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "yes")]
    accelerate: bool,
    #[serde(default)]
    rules: Vec<FileRule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRule {
    ports: Option<String>,
    uid: Option<u32>,
    accelerate: bool,
}

fn yes() -> bool {
    true
}

#[derive(Clone, Debug)]
struct Rule {
    ports: Option<RangeInclusive<u16>>,
    uid: Option<u32>,
    accelerate: bool,
}

/// The rules in their order, and what holds without one.
#[derive(Clone, Debug)]
pub struct Policy {
    rules: Vec<Rule>,
    otherwise: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self { rules: Vec::new(), otherwise: true }
    }
}

impl Policy {
    /// From the text of a file.
    ///
    /// Errors: [`FileError`].
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let file: File = file::parse(text)?;
        let mut rules = Vec::with_capacity(file.rules.len());
        for (index, rule) in file.rules.into_iter().enumerate() {
            let ports = match rule.ports {
                Some(text) => match range(&text) {
                    Some(range) => Some(range),
                    None => return Err(FileError::Ports { rule: index + 1, text }),
                },
                None => None,
            };
            rules.push(Rule { ports, uid: rule.uid, accelerate: rule.accelerate });
        }
        Ok(Self { rules, otherwise: file.accelerate })
    }

    /// Whether a process of user `uid` gets the connection between these ports accelerated.
    #[must_use]
    pub fn allows(&self, uid: u32, ports: [u16; 2]) -> bool {
        let fits = |rule: &&Rule| {
            rule.uid.is_none_or(|wanted| wanted == uid)
                && rule.ports.as_ref().is_none_or(|range| ports.iter().any(|p| range.contains(p)))
        };
        self.rules.iter().find(fits).map_or(self.otherwise, |rule| rule.accelerate)
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_decides() {
        let text = "accelerate = false\n\
                    [[rules]]\nports = \"6000-6009\"\nuid = 7\naccelerate = false\n\
                    [[rules]]\nports = \"6000-6999\"\naccelerate = true\n\
                    [[rules]]\nuid = 9\naccelerate = true\n";
        let policy = Policy::parse(text).unwrap();
        assert!(!policy.allows(7, [6005, 40_000]));
        assert!(policy.allows(8, [6005, 40_000]) && policy.allows(8, [40_000, 6005]));
        assert!(policy.allows(7, [6010, 40_000]));
        assert!(policy.allows(9, [1, 2]) && !policy.allows(8, [1, 2]));
    }

    #[test]
    fn without_rules_everything_is_accelerated_and_nonsense_is_refused() {
        assert!(Policy::parse("").unwrap().allows(0, [1, 2]));
        for wrong in [
            "acelerate = true",
            "[[rules]]\nports = \"9-8\"\naccelerate = true",
            "[[rules]]\nports = \"70000\"\naccelerate = true",
            "[[rules]]\nports = \"1\"",
        ] {
            assert!(Policy::parse(wrong).is_err(), "{wrong}");
        }
    }
}
