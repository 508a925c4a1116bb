//! `beeline direct`: pairs of a running node's direct store, through fabric.
//!
//! What a program reads goes to standard output as it is: `beeline direct get` adds no newline.

mod servers;
mod tune;

use std::time::Duration;

use beeline_kv_direct::function::number;
use beeline_kv_direct::membership::Change;
use beeline_kv_direct::{DirectClient, DirectClientError, Kind, Request, Status, Width};
use clap::{Args, Subcommand, ValueEnum};

use crate::cli::span;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// `beeline direct`.
#[derive(Debug, Subcommand)]
pub enum DirectCommand {
    /// Print the value of a key; exit code 1 when there is none.
    #[command(after_help = "Example:\n  beeline direct get greeting")]
    Get(KeyArguments),
    /// Store a pair. It is volatile: it ends with the node.
    #[command(after_help = "Examples:\n  beeline direct put greeting hello\n  \
                            beeline direct put counter --number 0\n  \
                            beeline direct put weights --vector 1,2,3 --width 4")]
    Put(PutArguments),
    /// Delete a key; exit code 1 when it was not there.
    #[command(after_help = "Example:\n  beeline direct delete greeting")]
    Delete(KeyArguments),
    /// Change a number, or every number of a vector, and print what was there before.
    #[command(after_help = "Examples:\n  beeline direct update counter add 1\n  \
                            beeline direct update weights add 10 --width 4\n  \
                            beeline direct update weights add 1,2,3 --width 4")]
    Update(UpdateArguments),
    /// Store NEW where the number is EXPECTED, and print what was there before.
    #[command(after_help = "Example:\n  beeline direct cas lock 0 1")]
    Cas(CasArguments),
    /// Fold a vector into one number, from an initial one.
    #[command(after_help = "Example:\n  beeline direct reduce weights add --width 4")]
    Reduce(ReduceArguments),
    /// Print the numbers of a vector that are not zero.
    #[command(after_help = "Example:\n  beeline direct filter weights --width 4")]
    Filter(FilterArguments),
    /// Print the servers of the map that a server belongs to, with their pairs.
    #[command(after_help = "Example:\n  beeline direct servers --connect auto://10.0.0.1:4790")]
    Servers(Servers),
    /// Take an empty server into the map that the servers of --connect belong to: it takes its share of their keys,
    /// and clients go on meanwhile. The first time, name all servers of the map.
    #[command(after_help = "Example:\n  \
                            beeline direct join auto://10.0.0.3:4790 --connect auto://10.0.0.1:4790,auto://10.0.0.2:4790")]
    Join(servers::ChangeArguments),
    /// Have a server give its keys to the others of the map; it can be stopped then.
    #[command(after_help = "Examples:\n  \
                            beeline direct leave auto://10.0.0.3:4790 --connect auto://10.0.0.1:4790\n  \
                            beeline direct leave auto://10.0.0.3:4790 --connect auto://10.0.0.1:4790 --lost")]
    Leave(servers::LeaveArguments),
    /// Choose `direct-index-share` and `direct-inline-threshold` for pairs of a size: fills small tables and
    /// counts accesses. Needs no node.
    #[command(after_help = "Examples:\n  beeline direct tune 10\n  \
                            beeline direct tune 10..40 --utilisation 40")]
    Tune(tune::TuneArguments),
}

/// How to reach the store.
#[derive(Clone, Debug, Args)]
pub struct Servers {
    /// Fabric addresses of the nodes that hold the map together, apart by commas: auto://HOST:PORT
    /// takes the best provider; shm://, ntb://, verbs:// and tcp:// insist on one.
    #[arg(
        long,
        value_name = "URL",
        default_value = "auto://127.0.0.1:4790",
        env = "BEELINE_CONNECT",
        value_delimiter = ','
    )]
    pub connect: Vec<String>,
    /// Bound of each exchange with a node, as in 500ms or 5s.
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = limit)]
    pub timeout: Duration,
}

fn limit(text: &str) -> Result<Duration, String> {
    Ok(span(text)?.0)
}

/// A key.
#[derive(Debug, Args)]
pub struct KeyArguments {
    /// 1 to 255 bytes.
    pub key: String,
    #[command(flatten)]
    pub servers: Servers,
}

