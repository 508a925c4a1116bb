//! Unmodified programs of two guests whose connections go through a memory window, woken by interrupts and, where the
//! device has none, by a timer.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Rows;
use super::peers::{Check, SOON};
use super::window::{Made, plain, with_interrupts};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Guest, Link, Options};
use crate::root;
use crate::setup::is_here;
use crate::step::Report;

const SCRIPT: &str = "xtask/src/lab/guest/servers.sh";
const SERVER: &str = "10.9.0.2";
const PORT: &str = "6003";
/// Some thousand round trips on emulated processors.
const LONG: Duration = Duration::from_secs(300);

/// A row for each way to be woken.
pub(super) fn run(report: &mut Report) {
    let mut rows = Rows { report, suite: "packets" };
    if !["beeline", "beeline-sockets-preload"].into_iter().all(super::build) {
        return rows.check("redis through the window", || {
            Ok(Err("the library does not build".to_owned()))
        });
    }
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    for (how, options, interrupts) in
        [("interrupts", with_interrupts as fn(&Path) -> Made, true), ("a timer", plain, false)]
    {
        let row = format!("redis through the window, woken by {how}");
        if let Some(program) = programs.iter().find(|program| !is_here(program)) {
            rows.skip(&row, &format!("{program} is not installed; `cargo xtask setup` fetches it"));
            continue;
        }
        rows.check(&row, || redis(options, interrupts));
    }
}

fn beeline(words: &str) -> String {
    let words = format!("target/debug/beeline {words}");
    line(&root(), &[], &words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
}

/// Runs the script's part `words` in `guest`: what it says.
fn script(guest: &mut Guest, words: &[&str], limit: Duration) -> Result<String, LabError> {
    let words: Vec<String> = ["sh", SCRIPT].iter().chain(words).map(|&word| word.into()).collect();
    let done = guest.run(&line(&root(), &[], &words), limit)?;
    if done.status == 0 {
        return Ok(done.output.trim().to_owned());
    }
    Err(LabError::Failed { command: words.join(" "), errors: done.errors })
}

/// The proxy's rows of a guest's status.
fn status(guest: &mut Guest) -> Result<serde_json::Value, LabError> {
    let said = guest.run(&beeline("sockets status --json"), SOON)?.output;
    let status: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
    Ok(status["proxy"].clone())
}

fn count(rows: &serde_json::Value, name: &str) -> u64 {
    let number = |value: &serde_json::Value| value.as_str()?.parse::<u64>().ok();
    let all = rows.as_object().into_iter().flatten();
    all.filter(|(row, _)| row.ends_with(&format!(": {name}"))).filter_map(|(_, v)| number(v)).sum()
}

/// Interrupts of the window's device so far.
fn interrupted(guest: &mut Guest) -> Result<u64, LabError> {
    let seen = guest.run("grep vfio-msix /proc/interrupts; true", SOON)?.output;
    let counts = seen.lines().flat_map(|line| {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok())
    });
    Ok(counts.sum())
}

/// Writes the list of peers of a guest, and starts its proxy.
fn start(guest: &mut Guest, side: usize) -> Result<(), LabError> {
    let peers = "printf 'addresses = [\"%s\"]\\nlisten = \"%s:9090\"\\n[[peers]]\\nname = \"other\"\\n\
                 addresses = [\"%s\"]\\nmonitor = \"%s:9090\"\\n' \
                 $LAB_SELF $LAB_SELF $LAB_PEER $LAB_PEER >/run/peers.toml";
    guest.run(peers, SOON)?;
    let program = root().join("target/debug/beeline");
    let program = program.display();
    let proxy = format!(
        "({program} sockets proxy --window \"ntb://$LAB_WINDOW?side={side}\" --peers /run/peers.toml \
         >/run/proxy 2>&1 &) & true"
    );
    guest.run(&proxy, SOON).map(|_| ())
}

fn redis(options: fn(&Path) -> Made, interrupts: bool) -> Check {
    let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
    let wire = folder.path().join("wire");
    let machine = options(folder.path())?;
    let link = Link::Listen(wire.clone());
    let mut client = Guest::boot(&Options { link, ..machine.clone() })?;
    let mut server = Guest::boot(&Options { number: 1, link: Link::Call(wire), ..machine })?;
    start(&mut client, 0)?;
    start(&mut server, 1)?;
    let begun = Instant::now();
    loop {
        let [one, other] = [status(&mut client)?, status(&mut server)?];
        if [&one, &other].into_iter().all(|rows| rows["link to other"] == "up") {
            break;
        }
        if begun.elapsed() > SOON {
            let said = client.run("cat /run/proxy", SOON)?.output;
            return Ok(Err(format!("the link is not up: {one} {other} {said}")));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    script(&mut server, &["serve", "redis", SERVER, PORT], SOON)?;
    let mut said = Vec::new();
    for what in ["load", "values"] {
        said.push(script(&mut client, &[what, SERVER, PORT], LONG)?);
    }
    script(&mut server, &["stop"], SOON)?;
    let [one, other] = [status(&mut client)?, status(&mut server)?];
    let [sent, received] = [count(&one, "bytes sent"), count(&other, "bytes sent")];
    let drops = count(&one, "drops") + count(&other, "drops");
    let raised = [interrupted(&mut client)?, interrupted(&mut server)?];
    let woken = !interrupts || raised.iter().all(|&raised| raised > 0);
    let told = format!(
        "{sent} and {received} bytes through the window, {drops} drops, interrupts {raised:?}"
    );
    // 3,000 values of 1,000 bytes each way, and one of 800,000.
    Ok(if sent.min(received) > 3_000_000 && drops == 0 && woken {
        Ok(format!("{}; {told}", said.join("; ")))
    } else {
        Err(format!("{told}: {}", said.join("; ")))
    })
}
