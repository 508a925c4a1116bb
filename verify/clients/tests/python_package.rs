//! The Python package against a running node: its own tests, run by pytest.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::{Server, bounded, note, program, root, skip};

/// Python with what the package's tests need, as `cargo xtask setup` makes it.
fn need_python(test: &str) -> Option<PathBuf> {
    let given = std::env::var_os("BEELINE_TEST_PYTHON").map(PathBuf::from);
    let home = root().join("target/clients-venv/bin/python");
    let found = given.into_iter().chain([home, PathBuf::from("python3")]).find(|python| {
        let code = "import sys, numpy, pytest; assert sys.version_info >= (3, 11)";
        let mut probe = Command::new(python);
        probe.args(["-c", code]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    if found.is_none() {
        skip(test, "Python 3.11 with numpy and pytest is not here; `cargo xtask setup` makes it");
    }
    found
}

/// Builds the native half and lays the package out in `folder`, as an installed wheel has it.
fn install(folder: &Path) {
    let built = Command::new("cargo")
        .args(["build", "--quiet", "--package", "beeline-python", "--message-format", "json"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let library = String::from_utf8_lossy(&built.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| {
            let files = message["filenames"].as_array()?.clone();
            files
                .iter()
                .filter_map(|file| file.as_str())
                .find_map(|file| (file.ends_with("lib_native.so")).then(|| PathBuf::from(file)))
        })
        .next_back()
        .expect("cargo names the extension module");
    let package = folder.join("beeline");
    std::fs::create_dir_all(&package).unwrap();
    for entry in std::fs::read_dir(root().join("python/package/beeline")).unwrap().flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), package.join(entry.file_name())).unwrap();
        }
    }
    std::fs::copy(library, package.join("_native.abi3.so")).unwrap();
}

#[test]
fn the_packages_own_tests_pass_against_a_node() {
    let Some(python) = need_python("the_packages_own_tests_pass_against_a_node") else { return };
    let folder = tempfile::tempdir().unwrap();
    let site = folder.path().join("site");
    install(&site);
    let data = folder.path().join("data");
    let server = Server::start(&data, &["--objects-memory", "256MiB"]);
    let mut tests = Command::new(python);
    tests
        .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"])
        .arg(root().join("python/tests"))
        .env("PYTHONPATH", &site)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("BEELINE_OBJECTS_SOCKET", data.join("objects.sock"))
        .env("BEELINE_PROGRAM", program())
        .env("BEELINE_CONNECT", format!("auto://{}", server.fabric()))
        .current_dir(folder.path());
    let output = bounded(&mut tests, Duration::from_secs(300));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    note(&format!("pytest of the Python package: {}", said.lines().last().unwrap_or_default()));
    drop(server);
}
