//! `beeline sockets status`, `metrics` and `connections`.

use anyhow::Context as _;
use beeline_sockets::control::{Answer, Introduced, Question, Status};
use beeline_sockets::introduce;
use serde::Serialize;

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};

pub fn ask(question: Question) -> Result<std::os::fd::OwnedFd, Failure> {
    let socket = introduce::dial()
        .context("no monitor of this user answers; `beeline run` starts one")
        .or_exit(Exit::Unreachable)?;
    introduce::ask(&socket, question, None).or_exit(Exit::Unreachable)?;
    Ok(socket)
}

#[derive(Serialize)]
struct StatusLine {
    process: u32,
    up_seconds: u64,
    asked: u64,
    paired: u64,
    waiting: u64,
    refused: u64,
    denied: u64,
    kept: u64,
}

fn fetch() -> Result<Status, Failure> {
    let socket = ask(Question::Status)?;
    let (answer, _) = introduce::answer(&socket).or_exit(Exit::Unreachable)?;
    if let Answer::Status(status) = answer { Ok(status) } else { Err(strange()) }
}

/// As a collector of text files takes them.
pub fn metrics(output: Output) -> Result<Exit, Failure> {
    output.bytes(exposition(&fetch()?).as_bytes())?;
    Ok(Exit::Done)
}

fn exposition(status: &Status) -> String {
    let metrics = [
        ("up_seconds", "gauge", "Seconds since the monitor began.", status.up_seconds),
        ("asked_total", "counter", "Ends of connections that asked.", status.asked),
        ("introduced_total", "counter", "Connections of which both ends asked.", status.paired),
        ("waiting", "gauge", "Ends that wait for their other end.", status.waiting),
        ("refused_total", "counter", "Ends left to the kernel.", status.refused),
        ("denied_total", "counter", "Ends left to the kernel by the policy.", status.denied),
        ("kept", "gauge", "Segments kept for ends that change programs.", status.kept),
    ];
    let mut text = String::new();
    for (name, kind, help, value) in metrics {
        let family = format!("beeline_sockets_{}", name.trim_end_matches("_total"));
        text += &format!("# HELP {family} {help}\n# TYPE {family} {kind}\n");
        text += &format!("beeline_sockets_{name} {value}\n");
    }
    text + "# EOF\n"
}

/// Counters.
pub fn status(output: Output) -> Result<Exit, Failure> {
    let status = fetch()?;
    let Status { process, up_seconds, asked, paired, waiting, refused, denied, kept } = status;
    let line = StatusLine { process, up_seconds, asked, paired, waiting, refused, denied, kept };
    if output.json {
        output.object(&line)?;
        return Ok(Exit::Done);
    }
    let rows = [
        ("monitor's process", u64::from(process)),
        ("up, seconds", up_seconds),
        ("ends that asked", asked),
        ("connections introduced", paired),
        ("ends that wait for their other end", waiting),
        ("ends left to the kernel", refused),
        ("of these, by the policy", denied),
        ("segments kept for a change of programs", kept),
    ];
    let cells: Vec<Vec<String>> =
        rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.to_string()]).collect();
    output.bytes(table(&["SOCKETS", "NOW"], &cells).as_bytes())?;
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct ConnectionLine {
    first: String,
    first_process: u32,
    second: String,
    second_process: u32,
}

/// The latest introductions.
pub fn connections(output: Output) -> Result<Exit, Failure> {
    let socket = ask(Question::Connections)?;
    let mut cells = Vec::new();
    loop {
        let (answer, _) = introduce::answer(&socket).or_exit(Exit::Unreachable)?;
        match answer {
            Answer::Connection(Introduced { first, first_process, second, second_process }) => {
                let (first, second) = (first.to_string(), second.to_string());
                if output.json {
                    output.object(&ConnectionLine {
                        first,
                        first_process,
                        second,
                        second_process,
                    })?;
                } else {
                    let (one, two) = (first_process.to_string(), second_process.to_string());
                    cells.push(vec![first, one, second, two]);
                }
            }
            Answer::End => break,
            _ => return Err(strange()),
        }
    }
    if !output.json {
        let header = ["ONE END", "PROCESS", "OTHER END", "PROCESS"];
        output.bytes(table(&header, &cells).as_bytes())?;
    }
    Ok(Exit::Done)
}

pub fn strange() -> Failure {
    Failure::new(Exit::Unreachable, anyhow::anyhow!("the monitor answered something else"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_name_each_family_and_its_kind() {
        let text = exposition(&Status { asked: 7, kept: 3, ..Status::default() });
        assert!(
            text.contains("# TYPE beeline_sockets_asked counter\nbeeline_sockets_asked_total 7")
        );
        assert!(text.contains("beeline_sockets_kept 3\n") && text.ends_with("# EOF\n"), "{text}");
    }
}
