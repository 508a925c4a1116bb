//! A read past the end of an allocation, for `cargo xtask deep` to see the address sanitizer work.

fn main() {
    let bytes = vec![0_u8; 16].into_boxed_slice();
    let past = std::hint::black_box(16);
    // SAFETY: none; this is the planted bug.
    let read = unsafe { std::ptr::read_volatile(bytes.as_ptr().add(past)) };
    println!("{read}");
}
