//! Tools of `deep` that no toolchain on the machine brings: fetched by `setup --deep` into
//! `target/`, used where they are, and skipped with a reason where they are not.
//!
//! - An instrumented standard library needs the library's source and the compiler it belongs to.
//!   Where rustup cannot add `rust-src`, Debian has both, as `rustc-web` and `rust-web-src`; the
//!   sanitizers' runtimes come from the pinned toolchain.
//! - `cargo fuzz` is built from its crate.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::root;
use crate::step::{Report, Step, works};

fn debian() -> PathBuf {
    root().join("target/debian-rust")
}

fn tools() -> PathBuf {
    root().join("target/tools")
}

/// A compiler with the source of its standard library.
#[derive(Debug)]
pub struct Compiler {
    /// Environment that makes cargo use it.
    pub environment: Vec<(&'static str, String)>,
    /// The compiler itself.
    pub rustc: PathBuf,
}

fn output(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next()?).args(words).current_dir(root()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Where the pinned toolchain lies.
fn sysroot() -> Option<PathBuf> {
    output("rustc --print sysroot").map(PathBuf::from)
}

/// The compiler to build an instrumented standard library with, if there is one.
pub fn with_library_source() -> Option<Compiler> {
    let bootstrap = ("RUSTC_BOOTSTRAP", "1".to_owned());
    if let Some(own) = sysroot()
        && own.join("lib/rustlib/src/rust/library").is_dir()
    {
        return Some(Compiler { environment: vec![bootstrap], rustc: own.join("bin/rustc") });
    }
    let rustc = debian().join("usr/bin/rustc");
    let library = debian().join("usr/lib/rustlib/src/rust/library");
    if !rustc.is_file() || !library.is_dir() {
        return None;
    }
    let libraries = debian().join("usr/lib/x86_64-linux-gnu");
    let environment = vec![
        bootstrap,
        ("RUSTC", rustc.display().to_string()),
        ("LD_LIBRARY_PATH", libraries.display().to_string()),
    ];
    Some(Compiler { environment, rustc })
}

/// `PATH` with our tools in front.
pub fn path() -> String {
    let rest = std::env::var("PATH").unwrap_or_default();
    format!("{}:{rest}", tools().join("bin").display())
}

/// True when `cargo fuzz` can be run.
pub fn has_cargo_fuzz() -> bool {
    tools().join("bin/cargo-fuzz").is_file() || works("cargo fuzz --version")
}

/// Fetches what is not there yet.
pub fn setup(report: &mut Report) {
    if has_cargo_fuzz() {
        report.done("cargo fuzz", "here");
    } else {
        let line = format!("cargo install --quiet cargo-fuzz --root {}", tools().display());
        if Step::new("cargo fuzz", &line).minutes(15).run().passed() {
            report.done("cargo fuzz", "built from its crate in target/tools");
        } else {
            report.skip("cargo fuzz", "cargo could not install cargo-fuzz");
        }
    }
    let name = "library source";
    if with_library_source().is_some() {
        report.done(name, "here");
        return;
    }
    match fetch_debian() {
        Ok(()) => report.done(name, "Debian's rustc-web and rust-web-src in target/debian-rust"),
        Err(reason) => report.skip(name, &reason),
    }
}

/// The packages needed, with the versions in their names.
fn packages() -> Vec<String> {
    let line = "apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
                --no-breaks --no-replaces --no-enhances rustc-web rust-web-src";
    let wanted = ["rustc-web", "rust-web-src", "libstd-rust-web", "libllvm"];
    let mut names: Vec<String> = output(line)
        .unwrap_or_default()
        .lines()
        .filter(|line| wanted.iter().any(|start| line.starts_with(start)))
        .map(str::to_owned)
        .collect();
    names.dedup();
    names
}

fn fetch_debian() -> Result<(), String> {
    if !works("which apt-get") || !works("which dpkg") {
        return Err("no apt-get and dpkg here, and the toolchain has no rust-src".to_owned());
    }
    let mut names = packages();
    if names.len() < 4 {
        Step::new("package lists", "apt-get update").minutes(10).run();
        names = packages();
    }
    if names.len() < 4 {
        return Err("Debian's rustc-web and rust-web-src are not to be had".to_owned());
    }
    let home = debian();
    let parts = home.join("packages");
    std::fs::create_dir_all(&parts).map_err(|error| format!("{}: {error}", parts.display()))?;
    let line = format!("apt-get download {}", names.join(" "));
    if !Step::new("Debian's compiler", &line).directory(&parts).minutes(10).run().passed() {
        return Err(format!("apt-get could not download {}", names.join(", ")));
    }
    let files = std::fs::read_dir(&parts).map_err(|error| error.to_string())?;
    for file in files.flatten() {
        let line = format!("dpkg -x {} {}", file.path().display(), home.display());
        if !Step::new("unpacking", &line).minutes(5).run().passed() {
            return Err(format!("{} could not be unpacked", file.path().display()));
        }
    }
    let _ = std::fs::remove_dir_all(&parts);
    link_runtimes(&home).map_err(|error| format!("the sanitizers' runtimes: {error}"))
}

/// Puts the pinned toolchain's sanitizer runtimes where Debian's compiler looks for them.
fn link_runtimes(home: &Path) -> std::io::Result<()> {
    let inside = "lib/rustlib/x86_64-unknown-linux-gnu/lib";
    let from = sysroot().unwrap_or_default().join(inside);
    let to = home.join("usr").join(inside);
    for kind in ["asan", "tsan"] {
        let name = format!("librustc-stable_rt.{kind}.a");
        if !to.join(&name).exists() {
            std::os::unix::fs::symlink(from.join(&name), to.join(&name))?;
        }
    }
    Ok(())
}