/// `beeline direct put`.
#[derive(Debug, Args)]
pub struct PutArguments {
    /// 1 to 255 bytes.
    pub key: String,
    /// The value, as it is.
    #[arg(required_unless_present_any = ["number", "vector"])]
    pub value: Option<String>,
    /// One number of --width bytes instead.
    #[arg(long, conflicts_with = "value", allow_negative_numbers = true)]
    pub number: Option<i64>,
    /// Numbers of --width bytes instead, apart by commas.
    #[arg(long, conflicts_with_all = ["value", "number"], value_delimiter = ',', allow_negative_numbers = true)]
    pub vector: Option<Vec<i64>>,
    #[command(flatten)]
    pub elements: Elements,
    #[command(flatten)]
    pub servers: Servers,
}

/// Width of elements.
#[derive(Clone, Copy, Debug, Args)]
pub struct Elements {
    /// Bytes of a number: 1, 2, 4 or 8.
    #[arg(long, default_value = "8", value_parser = width)]
    pub width: Width,
}

fn width(text: &str) -> Result<Width, String> {
    match text {
        "1" => Ok(Width::One),
        "2" => Ok(Width::Two),
        "4" => Ok(Width::Four),
        "8" => Ok(Width::Eight),
        _ => Err("choose 1, 2, 4 or 8".to_owned()),
    }
}

/// A built-in function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FunctionWord {
    /// Adds, wrapping.
    Add,
    /// Subtracts, wrapping.
    Subtract,
    /// Takes the larger, unsigned.
    Max,
    /// Takes the smaller, unsigned.
    Min,
    /// Keeps bits that both have.
    And,
    /// Keeps bits that either has.
    Or,
    /// Keeps bits that one has.
    Xor,
    /// Stores the parameter.
    Exchange,
}

impl FunctionWord {
    fn number(self) -> u8 {
        match self {
            Self::Add => number::ADD,
            Self::Subtract => number::SUBTRACT,
            Self::Max => number::MAX,
            Self::Min => number::MIN,
            Self::And => number::AND,
            Self::Or => number::OR,
            Self::Xor => number::XOR,
            Self::Exchange => number::EXCHANGE,
        }
    }
}

/// `beeline direct update`.
#[derive(Debug, Args)]
pub struct UpdateArguments {
    /// 1 to 255 bytes.
    pub key: String,
    /// What to do.
    pub function: FunctionWord,
    /// One number for all elements, or as many as there are, apart by commas.
    #[arg(value_delimiter = ',', required = true, allow_negative_numbers = true)]
    pub parameter: Vec<i64>,
    #[command(flatten)]
    pub elements: Elements,
    #[command(flatten)]
    pub servers: Servers,
}

/// `beeline direct cas`.
#[derive(Debug, Args)]
pub struct CasArguments {
    /// 1 to 255 bytes; its value has 8.
    pub key: String,
    /// What the number has to be.
    pub expected: u64,
    /// What it becomes then.
    pub new: u64,
    #[command(flatten)]
    pub servers: Servers,
}

/// `beeline direct reduce`.
#[derive(Debug, Args)]
pub struct ReduceArguments {
    /// 1 to 255 bytes.
    pub key: String,
    /// What to do.
    pub function: FunctionWord,
    /// Where the sum begins.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub initial: i64,
    #[command(flatten)]
    pub elements: Elements,
    #[command(flatten)]
    pub servers: Servers,
}

/// `beeline direct filter`.
#[derive(Debug, Args)]
pub struct FilterArguments {
    /// 1 to 255 bytes.
    pub key: String,
    #[command(flatten)]
    pub elements: Elements,
    #[command(flatten)]
    pub servers: Servers,
}

