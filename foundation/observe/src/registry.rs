//! The metric sets of one process, and their Prometheus text.
//!
//! Sets of the same type from several shards become one family with a `shard` label; distributions
//! with labels of their own ([`MetricSet::labelled`]) become one family by name, whichever set has
//! them. Reading happens at scrape time only; nothing is published periodically.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::metric::{Descriptor, Distribution, Kind, Labelled, MetricSet, Unit, Value};

/// What the text of [`Registry::encode`] is, for the `Content-Type` header.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metric sets of one process. Clones share the sets.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    sets: Arc<Mutex<Vec<Registered>>>,
}

#[derive(Clone, Debug)]
struct Registered {
    set: Arc<dyn MetricSet>,
    shard: Option<u32>,
}

impl Registry {
    /// A registry without sets.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a set; `shard` becomes its label. Sets of one type are added either all with a shard
    /// or once without.
    pub fn register(&self, set: Arc<dyn MetricSet>, shard: Option<u32>) {
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        sets.push(Registered { set, shard });
    }

    /// The sets, in the order in which they were added.
    #[must_use]
    pub fn sets(&self) -> Vec<Arc<dyn MetricSet>> {
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        sets.iter().map(|registered| Arc::clone(&registered.set)).collect()
    }

    /// The distributions with labels of all sets.
    #[must_use]
    pub fn labelled(&self) -> Vec<Labelled> {
        self.sets().iter().flat_map(|set| set.labelled()).collect()
    }

    /// Reads every cell and writes the OpenMetrics text, which Prometheus reads too.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(Families(self.clone())));
        let mut text = String::new();
        let written = text::encode(&mut text, &registry);
        assert!(written.is_ok(), "writing to a string does not fail");
        text
    }
}

/// Groups the sets by metric when asked.
#[derive(Debug)]
struct Families(Registry);

