//! How a client comes to its channel: the greetings, detection, the size of its region.

use std::net::SocketAddr;
use std::sync::Arc;

use beeline_env::Clock;
use beeline_fabric::{
    Access, ConnectInfo, Device, FabricError, QueuePairOptions, ReceiveRequest, RemoteAddress,
    RemoteKey, Role,
};

use crate::client::{ChannelClient, ClientOptions, Layout, Parts};
use crate::greeting::{Detected, Greeting, GreetingError, detect};
use crate::message::SLOT_BYTES;
use crate::register::{Meters, PAGE_BYTES, register_size};

/// Carries this end's connect data and greeting to the server, and the server's back.
pub type Exchange<'e> =
    &'e mut dyn FnMut(
        &ConnectInfo,
        &[u8],
    )
        -> Result<(ConnectInfo, Vec<u8>), Box<dyn std::error::Error + Send + Sync>>;

/// Why there is no channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Both ends know that TCP carries the commands.
    #[error("TCP carries the commands: {reason}")]
    UseTcp {
        /// Why.
        reason: String,
        /// Where the MongoDB wire is spoken.
        wire: Option<SocketAddr>,
    },
    /// The server could not be asked.
    #[error("the document store cannot be reached: {0}")]
    Exchange(Box<dyn std::error::Error + Send + Sync>),
    /// Its answer is none.
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    /// The device failed, or the connection did not come about.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The device refused a receive.
    #[error("the channel cannot post its receives")]
    Receives,
    /// An option that cannot be.
    #[error("{setting} is {found}; choose {needed}")]
    Option {
        /// Which.
        setting: &'static str,
        /// What it is.
        found: u64,
        /// What it may be.
        needed: &'static str,
    },
}

/// Opens a channel over `device`.
///
/// Errors: [`ConnectError`]; [`ConnectError::UseTcp`] where either end has `is_rdma` off.
pub fn connect(
    device: &Arc<dyn Device>,
    exchange: Exchange<'_>,
    options: &ClientOptions,
    clock: Arc<dyn Clock>,
    meters: &mut dyn Meters,
) -> Result<ChannelClient, ConnectError> {
    let check = |setting, found: u64, fine: bool, needed| match fine {
        true => Ok(()),
        false => Err(ConnectError::Option { setting, found, needed }),
    };
    let (slots, outstanding) = (options.slots, options.outstanding);
    check("slots", slots.into(), (1..=1024).contains(&slots), "1 to 1024")?;
    let fine = (1..=1024).contains(&outstanding);
    check("outstanding", outstanding.into(), fine, "1 to 1024")?;
    let large = options.large_buffers;
    check("large_buffers", large.into(), (1..=64).contains(&large), "1 to 64")?;
    let small = u64::from(options.small_bytes);
    check("small_bytes", small, (256..=1 << 20).contains(&small), "256 to 1 MiB")?;
    if !options.is_rdma {
        let own = Greeting::without(options.rnic.clone(), None, "the client's options say so");
        let (_, answer) =
            exchange(&ConnectInfo(Vec::new()), &own.encode()).map_err(ConnectError::Exchange)?;
        let theirs = Greeting::decode(&answer)?;
        let reason = match detect(&own, &theirs) {
            Detected::Tcp(reason) => reason,
            Detected::Rdma(_) => String::new(),
        };
        return Err(ConnectError::UseTcp { reason, wire: theirs.wire });
    }
    let domain = device.allocate_protection_domain()?;
    let layout = Layout::new(options, register_size(&options.register, &meters.load()));
    // Messages and acknowledgements of the server, and its replies.
    let receive_depth = 2 * u32::from(slots) + 2 * u32::from(outstanding) + 8;
    // Messages, acknowledgements of the server's, writes of bodies.
    let send_depth = 6 * u32::from(slots) + 64;
    let queue = device.create_completion_queue(receive_depth + send_depth)?;
    let depths = QueuePairOptions {
        send_depth,
        receive_depth,
        transport_timeout: options.transport_timeout,
        ..QueuePairOptions::default()
    };
    let mut qp = domain.create_queue_pair(&queue, &queue, None, depths)?;
    let page = |bytes: u64| bytes.next_multiple_of(PAGE_BYTES) as usize;
    let memory = device.allocate_memory(page(layout.bytes))?;
    let window = domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let own = Greeting {
        is_rdma: true,
        checksum: options.checksum,
        slots,
        rnic: options.rnic.clone(),
        region_key: window.remote_key().0,
        region_bytes: window.length_bytes(),
        wire: None,
        reason: String::new(),
    };
    let (info, answer) =
        exchange(&qp.connect_info(), &own.encode()).map_err(ConnectError::Exchange)?;
    let theirs = Greeting::decode(&answer)?;
    if let Detected::Tcp(reason) = detect(&own, &theirs) {
        return Err(ConnectError::UseTcp { reason, wire: theirs.wire });
    }
    let ring = u64::from(theirs.slots) * SLOT_BYTES as u64;
    if !(1..=1024).contains(&theirs.slots) || theirs.region_bytes <= ring {
        return Err(GreetingError::Damaged("its ring is not inside its region").into());
    }
    // Local copies of the messages under way, and of the bodies in the granted area.
    let staging = page(ring + (theirs.region_bytes - ring));
    let staging = domain.register(device.allocate_memory(staging)?, Access::empty())?;
    for _ in 0..receive_depth {
        let receive = ReceiveRequest { wr_id: 0, buffer: None };
        qp.post_receive(&[receive]).map_err(|_| ConnectError::Receives)?;
    }
    qp.connect(&info, Role::Active)?;
    qp.wait_connected(options.transport_timeout)?;
    Ok(ChannelClient::new(Parts {
        qp,
        queue,
        window,
        staging,
        theirs: RemoteAddress { key: RemoteKey(theirs.region_key), offset: 0 },
        layout,
        own_slots: slots,
        slots: theirs.slots,
        checksum: theirs.checksum,
        clock,
        outstanding,
        rnic: theirs.rnic,
        wire: theirs.wire,
        out: Box::new([0; SLOT_BYTES]),
    }))
}
