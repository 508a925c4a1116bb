//! `beeline documents get|put|find`: documents of a running node, one-sided where both ends can.

use std::time::Duration;

use beeline_documents_client::{Client, ClientError, Options};
use bson::{Bson, Document, doc};
use clap::Args;

use super::{UserArguments, json};
use crate::cli::span;
use crate::config::values::Span;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// MongoDB's codes for a client that is no user, and for a user or a password that is wrong.
const NO_RIGHTS: i32 = 13;
const NOT_THE_USER: i32 = 18;

/// How the store is reached.
#[derive(Clone, Debug, Args)]
pub struct ReachArguments {
    /// Where fabric clients are met, as `serve` prints it: auto:// for the best provider both ends have,
    /// shm://, verbs:// or tcp:// for that one, mongodb:// for the MongoDB wire.
    #[arg(long, value_name = "ADDRESS", default_value = "auto://127.0.0.1:4790")]
    pub fabric: String,
    /// How long an answer may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = span)]
    pub timeout: Span,
    #[command(flatten)]
    pub user: UserArguments,
}

/// `beeline documents get`.
#[derive(Clone, Debug, Args)]
pub struct GetArguments {
    /// Database and collection, as in shop.items.
    pub namespace: Namespace,
    /// The _id, as JSON; what is no JSON is a string.
    pub id: String,
    #[command(flatten)]
    pub reach: ReachArguments,
}

/// `beeline documents put`.
#[derive(Clone, Debug, Args)]
pub struct PutArguments {
    /// Database and collection, as in shop.items.
    pub namespace: Namespace,
    /// The document, as JSON; one whose _id is there is replaced.
    pub document: String,
    #[command(flatten)]
    pub reach: ReachArguments,
}

/// `beeline documents find`.
#[derive(Clone, Debug, Args)]
pub struct FindArguments {
    /// Database and collection, as in shop.items.
    pub namespace: Namespace,
    /// What to look for, as JSON.
    #[arg(default_value = "{}")]
    pub filter: String,
    /// The order, as JSON.
    #[arg(long, value_name = "JSON")]
    pub sort: Option<String>,
    /// Documents at most.
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<u32>,
    #[command(flatten)]
    pub reach: ReachArguments,
}

/// `database.collection`.
#[derive(Clone, Debug)]
pub struct Namespace {
    database: String,
    collection: String,
}

impl std::str::FromStr for Namespace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('.') {
            Some((database, collection)) if !database.is_empty() && !collection.is_empty() => {
                Ok(Self { database: database.to_owned(), collection: collection.to_owned() })
            }
            _ => Err("write DATABASE.COLLECTION, as in shop.items".to_owned()),
        }
    }
}

pub(super) fn failure(error: ClientError) -> Failure {
    let exit = match error {
        ClientError::Unreachable { .. } | ClientError::TimedOut { .. } => Exit::Unreachable,
        ClientError::Address { .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    let help = "log in with --user and BEELINE_DOCUMENTS_PASSWORD";
    match error.code() {
        Some(NO_RIGHTS | NOT_THE_USER) => Failure::new(exit, anyhow::anyhow!("{error}; {help}")),
        _ => Failure::new(exit, anyhow::Error::new(error)),
    }
}

fn usage(what: &str, reason: &str) -> Failure {
    Failure::new(Exit::Usage, anyhow::anyhow!("{what}: {reason}"))
}

fn document(what: &str, text: &str) -> Result<Document, Failure> {
    match json::read(text) {
        Ok(Bson::Document(document)) => Ok(document),
        Ok(_) => Err(usage(what, "write a JSON object, as in '{\"_id\": 1}'")),
        Err(reason) => Err(usage(what, &reason)),
    }
}

fn connect(reach: &ReachArguments, output: Output) -> Result<Client, Failure> {
    let timeout: Duration = reach.timeout.0;
    let options = Options { timeout, login: reach.user.login(), ..Options::default() };
    let client = Client::connect(&reach.fabric, options).map_err(failure)?;
    output.note(format!("over {} ({})", client.transport(), client.reason()));
    Ok(client)
}

fn show(document: &Document, output: Output) -> Result<(), Failure> {
    output.line(json::write(&Bson::Document(document.clone())))?;
    Ok(())
}

/// `get`.
pub fn get(arguments: &GetArguments, output: Output) -> Result<Exit, Failure> {
    let id = json::read(&arguments.id).unwrap_or_else(|_| Bson::String(arguments.id.clone()));
    let Namespace { database, collection } = &arguments.namespace;
    let mut client = connect(&arguments.reach, output)?;
    let found = client.collection(database, collection).find_one(doc! { "_id": id });
    match found.map_err(failure)? {
        Some(found) => {
            show(&found, output)?;
            Ok(Exit::Done)
        }
        None => Err(anyhow::anyhow!("no document of {database}.{collection} has this _id").into()),
    }
}

/// `put`.
pub fn put(arguments: &PutArguments, output: Output) -> Result<Exit, Failure> {
    let document = document("the document", &arguments.document)?;
    let Namespace { database, collection } = &arguments.namespace;
    let mut client = connect(&arguments.reach, output)?;
    let mut collection = client.collection(database, collection);
    let id = match document.get("_id").cloned() {
        None => collection.insert_one(document).map_err(failure)?,
        Some(id) => {
            let filter = doc! { "_id": id.clone() };
            collection.update_one(filter, document, true).map_err(failure)?;
            id
        }
    };
    output.line(json::write(&id))?;
    Ok(Exit::Done)
}

/// `find`.
pub fn find(arguments: &FindArguments, output: Output) -> Result<Exit, Failure> {
    let filter = document("the filter", &arguments.filter)?;
    let mut options = Document::new();
    if let Some(sort) = &arguments.sort {
        options.insert("sort", self::document("--sort", sort)?);
    }
    if let Some(limit) = arguments.limit {
        options.insert("limit", i64::from(limit));
    }
    let Namespace { database, collection } = &arguments.namespace;
    let mut client = connect(&arguments.reach, output)?;
    let found = client.collection(database, collection).find(filter, options).map_err(failure)?;
    for one in found {
        show(&one.map_err(failure)?, output)?;
    }
    Ok(Exit::Done)
}
