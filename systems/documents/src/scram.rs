//! SCRAM-SHA-256: users, and the conversation that shows who a client is.
//!
//! Source: RFC 5802 and RFC 7677. A password is not stored: a salted key is, from which the password does
//! not follow.
//! Invariant: an unknown user costs and looks the same as a wrong password.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use beeline_documents_query::error::{Code, QueryError, Result, fail};
use bson::{Bson, Document, doc};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

/// Rounds of the password's hash, as MongoDB.
const ROUNDS: u32 = 15_000;

type Key = [u8; 32];

/// What is stored of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    salt: Vec<u8>,
    rounds: u32,
    stored: Key,
    server: Key,
}

/// A conversation between its two messages.
#[derive(Clone, Debug)]
pub struct Conversation {
    user: String,
    credential: Credential,
    known: bool,
    first_bare: String,
    server_first: String,
    nonce: String,
    /// The proof was right; the client's last, empty message is awaited.
    proven: bool,
}

fn mac(key: &[u8], text: &[u8]) -> Key {
    let mut out = [0; 32];
    if let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) {
        mac.update(text);
        out.copy_from_slice(&mac.finalize().into_bytes());
    }
    out
}

fn hash(bytes: &[u8]) -> Key {
    let mut out = [0; 32];
    out.copy_from_slice(&Sha256::digest(bytes));
    out
}

impl Credential {
    /// Of a password, written as drivers write it before they use it: by SASLprep (RFC 4013).
    ///
    /// Errors: [`Code::BadValue`] for a password with characters that SASLprep prohibits.
    pub fn new(password: &str) -> Result<Self> {
        match stringprep::saslprep(password) {
            Ok(password) => Ok(Self::with(&password, rand::random::<[u8; 28]>().to_vec(), ROUNDS)),
            Err(error) => fail(
                Code::BadValue,
                format!("a password that drivers cannot send: {error}; choose another (RFC 4013)"),
            ),
        }
    }

    fn with(password: &str, salt: Vec<u8>, rounds: u32) -> Self {
        let mut salted = [0; 32];
        // The only failure is an output of a wrong length.
        let _ = pbkdf2::pbkdf2::<Hmac<Sha256>>(password.as_bytes(), &salt, rounds, &mut salted);
        let client = mac(&salted, b"Client Key");
        Self { salt, rounds, stored: hash(&client), server: mac(&salted, b"Server Key") }
    }

    /// As it is stored.
    #[must_use]
    pub fn to_document(&self) -> Document {
        let text = |bytes: &[u8]| STANDARD.encode(bytes);
        doc! { "iterationCount": self.rounds as i32, "salt": text(&self.salt), "storedKey": text(&self.stored), "serverKey": text(&self.server) }
    }

    /// From what is stored.
    #[must_use]
    pub fn from_document(stored: &Document) -> Option<Self> {
        let bytes = |name: &str| STANDARD.decode(stored.get_str(name).ok()?).ok();
        Some(Self {
            salt: bytes("salt")?,
            rounds: u32::try_from(stored.get_i32("iterationCount").ok()?).ok()?,
            stored: bytes("storedKey")?.try_into().ok()?,
            server: bytes("serverKey")?.try_into().ok()?,
        })
    }
}

fn refused<T>() -> Result<T> {
    fail(Code::AuthenticationFailed, "Authentication failed.")
}

fn attributes(message: &str) -> Vec<(char, &str)> {
    message
        .split(',')
        .filter_map(|part| {
            let mut letters = part.chars();
            let name = letters.next()?;
            letters.as_str().strip_prefix('=').map(|value| (name, value))
        })
        .collect()
}

fn attribute<'m>(all: &[(char, &'m str)], name: char) -> Result<&'m str> {
    match all.iter().find(|(known, _)| *known == name) {
        Some((_, value)) => Ok(value),
        None => refused(),
    }
}

impl Conversation {
    /// Answers the client's first message. `find` knows the credentials of a user, `secret`
    /// is the node's own.
    ///
    /// Errors: [`Code::AuthenticationFailed`] for a message of another form.
    pub fn start(
        message: &[u8],
        secret: &[u8; 32],
        find: impl FnOnce(&str) -> Result<Option<Credential>>,
    ) -> Result<(Self, Vec<u8>)> {
        let Ok(message) = std::str::from_utf8(message) else { return refused() };
        let Some(bare) = message.strip_prefix("n,,").or_else(|| message.strip_prefix("y,,")) else {
            return refused();
        };
        let all = attributes(bare);
        let user = attribute(&all, 'n')?.replace("=2C", ",").replace("=3D", "=");
        let client = attribute(&all, 'r')?;
        if client.len() > 512 {
            return refused();
        }
        let found = find(&user)?;
        let known = found.is_some();
        // The salt of an unknown user must not change from try to try, and follow from nothing that a
        // client knows.
        let credential = found.unwrap_or_else(|| Credential {
            salt: mac(secret, format!("no such user: {user}").as_bytes())[..28].to_vec(),
            rounds: ROUNDS,
            stored: [0; 32],
            server: [0; 32],
        });
        let nonce = format!("{client}{}", STANDARD.encode(rand::random::<[u8; 24]>()));
        let server_first =
            format!("r={nonce},s={},i={}", STANDARD.encode(&credential.salt), credential.rounds);
        let answer = server_first.clone().into_bytes();
        Ok((
            Self {
                user,
                credential,
                known,
                first_bare: bare.to_owned(),
                server_first,
                nonce,
                proven: false,
            },
            answer,
        ))
    }

