//! Gives the library an entry of its own: started by the loader as a program, it is the go-between
//! of the module `spawn`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let machine = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    if matches!(machine.as_str(), "x86_64" | "aarch64") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-e,beeline_sockets_go_between");
    }
}
