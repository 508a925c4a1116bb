//! Who a client is: what a logout ends, what a stranger learns, who the first user is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::{Arc, Barrier};

use beeline_documents::commands::Session;
use beeline_documents::store::{Memory, Store};
use beeline_documents::{EngineOptions, users};
use bson::spec::BinarySubtype;
use bson::{Binary, Document, doc};

use common::Client;

fn guarded(store: Arc<dyn Store>) -> Client {
    Client::over(store, &EngineOptions { authentication: true, ..EngineOptions::default() })
}

fn local() -> Session {
    Session { peer: "127.0.0.1:5".to_owned(), ..Session::default() }
}

fn user(name: &str) -> Document {
    doc! { "createUser": name, "pwd": "secret", "roles": [], "$db": "admin" }
}

fn code(reply: &Document) -> i32 {
    reply.get_i32("code").unwrap_or(0)
}

fn bytes(of: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: of.to_vec() }
}

/// The salt that a server gives for a user's name.
fn salt(client: &Client, name: &str) -> String {
    let payload = bytes(format!("n,,n={name},r=nonce").as_bytes());
    let start =
        doc! { "saslStart": 1, "mechanism": "SCRAM-SHA-256", "payload": payload, "$db": "admin" };
    let reply = client.run_in(&mut local(), start);
    assert_eq!(code(&reply), 0, "{reply}");
    let payload = String::from_utf8(reply.get_binary_generic("payload").unwrap().clone()).unwrap();
    let salt = payload.split(',').find(|part| part.starts_with("s=")).unwrap();
    salt.to_owned()
}

#[test]
fn a_salt_does_not_tell_whether_there_is_such_a_user() {
    let store = Arc::<Memory>::default();
    let client = guarded(store.clone());
    client.run_in(&mut local(), user("ann"));
    let (ann, ghost) = (salt(&client, "ann"), salt(&client, "ghost"));
    assert_eq!(ann.len(), ghost.len());
    // As a user's salt is, a ghost's is its own, always the same, and another on another node.
    assert_ne!(ghost, salt(&client, "other"));
    assert_eq!((salt(&client, "ann"), salt(&client, "ghost")), (ann.clone(), ghost.clone()));
    let again = guarded(store);
    assert_eq!((salt(&again, "ann"), salt(&again, "ghost")), (ann, ghost.clone()));
    assert_ne!(salt(&guarded(Arc::<Memory>::default()), "ghost"), ghost);
}

#[test]
fn after_a_logout_a_connection_is_no_user_and_no_conversation_goes_on() {
    let client = guarded(Arc::<Memory>::default());
    let mut ann = local();
    client.run_in(&mut ann, user("ann"));
    let stored = users::find(&client.engine, "ann").unwrap().unwrap();
    (ann.user, ann.user_mark) = (Some("ann".to_owned()), stored.get("userId").cloned());
    assert_eq!(code(&client.run_in(&mut ann, doc! { "count": "c" })), 0);
    let start = doc! { "saslStart": 1, "mechanism": "SCRAM-SHA-256", "payload": bytes(b"n,,n=ann,r=x"), "$db": "admin" };
    assert_eq!(code(&client.run_in(&mut ann, start)), 0);
    assert_eq!(code(&client.run_in(&mut ann, doc! { "logout": 1 })), 0);
    assert!(ann.user.is_none() && ann.conversation.is_none());
    assert_eq!(code(&client.run_in(&mut ann, doc! { "count": "c" })), 13);
    let go_on =
        doc! { "saslContinue": 1, "conversationId": 1, "payload": bytes(b""), "$db": "admin" };
    let reply = client.run_in(&mut ann, go_on);
    assert_eq!(code(&reply), 17, "{reply}");
    let status = client.run_in(&mut ann, doc! { "connectionStatus": 1 });
    let status = status.get_document("authInfo").unwrap();
    assert!(status.get_array("authenticatedUsers").unwrap().is_empty());
}

#[test]
fn of_several_that_would_be_the_first_user_one_is() {
    for _ in 0..50 {
        let client = guarded(Arc::<Memory>::default());
        let barrier = Arc::new(Barrier::new(4));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (client, barrier) = (Client::of(&client.engine), Arc::clone(&barrier));
                std::thread::spawn(move || {
                    barrier.wait();
                    code(&client.run_in(&mut local(), user(&format!("user{number}"))))
                })
            })
            .collect();
        let mut codes: Vec<i32> = threads.into_iter().map(|one| one.join().unwrap()).collect();
        codes.sort_unstable();
        assert_eq!(codes, [0, 13, 13, 13]);
        assert_eq!(users::names(&client.engine).unwrap().len(), 1);
    }
    let far = Session { peer: "192.0.2.7:5".to_owned(), ..Session::default() };
    let client = guarded(Arc::<Memory>::default());
    assert_eq!(code(&client.run_in(&mut { far }, user("eve"))), 13);
}
