//! From the settings a person chose to what the node is told.

use std::path::Path;

use beeline_kv::Eviction;
use beeline_node::{NodeConfig, PipelineOrder, RedisDoor, ReplicationOptions, ServerOptions};
use beeline_pmem::{Durability, PoolKind, PoolOptions};

use crate::config::ServeConfig;
use crate::config::values::{
    Auto, DurabilityWord, EvictionWord, Number, OrderWord, PoolWord, Size,
};

/// The node's configuration, `auto` resolved for this machine.
pub fn plan(config: &ServeConfig) -> NodeConfig {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shards = match config.shards {
        Auto::Set(Number(shards)) => shards as usize,
        Auto::Detect => cores.min(256),
    };
    NodeConfig {
        // Absolute, because clients are told (CONFIG GET dir).
        data_directory: std::path::absolute(&config.data).unwrap_or_else(|_| config.data.clone()),
        pool: pool(config),
        shards,
        pin_shards: config.pin.0,
        spin: std::time::Duration::from_micros(config.spin_us.0.into()),
        max_memory_bytes: config.max_memory.0,
        feed_bytes: config.change_feed.0,
        eviction: eviction(config.eviction_policy),
        cooperative_write_back: true,
        accept_damage: config.accept_damage.0,
        fabric: ServerOptions::default(),
        shutdown_wait: config.shutdown_wait.0,
        replication: config.member().map(|member| ReplicationOptions {
            cluster: config.cluster.0,
            node: member.id,
            request_timeout: config.request_timeout.0,
            ordered_commits: config.durability == DurabilityWord::Power,
        }),
        redis: config.resp.address.0.map(|address| RedisDoor {
            require_password: Some(config.resp.require_password.0.clone())
                .filter(|password| !password.is_empty()),
            max_clients: config.resp.max_clients.0 as usize,
            idle_timeout: Some(config.resp.idle_timeout.0).filter(|timeout| !timeout.is_zero()),
            output_limit_bytes: usize::try_from(config.resp.output_buffer_limit.0)
                .unwrap_or(usize::MAX),
            query_limit_bytes: u32::try_from(config.resp.query_buffer_limit.0).unwrap_or(u32::MAX),
            slow_log: config.resp.slow_log.0,
            pipeline_order: match config.resp.pipeline_order {
                OrderWord::Strict => PipelineOrder::Strict,
                OrderWord::Relaxed => PipelineOrder::Relaxed,
            },
            ..RedisDoor::at(address)
        }),
    }
}

/// The pool that the settings ask for.
pub fn pool(config: &ServeConfig) -> PoolOptions {
    let segment_bytes = u32::try_from(config.segment_size.0).unwrap_or(u32::MAX);
    let capacity_bytes = match config.capacity {
        Auto::Set(Size(bytes)) => bytes,
        Auto::Detect => automatic_capacity(config, u64::from(segment_bytes)),
    };
    PoolOptions {
        kind: match config.pool {
            PoolWord::Auto => None,
            PoolWord::Dax => Some(PoolKind::Dax),
            PoolWord::File => Some(PoolKind::File),
            PoolWord::Dram => Some(PoolKind::Dram),
        },
        durability: match config.durability {
            DurabilityWord::None => Durability::None,
            DurabilityWord::Process => Durability::Process,
            DurabilityWord::Power => Durability::Power,
        },
        segment_bytes,
        capacity_bytes,
        write_delay_ns: config.write_delay_ns.0,
        write_back: config.write_back.instruction(),
        prepared_segments: config.prepared_segments.0,
        emulate_durability: config.emulate_durability.0,
        ..PoolOptions::default()
    }
}

/// 80 % of what is free where the data lies, what the pool takes already counted as free; half of
/// the memory for a pool in memory. At least eight segments, so that a nearly full disk is met by
/// the error of the allocation that fails and not by a guess.
fn automatic_capacity(config: &ServeConfig, segment_bytes: u64) -> u64 {
    let capacity = if config.pool == PoolWord::Dram {
        memory_bytes() / 2
    } else {
        let place = crate::doctor::existing(&config.data);
        let free = crate::doctor::free_bytes(&place).unwrap_or(0);
        (free + taken_bytes(&config.data)) / 5 * 4
    };
    capacity.max(8 * segment_bytes)
}

/// Memory of this machine.
pub fn memory_bytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        .map_or(1 << 30, |kibibytes| kibibytes << 10)
}

fn taken_bytes(data: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(data.join("segments")) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|about| about.len()).sum()
}

fn eviction(word: EvictionWord) -> Eviction {
    match word {
        EvictionWord::NoEviction => Eviction::NoEviction,
        EvictionWord::AllKeysLru => Eviction::AllKeysLru,
        EvictionWord::AllKeysRandom => Eviction::AllKeysRandom,
        EvictionWord::VolatileLru => Eviction::VolatileLru,
        EvictionWord::VolatileRandom => Eviction::VolatileRandom,
        EvictionWord::VolatileTtl => Eviction::VolatileTtl,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, FileLayer, ServeFlags};

    fn planned(flags: &ServeFlags) -> NodeConfig {
        let (file, environment) = (FileLayer::default(), Environment::default());
        plan(&ServeConfig::load(flags, &file, &environment).unwrap().0)
    }

    #[test]
    fn auto_fits_the_machine() {
        let node = planned(&ServeFlags::default());
        assert!(node.shards >= 1);
        assert!(node.pool.capacity_bytes >= 8 * u64::from(node.pool.segment_bytes));
        assert!(node.pool.kind.is_none());
        let door = node.redis.unwrap();
        assert_eq!(door.require_password, None);
        assert_eq!(door.idle_timeout, None);
    }

    #[test]
    fn a_door_that_is_off_is_not_there() {
        let flags = ServeFlags::default().with("resp-address", "off");
        assert!(planned(&flags).redis.is_none());
    }

    #[test]
    fn every_policy_has_its_name_in_the_store() {
        use crate::config::Knob as _;
        for policy in Eviction::ALL {
            let word = EvictionWord::parse(policy.name()).unwrap();
            assert_eq!(eviction(word), policy);
        }
    }
}
