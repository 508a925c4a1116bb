//! The direct store's client for C: `include/beeline_direct.h` over the Rust client.
//!
//! Place: `apps`. The header says what each call does; here are the conversions. A client is an owned
//! [`Client`] behind a pointer; memory that C lends is read and written during a call only.
//!
//! Invariants: no call unwinds into C; pointers that may be null are checked, the rest is the caller's
//! promise, as each function's safety note repeats.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use beeline_kv_direct::client::OnResult;
use beeline_kv_direct::function::number;
use beeline_kv_direct::{DirectClient, DirectClientError, Kind, Request, Status, Width};

const UNREACHABLE: i32 = 64;
const USAGE: i32 = 65;

/// A client: `beeline_direct` of the header.
#[derive(Debug)]
pub struct Client {
    client: DirectClient,
    said: CString,
}

/// `beeline_direct_operation` of the header, field by field.
#[repr(C)]
#[derive(Debug)]
pub struct Operation {
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
    result: *mut c_void,
    result_capacity: usize,
    kind: u8,
    function: u8,
    width: u8,
    status: u8,
    result_length: usize,
}

/// Bytes that C lends for a call; none where the pointer is null.
///
/// # Safety
///
/// A pointer that is not null points to `length` readable bytes that do not change during `'a`.
unsafe fn lent<'a>(bytes: *const c_void, length: usize) -> &'a [u8] {
    if bytes.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: not null; the rest is the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.cast(), length) }
}

/// Copies as much of `bytes` as fits to memory that C lends.
///
/// # Safety
///
/// A pointer that is not null points to `capacity` writable bytes.
unsafe fn fill(to: *mut c_void, capacity: usize, bytes: &[u8]) {
    if to.is_null() {
        return;
    }
    let length = bytes.len().min(capacity);
    // SAFETY: not null, `length` bytes at most are there, and a value of ours does not overlap them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), length) };
}

fn text(line: &str) -> CString {
    CString::new(line.replace('\0', " ")).unwrap_or_default()
}

/// Runs a call; a panic becomes a failed call, because nothing may unwind into C.
fn guarded(call: impl FnOnce() -> i32) -> i32 {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(UNREACHABLE)
}

impl Client {
    fn usage(&mut self, line: &str) -> i32 {
        self.said = text(line);
        USAGE
    }

    /// Executes; the statuses are handed out, and an error becomes its number.
    fn run(&mut self, requests: &[Request<'_>], on_result: OnResult<'_>) -> i32 {
        self.said = CString::default();
        match self.client.execute(requests, on_result) {
            Ok(()) => 0,
            Err(error) => {
                self.said = text(&error.to_string());
                match error {
                    DirectClientError::TooLong { .. } => i32::from(Status::TooLong.code()),
                    DirectClientError::Refused { status } => i32::from(status.code()),
                    DirectClientError::Moving { .. } => i32::from(Status::Moved.code()),
                    _ => UNREACHABLE,
                }
            }
        }
    }

    /// One request; its bytes go to `on_bytes`.
    fn one(&mut self, request: Request<'_>, mut on_bytes: impl FnMut(&[u8])) -> i32 {
        if request.key.is_empty() || request.key.len() > 255 {
            return self.usage("a key has 1 to 255 bytes");
        }
        let mut outcome = i32::from(Status::Malformed.code());
        let ran = self.run(&[request], &mut |_, status, bytes| {
            outcome = i32::from(status.code());
            on_bytes(bytes.unwrap_or_default());
        });
        if ran == 0 { outcome } else { ran }
    }
}

/// `beeline_direct_connect`.
///
/// # Safety
///
/// `servers` is a text that ends in a zero; `error` points to `error_capacity` writable bytes, or is
/// null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_connect(
    servers: *const c_char,
    timeout_ms: u32,
    error: *mut c_char,
    error_capacity: usize,
) -> *mut Client {
    let connect = || -> Result<DirectClient, String> {
        if servers.is_null() {
            return Err("no servers are given".to_owned());
        }
        // SAFETY: not null; the caller promises a text that ends in a zero.
        let servers = unsafe { CStr::from_ptr(servers) };
        let servers = servers.to_str().map_err(|error| error.to_string())?;
        let servers = servers.split(',').map(str::to_owned);
        let timeout = Duration::from_millis(timeout_ms.into());
        beeline_direct_client::connect(servers, timeout).map_err(|error| error.to_string())
    };
    let connected = catch_unwind(AssertUnwindSafe(connect))
        .unwrap_or_else(|_| Err("the client failed inside".to_owned()));
    match connected {
        Ok(client) => Box::into_raw(Box::new(Client { client, said: CString::default() })),
        Err(line) => {
            let line = text(&line);
            let bytes = line.as_bytes_with_nul();
            let cut = bytes.len().min(error_capacity);
            // SAFETY: the caller's promise about `error`.
            unsafe { fill(error.cast(), error_capacity, &bytes[..cut]) };
            if cut > 0 && !error.is_null() {
                // SAFETY: within `error_capacity` bytes of a pointer that is not null.
                let last = unsafe { error.add(cut - 1) };
                // SAFETY: the caller promises that it is writable.
                unsafe { last.write(0) };
            }
            std::ptr::null_mut()
        }
    }
}

