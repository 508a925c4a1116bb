//! The device: a listener, and connections dialled to others'.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::error::system;
use beeline_fabric::{
    CompletionQueue, ConnectInfo, Device, DeviceAttributes, FabricError, ProtectionDomain,
};
use beeline_fabric_engine::EngineDevice;
use beeline_fabric_engine::stream::{Attention, Served, Stream, Transport};
use beeline_os::SharedMemory;
use beeline_os::callers::{AfterFailure, after_failure};
use beeline_os::memory::MemoryObject;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::handshake::{Endpoint, Identity};
use crate::socket::Socket;

/// Callers taken per look at the listener; what is left is reported again.
const ACCEPTS: usize = 64;

/// How to open the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Where peers' connections arrive. Default 127.0.0.1 and a port of the kernel's choice: a
    /// wider door is asked for in words.
    pub bind: SocketAddr,
    /// The address told to peers, when it differs from `bind` (several networks, translation).
    /// With `bind` unspecified and none given, the bootstrap exchange fills in the address it
    /// reached the peer at ([`crate::with_host`]).
    pub advertise: Option<IpAddr>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0), advertise: None }
    }
}

fn listen(bind: SocketAddr) -> Result<(OwnedFd, SocketAddr), FabricError> {
    let family = if bind.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let listener = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
        .map_err(system("making the listener's socket"))?;
    sockopt::set_socket_reuseaddr(&listener, true).map_err(system("setting SO_REUSEADDR"))?;
    rustix::net::bind(&listener, &bind).map_err(system("binding the listener"))?;
    rustix::net::listen(&listener, 1024).map_err(system("listening"))?;
    let name = rustix::net::getsockname(&listener).map_err(system("asking the listener's port"))?;
    let address = SocketAddr::try_from(name).map_err(system("reading the listener's address"))?;
    Ok((listener, address))
}

#[derive(Debug)]
struct TcpTransport {
    listener: OwnedFd,
    /// As told to peers.
    address: SocketAddr,
    attributes: DeviceAttributes,
}

impl Transport for TcpTransport {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn serve(&self, _: &dyn Fn() -> Attention, accepted: &mut Vec<Box<dyn Stream>>) -> Served {
        for _ in 0..ACCEPTS {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(fd) => accepted.push(Box::new(Socket::accepted(fd))),
                Err(error) => match after_failure(&error.into()) {
                    AfterFailure::Sleep => break,
                    AfterFailure::Next => {}
                    AfterFailure::MakeRoom => return Served::NoDescriptor,
                },
            }
        }
        Served::Done
    }

    fn connect_info(&self, &(qp_num, nonce): &Identity) -> ConnectInfo {
        Endpoint { address: self.address, qp_num, nonce }.encode()
    }

    fn peer(&self, info: &ConnectInfo) -> Result<Identity, FabricError> {
        let endpoint = Endpoint::decode(info)?;
        Ok((endpoint.qp_num, endpoint.nonce))
    }

    fn dial(&self, info: &ConnectInfo) -> Result<Box<dyn Stream>, FabricError> {
        let socket = Socket::dial(Endpoint::decode(info)?.address)
            .map_err(|source| FabricError::System { action: "connecting", source })?;
        Ok(Box::new(socket))
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = SharedMemory::allocate("beeline-tcp", length_bytes).map_err(|error| {
            FabricError::System { action: "allocating memory", source: error.into() }
        })?;
        Ok(Arc::new(memory))
    }
}

/// The provider, opened. One listener and one thread, asleep unless needed.
#[derive(Debug)]
pub struct TcpDevice {
    engine: EngineDevice,
    address: SocketAddr,
}

impl TcpDevice {
    /// Opens the device: binds, listens, starts the library's thread.
    ///
    /// Errors: [`FabricError::System`] (address in use or not ours, descriptor limits).
    pub fn open(config: TcpConfig) -> Result<Arc<dyn Device>, FabricError> {
        Ok(Self::open_concrete(config)?)
    }

    /// As [`TcpDevice::open`], with the concrete type.
    ///
    /// Errors: as there.
    pub fn open_concrete(config: TcpConfig) -> Result<Arc<Self>, FabricError> {
        let (listener, bound) = listen(config.bind)?;
        let address = SocketAddr::new(config.advertise.unwrap_or(bound.ip()), bound.port());
        let attributes = beeline_fabric_engine::attributes(
            "tcp",
            "the target's thread makes the range persistent, then acknowledges",
        );
        let transport = Arc::new(TcpTransport { listener, address, attributes });
        Ok(Arc::new(Self { engine: EngineDevice::start(transport)?, address }))
    }

    /// Where peers' connections arrive, as told to them.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Device for TcpDevice {
    fn attributes(&self) -> &DeviceAttributes {
        self.engine.attributes()
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        self.engine.allocate_memory(length_bytes)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        self.engine.allocate_protection_domain()
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        self.engine.create_completion_queue(depth_entries)
    }
}
