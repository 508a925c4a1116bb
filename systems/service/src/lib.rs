//! What a part of a node is: it is opened in dependency order, watched while it runs, and stopped in
//! reverse.
//!
//! Place: `systems`, below every service. A service's crate implements [`Service`]; `apps/beeline`
//! turns its configuration table into an [`Opening`] and hands the list to [`Services::open`].
//!
//! Invariants: a service is opened after every service it names in [`Opening::after`]; when one
//! cannot be opened, those that were opened before it are stopped and the error names the one that
//! could not; [`Service::stop`] is called exactly once.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use beeline_observe::MetricSet;

/// One line of the banner and of the status page: what the service listens on, holds or lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// A word or two, as in `documents`.
    pub name: String,
    /// What a person wants to know first, as in `127.0.0.1:27017  replica set rs0`.
    pub value: String,
}

impl Fact {
    /// A fact.
    #[must_use]
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

/// A running part of a node.
///
/// All methods but [`Service::stop`] are called from other threads while the service works, and
/// return at once.
pub trait Service: fmt::Debug + Send + Sync {
    /// The word that names it: its configuration table, `--without NAME`, its metrics' prefix.
    fn name(&self) -> &'static str;

    /// What the banner and the status page say of it: what stays as it is while it runs.
    fn facts(&self) -> Vec<Fact>;

    /// What the status page says of it beside that: how it stands at this moment.
    fn now(&self) -> Vec<Fact> {
        Vec::new()
    }

    /// Its metric sets; each is registered once, after the service was opened.
    fn metrics(&self) -> Vec<Arc<dyn MetricSet>>;

    /// Copies the figures of this moment into the metric sets; called before each scrape.
    fn publish(&self) {}

    /// Whether it serves.
    ///
    /// Errors: one sentence that names what is wrong and what to do.
    fn health(&self) -> Result<(), String>;

    /// Stops: no new work is taken, replies that are owed are sent within a bounded time, what was
    /// acknowledged is persisted at the level promised.
    fn stop(self: Box<Self>);
}

/// A service that could not be opened.
#[derive(Debug)]
pub struct OpenFailure {
    /// Its name.
    pub service: &'static str,
    /// Why, and what to change.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl fmt::Display for OpenFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the service {} cannot start: {}; mend that, or leave it out with --without {}",
            self.service, self.source, self.service
        )
    }
}

impl std::error::Error for OpenFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}

/// What [`Opening::open`] calls.
pub type OpenService =
    Box<dyn FnOnce() -> Result<Box<dyn Service>, Box<dyn std::error::Error + Send + Sync>>>;

/// A service that is about to be opened.
pub struct Opening {
    /// Its name, as [`Service::name`].
    pub name: &'static str,
    /// Names of the services that must run before it. A name that is not in the list was left out.
    pub after: &'static [&'static str],
    /// Opens it.
    pub open: OpenService,
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening").field("name", &self.name).field("after", &self.after).finish()
    }
}

/// The services that run, in the order in which they were opened. Dropping them stops them.
#[derive(Debug, Default)]
pub struct Services {
    running: Vec<Box<dyn Service>>,
}

impl Services {
    /// Opens every service, each after those it names.
    ///
    /// Errors: [`OpenFailure`] of the first that cannot be opened; those opened before are stopped.
    /// Invariant: the names in [`Opening::after`] form no circle; that is asserted.
    pub fn open(openings: Vec<Opening>) -> Result<Self, OpenFailure> {
        let mut waiting = openings;
        let mut services = Self::default();
        while !waiting.is_empty() {
            let names: Vec<&'static str> = waiting.iter().map(|opening| opening.name).collect();
            let ready = waiting
                .iter()
                .position(|opening| !opening.after.iter().any(|name| names.contains(name)));
            assert!(ready.is_some(), "the services {names:?} wait for each other");
            let opening = waiting.remove(ready.unwrap_or(0));
            let name = opening.name;
            match (opening.open)() {
                Ok(service) => services.running.push(service),
                Err(source) => return Err(OpenFailure { service: name, source }),
            }
        }
        Ok(services)
    }

    /// Those that run, in the order in which they were opened.
    pub fn iter(&self) -> impl Iterator<Item = &dyn Service> {
        self.running.iter().map(|service| &**service)
    }

    /// What is wrong with the first service that does not serve.
    ///
    /// Errors: that service's name and its own sentence.
    pub fn health(&self) -> Result<(), String> {
        for service in self.iter() {
            service.health().map_err(|problem| format!("{}: {problem}", service.name()))?;
        }
        Ok(())
    }

    /// Stops them, the last opened first.
    pub fn stop(&mut self) {
        while let Some(service) = self.running.pop() {
            tracing::debug!(service = service.name(), "stopping");
            service.stop();
        }
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    type Diary = Arc<Mutex<Vec<String>>>;

    #[derive(Debug)]
    struct Part {
        name: &'static str,
        diary: Diary,
        healthy: bool,
    }

    impl Service for Part {
        fn name(&self) -> &'static str {
            self.name
        }

        fn facts(&self) -> Vec<Fact> {
            vec![Fact::new(self.name, "here")]
        }

        fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
            Vec::new()
        }

        fn health(&self) -> Result<(), String> {
            if self.healthy { Ok(()) } else { Err("out of order".to_owned()) }
        }

        fn stop(self: Box<Self>) {
            self.diary.lock().unwrap().push(format!("stop {}", self.name));
        }
    }

    fn opening(name: &'static str, after: &'static [&'static str], diary: &Diary) -> Opening {
        let diary = Arc::clone(diary);
        let open = Box::new(move || {
            if name == "broken" {
                return Err("the port is taken; choose another".into());
            }
            diary.lock().unwrap().push(format!("open {name}"));
            let part = Part { name, diary, healthy: name != "ill" };
            Ok(Box::new(part) as Box<dyn Service>)
        });
        Opening { name, after, open }
    }

    #[test]
    fn services_open_in_dependency_order_and_stop_in_reverse() {
        let diary = Diary::default();
        let list =
            vec![opening("door", &["store", "left-out"], &diary), opening("store", &[], &diary)];
        let services = Services::open(list).unwrap();
        assert_eq!(services.iter().map(Service::name).collect::<Vec<_>>(), ["store", "door"]);
        drop(services);
        assert_eq!(*diary.lock().unwrap(), ["open store", "open door", "stop door", "stop store"]);
    }

    #[test]
    fn a_service_that_cannot_open_names_itself_and_the_rest_is_stopped() {
        let diary = Diary::default();
        let list = vec![opening("store", &[], &diary), opening("broken", &["store"], &diary)];
        let failure = Services::open(list).unwrap_err();
        assert_eq!(failure.service, "broken");
        let text = failure.to_string();
        assert!(text.contains("the port is taken") && text.contains("--without broken"), "{text}");
        assert_eq!(*diary.lock().unwrap(), ["open store", "stop store"]);
    }

    #[test]
    fn ill_health_names_the_service() {
        let diary = Diary::default();
        let services =
            Services::open(vec![opening("well", &[], &diary), opening("ill", &[], &diary)])
                .unwrap();
        assert_eq!(services.health().unwrap_err(), "ill: out of order");
    }

    #[test]
    #[should_panic(expected = "wait for each other")]
    fn a_circle_is_an_error_of_the_program() {
        let diary = Diary::default();
        let list = vec![opening("a", &["b"], &diary), opening("b", &["a"], &diary)];
        let _ = Services::open(list);
    }
}
