//! What one look at a connection carries to the other host.

use beeline_fabric::{Access, FabricError};

use crate::connection::{Connection, Phase};
use crate::link::{Link, Staged};
use crate::message::{Ground, Record};
use crate::mirror::{Nonsense, SignsCopy};
use crate::relay::Core;
use crate::settings::Counters;

/// Messages under way with data of one connection: beyond them it waits for a completion, and then
/// everything since goes at once (p. 4.6).
pub const MOST_IN_FLIGHT: u32 = 4;
/// Largest batch that goes whole in a message.
pub const MOST_INLINE: u64 = 1024;
/// About the largest batch that is written at once.
const MOST_BATCH: u64 = 64 << 10;
/// Batches of one connection in one look.
const BATCHES: usize = 4;

/// What a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing new.
    Nothing,
    /// Something, and it is staged.
    Progress,
    /// Something that has to wait for a completion.
    Blocked,
}

fn signs_record(signs: &SignsCopy) -> Record<'static> {
    let SignsCopy { switched_at, finished, closed, mute } = *signs;
    Record::Signs { switched_at, finished, closed, mute }
}

/// Stages everything new of `connection`, number `index`.
fn carry(
    connection: &mut Connection,
    index: u32,
    link: &mut Link,
    counters: &mut Counters,
) -> Result<Look, Nonsense> {
    let far = connection.far;
    // Loaded before the ring: what was sent before an end was said is found in it.
    let signs = connection.signs();
    connection.mirror.check_signs(&signs)?;
    let sent = connection.mirror.signs_sent();
    let mut look = Look::Nothing;
    if !link.settle() {
        let due = signs != sent
            || connection.mirror.has_unsent()
            || connection.mirror.credits()?.is_some();
        return Ok(if due { Look::Blocked } else { Look::Nothing });
    }
    if (signs.switched_at, signs.mute) != (sent.switched_at, sent.mute) {
        // The switch before the bytes, and an end behind them.
        let switch = SignsCopy { finished: sent.finished, closed: sent.closed, ..signs };
        if !link.stage(far, &signs_record(&switch)) {
            return Ok(Look::Blocked);
        }
        connection.mirror.carried(switch);
        if signs.switched_at != 0 {
            connection.is_nudged = false;
        }
        look = Look::Progress;
    }
    let mut is_empty = false;
    for _ in 0..BATCHES {
        if connection.in_flight >= MOST_IN_FLIGHT && !link.carries(index) {
            is_empty = !connection.mirror.has_unsent();
            if !is_empty && look == Look::Nothing {
                look = Look::Blocked;
            }
            break;
        }
        let Some(batch) = connection.mirror.batch(MOST_BATCH)? else {
            is_empty = true;
            break;
        };
        let length = batch.end - batch.from;
        let staged = if length <= MOST_INLINE {
            let mirror = &connection.mirror;
            link.stage_data((index, far), batch.from, length as usize, |target| {
                mirror.copy_out(batch, target);
            })
        } else {
            let (Some(source), Some(target)) = (&connection.outgoing, connection.ground) else {
                return Err(Nonsense { what: "a connection without memory" });
            };
            let ranges = connection.mirror.ranges(batch);
            let record =
                Record::Placed { position: batch.from, end: batch.end, header: batch.header };
            link.write((index, far), source, target, ranges, &record)
        };
        match staged {
            Staged::Not => {
                if look == Look::Nothing {
                    look = Look::Blocked;
                }
                break;
            }
            Staged::First => connection.in_flight += 1,
            Staged::Along => {}
        }
        connection.mirror.sent(batch);
        connection.moved[0] = batch.end;
        counters.sent_bytes += length;
        if length <= MOST_INLINE {
            counters.inline_batches += 1;
        } else {
            counters.written_batches += 1;
            connection.sleepy.large();
        }
        look = Look::Progress;
    }
    if let Some(position) = connection.mirror.credits()? {
        if link.stage(far, &Record::Credit { position }) {
            connection.mirror.returned(position);
            look = Look::Progress;
        } else if look == Look::Nothing {
            look = Look::Blocked;
        }
    }
    if is_empty && signs.ends_differ(&connection.mirror.signs_sent()) {
        if link.stage(far, &signs_record(&signs)) {
            connection.mirror.carried(signs);
            look = Look::Progress;
        } else if look == Look::Nothing {
            look = Look::Blocked;
        }
    }
    Ok(look)
}

impl Core {
    /// Looks at a connection and stages what is new.
    pub(crate) fn carry(&mut self, index: u32) -> Look {
        self.counters.looks += 1;
        let Some(connection) = self.table.get_mut(index) else { return Look::Nothing };
        let Some((_, Some(link))) = self.links.get_mut(connection.link) else {
            return Look::Nothing;
        };
        // After the last doorbell what ends is the kernel's.
        if connection.phase != Phase::Paired || connection.is_silent() {
            return Look::Nothing;
        }
        match carry(connection, index, link, &mut self.counters) {
            Ok(look) => {
                if connection.mirror.signs_sent().is_last() {
                    self.stop_recall(index);
                    self.enter(index, Phase::Ending);
                }
                look
            }
            Err(nonsense) => {
                self.fault(index, nonsense);
                Look::Progress
            }
        }
    }

    /// Ends a connection whose program or other relay said nonsense, as if reset: nobody else's.
    pub(crate) fn fault(&mut self, index: u32, nonsense: Nonsense) {
        let Some(connection) = self.table.get_mut(index) else { return };
        tracing::debug!(own = %connection.own, peer = %connection.peer, %nonsense, "reset");
        connection.mirror.store_reset();
        connection.cut();
        let (link, far, is_silent) = (connection.link, connection.far, connection.is_silent());
        self.counters.broken += 1;
        if let Some(link) = self.link(link) {
            link.owe(far, Record::Reset);
        }
        self.stop_recall(index);
        if is_silent {
            // Nothing is under way, and nobody may be there to answer.
            self.forget(index);
        } else if self.table.get(index).is_some_and(|one| one.phase == Phase::Paired) {
            self.enter(index, Phase::Ending);
        }
    }

    /// Registers both rings of a connection for link `at`.
    ///
    /// Errors: fabric's.
    pub(crate) fn register(&mut self, index: u32, at: usize) -> Result<Ground, FabricError> {
        let (Some(connection), Some((_, Some(link)))) =
            (self.table.get_mut(index), self.links.get(at))
        else {
            return Err(FabricError::PeerGone);
        };
        let (mirror, domain) = (&connection.mirror, link.domain());
        let outgoing = domain.register(mirror.outgoing_memory(), Access::empty())?;
        let alone = domain.register(mirror.incoming_memory(), Access::REMOTE_WRITE);
        let (incoming, base) = match alone {
            Err(FabricError::CannotRegister { .. }) => {
                let (memory, base) = mirror.whole_memory();
                (domain.register(memory, Access::REMOTE_WRITE)?, base)
            }
            alone => (alone?, 0),
        };
        let ground = Ground { key: incoming.remote_key().0, base };
        connection.outgoing = Some(outgoing);
        connection.incoming = Some(incoming);
        Ok(ground)
    }
}
