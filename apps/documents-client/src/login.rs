//! Logging in by SCRAM-SHA-256, over whatever carries commands: the channel or the wire.
//!
//! The password does not leave this end: the store is shown that this end knows it, and shows that it knows the key
//! that was made of it. A store that cannot is refused.
//!
//! Source: RFC 5802 and RFC 7677.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use beeline_documents_channel::RequestError;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::error::{ClientError, check_command};

/// Fewer rounds than this make a password easy to guess for a listener on the connection (RFC 7677).
const LEAST_ROUNDS: u32 = 4096;
/// More would keep this end busy for minutes.
const MOST_ROUNDS: u32 = 10_000_000;

type Key = [u8; 32];

/// The user that a client logs in as, at a store with `--documents-authentication on`.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user's name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

impl Login {
    /// Takes `USER:PASSWORD@` out of an address, where special characters are written as in `%40`.
    ///
    /// Errors: what is wrong with it.
    pub(crate) fn split(address: &str) -> Result<(String, Option<Self>), &'static str> {
        let Some((scheme, rest)) = address.split_once("://") else {
            return Ok((address.to_owned(), None));
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let Some(at) = rest[..end].rfind('@') else { return Ok((address.to_owned(), None)) };
        let (user, password) =
            rest[..at].split_once(':').ok_or("a user has a password: USER:PASSWORD@HOST")?;
        let plain = "a character beside %XX in the user or the password is no part of UTF-8 text";
        let login =
            Self { user: decoded(user).ok_or(plain)?, password: decoded(password).ok_or(plain)? };
        if login.user.is_empty() {
            return Err("the user has no name: USER:PASSWORD@HOST");
        }
        Ok((format!("{scheme}://{}", &rest[at + 1..]), Some(login)))
    }
}

/// Text with `%XX` in it.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, behind) = rest.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = behind;
    }
    String::from_utf8(bytes).ok()
}

/// A password's key, which takes long to make: kept for the next connection.
#[derive(Clone)]
pub(crate) struct Salted {
    salt: Vec<u8>,
    rounds: u32,
    key: Key,
}

impl fmt::Debug for Salted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Salted").finish_non_exhaustive()
    }
}

impl Salted {
    fn new(password: &str, salt: Vec<u8>, rounds: u32) -> Self {
        // Written in one way (RFC 4013); the store refuses a user with a password that cannot be.
        let password = stringprep::saslprep(password).unwrap_or(password.into());
        let mut key = [0; 32];
        // The only failure is an output of a wrong length.
        let _ = pbkdf2::pbkdf2::<Hmac<Sha256>>(password.as_bytes(), &salt, rounds, &mut key);
        Self { salt, rounds, key }
    }
}

fn mac(key: &[u8], text: &[u8]) -> Key {
    let mut out = [0; 32];
    if let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) {
        mac.update(text);
        out.copy_from_slice(&mac.finalize().into_bytes());
    }
    out
}

/// A conversation behind this end's first message.
struct Conversation {
    nonce: String,
    first_bare: String,
}

impl Conversation {
    fn new(user: &str, nonce: String) -> Self {
        let user = user.replace('=', "=3D").replace(',', "=2C");
        Self { first_bare: format!("n={user},r={nonce}"), nonce }
    }

    fn first(&self) -> Vec<u8> {
        format!("n,,{}", self.first_bare).into_bytes()
    }

    /// The proof, and what the store has to answer.
    fn prove(
        &self,
        server_first: &[u8],
        password: &str,
        known: &mut Option<Salted>,
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        let server_first = std::str::from_utf8(server_first).ok()?;
        let value = |name: &str| server_first.split(',').find_map(|part| part.strip_prefix(name));
        let nonce = value("r=")?;
        let salt = STANDARD.decode(value("s=")?).ok()?;
        let rounds: u32 = value("i=")?.parse().ok()?;
        // An answer to another beginning, or none at all.
        if !nonce.starts_with(&self.nonce)
            || nonce.len() == self.nonce.len()
            || !(LEAST_ROUNDS..=MOST_ROUNDS).contains(&rounds)
        {
            return None;
        }
        let salted = match known.take() {
            Some(salted) if salted.salt == salt && salted.rounds == rounds => salted,
            _ => Salted::new(password, salt, rounds),
        };
        let client = mac(&salted.key, b"Client Key");
        let stored: Key = Sha256::digest(client).into();
        let without_proof = format!("c=biws,r={nonce}");
        let spoken = format!("{},{server_first},{without_proof}", self.first_bare);
        let signature = mac(&stored, spoken.as_bytes());
        let proof: Vec<u8> = client.iter().zip(signature).map(|(key, by)| key ^ by).collect();
        let message = format!("{without_proof},p={}", STANDARD.encode(proof));
        let server = mac(&mac(&salted.key, b"Server Key"), spoken.as_bytes());
        *known = Some(salted);
        Some((message.into_bytes(), format!("v={}", STANDARD.encode(server)).into_bytes()))
    }
}

/// Why a client did not log in.
#[derive(Debug)]
pub(crate) enum LoginError {
    /// The connection broke, or did not answer.
    Broken(RequestError),
    /// The store refuses, or is none that knows the password's key.
    Refused(ClientError),
}

/// Carries a command's bytes to the store, and its reply's back.
pub(crate) type Call<'a> = &'a mut dyn FnMut(&[u8]) -> Result<Vec<u8>, RequestError>;

