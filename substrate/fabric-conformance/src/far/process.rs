//! A peer process in the other host.

use std::net::TcpStream;

use super::wire::{Answer, Call};
use super::{connect, converse};
use crate::harness::Stop;

/// Its connection, which is its own.
pub(crate) struct FarProcess(TcpStream);

impl FarProcess {
    /// Starts the peer process of the suite called `suite`.
    pub(crate) fn start(suite: &str) -> Result<Self, Stop> {
        let mut process = Self(connect()?);
        process.command(&Call::Process { suite: suite.to_owned() })?;
        Ok(process)
    }

    fn ask(&mut self, call: &Call, bytes: &[u8]) -> Result<(Answer, Vec<u8>), Stop> {
        match converse(&mut self.0, call, bytes)? {
            (Answer::Failed(words), _) => Err(Stop::failed(words)),
            answered => Ok(answered),
        }
    }

    fn command(&mut self, call: &Call) -> Result<(), Stop> {
        self.ask(call, &[]).map(drop)
    }

    /// Carries a message there and its reply back: code, numbers, bytes.
    pub(crate) fn order(
        &mut self,
        (code, numbers, bytes): (u8, [u64; 4], &[u8]),
    ) -> Result<(u8, [u64; 4], Vec<u8>), Stop> {
        match self.ask(&Call::Order { code, numbers }, bytes)? {
            (Answer::Said { code, numbers }, bytes) => Ok((code, numbers, bytes)),
            (other, _) => Err(Stop::failed(format!("{other:?} answers another call"))),
        }
    }

    /// SIGKILL; returns when it is gone.
    pub(crate) fn kill(&mut self) -> Result<(), Stop> {
        self.command(&Call::Kill)
    }

    /// SIGSTOP; returns when it stands still.
    pub(crate) fn stop(&mut self) -> Result<(), Stop> {
        self.command(&Call::Stop)
    }

    /// SIGCONT.
    pub(crate) fn go_on(&mut self) -> Result<(), Stop> {
        self.command(&Call::GoOn)
    }
}
