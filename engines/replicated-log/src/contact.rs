//! How a member is reached: what its entry of the membership carries.
//!
//! ```text
//!  0  length of the address u8     1  address, UTF-8     then  details, to the end
//! ```

use beeline_paxos::MAX_CONTACT_BYTES;

/// How a member is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contact {
    /// Where its log answers, in the words of the [`crate::Transport`].
    pub address: String,
    /// The service's own: where clients reach it, say. The log does not read it.
    pub details: Vec<u8>,
}

impl Contact {
    /// Bytes of address and details together at most.
    pub const MAX_BYTES: usize = MAX_CONTACT_BYTES - 1;

    /// The contact as the membership carries it; `None` when it is too long.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.address.len() + self.details.len() > Self::MAX_BYTES {
            return None;
        }
        let mut bytes = vec![u8::try_from(self.address.len()).ok()?];
        bytes.extend_from_slice(self.address.as_bytes());
        bytes.extend_from_slice(&self.details);
        Some(bytes)
    }

    /// What [`Contact::encode`] wrote; an empty contact for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Self {
        let parts = bytes.split_first().and_then(|(length, rest)| {
            let (address, details) = rest.split_at_checked(usize::from(*length))?;
            let address = str::from_utf8(address).ok()?.to_owned();
            Some(Self { address, details: details.to_vec() })
        });
        parts.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contact_comes_back_and_a_long_one_is_refused() {
        let contact = Contact { address: "127.0.0.1:4790".to_owned(), details: vec![1, 2] };
        assert_eq!(Contact::decode(&contact.encode().unwrap()), contact);
        assert_eq!(Contact::decode(&[9, b'a']), Contact::default());
        let long = Contact { details: vec![0; Contact::MAX_BYTES], ..contact };
        assert_eq!(long.encode(), None);
    }
}
