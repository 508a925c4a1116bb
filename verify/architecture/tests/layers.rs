//! The layering rule over this workspace, and over planted violations.

use beeline_verify_architecture::layers::{Dependency, Package, problems, rank, workspace};
use beeline_verify_architecture::root;

/// Edges inside one folder: from, to, reason.
const SAME_FOLDER: &[(&str, &str, &str)] = &[
    ("fabric-shm", "fabric", "a provider implements the traits"),
    ("fabric-engine", "fabric", "implements the traits for providers of byte streams"),
    ("fabric-tcp", "fabric", "a provider implements the traits"),
    ("fabric-tcp", "fabric-engine", "queue pairs over its byte streams"),
    ("fabric-ntb", "fabric", "a provider implements the traits"),
    ("fabric-ntb", "fabric-engine", "queue pairs over its rings"),
    ("fabric-ntb", "ntb", "windows, their parts, doorbells and emulations"),
    ("fabric-verbs", "fabric", "a provider implements the traits"),
    ("fabric-sim", "fabric", "a provider implements the traits"),
    ("fabric-conformance", "fabric", "the suite is written against the traits"),
    ("fabric-open", "fabric", "hands out trait objects"),
    ("fabric-open", "fabric-shm", "from URL to provider"),
    ("fabric-open", "fabric-tcp", "from URL to provider"),
    ("fabric-open", "fabric-ntb", "from URL to provider"),
    ("fabric-open", "fabric-verbs", "from URL to provider"),
    ("fabric-open", "fabric-sim", "from URL to provider"),
    ("kv-server", "kv", "serves the store over fabric"),
    ("kv-direct-model", "kv-direct", "drives its table, station and packets"),
    ("kv-client", "kv", "shares the entry and message formats"),
    ("replicated-log", "paxos", "carries out the protocol's commands"),
    ("replicated-service", "replicated-log", "gives services a log to share"),
    ("node", "resp", "runs the Redis door in its shards"),
    ("objects", "service", "the store is a part of a node"),
    ("documents", "documents-query", "commands are made of its filters, updates and pipelines"),
    ("documents", "node", "documents lie in the node's store"),
    ("documents", "service", "is a service of the node"),
    ("direct", "service", "is a service of the node"),
    ("beeline", "direct-client", "the command is a client"),
    ("beeline", "documents-client", "the command is a client"),
    ("beeline", "documents-router", "the command runs it"),
    ("documents-router", "documents-client", "reaches shards as every client does"),
    ("direct-c", "direct-client", "connects as every client does"),
    ("python", "direct-client", "connects as every client does"),
    ("ir", "syntax", "lowers the syntax tree"),
    ("native", "ir", "compiles the typed tree"),
    ("passes", "ir", "optimises and schedules the typed tree"),
    ("passes", "syntax", "storage classes and places in the source"),
    ("verilog", "ir", "graphs and widths"),
    ("verilog", "passes", "writes its schedule"),
    ("nf", "passes", "the runtime's rank is the compiler's; it runs the cycle model"),
    ("nf", "verilog", "the runtime's rank is the compiler's; it starts simulators"),
    ("nf", "syntax", "the runtime's rank is the compiler's; it shows diagnostics"),
    ("nf", "ir", "the runtime's rank is the compiler's; it runs graphs"),
    ("nf", "native", "the runtime's rank is the compiler's; it runs machine code"),
    ("sockets-preload", "sockets", "exports the C library's names over it"),
    ("sockets-monitor", "sockets", "shares the segment and the records"),
    ("sockets-relay", "sockets", "stands for an end of a segment"),
    ("sockets-proxy", "sockets", "shares queues and blocks with programs"),
    ("verify-log", "verify-clients", "ports for processes under test"),
    ("verify-lab", "verify-clients", "one connector and one way to skip for programs under test"),
];

#[test]
fn every_edge_of_this_workspace_keeps_the_rule() {
    let packages = workspace(&root()).unwrap();
    assert!(packages.len() >= 15, "cargo metadata names only {} crates", packages.len());
    let problems = problems(&packages, SAME_FOLDER);
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

fn package(name: &str, folder: &str, dependencies: &[(&str, bool)]) -> Package {
    let dependencies = dependencies
        .iter()
        .map(|(name, development)| Dependency {
            name: (*name).to_owned(),
            development: *development,
        })
        .collect();
    Package { name: name.to_owned(), folder: folder.to_owned(), dependencies }
}

fn world(extra: Package) -> Vec<Package> {
    let mut packages = vec![
        package("os", "foundation", &[]),
        package("fabric", "substrate", &[("os", false)]),
        package("fabric-shm", "substrate", &[("fabric", false)]),
        package("fabric-sim", "substrate", &[]),
        package("fabric-open", "substrate", &[("fabric-shm", false)]),
        package("kv", "engines", &[]),
        package("node", "systems", &[]),
        package("passes", "compiler", &[]),
    ];
    packages.push(extra);
    packages
}

const ALLOWED: &[(&str, &str, &str)] = &[
    ("fabric-shm", "fabric", "a provider implements the traits"),
    ("fabric-open", "fabric-shm", "from URL to provider"),
];

#[test]
fn a_planted_edge_is_named_with_its_remedy() {
    let cases = [
        (package("env", "foundation", &[("kv", false)]), "must not know rank 2"),
        (package("pmem", "substrate", &[("fabric", false)]), "stands in the list"),
        (package("kv-server", "engines", &[("fabric-shm", false)]), "through fabric-open alone"),
        (package("resp", "systems", &[("fabric-open", false)]), "only apps and rank 5"),
        (package("resp", "systems", &[("passes", false)]), "of one rank"),
        (package("native", "compiler", &[("kv", false)]), "foundation/ and substrate/ only"),
        (package("resp", "systems", &[("fabric-shm", true)]), "through fabric-open alone"),
        (package("stray", "misc", &[]), "has no rank"),
    ];
    for (planted, remedy) in cases {
        let name = planted.name.clone();
        let found = problems(&world(planted), ALLOWED);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        assert!(found[0].starts_with(&name) && found[0].contains(remedy), "{found:?}");
    }
}

#[test]
fn tests_may_reach_the_simulated_provider_and_the_edge_may_open_providers() {
    for fine in [
        package("resp", "systems", &[("fabric-sim", true)]),
        package("beeline", "apps", &[("fabric-open", false), ("node", false)]),
        package("crash", "verify", &[("fabric-shm", false)]),
    ] {
        assert_eq!(problems(&world(fine), ALLOWED), Vec::<String>::new());
    }
}

#[test]
fn a_listed_edge_that_is_gone_is_a_problem() {
    let listed = [ALLOWED, &[("kv", "fabric", "a reason of old")]].concat();
    let found = problems(&world(package("wire", "foundation", &[])), &listed);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("gone"));
}

#[test]
fn ranks_follow_the_style_guide() {
    let ranks: Vec<_> =
        ["foundation", "substrate", "engines", "systems", "compiler", "apps", "python", "verify"]
            .into_iter()
            .filter_map(rank)
            .collect();
    assert_eq!(ranks, [0, 1, 2, 3, 3, 4, 4, 5]);
}
