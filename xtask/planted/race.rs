//! Two threads that add without an order, for `cargo xtask deep` to see the thread sanitizer work.

struct Shared(std::cell::UnsafeCell<u64>);

// SAFETY: none; this is the planted bug.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared(std::cell::UnsafeCell::new(0));

fn add() {
    for _ in 0..100_000 {
        let place = SHARED.0.get();
        // SAFETY: none; as above.
        let value = unsafe { place.read_volatile() };
        // SAFETY: none; as above.
        unsafe { place.write_volatile(value + 1) };
    }
}

fn main() {
    let other = std::thread::spawn(add);
    add();
    let _ = other.join();
}
