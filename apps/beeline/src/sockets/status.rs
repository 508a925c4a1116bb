//! `beeline sockets status` and `connections`.

use anyhow::Context as _;
use beeline_sockets::control::{Answer, Introduced, Question, Status};
use beeline_sockets::introduce;
use serde::Serialize;

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};

fn ask(question: Question) -> Result<std::os::fd::OwnedFd, Failure> {
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
}

/// Counters.
pub fn status(output: Output) -> Result<Exit, Failure> {
    let socket = ask(Question::Status)?;
    let (answer, _) = introduce::answer(&socket).or_exit(Exit::Unreachable)?;
    let Answer::Status(status) = answer else { return Err(strange()) };
    let Status { process, up_seconds, asked, paired, waiting, refused } = status;
    let line = StatusLine { process, up_seconds, asked, paired, waiting, refused };
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

fn strange() -> Failure {
    Failure::new(Exit::Unreachable, anyhow::anyhow!("the monitor answered something else"))
}