    /// Answers the client's proof; true with the answer when nothing more is awaited.
    ///
    /// Errors: [`Code::AuthenticationFailed`].
    pub fn prove(&mut self, message: &[u8]) -> Result<Vec<u8>> {
        let Ok(message) = std::str::from_utf8(message) else { return refused() };
        let all = attributes(message);
        let Some((without_proof, _)) = message.rsplit_once(",p=") else { return refused() };
        let proof: Key = match STANDARD
            .decode(attribute(&all, 'p')?)
            .ok()
            .and_then(|proof| proof.try_into().ok())
        {
            Some(proof) => proof,
            None => return refused(),
        };
        if attribute(&all, 'r')? != self.nonce || !matches!(attribute(&all, 'c')?, "biws" | "eSws")
        {
            return refused();
        }
        let spoken = format!("{},{},{without_proof}", self.first_bare, self.server_first);
        let signature = mac(&self.credential.stored, spoken.as_bytes());
        let mut client = [0; 32];
        for (at, byte) in client.iter_mut().enumerate() {
            *byte = proof[at] ^ signature[at];
        }
        // Every byte is looked at, whatever the first ones are.
        let difference =
            hash(&client).iter().zip(&self.credential.stored).fold(0, |sum, (a, b)| sum | (a ^ b));
        if difference != 0 || !self.known {
            return refused();
        }
        self.proven = true;
        Ok(format!("v={}", STANDARD.encode(mac(&self.credential.server, spoken.as_bytes())))
            .into_bytes())
    }

    /// True once the proof was right.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.proven
    }

    /// The user the client says it is.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }
}

/// The bytes of a payload.
///
/// Errors: another type.
pub fn payload(command: &Document) -> Result<Vec<u8>> {
    match command.get("payload") {
        Some(Bson::Binary(binary)) => Ok(binary.bytes.clone()),
        Some(Bson::String(text)) => Ok(text.clone().into_bytes()),
        _ => Err(QueryError::new(Code::TypeMismatch, "a payload must be binary")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7677, section 3.
    #[test]
    fn the_example_of_the_standard_is_reproduced() {
        let salt = STANDARD.decode("W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        let credential = Credential::with("pencil", salt, 4096);
        let first_bare = "n=user,r=rOprNGfwEbeRWgbNEkqO";
        let server_first = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
        let mut conversation = Conversation {
            user: "user".to_owned(),
            credential: credential.clone(),
            known: true,
            first_bare: first_bare.to_owned(),
            server_first: server_first.to_owned(),
            nonce: "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0".to_owned(),
            proven: false,
        };
        let last = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        assert_eq!(
            conversation.prove(last).unwrap(),
            b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
        );
        let mut wrong = last.to_vec();
        let at = wrong.len() - 5;
        wrong[at] ^= 1;
        assert_eq!(conversation.prove(&wrong).unwrap_err().code, Code::AuthenticationFailed);
        assert_eq!(Credential::from_document(&credential.to_document()), Some(credential));
    }

    #[test]
    fn a_password_is_taken_as_drivers_write_it() {
        // The examples of RFC 4013, section 3: a soft hyphen, a compatibility character, a control character.
        for (given, written) in [("I\u{ad}X", "IX"), ("\u{2168}", "IX"), ("user", "user")] {
            let made = Credential::new(given).unwrap();
            assert_eq!(made, Credential::with(written, made.salt.clone(), ROUNDS), "{given:?}");
        }
        assert_eq!(Credential::new("\u{7}").unwrap_err().code, Code::BadValue);
    }

    #[test]
    fn an_unknown_user_sees_what_a_known_one_sees() {
        let first = b"n,,n=eve,r=abc";
        let (one, answer) = Conversation::start(first, &[7; 32], |_| Ok(None)).unwrap();
        let (two, again) = Conversation::start(first, &[7; 32], |_| Ok(None)).unwrap();
        let salt =
            |answer: &[u8]| String::from_utf8_lossy(answer).split(',').nth(1).map(str::to_owned);
        assert_eq!(salt(&answer), salt(&again));
        assert!(one.nonce != two.nonce && !one.is_proven());
        assert!(Conversation::start(b"p=tls,,n=eve,r=abc", &[7; 32], |_| Ok(None)).is_err());
    }
}
