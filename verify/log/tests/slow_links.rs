//! Real members over links that are slow, late or lossy, under clients whose histories are checked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod real;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use real::network::Network;
use real::switch::Switch;
use real::{Clients, Cluster, Known, note, skip};

const ALL: [usize; 3] = [1, 2, 3];

fn known(cluster: &Cluster) -> Known {
    Arc::new(Mutex::new(cluster.clients.clone()))
}

#[test]
fn narrow_links_slow_a_cluster_down_and_change_nothing_else() {
    let test = "narrow_links_slow_a_cluster_down_and_change_nothing_else";
    let Some(network) = Network::new() else {
        return skip(test, "network namespaces need root and ip");
    };
    if !network.narrow(1, "4mbit") {
        return skip(test, "links are slowed by tc and the kernel's tbf");
    }
    network.widen(1);
    let mut cluster = Cluster::new(network.shape(), 3, 3);
    let clients = Clients::start(&known(&cluster), 4);
    clients.go_on(20);
    for rate in ["4mbit", "600kbit"] {
        // The leader's own link first, then everybody's.
        assert!(network.narrow(cluster.leader(), rate));
        clients.go_on(30);
        for node in ALL {
            assert!(network.narrow(node, rate));
        }
        clients.go_on(30);
        let leader = cluster.leader();
        cluster.kill(leader);
        clients.go_on(10);
        cluster.start(leader);
        clients.go_on(10);
        ALL.into_iter().for_each(|node| network.widen(node));
    }
    let answered = clients.check(|| cluster.converge(&ALL));
    note(&format!("{answered} operations over links of 4 Mbit/s and 600 kbit/s"));
}

#[test]
fn packets_that_come_late_in_another_order_or_not_at_all_do_no_harm() {
    let test = "packets_that_come_late_in_another_order_or_not_at_all_do_no_harm";
    let Some(switch) = Switch::new() else {
        return skip(test, "tun devices and network namespaces need root and ip");
    };
    let mut cluster = Cluster::new(switch.shape(), 3, 3);
    let clients = Clients::start(&known(&cluster), 4);
    clients.go_on(20);
    // One way, so that a round takes twice that: from a campus to another continent.
    for (delay_ms, jitter_ms, lost) in [(5, 5, 0), (20, 5, 20), (70, 10, 0), (30, 40, 10)] {
        switch.weather.delay_us.store(delay_ms * 1000, Ordering::Relaxed);
        switch.weather.jitter_us.store(jitter_ms * 1000, Ordering::Relaxed);
        switch.weather.lost.store(lost, Ordering::Relaxed);
        clients.go_on(20);
        let leader = cluster.leader();
        cluster.kill(leader);
        clients.go_on(5);
        cluster.start(leader);
        clients.go_on(10);
    }
    let (seen, dropped) = (&switch.weather.seen, &switch.weather.dropped);
    let (seen, dropped) = (seen.load(Ordering::Relaxed), dropped.load(Ordering::Relaxed));
    assert!(seen > 1000 && dropped > 5, "{dropped} of {seen} packets lost");
    switch.weather.delay_us.store(0, Ordering::Relaxed);
    switch.weather.lost.store(0, Ordering::Relaxed);
    let answered = clients.check(|| cluster.converge(&ALL));
    note(&format!("{answered} operations, {seen} packets late, {dropped} lost"));
}