/// The command.
pub fn run(command: &DirectCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        DirectCommand::Tune(arguments) => tune::run(arguments, output),
        DirectCommand::Servers(servers) => servers::list(servers, output),
        DirectCommand::Join(arguments) => servers::change(arguments, Change::Join, output),
        DirectCommand::Leave(arguments) => {
            let change = if arguments.lost { Change::Lost } else { Change::Leave };
            servers::change(&arguments.change, change, output)
        }
        DirectCommand::Get(arguments) => {
            let value = one(&arguments.servers, Request::get(arguments.key.as_bytes()))?;
            let Some(value) = value else { return absent(&arguments.key) };
            output.bytes(&value)?;
            Ok(Exit::Done)
        }
        DirectCommand::Put(arguments) => {
            let width = arguments.elements.width;
            let value = match (&arguments.value, arguments.number, &arguments.vector) {
                (Some(value), _, _) => value.clone().into_bytes(),
                (_, Some(number), _) => encode(&[number], width),
                (_, _, vector) => encode(vector.as_deref().unwrap_or_default(), width),
            };
            one(&arguments.servers, Request::put(arguments.key.as_bytes(), &value))?;
            Ok(Exit::Done)
        }
        DirectCommand::Delete(arguments) => {
            let existed = one(&arguments.servers, Request::delete(arguments.key.as_bytes()))?;
            existed.map_or_else(|| absent(&arguments.key), |_| Ok(Exit::Done))
        }
        DirectCommand::Update(arguments) => {
            let width = arguments.elements.width;
            let parameter = encode(&arguments.parameter, width);
            let kind = match arguments.parameter.len() {
                1 => Kind::UpdateVectorByScalar,
                _ => Kind::UpdateVector,
            };
            let request = Request::with_function(
                kind,
                arguments.key.as_bytes(),
                arguments.function.number(),
                width,
                &parameter,
            );
            let before = one(&arguments.servers, request)?;
            show(before, width, &arguments.key, output)
        }
        DirectCommand::Cas(arguments) => {
            let both = [arguments.expected.to_le_bytes(), arguments.new.to_le_bytes()].concat();
            let request = Request::with_function(
                Kind::UpdateScalar,
                arguments.key.as_bytes(),
                number::COMPARE_AND_SWAP,
                Width::Eight,
                &both,
            );
            let before = one(&arguments.servers, request)?;
            show(before, Width::Eight, &arguments.key, output)
        }
        DirectCommand::Reduce(arguments) => {
            let width = arguments.elements.width;
            let initial = encode(&[arguments.initial], width);
            let request = Request::with_function(
                Kind::Reduce,
                arguments.key.as_bytes(),
                arguments.function.number(),
                width,
                &initial,
            );
            let sum = one(&arguments.servers, request)?;
            show(sum, width, &arguments.key, output)
        }
        DirectCommand::Filter(arguments) => {
            let width = arguments.elements.width;
            let key = arguments.key.as_bytes();
            let request = Request::with_function(Kind::Filter, key, number::ADD, width, &[]);
            let kept = one(&arguments.servers, request)?;
            show(kept, width, &arguments.key, output)
        }
    }
}

/// One operation; `None` where the key is absent, no bytes where there are none to return.
fn one(servers: &Servers, request: Request<'_>) -> Result<Option<Vec<u8>>, Failure> {
    let mut client = open(servers)?;
    match client.one(request) {
        Ok(bytes) => Ok(Some(bytes.unwrap_or_default())),
        Err(DirectClientError::Refused { status: Status::NotFound }) => Ok(None),
        Err(error) => Err(failure(error)),
    }
}

/// A client of the map that the servers hold.
pub fn open(servers: &Servers) -> Result<DirectClient, Failure> {
    beeline_direct_client::connect(servers.connect.clone(), servers.timeout).map_err(failure)
}

fn failure(error: DirectClientError) -> Failure {
    match error {
        error @ (DirectClientError::Moving { .. } | DirectClientError::Forgot { .. }) => {
            Failure::new(Exit::Unreachable, error)
        }
        DirectClientError::Link { .. } => Failure::new(
            Exit::Unreachable,
            anyhow::anyhow!("{error}; is a node running there, with the service direct?"),
        ),
        DirectClientError::TooLong { .. } => Failure::new(Exit::Usage, error),
        error => Failure::new(Exit::Failed, error),
    }
}

fn absent(key: &str) -> Result<Exit, Failure> {
    crate::output::complain(format_args!("{key}: no such key"));
    Ok(Exit::Failed)
}

fn encode(numbers: &[i64], width: Width) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()[..width.bytes()].to_vec()).collect()
}

fn show(bytes: Option<Vec<u8>>, width: Width, key: &str, output: Output) -> Result<Exit, Failure> {
    let Some(bytes) = bytes else { return absent(key) };
    let numbers: Vec<String> = bytes
        .chunks(width.bytes())
        .map(|element| {
            element.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)).to_string()
        })
        .collect();
    output.line(numbers.join(","))?;
    Ok(Exit::Done)
}
