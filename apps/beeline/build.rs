//! Stamps the commit into the binary, so that a measurement names what it measured; and puts the library that
//! `beeline run` preloads into a release build, so that what `cargo install` brings is whole.
//!
//! Cargo's stable part knows no dependency on another crate's shared library, so a cargo of its own builds that one,
//! in this script's folder. Builds for development find it beside the program, and embed it only where
//! `BEELINE_EMBED_PRELOAD=1` says so (0: never).

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the library is made of.
const SOURCES: [&str; 4] =
    ["systems/sockets", "systems/sockets-preload", "foundation/os", "Cargo.lock"];
const LIBRARY: &str = "libbeeline_sockets_preload.so";

fn main() {
    stamp();
    let Some(out) = std::env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    println!("cargo::rerun-if-env-changed=BEELINE_EMBED_PRELOAD");
    let embedded = match std::env::var("BEELINE_EMBED_PRELOAD").as_deref() {
        Ok("1") => true,
        Ok("0") => false,
        // PROFILE/build/PACKAGE/out
        _ => out.ancestors().nth(3).is_some_and(|folder| folder.ends_with("release")),
    };
    let bytes = if embedded {
        match library(&out) {
            Ok(file) => format!("Some(include_bytes!({file:?}))"),
            Err(error) => return println!("cargo::error=the preload library: {error}"),
        }
    } else {
        "None".to_owned()
    };
    let text = format!("const PRELOAD: Option<&[u8]> = {bytes};\n");
    if let Err(error) = std::fs::write(out.join("preload.rs"), text) {
        println!("cargo::error={error}");
    }
}

/// Builds it. Where it is.
fn library(out: &Path) -> Result<PathBuf, String> {
    let variable = |name: &str| std::env::var(name).map_err(|error| format!("{name}: {error}"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let (target, folder) = (variable("TARGET")?, out.join("preload"));
    let mut command = Command::new(variable("CARGO")?);
    command.args(["build", "--release", "--quiet", "--package", "beeline-sockets-preload"]);
    command.args(["--target", &target, "--target-dir"]).arg(&folder);
    command.arg("--manifest-path").arg(root.join("Cargo.toml"));
    // What a lint run wraps its compiler in.
    command.env_remove("RUSTC_WORKSPACE_WRAPPER").env_remove("CLIPPY_ARGS");
    let done = command.status().map_err(|error| error.to_string())?;
    if !done.success() {
        return Err(format!("cargo ended with {done}"));
    }
    Ok(folder.join(target).join("release").join(LIBRARY))
}

fn stamp() {
    let git = |arguments: &[&str]| -> Option<String> {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    // HEAD names a branch; the branch's file changes with each commit.
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(file) = git(&["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={file}");
        }
    }
}
