//! libibverbs, loaded at run time.
//!
//! Nothing of rdma-core is needed to build Beeline or to start it: the library is opened by its
//! name when a device is asked for, and what is missing is an error that names the package.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::abi;

/// Why verbs cannot be used on this machine, and what would help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Missing {
    /// The library is not installed.
    #[error(
        "libibverbs.so.1 cannot be loaded ({reason}): install rdma-core (packages libibverbs1 and ibverbs-providers)"
    )]
    Library {
        /// The loader's words.
        reason: String,
    },
    /// The library is too old.
    #[error("libibverbs lacks {symbol}: install rdma-core 28 or later")]
    Symbol {
        /// The function it lacks.
        symbol: &'static str,
    },
    /// The kernel offers no device.
    #[error(
        "there is no RDMA device: load its driver, or make one of an Ethernet device with `rdma link add rxe0 type rxe netdev eth0` (kernel module rdma_rxe)"
    )]
    Device,
    /// No device has the name asked for.
    #[error("there is no RDMA device called {name}; there are: {known}")]
    Named {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// Devices are there, but none with an active port and an address.
    #[error("no port of {device} can be used: {reason}")]
    Port {
        /// The device.
        device: String,
        /// What its ports lack.
        reason: String,
    },
}

impl Missing {
    /// True when the same call may succeed later without anybody installing anything.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Device | Self::Named { .. } | Self::Port { .. })
    }
}

/// The control functions. The data path goes through [`abi::ContextOps`].
pub(crate) struct Library {
    pub(crate) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut abi::Device,
    pub(crate) free_device_list: unsafe extern "C" fn(*mut *mut abi::Device),
    pub(crate) open_device: unsafe extern "C" fn(*mut abi::Device) -> *mut abi::Context,
    pub(crate) close_device: unsafe extern "C" fn(*mut abi::Context) -> c_int,
    pub(crate) query_device: unsafe extern "C" fn(*mut abi::Context, *mut abi::DeviceAttr) -> c_int,
    pub(crate) query_port: unsafe extern "C" fn(*mut abi::Context, u8, *mut abi::PortAttr) -> c_int,
    pub(crate) query_gid:
        unsafe extern "C" fn(*mut abi::Context, u8, c_int, *mut abi::Gid) -> c_int,
    pub(crate) alloc_pd: unsafe extern "C" fn(*mut abi::Context) -> *mut abi::Pd,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut abi::Pd) -> c_int,
    pub(crate) reg_mr:
        unsafe extern "C" fn(*mut abi::Pd, *mut c_void, usize, c_int) -> *mut abi::Mr,
    pub(crate) reg_mr_iova2:
        unsafe extern "C" fn(*mut abi::Pd, *mut c_void, usize, u64, c_int) -> *mut abi::Mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut abi::Mr) -> c_int,
    pub(crate) create_comp_channel:
        unsafe extern "C" fn(*mut abi::Context) -> *mut abi::CompChannel,
    pub(crate) destroy_comp_channel: unsafe extern "C" fn(*mut abi::CompChannel) -> c_int,
    pub(crate) create_cq: unsafe extern "C" fn(
        *mut abi::Context,
        c_int,
        *mut c_void,
        *mut abi::CompChannel,
        c_int,
    ) -> *mut abi::Cq,
    pub(crate) destroy_cq: unsafe extern "C" fn(*mut abi::Cq) -> c_int,
    pub(crate) get_cq_event:
        unsafe extern "C" fn(*mut abi::CompChannel, *mut *mut abi::Cq, *mut *mut c_void) -> c_int,
    pub(crate) ack_cq_events: unsafe extern "C" fn(*mut abi::Cq, std::ffi::c_uint),
    pub(crate) create_srq:
        unsafe extern "C" fn(*mut abi::Pd, *mut abi::SrqInitAttr) -> *mut abi::Srq,
    pub(crate) destroy_srq: unsafe extern "C" fn(*mut abi::Srq) -> c_int,
    pub(crate) create_qp: unsafe extern "C" fn(*mut abi::Pd, *mut abi::QpInitAttr) -> *mut abi::Qp,
    pub(crate) modify_qp: unsafe extern "C" fn(*mut abi::Qp, *mut abi::QpAttr, c_int) -> c_int,
    pub(crate) query_qp:
        unsafe extern "C" fn(*mut abi::Qp, *mut abi::QpAttr, c_int, *mut abi::QpInitAttr) -> c_int,
    pub(crate) destroy_qp: unsafe extern "C" fn(*mut abi::Qp) -> c_int,
    pub(crate) get_async_event:
        unsafe extern "C" fn(*mut abi::Context, *mut abi::AsyncEvent) -> c_int,
    pub(crate) ack_async_event: unsafe extern "C" fn(*mut abi::AsyncEvent),
    /// Keeps the code mapped; never unloaded.
    _library: libloading::Library,
}

/// Looks one function up.
///
/// # Safety
///
/// `F` is the function's type in the library's header.
unsafe fn symbol<F: Copy>(library: &libloading::Library, name: &'static str) -> Result<F, Missing> {
    // SAFETY: the caller gives the function's own type.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| Missing::Symbol { symbol: name })
}

macro_rules! functions {
    ($library:ident: $($field:ident = $name:literal),+ $(,)?) => {
        Library {
            $(
                // SAFETY: the field's type is the function's in the header; the layout test
                // covers the structures it takes.
                $field: unsafe { symbol(&$library, $name) }?,
            )+
            _library: $library,
        }
    };
}

fn open() -> Result<Library, Missing> {
    // SAFETY: libibverbs' initialisers have no requirements on their caller.
    let library = unsafe { libloading::Library::new("libibverbs.so.1") }
        .map_err(|error| Missing::Library { reason: error.to_string() })?;
    Ok(functions! { library:
        get_device_list = "ibv_get_device_list",
        free_device_list = "ibv_free_device_list",
        open_device = "ibv_open_device",
        close_device = "ibv_close_device",
        query_device = "ibv_query_device",
        query_port = "ibv_query_port",
        query_gid = "ibv_query_gid",
        alloc_pd = "ibv_alloc_pd",
        dealloc_pd = "ibv_dealloc_pd",
        reg_mr = "ibv_reg_mr",
        reg_mr_iova2 = "ibv_reg_mr_iova2",
        dereg_mr = "ibv_dereg_mr",
        create_comp_channel = "ibv_create_comp_channel",
        destroy_comp_channel = "ibv_destroy_comp_channel",
        create_cq = "ibv_create_cq",
        destroy_cq = "ibv_destroy_cq",
        get_cq_event = "ibv_get_cq_event",
        ack_cq_events = "ibv_ack_cq_events",
        create_srq = "ibv_create_srq",
        destroy_srq = "ibv_destroy_srq",
        create_qp = "ibv_create_qp",
        modify_qp = "ibv_modify_qp",
        query_qp = "ibv_query_qp",
        destroy_qp = "ibv_destroy_qp",
        get_async_event = "ibv_get_async_event",
        ack_async_event = "ibv_ack_async_event",
    })
}

/// The library, loaded once.
///
/// Errors: [`Missing::Library`], [`Missing::Symbol`]; remembered for the life of the process.
pub(crate) fn load() -> Result<&'static Library, Missing> {
    static LOADED: OnceLock<Result<Library, Missing>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref().map_err(Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_is_told_what_to_install() {
        let missing = Missing::Library { reason: "not found".to_owned() }.to_string();
        assert!(missing.contains("rdma-core"), "{missing}");
        // Whatever this machine has, asking does not fail otherwise.
        match load() {
            Ok(_) | Err(Missing::Library { .. } | Missing::Symbol { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}
