//! A replica set: which of its members takes commands, and the way to it.
//!
//! A member tells in its hello who the others are, where each meets fabric clients, and who leads. A client that
//! is refused because another leads, or that reaches nobody, goes on there.

use std::net::SocketAddr;

use bson::Document;

use crate::error::ClientError;

/// The member does not lead, and did nothing.
const NOT_EXECUTED: &[i32] = &[10107, 13435, 13436];
/// It stopped leading, or stops; what it did may be there.
const UNKNOWN: &[i32] = &[91, 189, 11600, 11602];

/// Where a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Where it speaks the MongoDB wire.
    pub(crate) wire: SocketAddr,
    /// Where it meets fabric clients.
    pub(crate) fabric: Option<SocketAddr>,
}

/// The members that are known.
#[derive(Debug, Default)]
pub(crate) struct Members {
    known: Vec<Member>,
    primary: Option<usize>,
    tried: usize,
}

impl Members {
    /// Takes in what a member says; true: it leads.
    pub(crate) fn learn(&mut self, hello: &Document) -> bool {
        let texts = hello.get_array("hosts").into_iter().flatten().filter_map(bson::Bson::as_str);
        let doors = hello.get_document("beelineFabric").ok();
        let fabric = |host: &str| doors?.get_str(host).ok()?.parse().ok();
        let known: Vec<Member> = texts
            .filter_map(|host| Some(Member { wire: host.parse().ok()?, fabric: fabric(host) }))
            .collect();
        let primary = hello.get_str("primary").ok().and_then(|host| host.parse().ok());
        self.primary = known.iter().position(|member| Some(member.wire) == primary);
        self.known = known;
        hello.get_bool("isWritablePrimary").unwrap_or(false)
    }

    /// Whether there is another member to go to.
    pub(crate) fn are_several(&self) -> bool {
        self.known.len() > 1
    }

    /// The member to try next: the one that leads as far as is known, once; then one after the other.
    pub(crate) fn next(&mut self) -> Option<Member> {
        if let Some(primary) = self.primary.take() {
            self.tried = primary;
        } else if !self.known.is_empty() {
            self.tried = (self.tried + 1) % self.known.len();
        }
        self.known.get(self.tried).copied()
    }
}

/// Whether a command that ended so may be sent to another member.
pub(crate) fn goes_on(error: &ClientError, again: bool) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::OutcomeUnknown { .. } => again,
        ClientError::Command { code, .. } => {
            NOT_EXECUTED.contains(code) || again && UNKNOWN.contains(code)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn the_primary_is_tried_first_and_then_every_member_in_turn() {
        let mut members = Members::default();
        assert_eq!(members.next(), None);
        let hosts = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"];
        let hello = doc! { "hosts": hosts.to_vec(), "primary": hosts[1], "isWritablePrimary": false, "beelineFabric": { hosts[1]: "127.0.0.1:12" } };
        assert!(!members.learn(&hello) && members.are_several());
        let primary = members.next().unwrap();
        assert_eq!(primary.wire, hosts[1].parse().unwrap());
        assert_eq!(primary.fabric, "127.0.0.1:12".parse().ok());
        let ports: Vec<u16> = (0..4).map(|_| members.next().unwrap().wire.port()).collect();
        assert_eq!(ports, [3, 1, 2, 3]);
        assert!(!{
            members.learn(&doc! { "hosts": ["127.0.0.1:1"] });
            members.are_several()
        });
    }

    #[test]
    fn what_may_have_been_executed_goes_to_another_member_only_where_it_may_be_sent_again() {
        let refused = |code| ClientError::Command {
            code,
            name: String::new(),
            message: String::new(),
            labels: Vec::new(),
        };
        assert!(goes_on(&refused(10107), false));
        assert!(goes_on(&refused(189), true) && !goes_on(&refused(189), false));
        assert!(!goes_on(&refused(11000), true));
        let unknown = ClientError::OutcomeUnknown { reason: String::new() };
        assert!(goes_on(&unknown, true) && !goes_on(&unknown, false));
    }
}
