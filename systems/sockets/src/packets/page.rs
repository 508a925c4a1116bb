//! What every program of a host sees of its proxy: one page, which programs map for reading.
//!
//! ```text
//!    0  magic and version 8, routes 4
//!   64  asleep: a word of 4 for each of 16 partitions' threads
//! 1024  routes, 32 bytes each: host 16, family 2, up 1
//! ```

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use beeline_os::Mapping;
use beeline_os::mapping::Protection;

use super::channel::ChannelError;

const MAGIC: u64 = u64::from_le_bytes(*b"BLNTPG\0\x01");
const ROUTES_AT: usize = 1024;
const ROUTE_BYTES: usize = 32;
const ASLEEP_AT: usize = 64;
const LENGTH: usize = 8192;

/// Most threads of a proxy.
pub const THREADS: usize = 64;
/// Most addresses of other hosts.
pub const ROUTES: usize = (LENGTH - ROUTES_AT) / ROUTE_BYTES;

/// The page.
#[derive(Debug)]
pub struct Page(Mapping);

impl Page {
    /// A fresh page.
    ///
    /// Errors: [`ChannelError::Mapping`].
    pub fn create() -> Result<Self, ChannelError> {
        let page = Self(Mapping::memfd("beeline-proxy", LENGTH)?);
        page.word(0).store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// The page of a proxy that is gone, for the one that takes its place.
    ///
    /// Errors: [`ChannelError`].
    pub fn adopt(memory: OwnedFd) -> Result<Self, ChannelError> {
        Self::map(memory, Protection::ReadWrite)
    }

    /// The page of a proxy, for reading.
    ///
    /// Errors: [`ChannelError`].
    pub fn take(memory: OwnedFd) -> Result<Self, ChannelError> {
        let page = Self::map(memory, Protection::ReadOnly)?;
        page.0.forget_descriptor();
        Ok(page)
    }

    fn map(memory: OwnedFd, protection: Protection) -> Result<Self, ChannelError> {
        let length = rustix::fs::fstat(&memory)
            .map_or(0, |about| usize::try_from(about.st_size).unwrap_or(0));
        let sealed = rustix::fs::fcntl_get_seals(&memory)
            .is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        if length != LENGTH || !sealed {
            return Err(ChannelError::NotAChannel { length });
        }
        let page = Self(Mapping::shared(memory, length, protection)?);
        if page.word(0).load(Ordering::Acquire) != MAGIC {
            return Err(ChannelError::NotAChannel { length });
        }
        Ok(page)
    }

    /// The memory, for what outlives this process.
    #[must_use]
    pub fn memory(&self) -> Option<std::sync::Arc<OwnedFd>> {
        self.0.descriptor()
    }

    /// A descriptor by which programs can read the page and not write it.
    ///
    /// Errors: the system's.
    pub fn for_reading(&self) -> std::io::Result<OwnedFd> {
        let memory = self.0.descriptor().ok_or(std::io::ErrorKind::NotFound)?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&memory.as_fd());
        Ok(std::fs::File::open(format!("/proc/self/fd/{number}"))?.into())
    }

    fn place(&self, offset: usize) -> *mut u8 {
        assert!(offset + 8 <= LENGTH, "an access stays in the page");
        // SAFETY: just checked.
        unsafe { self.0.base().add(offset) }.as_ptr()
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: in the mapping, aligned to 8; a program only loads, as its mapping allows.
        unsafe { AtomicU64::from_ptr(self.place(offset).cast()) }
    }

    /// Nonzero while a thread of the proxy sleeps, so that it has to be rung for.
    #[must_use]
    pub fn asleep(&self, thread: usize) -> &AtomicU32 {
        let thread = thread.min(THREADS - 1);
        // SAFETY: as in `word`; aligned to 4.
        unsafe { AtomicU32::from_ptr(self.place(ASLEEP_AT + thread * 8).cast()) }
    }

    /// The proxy says where it leads, and which of these links are up.
    pub fn set_routes(&self, routes: &[(IpAddr, bool)]) {
        let routes = routes.get(..ROUTES).unwrap_or(routes);
        for (index, (host, up)) in routes.iter().enumerate() {
            let at = ROUTES_AT + index * ROUTE_BYTES;
            let (family, bits) = match host {
                IpAddr::V4(host) => (4_u64, u128::from(host.to_bits())),
                IpAddr::V6(host) => (6, host.to_bits()),
            };
            self.word(at).store((bits & u128::from(u64::MAX)) as u64, Ordering::Relaxed);
            self.word(at + 8).store((bits >> 64) as u64, Ordering::Relaxed);
            self.word(at + 16).store(family | u64::from(*up) << 16, Ordering::Release);
        }
        self.word(8).store(routes.len() as u64, Ordering::Release);
    }

    /// Whether a proxy leads to `host`, and the link is up; `None`: it is not known here.
    #[must_use]
    pub fn route(&self, host: IpAddr) -> Option<bool> {
        let count = usize::try_from(self.word(8).load(Ordering::Acquire)).unwrap_or(0).min(ROUTES);
        (0..count).find_map(|index| {
            let at = ROUTES_AT + index * ROUTE_BYTES;
            let state = self.word(at + 16).load(Ordering::Acquire);
            let low = u128::from(self.word(at).load(Ordering::Relaxed));
            let bits = low | u128::from(self.word(at + 8).load(Ordering::Relaxed)) << 64;
            let known = match state & 0xffff {
                4 => IpAddr::V4(u32::try_from(bits).ok()?.into()),
                6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
                _ => return None,
            };
            (known == host).then_some(state >> 16 & 1 != 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_read_what_the_proxy_says_and_cannot_write_it() {
        let page = Page::create().unwrap();
        let [one, other]: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "fd00::7".parse().unwrap()];
        page.set_routes(&[(one, true), (other, false)]);
        page.asleep(3).store(1, Ordering::Relaxed);
        let reading = page.for_reading().unwrap();
        let again = reading.try_clone().unwrap();
        let seen = Page::take(reading).unwrap();
        assert_eq!((seen.route(one), seen.route(other)), (Some(true), Some(false)));
        assert_eq!(seen.route("10.0.0.2".parse().unwrap()), None);
        assert_eq!(seen.asleep(3).load(Ordering::Relaxed), 1);
        assert!(Mapping::shared(again, LENGTH, Protection::ReadWrite).is_err());
    }
}