/// `beeline_direct_close`.
///
/// # Safety
///
/// `client` is null or came from [`beeline_direct_connect`], and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_close(client: *mut Client) {
    if !client.is_null() {
        // SAFETY: the caller's promise: it was made by `Box::into_raw`, and this is its last use.
        let client = unsafe { Box::from_raw(client) };
        let _ = catch_unwind(AssertUnwindSafe(move || drop(client)));
    }
}

/// `beeline_direct_error`.
///
/// # Safety
///
/// `client` is null or came from [`beeline_direct_connect`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_error(client: *const Client) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.map_or(c"no client".as_ptr(), |client| client.said.as_ptr())
}

/// `beeline_direct_execute`.
///
/// # Safety
///
/// `client` came from [`beeline_direct_connect`] and is used by this thread alone; `operations` points
/// to `count` operations as the header describes them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_execute(
    client: *mut Client,
    operations: *mut Operation,
    count: usize,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(client) = (unsafe { client.as_mut() }) else { return USAGE };
    if operations.is_null() || count == 0 {
        return if count == 0 { 0 } else { USAGE };
    }
    // SAFETY: not null; the caller promises `count` of them, for this call alone.
    let operations = unsafe { std::slice::from_raw_parts_mut(operations, count) };
    guarded(|| {
        let mut requests = Vec::with_capacity(count);
        for operation in operations.iter() {
            // SAFETY: the caller's promise about `key`.
            let key = unsafe { lent(operation.key, operation.key_length) };
            // SAFETY: the caller's promise about `value`.
            let value = unsafe { lent(operation.value, operation.value_length) };
            let kind = Kind::of_code(operation.kind).filter(|kind| !kind.is_control());
            let Some(kind) = kind else {
                return client.usage("no such kind of operation");
            };
            if key.is_empty() || key.len() > 255 {
                return client.usage("a key has 1 to 255 bytes");
            }
            let request = match kind {
                Kind::Get => Request::get(key),
                Kind::Put => Request::put(key, value),
                Kind::Delete => Request::delete(key),
                _ => {
                    let Some(width) = Width::of_bytes(operation.width.into()) else {
                        return client.usage("a width is 1, 2, 4 or 8");
                    };
                    let value = if kind == Kind::Filter { &[] } else { value };
                    Request::with_function(kind, key, operation.function, width, value)
                }
            };
            let wanted = !operation.result.is_null() || kind == Kind::Reduce;
            requests.push(if wanted { request } else { request.without_return() });
        }
        for operation in operations.iter_mut() {
            operation.status = Status::Moved.code();
            operation.result_length = 0;
        }
        client.run(&requests, &mut |index, status, bytes| {
            let operation = &mut operations[index];
            let bytes = bytes.unwrap_or_default();
            operation.status = status.code();
            operation.result_length = bytes.len();
            // SAFETY: the caller's promise about `result`.
            unsafe { fill(operation.result, operation.result_capacity, bytes) };
        })
    })
}

