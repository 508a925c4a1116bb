//! Programs of two guests whose connections run over soft-RoCE: unmodified, under `beeline run`.

mod servers;

use std::time::Duration;

use super::peers::{Check, SOON};
use super::perftest::Seen;
use super::{Binaries, Rows};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Guest, Link, Options};
use crate::root;
use crate::step::Report;

const SCRIPT: &str = "verify/clients/python/sockets_hosts.py";
const SERVER: &str = "10.9.0.2";
/// Emulated processors, a debug build, Python.
const LONG: Duration = Duration::from_secs(240);
/// Turns of a measurement, each with the library and without.
const TURNS: usize = 5;

/// A server in guest 1, its clients in guest 0, a monitor and a relay in each.
pub(super) fn run(report: &mut Report, _binaries: &Binaries) {
    let mut rows = Rows { report, suite: "sockets" };
    let talk = &["--package", "beeline-verify-lab", "--example", "talk"];
    if !["beeline", "beeline-sockets-preload"].into_iter().all(super::build)
        || !super::build_with(talk)
    {
        return rows.check("programs", || Ok(Err("beeline does not build".to_owned())));
    }
    for provider in ["verbs", "tcp"] {
        let named = |row: &str| format!("{row}, {provider}");
        let mut world = match World::boot(provider) {
            Ok(world) => world,
            Err(error) => {
                rows.check(&named("boot"), || Err(error));
                continue;
            }
        };
        // Name of the row, the server, the client, and what it says.
        let conversations = [
            ("a half-closed connection", "half_server", "half", "600000", "half and half"),
            ("fork in mid-stream", "fork_server 1500", "fork_client", "1500", "every line of both"),
            ("many connections, epoll", "epoll_server", "many", "20 60", "answered"),
            ("both directions at once", "bulk_server 3000000", "bulk", "3000000", "both ways"),
            ("bytes unread at the close", "unread_server", "unread", "", "ECONNRESET"),
        ];
        for (row, server, client, more, said) in conversations {
            rows.check(&named(row), || world.conversation(server, client, more, said));
        }
        servers::run(&mut rows, &mut world, provider);
        rows.check(&named("measured"), || world.measured());
        rows.check(&named("the cable pulled"), || world.pull());
    }
}

struct World {
    client: Guest,
    server: Guest,
    _folder: tempfile::TempDir,
}