/// Logs in by commands over `call`.
///
/// Errors: [`LoginError`].
pub(crate) fn log_in(
    login: &Login,
    known: &mut Option<Salted>,
    call: Call<'_>,
) -> Result<(), LoginError> {
    let strange = || {
        let reason =
            "the store's part of SCRAM-SHA-256 is wrong: it does not know the password's key";
        LoginError::Refused(ClientError::Protocol(reason.to_owned()))
    };
    let unreadable =
        |error: bson::error::Error| LoginError::Refused(ClientError::Protocol(error.to_string()));
    let mut ask = |command: Document| -> Result<Document, LoginError> {
        let body = command.to_vec().map_err(unreadable)?;
        let bytes = call(&body).map_err(|error| match error {
            RequestError::Refused { code, text } => {
                LoginError::Refused(ClientError::refused(code, text))
            }
            error => LoginError::Broken(error),
        })?;
        let reply = Document::from_reader(&bytes[..]).map_err(unreadable)?;
        check_command(reply).map_err(LoginError::Refused)
    };
    let payload = |reply: &Document| match reply.get("payload") {
        Some(Bson::Binary(binary)) => Some(binary.bytes.clone()),
        _ => None,
    };
    let binary = |bytes: Vec<u8>| Binary { subtype: BinarySubtype::Generic, bytes };
    let nonce = STANDARD.encode(rand::random::<[u8; 24]>());
    let conversation = Conversation::new(&login.user, nonce);
    let first = ask(doc! {
        "saslStart": 1, "mechanism": "SCRAM-SHA-256", "payload": binary(conversation.first()),
        "options": { "skipEmptyExchange": true }, "$db": "admin",
    })?;
    let id = first.get("conversationId").cloned().unwrap_or(Bson::Int32(1));
    let go_on = |message: Vec<u8>| doc! { "saslContinue": 1, "conversationId": id.clone(), "payload": binary(message), "$db": "admin" };
    let server_first = payload(&first).ok_or_else(strange)?;
    let (message, expected) =
        conversation.prove(&server_first, &login.password, known).ok_or_else(strange)?;
    let answer = ask(go_on(message)).inspect_err(|_| *known = None)?;
    if payload(&answer) != Some(expected) {
        return Err(strange());
    }
    if !answer.get_bool("done").unwrap_or(false) {
        ask(go_on(Vec::new()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7677, section 3.
    #[test]
    fn the_example_of_the_standard_is_reproduced() {
        let conversation = Conversation::new("user", "rOprNGfwEbeRWgbNEkqO".to_owned());
        assert_eq!(conversation.first(), b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO");
        let first = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
        let mut known = None;
        let (proof, expected) = conversation.prove(first, "pencil", &mut known).unwrap();
        assert_eq!(
            proof,
            b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
        );
        assert_eq!(expected, b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
        // The key is kept, and made anew for another salt.
        assert_eq!(conversation.prove(first, "pencil", &mut known).unwrap().0, proof);
        let other = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gA==,i=4096";
        assert!(conversation.prove(other, "pencil", &mut known).unwrap().0 != proof);
        assert_eq!(conversation.prove(first, "pencil", &mut known).unwrap().0, proof);
        for wrong in [
            &b"r=other,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"[..],
            b"r=rOprNGfwEbeRWgbNEkqO,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
            b"r=rOprNGfwEbeRWgbNEkqOx,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=1",
            b"r=rOprNGfwEbeRWgbNEkqOx,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4000000000",
            b"r=rOprNGfwEbeRWgbNEkqOx,s=*,i=4096",
            b"",
        ] {
            assert!(conversation.prove(wrong, "pencil", &mut known).is_none());
        }
    }

    #[test]
    fn a_store_that_does_not_know_the_passwords_key_is_refused() {
        let login = Login { user: "eve".to_owned(), password: "x".to_owned() };
        let mut call = |body: &[u8]| {
            let asked = Document::from_reader(body).unwrap();
            let said = match asked.get("payload") {
                Some(Bson::Binary(said)) => String::from_utf8(said.bytes.clone()).unwrap(),
                _ => String::new(),
            };
            let payload = match asked.contains_key("saslStart") {
                true => format!("{}+,s=AAAA,i=4096", said.rsplit_once("r=").unwrap().1),
                // It takes any proof, and cannot give its own.
                false => "v=AAAA".to_owned(),
            };
            let payload = match asked.contains_key("saslStart") {
                true => format!("r={payload}"),
                false => payload,
            };
            let bytes = payload.into_bytes();
            let payload = Binary { subtype: BinarySubtype::Generic, bytes };
            Ok(doc! { "conversationId": 1, "done": true, "payload": payload, "ok": 1.0 }
                .to_vec()
                .unwrap())
        };
        let refused = log_in(&login, &mut None, &mut call);
        assert!(
            matches!(refused, Err(LoginError::Refused(ClientError::Protocol(_)))),
            "{refused:?}"
        );
    }

    #[test]
    fn a_user_is_taken_out_of_an_address() {
        let login = |user: &str, password: &str| {
            Some(Login { user: user.to_owned(), password: password.to_owned() })
        };
        let split = |address: &str| Login::split(address).unwrap();
        assert_eq!(split("auto://a:4790/x@y"), ("auto://a:4790/x@y".to_owned(), None));
        assert_eq!(split("auto://u:p@a:1"), ("auto://a:1".to_owned(), login("u", "p")));
        assert_eq!(
            split("mongodb://u%40x:p%3A%C3%A4@a/?b=c"),
            ("mongodb://a/?b=c".to_owned(), login("u@x", "p:\u{e4}"))
        );
        for wrong in ["auto://u@a:1", "auto://:p@a:1", "auto://u:%4@a:1", "auto://u:%ff@a:1"] {
            assert!(Login::split(wrong).is_err(), "{wrong}");
        }
        let shown = format!("{:?}", login("u", "secret"));
        assert!(shown.contains('u') && !shown.contains("secret"));
    }
}