/// `beeline_direct_get`.
///
/// # Safety
///
/// As the header says: `client` from [`beeline_direct_connect`], `key` of `key_length` bytes, `value`
/// null or of `capacity` writable bytes, `length` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_get(
    client: *mut Client,
    key: *const c_void,
    key_length: usize,
    value: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(client) = (unsafe { client.as_mut() }) else { return USAGE };
    // SAFETY: the caller's promise about `key`.
    let key = unsafe { lent(key, key_length) };
    guarded(|| {
        client.one(Request::get(key), |bytes| {
            // SAFETY: the caller's promise about `value`.
            unsafe { fill(value, capacity, bytes) };
            // SAFETY: the caller's promise about `length`.
            if let Some(length) = unsafe { length.as_mut() } {
                *length = bytes.len();
            }
        })
    })
}

/// `beeline_direct_put`.
///
/// # Safety
///
/// `client` from [`beeline_direct_connect`]; `key` and `value` of the lengths given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_put(
    client: *mut Client,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(client) = (unsafe { client.as_mut() }) else { return USAGE };
    // SAFETY: the caller's promise about `key`.
    let key = unsafe { lent(key, key_length) };
    // SAFETY: the caller's promise about `value`.
    let value = unsafe { lent(value, value_length) };
    guarded(|| client.one(Request::put(key, value), |_| {}))
}

/// `beeline_direct_delete`.
///
/// # Safety
///
/// `client` from [`beeline_direct_connect`]; `key` of the length given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_delete(
    client: *mut Client,
    key: *const c_void,
    key_length: usize,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(client) = (unsafe { client.as_mut() }) else { return USAGE };
    // SAFETY: the caller's promise about `key`.
    let key = unsafe { lent(key, key_length) };
    guarded(|| client.one(Request::delete(key), |_| {}))
}

/// An update of an 8-byte number.
///
/// # Safety
///
/// As the two functions that call it say.
unsafe fn update(
    client: *mut Client,
    key: (*const c_void, usize),
    function: u8,
    parameter: &[u8],
    before: *mut u64,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(client) = (unsafe { client.as_mut() }) else { return USAGE };
    // SAFETY: the caller's promise about `key`.
    let key = unsafe { lent(key.0, key.1) };
    let request =
        Request::with_function(Kind::UpdateScalar, key, function, Width::Eight, parameter);
    guarded(|| {
        client.one(request, |bytes| {
            let number = bytes.try_into().map(u64::from_le_bytes);
            // SAFETY: the caller's promise about `before`.
            let before = unsafe { before.as_mut() };
            if let (Ok(number), Some(before)) = (number, before) {
                *before = number;
            }
        })
    })
}

/// `beeline_direct_fetch_add`.
///
/// # Safety
///
/// `client` from [`beeline_direct_connect`]; `key` of the length given; `before` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_fetch_add(
    client: *mut Client,
    key: *const c_void,
    key_length: usize,
    by: u64,
    before: *mut u64,
) -> i32 {
    // SAFETY: the caller's promises, as they are.
    unsafe { update(client, (key, key_length), number::ADD, &by.to_le_bytes(), before) }
}

/// `beeline_direct_compare_and_swap`.
///
/// # Safety
///
/// As [`beeline_direct_fetch_add`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_direct_compare_and_swap(
    client: *mut Client,
    key: *const c_void,
    key_length: usize,
    expected: u64,
    new_value: u64,
    before: *mut u64,
) -> i32 {
    let mut both = [0; 16];
    both[..8].copy_from_slice(&expected.to_le_bytes());
    both[8..].copy_from_slice(&new_value.to_le_bytes());
    // SAFETY: the caller's promises, as they are.
    unsafe { update(client, (key, key_length), number::COMPARE_AND_SWAP, &both, before) }
}
