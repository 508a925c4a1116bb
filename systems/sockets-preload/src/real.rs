//! The C library's own functions, found once by the constructor.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library, looked up by the constructor.
pub struct Real {
    name: &'static CStr,
    place: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Self {
        Self { name, place: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address; looked up now if the constructor has not run yet.
    pub fn address(&self) -> *mut c_void {
        let place = self.place.load(Ordering::Relaxed);
        if place.is_null() { self.find() } else { place }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: a name with its end, and a handle that means "the next library".
        let place = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.place.store(place, Ordering::Relaxed);
        place
    }
}

/// Calls the C library's `$name` with the given signature; without one, `ENOSYS`.
macro_rules! real {
    ($name:ident ( $($argument:expr),* ) as fn($($kind:ty),* $(,)?) -> $result:ty) => {{
        let address = $crate::real::$name.address();
        if address.is_null() {
            $crate::set_errno(libc::ENOSYS);
            -1
        } else {
            type Function = unsafe extern "C" fn($($kind),*) -> $result;
            // SAFETY: the C library's function of this name has this signature.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, Function>(address)
            };
            // SAFETY: the program's own arguments, for the function it meant to call.
            unsafe { function($($argument),*) }
        }
    }};
}
pub(crate) use real;

/// As `real`, for functions that return a pointer.
macro_rules! real_pointer {
    ($name:ident ( $($argument:expr),* ) as fn($($kind:ty),* $(,)?) -> $result:ty) => {{
        let address = $crate::real::$name.address();
        if address.is_null() {
            $crate::set_errno(libc::ENOSYS);
            std::ptr::null_mut()
        } else {
            type Function = unsafe extern "C" fn($($kind),*) -> $result;
            // SAFETY: the C library's function of this name has this signature.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, Function>(address)
            };
            // SAFETY: the program's own arguments, for the function it meant to call.
            unsafe { function($($argument),*) }
        }
    }};
}
pub(crate) use real_pointer;

macro_rules! functions {
    ($($name:ident)*) => {
        $(
            #[allow(non_upper_case_globals, reason = "named as the C library names them")]
            pub static $name: Real = Real::new(
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                },
            );
        )*
        /// Finds them all, so that no call has to.
        pub fn find_all() {
            $( $name.find(); )*
        }
    };
}

functions! {
    read readv recv recvfrom recvmsg recvmmsg write writev send sendto sendmsg sendmmsg
    sendfile sendfile64 splice
    socket connect listen accept accept4 getsockname getpeername close close_range closefrom dup dup2 dup3 fcntl fcntl64 ioctl
    shutdown getsockopt setsockopt epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select
    pselect fdopen execve execv execvp execvpe fexecve posix_spawn posix_spawnp
    posix_spawn_file_actions_init posix_spawn_file_actions_destroy posix_spawn_file_actions_adddup2
    system popen prctl fork _Fork clone
    vdprintf __vdprintf_chk
}
