//! Direct mode at the monitors: memory of one host that programs of the other write. The host whose memory it is
//! makes it, bounds it, and hands it over; its own program gets it for reading.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;

use beeline_os::control_socket::ControlSocket;
use beeline_sockets::packets::protocol::Answer;
use rustix::io::Errno;

use crate::message::Message;
use crate::monitor::Monitor;

/// Most bytes of one extent.
const LONGEST: u64 = 1 << 30;

fn refuse(client: &ControlSocket, error: Errno) {
    let _ = client.send(&Answer::Kernel { error: error.raw_os_error() }.encode(), &[]);
}

impl Monitor {
    /// Bytes of extents that this process has of other hosts.
    fn extents_of(&self, process: u64) -> u64 {
        let own = self.connections.values().filter(|known| known.owner == process);
        own.map(|known| known.extent_bytes).sum()
    }

    /// A program asks for memory of the other host.
    pub(crate) fn ask_extent(
        &mut self,
        client: ControlSocket,
        placeholder: Option<OwnedFd>,
        bytes: u64,
    ) {
        let process = crate::programs::process_of(&client);
        let id = placeholder.and_then(|end| self.placeholders_id(&end));
        let used = self.extents_of(process);
        let Some(connection) = id.and_then(|id| self.connections.get_mut(&id)) else {
            return refuse(&client, Errno::INVAL);
        };
        if connection.extent_bytes > 0 || connection.extent_client.is_some() {
            return refuse(&client, Errno::EXIST);
        }
        let most = self.config.extents_of_a_process;
        if bytes == 0 || bytes > LONGEST || used.saturating_add(bytes) > most {
            self.tally.extents_refused += 1;
            return refuse(&client, Errno::NOBUFS);
        }
        connection.owner = process;
        connection.extent_bytes = bytes;
        connection.extent_client = Some(client);
        let (link, to) = (connection.link, connection.peer_id);
        self.send(link, &Message::Extent { to, from: id.unwrap_or(0), bytes });
    }

    /// The other monitor's program asks for memory of this host.
    pub(crate) fn hear_extent(&mut self, index: usize, to: u64, from: u64, bytes: u64) {
        let number = self.make_extent(index, to, bytes).unwrap_or(0);
        self.send(index, &Message::ExtentIs { to: from, number });
    }

    /// Makes an extent for the connection `to` and hands it over: its number.
    fn make_extent(&mut self, index: usize, to: u64, bytes: u64) -> Option<u64> {
        let used: u64 = self.connections.values().map(|known| known.arrival_bytes).sum();
        let connection = self.connections.get_mut(&to).filter(|known| known.link == index)?;
        if connection.arrivals.is_some()
            || bytes > LONGEST
            || used.saturating_add(bytes) > self.config.extents_of_this_host
        {
            self.tally.extents_refused += 1;
            return None;
        }
        let length = usize::try_from(bytes).ok()?.next_multiple_of(4096);
        let memory = beeline_os::mapping::create_memfd("beeline-extent", length).ok()?;
        self.remotes[index].extents.give(to, memory.as_fd()).ok()?;
        connection.arrivals = Some(Arc::new(memory));
        connection.arrival_bytes = bytes;
        self.tally.extents += 1;
        Some(to)
    }

    /// The other monitor answers.
    pub(crate) fn hear_extent_is(&mut self, index: usize, to: u64, number: u64) {
        let memory = (number != 0).then(|| self.remotes[index].extents.take(number)).flatten();
        let known = self.connections.get_mut(&to).filter(|known| known.link == index);
        let Some(connection) = known else { return };
        let Some(client) = connection.extent_client.take() else { return };
        match memory {
            Some(memory) => _ = client.send(&Answer::Extent.encode(), &[memory.as_fd()]),
            None => {
                connection.extent_bytes = 0;
                refuse(&client, Errno::NOBUFS);
            }
        }
    }

    /// A program reads what the other host's wrote.
    pub(crate) fn give_arrivals(&self, client: &ControlSocket, placeholder: Option<OwnedFd>) {
        let id = placeholder.and_then(|end| self.placeholders_id(&end));
        let memory = id.and_then(|id| self.connections.get(&id)?.arrivals.clone());
        // Opened anew for reading. It is sealed against other lengths since it was made.
        let reading = memory.and_then(|memory| {
            std::fs::File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).ok()
        });
        match reading {
            Some(memory) => _ = client.send(&Answer::Extent.encode(), &[memory.as_fd()]),
            None => refuse(client, Errno::CONNRESET),
        }
    }
}
