//! How long the commands of a service take, by command.

use std::time::Duration;

use crate::metric::{Descriptor, Distribution, Histogram, Kind, Labelled, MetricSet, Unit, Value};

/// The one declaration that all services share.
pub const COMMAND_SECONDS: Descriptor = Descriptor {
    name: "beeline_command_seconds",
    help: "How long commands took where they ran, by service and command. Of some services a part \
           of the commands is timed; the page of each says which.",
    kind: Kind::Histogram,
    unit: Unit::Seconds,
};

/// The name under which a command is counted that the service does not list.
const OTHER: &str = "other";

/// One distribution of [`COMMAND_SECONDS`], of so many calls in all.
#[must_use]
pub fn command_seconds(
    service: &str,
    command: &str,
    distribution: Distribution,
    calls: u64,
) -> Labelled {
    let labels = vec![("service", service.to_owned()), ("command", command.to_owned())];
    Labelled { descriptor: COMMAND_SECONDS, labels, distribution, calls }
}

/// A histogram for each command of a service. Any thread records; memory is taken when it is made,
/// so a client that invents names makes nothing grow.
#[derive(Debug)]
pub struct CommandTimes {
    service: &'static str,
    names: &'static [&'static str],
    /// One call of so many is recorded.
    sample: u64,
    /// One for each name, then one for the others.
    histograms: Box<[Histogram]>,
}

impl CommandTimes {
    /// Of a service with these commands.
    #[must_use]
    pub fn new(service: &'static str, names: &'static [&'static str]) -> Self {
        let histograms = (0..=names.len()).map(|_| Histogram::default()).collect();
        Self { service, names, sample: 1, histograms }
    }

    /// The same, where the service records one call of so many.
    #[must_use]
    pub fn sampled(self, sample: u64) -> Self {
        Self { sample, ..self }
    }

    /// Counts a command that took so long.
    pub fn record(&self, name: &str, took: Duration) {
        let known = self.names.iter().position(|known| *known == name);
        self.record_at(known.unwrap_or(self.names.len()), took);
    }

    /// The same for the command with this place among the names.
    pub fn record_at(&self, place: usize, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.histograms[place.min(self.names.len())].record_shared_ns(nanoseconds);
    }
}

impl MetricSet for CommandTimes {
    fn descriptors(&self) -> &'static [Descriptor] {
        &[]
    }

    fn values(&self) -> Vec<Value> {
        Vec::new()
    }

    fn labelled(&self) -> Vec<Labelled> {
        let names = self.names.iter().copied().chain([OTHER]);
        names
            .zip(&self.histograms)
            .map(|(name, histogram)| (name, Distribution::from(&histogram.snapshot())))
            .filter(|(_, distribution)| distribution.count() > 0)
            .map(|(name, distribution)| {
                let calls = distribution.count().saturating_mul(self.sample);
                command_seconds(self.service, name, distribution, calls)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_the_service_does_not_list_makes_nothing_grow() {
        let times = CommandTimes::new("shed", &["open", "shut"]).sampled(4);
        times.record("shut", Duration::from_micros(5));
        for name in ["mend", "paint", ""] {
            times.record(name, Duration::from_secs(u64::MAX));
        }
        let labelled = times.labelled();
        let told: Vec<(&str, u64)> = labelled
            .iter()
            .map(|one| (one.labels[1].1.as_str(), one.distribution.count()))
            .collect();
        assert_eq!(told, [("shut", 1), ("other", 3)]);
        assert_eq!(labelled.iter().map(|one| one.calls).collect::<Vec<_>>(), [4, 12]);
        assert!(labelled.iter().all(|one| one.labels[0] == ("service", "shed".to_owned())));
        assert_eq!(labelled[0].distribution.quantile_ns(500), 8192);
    }
}
