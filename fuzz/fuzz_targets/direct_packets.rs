//! See `beeline_verify_fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    (beeline_verify_fuzz::target("direct_packets").run)(bytes);
});
