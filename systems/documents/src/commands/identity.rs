//! Who a client is: SCRAM-SHA-256, and the users there are.
//!
//! A user who has shown to be one may do everything: roles are kept and not looked at.

use std::sync::atomic::Ordering;

use beeline_documents_query::error::{Code, Result, fail};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};

use super::Context;
use crate::engine::lock;
use crate::reply::Reply;
use crate::scram::{Conversation, Credential, payload};
use crate::users;

fn answer(payload: Vec<u8>, done: bool) -> Document {
    let payload = Binary { subtype: BinarySubtype::Generic, bytes: payload };
    doc! { "conversationId": 1, "done": done, "payload": payload, "ok": 1.0 }
}

fn begin(context: &mut Context<'_>, command: &Document) -> Result<Document> {
    match command.get_str("mechanism") {
        Ok("SCRAM-SHA-256") => {}
        _ => {
            return fail(
                Code::MechanismUnavailable,
                "Received authentication for a mechanism that this server does not have; it has SCRAM-SHA-256",
            );
        }
    }
    let engine = context.engine;
    let (conversation, payload) =
        Conversation::start(&payload(command)?, &engine.secret, |user| {
            users::credential(engine, user)
        })?;
    context.session.conversation = Some(conversation);
    Ok(answer(payload, false))
}

pub(super) fn start(context: &mut Context<'_>) -> Result<Reply> {
    let command = context.request.body.clone();
    begin(context, &command).map(Reply::Document)
}

pub(super) fn speculate(context: &mut Context<'_>, command: &Document) -> Result<Document> {
    let mut answer = begin(context, command)?;
    answer.remove("ok");
    Ok(answer)
}

pub(super) fn go_on(context: &mut Context<'_>) -> Result<Reply> {
    let Some(mut conversation) = context.session.conversation.take() else {
        return fail(Code::ProtocolError, "No SASL session state found");
    };
    let message = payload(&context.request.body)?;
    // The proof named the client's user; after a logout this message says nothing.
    if conversation.is_proven() && message.is_empty() {
        return Ok(Reply::Document(answer(Vec::new(), true)));
    }
    let proof = conversation.prove(&message).inspect_err(|_| {
        tracing::warn!(
            user = conversation.user(),
            peer = context.session.peer,
            "a MongoDB client could not show who it is"
        );
    })?;
    context.session.user_mark = users::find(context.engine, conversation.user())?.and_then(mark);
    context.session.user = Some(conversation.user().to_owned());
    context.session.conversation = Some(conversation);
    // Clients that did not ask to skip it send one more, empty message.
    Ok(Reply::Document(answer(proof, true)))
}

/// What tells a user from another user that had the name before.
fn mark(user: Document) -> Option<Bson> {
    user.get("userId").cloned()
}

/// Looks whether the connection's user is there still, if any was changed since it looked last.
pub(super) fn look_again(context: &mut Context<'_>) -> Result<()> {
    let changes = context.engine.users_changed.load(Ordering::Acquire);
    if context.session.users_seen == changes {
        return Ok(());
    }
    if let Some(user) = &context.session.user {
        let known = users::find(context.engine, user)?;
        let same = known.is_some_and(|known| mark(known) == context.session.user_mark);
        if !same {
            (context.session.user, context.session.conversation) = (None, None);
        }
    }
    context.session.users_seen = changes;
    Ok(())
}

/// While there is no user, one may be made from this host.
pub(super) fn is_first_user(context: &Context<'_>, name: &str) -> Result<bool> {
    let local = context
        .session
        .peer
        .parse::<std::net::SocketAddr>()
        .is_ok_and(|peer| peer.ip().is_loopback());
    Ok(name == "createUser" && local && users::names(context.engine)?.is_empty())
}

pub(super) fn put_user(context: &mut Context<'_>, name: &str) -> Result<Reply> {
    let body = &context.request.body;
    let Ok(user) = body.get_str(name) else {
        return fail(Code::TypeMismatch, "a user's name must be a string");
    };
    if user.is_empty() || user.len() > 256 {
        return fail(Code::BadValue, "a user's name has 1 to 256 bytes");
    }
    let credential = match body.get("pwd") {
        Some(Bson::String(password)) if !password.is_empty() => {
            Some(Credential::new(password)?.to_document())
        }
        None if name == "updateUser" => None,
        _ => return fail(Code::BadValue, "a user needs a password: pwd"),
    };
    let _alone = lock(&context.engine.users);
    // Another may have become the first meanwhile.
    if context.engine.authentication
        && context.session.user.is_none()
        && !users::names(context.engine)?.is_empty()
    {
        return fail(Code::Unauthorized, format!("Command {name} requires authentication"));
    }
    let known = users::find(context.engine, user)?;
    let mut stored = match (name, known) {
        ("createUser", Some(_)) => {
            return fail(
                Code::UserExists,
                format!("User \"{user}@{}\" already exists", context.database),
            );
        }
        ("createUser", None) => {
            let id: [u8; 16] = rand::random();
            let id = Binary { subtype: BinarySubtype::Generic, bytes: id.to_vec() };
            doc! { "user": user, "db": context.database.clone(), "roles": [], "userId": id }
        }
        (_, Some(known)) => known,
        (_, None) => {
            return fail(
                Code::UserNotFound,
                format!("Could not find user \"{user}\" for db \"{}\"", context.database),
            );
        }
    };
    if let Some(credential) = credential {
        stored.insert("SCRAM-SHA-256", credential);
    }
    if let Some(roles) = body.get("roles") {
        stored.insert("roles", roles.clone());
    }
    users::put(context.engine, user, &stored)?;
    Ok(Reply::ok())
}

pub(super) fn drop_user(context: &mut Context<'_>) -> Result<Reply> {
    let user = context.request.body.get_str("dropUser").unwrap_or_default();
    let _alone = lock(&context.engine.users);
    if users::remove(context.engine, user)? {
        context.engine.users_changed.fetch_add(1, Ordering::AcqRel);
        return Ok(Reply::ok());
    }
    fail(Code::UserNotFound, format!("User '{user}@{}' not found", context.database))
}

pub(super) fn users_info(context: &mut Context<'_>) -> Result<Reply> {
    let wanted = match context.request.body.get("usersInfo") {
        Some(Bson::String(name)) => Some(name.clone()),
        Some(Bson::Document(one)) => one.get_str("user").ok().map(str::to_owned),
        _ => None,
    };
    let mut all = Vec::new();
    for name in users::names(context.engine)? {
        if wanted.as_ref().is_none_or(|wanted| *wanted == name)
            && let Some(user) = users::find(context.engine, &name)?
        {
            let database = user.get_str("db").unwrap_or("admin");
            all.push(doc! {
                "_id": format!("{database}.{name}"), "user": name, "db": database,
                "roles": user.get("roles").cloned().unwrap_or(Bson::Null), "mechanisms": ["SCRAM-SHA-256"],
            });
        }
    }
    Ok(Reply::Document(doc! { "users": all, "ok": 1.0 }))
}