type Labels = Vec<(&'static str, String)>;
type Samples = Vec<(Labels, Sample)>;

/// What stands behind a name and its labels.
enum Sample {
    Value(Value),
    Distribution(Distribution),
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let sets = self.0.sets.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut families: BTreeMap<&'static str, (Descriptor, Samples)> = BTreeMap::new();
        for Registered { set, shard } in sets {
            for (descriptor, value) in set.descriptors().iter().zip(set.values()) {
                let labels = shard.map(|shard| ("shard", shard.to_string()));
                families
                    .entry(descriptor.name)
                    .or_insert_with(|| (*descriptor, Vec::new()))
                    .1
                    .push((labels.into_iter().collect(), Sample::Value(value)));
            }
            for Labelled { descriptor, labels, distribution, .. } in set.labelled() {
                families
                    .entry(descriptor.name)
                    .or_insert_with(|| (descriptor, Vec::new()))
                    .1
                    .push((labels, Sample::Distribution(distribution)));
            }
        }
        for (descriptor, samples) in families.into_values() {
            let (name, kind) = match descriptor.kind {
                // The encoder adds `_total` itself.
                Kind::Counter => (
                    descriptor.name.strip_suffix("_total").unwrap_or(descriptor.name),
                    MetricType::Counter,
                ),
                Kind::Gauge => (descriptor.name, MetricType::Gauge),
                Kind::Histogram => (descriptor.name, MetricType::Histogram),
            };
            let mut family = encoder.encode_descriptor(name, descriptor.help, None, kind)?;
            for (labels, sample) in samples {
                if labels.is_empty() {
                    encode_sample(&mut family, descriptor, &sample)?;
                } else {
                    encode_sample(&mut family.encode_family(&labels)?, descriptor, &sample)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_sample(
    encoder: &mut MetricEncoder<'_>,
    descriptor: Descriptor,
    sample: &Sample,
) -> Result<(), fmt::Error> {
    match sample {
        Sample::Value(value) => encode_value(encoder, descriptor, value),
        Sample::Distribution(distribution) => encode_distribution(encoder, distribution),
    }
}

fn encode_value(
    encoder: &mut MetricEncoder<'_>,
    descriptor: Descriptor,
    value: &Value,
) -> Result<(), fmt::Error> {
    match (value, descriptor.kind) {
        (Value::Histogram(snapshot), _) => encode_distribution(encoder, &snapshot.into()),
        (Value::Number(number), Kind::Counter) if descriptor.unit == Unit::Seconds => {
            encoder.encode_counter::<NoLabelSet, _, f64>(&seconds(*number), None)
        }
        (Value::Number(number), Kind::Counter) => {
            encoder.encode_counter::<NoLabelSet, _, u64>(number, None)
        }
        (Value::Number(number), _) if descriptor.unit == Unit::Seconds => {
            encoder.encode_gauge(&seconds(*number))
        }
        (Value::Number(number), _) => {
            encoder.encode_gauge(&i64::try_from(*number).unwrap_or(i64::MAX))
        }
    }
}

fn encode_distribution(
    encoder: &mut MetricEncoder<'_>,
    distribution: &Distribution,
) -> Result<(), fmt::Error> {
    let bound = |bound| if bound == u64::MAX { f64::MAX } else { seconds(bound) };
    let buckets: Vec<(f64, u64)> =
        distribution.buckets.iter().map(|&(most, count)| (bound(most), count)).collect();
    let (sum, count) = (seconds(distribution.sum_ns), distribution.count());
    encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
}

#[expect(clippy::cast_precision_loss, reason = "a reading, not an account")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// One section of `docs/metrics.md`: a table of the declarations of a set.
#[must_use]
pub fn markdown(title: &str, descriptors: &[Descriptor]) -> String {
    use fmt::Write as _;
    let mut text = format!("## {title}\n\n| metric | kind | meaning |\n| --- | --- | --- |\n");
    for descriptor in descriptors {
        let written = writeln!(
            text,
            "| `{}` | {} | {} |",
            descriptor.name,
            descriptor.kind.word(),
            descriptor.help
        );
        assert!(written.is_ok(), "writing to a string does not fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::metrics! {
        /// For the tests.
        struct TestMetrics in "beeline_test" {
            counter commands: Count, "Commands executed.";
            counter busy_seconds: Seconds, "Time spent at work.";
            gauge used_bytes: Bytes, "Bytes in use.";
            histogram command_seconds: Seconds, "Time per command.";
        }
    }

    #[test]
    fn shards_become_labels_of_one_family() {
        let registry = Registry::new();
        for shard in 0..2 {
            let set = TestMetrics::default();
            set.commands.add(5 + u64::from(shard));
            set.busy_seconds.add(1_500_000_000);
            set.used_bytes.set(4096);
            set.command_seconds.record_ns(1_500);
            registry.register(Arc::new(set), Some(shard));
        }
        let text = registry.encode();
        for line in [
            "# HELP beeline_test_commands Commands executed.",
            "# TYPE beeline_test_commands counter",
            "beeline_test_commands_total{shard=\"0\"} 5",
            "beeline_test_commands_total{shard=\"1\"} 6",
            "beeline_test_busy_seconds_total{shard=\"0\"} 1.5",
            "beeline_test_used_bytes{shard=\"1\"} 4096",
            "beeline_test_command_seconds_count{shard=\"0\"} 1",
            "beeline_test_command_seconds_sum{shard=\"0\"} 0.0000015",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "missing: {line}\n{text}");
        }
        assert_eq!(text.matches("# TYPE beeline_test_commands counter").count(), 1);
        assert!(text.contains("le=\"+Inf\""), "the last bucket is unbounded: {text}");
    }

    #[test]
    fn services_share_one_family_of_command_times() {
        let registry = Registry::new();
        for service in ["shed", "garage"] {
            let times = crate::CommandTimes::new(service, &["open"]);
            times.record("open", std::time::Duration::from_micros(3));
            registry.register(Arc::new(times), None);
        }
        let text = registry.encode();
        for service in ["shed", "garage"] {
            let labels = format!("service=\"{service}\",command=\"open\"");
            let counted = format!("beeline_command_seconds_count{{{labels}}} 1");
            assert!(text.lines().any(|line| line == counted), "missing: {counted}\n{text}");
            let bucket = format!("le=\"0.000004096\",{labels}");
            assert!(text.contains(&bucket), "missing: {bucket}\n{text}");
        }
        assert_eq!(text.matches("# TYPE beeline_command_seconds histogram").count(), 1);
        assert_eq!(registry.labelled().len(), 2);
    }

    #[test]
    fn a_set_without_a_shard_has_no_label() {
        let registry = Registry::new();
        let set = Arc::new(TestMetrics::default());
        registry.register(set.clone(), None);
        set.commands.add_shared(3);
        assert!(registry.encode().contains("beeline_test_commands_total 3\n"));
    }

    #[test]
    fn the_document_names_every_declaration() {
        let text = markdown("Test", TestMetrics::DESCRIPTORS);
        assert!(text.contains("| `beeline_test_commands_total` | counter | Commands executed. |"));
        assert_eq!(text.lines().count(), 4 + TestMetrics::DESCRIPTORS.len());
    }
}
