//! kill -9 of either end of accelerated connections, at random moments: whoever is left goes on,
//! and nothing of the dead stays behind.
//!
//! `BEELINE_ROUNDS=n` (else 8), `BEELINE_SEED=n`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::preload::{Background, Monitor, listening};
use beeline_verify_clients::{Chance, eventually, free_port, need, note, number, root};

const PATIENCE: Duration = Duration::from_secs(60);

fn descriptors(server: &Background) -> usize {
    let folder = format!("/proc/{}/fd", server.0.id());
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[test]
fn ends_killed_at_random_moments_leave_nothing_behind() {
    let test = "ends_killed_at_random_moments_leave_nothing_behind";
    if need(test, "python3").is_none() {
        return;
    }
    let rounds = number("BEELINE_ROUNDS").unwrap_or(8).max(4);
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let mut chance = Chance(seed);
    let script = root().join("verify/clients/python/sockets_echo.py");
    let script = script.to_str().unwrap();
    let monitor = Monitor::start();
    let start = || {
        let port = free_port();
        let text = port.to_string();
        let server =
            Background::start(&mut monitor.command(true, &["python3", script, "serve", &text]));
        listening(port);
        (server, text)
    };
    let (mut server, mut port) = start();
    let mut servers = 1;
    for round in 0..rounds {
        let before = monitor.paired();
        let clients: Vec<Background> = (0..2)
            .map(|_| {
                let how = ["block", "timeout", "poll"][chance.below(3) as usize];
                let words = ["python3", script, "ask", &port, how, "1000000"];
                Background::start(&mut monitor.command(true, &words))
            })
            .collect();
        eventually("both clients through shared memory", PATIENCE, || {
            (monitor.paired() >= before + 2).then_some(())
        });
        std::thread::sleep(Duration::from_millis(chance.below(150)));
        if round % 4 == 3 {
            // The clients hear of it, and end by themselves.
            drop(server);
            for mut client in clients {
                eventually("an end of a client whose server was killed", PATIENCE, || {
                    client.0.try_wait().unwrap()
                });
            }
            (server, port) = start();
            servers += 1;
        } else {
            drop(clients);
        }
    }
    let words = ["python3", script, "ask", &port, "block", "20"];
    assert!(monitor.run(true, &words).contains("echoed"), "seed {seed}");
    // Standard streams, the listener and little else.
    let few = eventually("a server without the descriptors of dead clients", PATIENCE, || {
        let count = descriptors(&server);
        (count <= 8).then_some(count)
    });
    drop(server);
    let status = eventually("a monitor that keeps nothing of the dead", PATIENCE, || {
        let status = monitor.status()?;
        (status["kept"] == 0 && status["waiting"] == 0).then_some(status)
    });
    let paired = status["paired"].as_u64().unwrap();
    note(&format!(
        "{rounds} rounds of kill -9, {servers} servers, {paired} connections; {few} descriptors \
         left in the last server, seed {seed}"
    ));
    assert!(paired > 2 * rounds, "hardly anything was accelerated: {status}");
}