/// `words` of `beeline`, in the workspace.
fn beeline(words: &str) -> String {
    let words = format!("target/debug/beeline {words}");
    line(&root(), &[], &words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
}

/// One of the relay's counters in a guest.
fn count(guest: &mut Guest, name: &str) -> Result<u64, LabError> {
    let said = guest.run(&beeline("sockets status --json"), SOON)?.output;
    let status: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
    Ok(status["relay"][name].as_u64().unwrap_or(0))
}

impl World {
    fn boot(provider: &str) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
        let wire = folder.path().join("wire");
        let machine = match provider {
            "verbs" => Options { rdma: true, ..Options::plain() },
            _ => Options::plain(),
        };
        let link = Link::Listen(wire.clone());
        let mut client = Guest::boot(&Options { link, ..machine.clone() })?;
        let mut server = Guest::boot(&Options { number: 1, link: Link::Call(wire), ..machine })?;
        for guest in [&mut client, &mut server] {
            guest.run(&hosts_file(provider), SOON)?;
            guest.run(&beeline("sockets monitor --background --hosts /run/hosts.toml"), SOON)?;
        }
        Ok(Self { client, server, _folder: folder })
    }

    /// Starts `mode` in the server's guest, and waits until it listens.
    fn serve(&mut self, mode: &str) -> Result<(), LabError> {
        let (mode, more) = mode.split_once(' ').unwrap_or((mode, ""));
        let run = beeline(&format!("run -- python3 {SCRIPT} {mode} {SERVER} 6000 {more}"));
        self.server.start(&format!("({run} >/run/server 2>&1 & echo $! >/run/process) & true"))?;
        self.server.finish(SOON)?;
        let listening = "for i in $(seq 600); do ss -ltnH sport = :6000 | grep -q . && exit; \
                         sleep 0.1; done; cat /run/server >&2; exit 1";
        let seen = self.server.run(listening, SOON)?;
        if seen.status == 0 {
            Ok(())
        } else {
            Err(LabError::Command { command: format!("{mode}: {}", seen.errors) })
        }
    }

    fn stop(&mut self) -> Result<(), LabError> {
        let stop = "kill -9 $(cat /run/process); for i in $(seq 100); do \
                    ss -ltnH sport = :6000 | grep -q . || exit; sleep 0.1; done";
        self.server.run(stop, SOON).map(|_| ())
    }

    /// One of the relay's counters in the client's guest.
    fn count(&mut self, name: &str) -> Result<u64, LabError> {
        count(&mut self.client, name)
    }

    fn moved(&mut self) -> Result<u64, LabError> {
        Ok(self.count("sent_bytes")? + self.count("received_bytes")?)
    }

    fn conversation(&mut self, server: &str, client: &str, more: &str, expected: &str) -> Check {
        self.serve(server)?;
        let before = self.moved()?;
        let run = beeline(&format!("run -- python3 {SCRIPT} {client} {SERVER} 6000 {more}"));
        let done = self.client.run(&run, LONG)?;
        let moved = self.moved()?.saturating_sub(before);
        let broken = self.count("broken")?;
        self.stop()?;
        let well = done.status == 0 && done.output.contains(expected);
        Ok(if well && moved > 1000 && broken == 0 {
            Ok(format!("{}; {moved} bytes over the fabric", done.output.trim()))
        } else {
            Err(format!("{moved} bytes over the fabric, {broken} broken, {done:?}"))
        })
    }

    /// What a round trip and large sends of two programs take, under `beeline run` and without it, in
    /// turns. Emulated processors, on which relays and programs spin: figures to see, not to judge.
    fn measured(&mut self) -> Check {
        let talk = root().join("target/debug/examples/talk").display().to_string();
        let ours = beeline(&format!("run -- {talk}"));
        // Soft-RoCE is kernel work, which programs that spin keep waiting for ticks of the scheduler: here
        // it goes before them, as a device's own processor would.
        for guest in [&mut self.client, &mut self.server] {
            guest.run("for i in $(pgrep ksoftirqd); do chrt -f -p 1 $i; done", SOON)?;
        }
        for (program, port) in [(&ours, 6001), (&talk, 6002)] {
            let line = format!("({program} serve {SERVER}:{port} >/run/talk 2>&1 &) & sleep 2");
            self.server.run(&line, SOON)?;
        }
        let (mut trips, mut rates) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let before = self.moved()?;
        for turn in 0..2 * TURNS {
            // Ours, theirs, theirs, ours.
            let which = usize::from(turn % 4 == 1 || turn % 4 == 2);
            let (program, port) = [(&ours, 6001), (&talk, 6002)][which];
            let done = self.client.run(&format!("{program} ask {SERVER}:{port}"), LONG)?;
            let number = |after: &str| {
                let rest = done.output.split_once(after)?.1;
                rest.split_whitespace().next()?.parse::<f64>().ok()
            };
            let (Some(trip), Some(rate)) = (number("round trip "), number("sends ")) else {
                return Ok(Err(format!("{done:?}")));
            };
            trips[which].push(trip);
            rates[which].push(rate);
        }
        let moved = self.moved()?.saturating_sub(before);
        self.server.run("pkill -9 -x talk; true", SOON)?;
        let [our_trip, trip] = trips.map(Seen::of);
        let [our_rate, rate] = rates.map(Seen::of);
        Ok(if moved > 10 << 20 {
            Ok(format!(
                "8 B round trip {our_trip} us, the kernel's {trip}; 1 MiB sends {our_rate} MB/s, the \
                 kernel's {rate}; {TURNS} turns, {moved} bytes over the fabric"
            ))
        } else {
            Err(format!("{moved} bytes over the fabric"))
        })
    }

    /// A talk whose cable is pulled is reset, and another works after it is plugged in.
    fn pull(&mut self) -> Check {
        self.serve("chatter_server")?;
        let run = beeline(&format!("run -- python3 {SCRIPT} chatter {SERVER} 6000 200"));
        self.client.start(&run)?;
        std::thread::sleep(Duration::from_secs(10));
        self.server.cable(false)?;
        let done = self.client.finish(LONG)?;
        self.server.cable(true)?;
        let fate = done.output.lines().last().unwrap_or_default().to_owned();
        if !fate.contains(" after ") || fate.contains("well") {
            return Ok(Err(format!("not noticed: {done:?}")));
        }
        let run = beeline(&format!("run -- python3 {SCRIPT} chatter {SERVER} 6000 8"));
        for _ in 0..10 {
            let before = self.count("paired")?;
            let done = self.client.run(&run, LONG)?;
            let well = done.output.contains("well after");
            if well && self.count("paired")? > before {
                return Ok(Ok(format!("{fate}; then {}", done.output.trim())));
            }
        }
        Ok(Err(format!("{fate}; and no connection over the fabric afterwards")))
    }
}

/// Writes the list of hosts of a guest.
fn hosts_file(provider: &str) -> String {
    format!(
        "printf 'listen = \"{provider}://%s:4791\"\\nsleepers_hold_seconds = 0\\nover_tcp = true\\n\
         [[hosts]]\\naddresses = [\"%s\"]\\nrelay = \"{provider}://%s:4791\"\\n' $LAB_SELF $LAB_PEER $LAB_PEER >/run/hosts.toml"
    )
}
