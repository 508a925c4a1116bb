//! Unmodified servers and clients with user-space sockets, in each pairing: both ends accelerated,
//! only the server, only the client. Every byte is looked at.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::preload::{Background, Monitor, listening};
use beeline_verify_clients::{bounded, deep, eventually, free_port, need, root, said, skip};

const PATIENCE: Duration = Duration::from_secs(60);

/// Server accelerated, client accelerated.
const PAIRINGS: [(bool, bool); 3] = [(true, true), (true, false), (false, true)];

fn has_all(test: &str, programs: &[&str]) -> bool {
    programs.iter().all(|program| need(test, program).is_some())
}

fn file(path: &str) -> String {
    root().join("verify/clients").join(path).to_string_lossy().into_owned()
}

/// A server that has children of its own: it is asked to end, so that they end with it.
struct Server(Option<Background>);

impl Server {
    fn start(command: &mut Command) -> Self {
        Self(Some(Background::start(command)))
    }

    fn process(&self) -> u32 {
        self.0.as_ref().unwrap().0.id()
    }

    fn signal(&self, signal: &str) {
        let process = self.process().to_string();
        let done = Command::new("kill").args([signal, &process]).status().unwrap();
        assert!(done.success(), "kill {signal} {process}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal("-TERM");
        let mut server = self.0.take().unwrap();
        for _ in 0..250 {
            if server.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn children(process: u32) -> Vec<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

fn descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count)
}

/// One server and one client program: what they are called with is told by the port.
fn talk(
    programs: (&str, &[&str]),
    serve: impl Fn(&Monitor, bool, u16) -> Command,
    ask: impl Fn(u16) -> Vec<String>,
) {
    let (test, programs) = programs;
    if !has_all(test, programs) {
        return;
    }
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let port = free_port();
        let running = Server::start(&mut serve(&monitor, server, port));
        listening(port);
        let words = ask(port);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let said = monitor.run(client, &words);
        assert!(said.contains("all right"), "server {server}, client {client}: {said}");
        let paired = monitor.paired();
        assert_eq!(server && client, paired > 0, "server {server}, client {client}: {paired}");
        drop(running);
    }
}

fn load(what: &'static str) -> impl Fn(u16) -> Vec<String> {
    move |port| {
        ["python3", &file("python/sockets_load.py"), what, &port.to_string()]
            .map(str::to_owned)
            .into()
    }
}

fn words(monitor: &Monitor, accelerated: bool, words: &[&str]) -> Command {
    monitor.command(accelerated, words)
}

#[test]
fn memcached_keeps_what_eight_clients_store() {
    talk(
        ("memcached_keeps_what_eight_clients_store", &["memcached", "python3"]),
        |monitor, accelerated, port| {
            let port = port.to_string();
            let mut line = vec!["memcached", "-l", "127.0.0.1", "-p", &port, "-U", "0", "-t", "4"];
            if is_root() {
                line.extend(["-u", "root"]);
            }
            words(monitor, accelerated, &line)
        },
        load("memcached"),
    );
}

#[test]
fn node_serves_and_asks() {
    talk(
        ("node_serves_and_asks", &["node"]),
        |monitor, accelerated, port| {
            let script = file("programs/http.js");
            words(monitor, accelerated, &["node", &script, "serve", &port.to_string()])
        },
        |port| {
            ["node", &file("programs/http.js"), "ask", &port.to_string()].map(str::to_owned).into()
        },
    );
}

/// libuv closes descriptors by the number of the system call.
#[test]
fn a_file_on_the_number_of_a_closed_connection_is_a_file() {
    talk(
        ("a_file_on_the_number_of_a_closed_connection_is_a_file", &["node"]),
        |monitor, accelerated, port| {
            let script = file("programs/reuse.js");
            words(monitor, accelerated, &["node", &script, "serve", &port.to_string()])
        },
        |port| {
            let script = file("programs/reuse.js");
            ["node", &script, "ask", &port.to_string()].map(str::to_owned).into()
        },
    );
}

#[test]
fn asyncio_streams_talk() {
    talk(
        ("asyncio_streams_talk", &["python3"]),
        |monitor, accelerated, port| {
            let script = file("python/sockets_load.py");
            words(monitor, accelerated, &["python3", &script, "asyncio_serve", &port.to_string()])
        },
        load("asyncio_ask"),
    );
}

#[test]
fn multiprocessing_managers_talk() {
    talk(
        ("multiprocessing_managers_talk", &["python3"]),
        |monitor, accelerated, port| {
            let script = file("python/sockets_load.py");
            words(monitor, accelerated, &["python3", &script, "manager_serve", &port.to_string()])
        },
        load("manager_ask"),
    );
}

#[test]
fn gunicorn_with_two_workers_answers() {
    let folder = tempfile::tempdir().unwrap();
    let application = "import hashlib
def application(environment, begin):
    body = environment['wsgi.input'].read()
    begin('200 OK', [])
    return [hashlib.sha1(body).hexdigest().encode()] * 1000
";
    std::fs::write(folder.path().join("digest.py"), application).unwrap();
    talk(
        ("gunicorn_with_two_workers_answers", &["gunicorn", "python3"]),
        |monitor, accelerated, port| {
            let address = format!("127.0.0.1:{port}");
            let line = ["gunicorn", "-w", "2", "--threads", "2", "-b", &address];
            let mut command = words(monitor, accelerated, &line);
            command.arg("digest:application").current_dir(folder.path());
            command
        },
        load("post"),
    );
}

#[test]
fn a_program_of_the_c_librarys_streams_talks() {
    let test = "a_program_of_the_c_librarys_streams_talks";
    if !has_all(test, &["gcc", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(folder.path(), "dynamic", &[]);
    // `dprintf` is another function where the compiler checks formats.
    let checked = compiled(folder.path(), "checked", &["-O2", "-D_FORTIFY_SOURCE=2"]);
    // As a stream that the program makes; as its standard input and output after `exec`.
    let modes = [("streams", &program), ("exec", &program), ("dprintf", &program)];
    for (mode, program) in modes.into_iter().chain([("dprintf", &checked)]) {
        talk(
            (test, &[]),
            |monitor, accelerated, port| {
                words(monitor, accelerated, &[program, mode, &port.to_string(), program])
            },
            load("streams"),
        );
    }
}

#[test]
fn what_a_standard_stream_held_goes_out_first_where_its_descriptor_becomes_a_connection() {
    let test =
        "what_a_standard_stream_held_goes_out_first_where_its_descriptor_becomes_a_connection";
    if !has_all(test, &["gcc", "g++", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let c = compiled(folder.path(), "dynamic", &[]);
    let cpp = folder.path().join("cpp").to_string_lossy().into_owned();
    let mut command = Command::new("g++");
    command.args(["-O1", "-o", &cpp, &file("programs/streams.cc")]);
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    for (mode, program, ask) in
        [("held", &c, "held"), ("held", &cpp, "held"), ("exec", &cpp, "streams")]
    {
        talk(
            (test, &[]),
            |monitor, accelerated, port| {
                words(monitor, accelerated, &[program, mode, &port.to_string(), program])
            },
            load(ask),
        );
    }
}

#[test]
fn a_static_program_gets_by_exec_what_it_can_read() {
    let test = "a_static_program_gets_by_exec_what_it_can_read";
    if !has_all(test, &["gcc", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(folder.path(), "dynamic", &[]);
    let other = compiled(folder.path(), "static", &["-static"]);
    for mode in ["exec", "execl", "execle"] {
        talk(
            (test, &[]),
            |monitor, accelerated, port| {
                words(monitor, accelerated, &[&program, mode, &port.to_string(), &other])
            },
            load("streams"),
        );
    }
}

/// Compiles `verify/clients/programs/streams.c` as `name`.
fn compiled(folder: &Path, name: &str, more: &[&str]) -> String {
    let program = folder.join(name).to_string_lossy().into_owned();
    let mut command = Command::new("gcc");
    command.args(["-O1", "-o", &program]).args(more).arg(file("programs/streams.c"));
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    program
}

fn nginx_configuration(folder: &Path, port: u16, behind: u16) -> String {
    let folder = folder.display();
    let user = if is_root() { "user root;" } else { "" };
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {folder}/{name};"))
        .join(" ");
    format!(
        "{user} worker_processes 3; daemon off; pid {folder}/pid; error_log {folder}/errors;
         events {{ worker_connections 256; }}
         http {{
             access_log off; {paths} sendfile on; tcp_nopush on; keepalive_timeout 30;
             server {{ listen 127.0.0.1:{behind}; root {folder}/files; }}
             server {{
                 listen 127.0.0.1:{port};
                 location / {{
                     proxy_pass http://127.0.0.1:{behind};
                     proxy_http_version 1.1;
                     proxy_set_header Connection \"\";
                 }}
             }}
         }}"
    )
}

/// A folder with files and nginx's configuration: serving on one port, proxying to it on another.
fn nginx_folder() -> (tempfile::TempDir, u16, u16) {
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253) as u8).collect();
    std::fs::write(files.join("large"), body).unwrap();
    std::fs::write(files.join("small"), "small\n").unwrap();
    let (port, behind) = (free_port(), free_port());
    let configuration = nginx_configuration(folder.path(), port, behind);
    std::fs::write(folder.path().join("configuration"), configuration).unwrap();
    (folder, port, behind)
}

fn nginx(monitor: &Monitor, accelerated: bool, folder: &Path) -> Server {
    let configuration = folder.join("configuration").to_string_lossy().into_owned();
    let errors = folder.join("errors").to_string_lossy().into_owned();
    let line = ["nginx", "-e", &errors, "-c", &configuration];
    Server::start(&mut words(monitor, accelerated, &line))
}

/// Where nginx and sshd live, which not everybody's path has.
fn needs_daemon(test: &str, program: &str) -> bool {
    let there =
        ["/usr/sbin", "/usr/local/sbin"].iter().any(|d| Path::new(d).join(program).exists());
    there || need(test, program).is_some()
}

fn fetch(monitor: &Monitor, accelerated: bool, folder: &Path, port: u16) {
    let fetched = folder.join("fetched").to_string_lossy().into_owned();
    let url = format!("http://127.0.0.1:{port}/large");
    let line = ["curl", "-sS", "--fail", "--max-time", "30", "-o", &fetched, &url];
    let _ = monitor.run(accelerated, &line);
    let expected = std::fs::read(folder.join("files/large")).unwrap();
    assert!(std::fs::read(&fetched).unwrap() == expected, "other bytes from port {port}");
}

#[test]
fn nginx_with_three_workers_serves_and_proxies_curl_and_wrk() {
    let test = "nginx_with_three_workers_serves_and_proxies_curl_and_wrk";
    if !needs_daemon(test, "nginx") || !has_all(test, &["curl", "wrk"]) {
        return;
    }
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let (folder, port, behind) = nginx_folder();
        let running = nginx(&monitor, server, folder.path());
        listening(port);
        let pair = format!("server {server}, client {client}");
        for port in [port, behind] {
            fetch(&monitor, client, folder.path(), port);
            for (path, connections) in [("small", "20"), ("large", "6")] {
                let url = format!("http://127.0.0.1:{port}/{path}");
                let line = ["wrk", "-t1", "-c", connections, "-d1", "--timeout", "20", &url];
                let said = monitor.run(client, &line);
                let wrong = ["Socket errors", "Non-2xx"].iter().any(|word| said.contains(word));
                assert!(!wrong && said.contains("Requests/sec"), "{pair}: {said}");
            }
        }
        // New workers take over; the old ones leave.
        let before = children(running.process());
        running.signal("-HUP");
        eventually("new workers", PATIENCE, || {
            let now = children(running.process());
            (now.len() == 3 && now.iter().all(|child| !before.contains(child))).then_some(())
        });
        fetch(&monitor, client, folder.path(), port);
        // Every connection that is over gave back its descriptors.
        for worker in children(running.process()) {
            assert!(descriptors(worker) < 40, "{pair}: {}", descriptors(worker));
        }
    }
}

#[test]
fn haproxy_stands_before_nginx() {
    let test = "haproxy_stands_before_nginx";
    let missing = ["nginx", "haproxy"].iter().any(|program| !needs_daemon(test, program));
    if missing || !has_all(test, &["curl", "wrk"]) {
        return;
    }
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let (folder, _, behind) = nginx_folder();
        let port = free_port();
        let configuration = format!(
            "global\n    nbthread 2\ndefaults\n    mode http\n    timeout connect 10s\n    \
             timeout client 30s\n    timeout server 30s\nfrontend door\n    \
             bind 127.0.0.1:{port}\n    default_backend files\nbackend files\n    \
             server one 127.0.0.1:{behind}\n"
        );
        let path = folder.path().join("haproxy").to_string_lossy().into_owned();
        std::fs::write(&path, configuration).unwrap();
        let _nginx = nginx(&monitor, server, folder.path());
        listening(behind);
        // The middle runs with the library in every pairing.
        let _haproxy = Server::start(&mut words(&monitor, true, &["haproxy", "-db", "-f", &path]));
        listening(port);
        fetch(&monitor, client, folder.path(), port);
        let url = format!("http://127.0.0.1:{port}/small");
        let said = monitor.run(client, &["wrk", "-t1", "-c8", "-d1", "--timeout", "20", &url]);
        let wrong = ["Socket errors", "Non-2xx"].iter().any(|word| said.contains(word));
        assert!(!wrong, "server {server}, client {client}: {said}");
        assert!(monitor.paired() > 0);
    }
}

#[test]
fn iperf3_and_sockperf_measure() {
    let test = "iperf3_and_sockperf_measure";
    if !has_all(test, &["iperf3", "sockperf"]) {
        return;
    }
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let port = free_port().to_string();
        let line = ["iperf3", "-s", "-B", "127.0.0.1", "-p", &port];
        let _iperf3 = Server::start(&mut words(&monitor, server, &line));
        // A bare connection would be taken for a client.
        for more in [&["-n", "50M", "-P", "2"][..], &["-n", "50M", "-R"]] {
            let mut line = vec!["iperf3", "-c", "127.0.0.1", "-J", "-p", &port];
            line.extend(more);
            // Refused, it says so and ends well.
            eventually("iperf3", PATIENCE, || {
                let output = bounded(&mut words(&monitor, client, &line), PATIENCE);
                said(&output).contains("sum_received").then_some(())
            });
        }
        let port = free_port().to_string();
        let address = ["--tcp", "-i", "127.0.0.1", "-p", &port];
        let line: Vec<&str> = ["sockperf", "server"].into_iter().chain(address).collect();
        let _sockperf = Server::start(&mut words(&monitor, server, &line));
        listening(port.parse().unwrap());
        // Its table of messages has room for 600,000 a second, which rings exceed: a pace of its own.
        let pace = ["-t", "1", "--mps", "100000"];
        let line: Vec<&str> =
            ["sockperf", "ping-pong"].into_iter().chain(address).chain(pace).collect();
        let said = monitor.run(client, &line);
        assert!(said.contains("Latency is"), "server {server}, client {client}: {said}");
    }
}

#[test]
fn openssh_is_not_harmed() {
    let test = "openssh_is_not_harmed";
    if !needs_daemon(test, "sshd") || !has_all(test, &["ssh", "ssh-keygen"]) {
        return;
    }
    if !is_root() {
        skip(test, "sshd of a test's own wants root");
        return;
    }
    let _ = std::fs::create_dir_all("/run/sshd");
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    for key in ["host", "user"] {
        let line = ["-q", "-t", "ed25519", "-N", "", "-f", &path(key)];
        assert!(Command::new("ssh-keygen").args(line).status().unwrap().success());
    }
    std::fs::copy(path("user.pub"), path("allowed")).unwrap();
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let port = free_port();
        let configuration = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n",
            path("host"),
            path("allowed")
        );
        std::fs::write(path("configuration"), configuration).unwrap();
        let configuration = path("configuration");
        // It starts itself anew for each connection, by its whole name.
        let line = ["/usr/sbin/sshd", "-D", "-f", &configuration];
        let _sshd = Server::start(&mut words(&monitor, server, &line));
        listening(port);
        let (key, port) = (path("user"), port.to_string());
        let ssh = ["ssh", "-p", &port, "-i", &key, "-o", "StrictHostKeyChecking=no", "-o"];
        let ssh: Vec<&str> = ssh
            .into_iter()
            .chain(["UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "127.0.0.1"])
            .chain(["head -c 2000000 /dev/zero | sha1sum"])
            .collect();
        let said = monitor.run(client, &ssh);
        let zeros = "bebd3ad7c0bde0cf93e2e5c1a6bb2f9ef60bd8f1";
        assert_eq!(said.split_whitespace().next().map(str::len), Some(zeros.len()), "{said}");
    }
}

/// Java's own servers and clients; only where time is no matter.
#[test]
fn java_talks_by_streams_and_selectors() {
    let test = "java_talks_by_streams_and_selectors";
    if !deep() {
        skip(test, "a long one: `cargo xtask deep` runs it");
        return;
    }
    if !has_all(test, &["java", "javac"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut compile = Command::new("javac");
    compile.arg("-d").arg(folder.path()).arg(file("programs/Talk.java"));
    let output = bounded(&mut compile, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    let classes = folder.path().to_string_lossy().into_owned();
    for what in ["http", "nio"] {
        let line = |mode: &str, port: u16| {
            let mode = format!("{what}-{mode}");
            ["java", "-cp", &classes, "Talk", &mode, &port.to_string()].map(str::to_owned)
        };
        talk(
            (test, &[]),
            |monitor, accelerated, port| {
                let line = line("serve", port);
                let line: Vec<&str> = line.iter().map(String::as_str).collect();
                words(monitor, accelerated, &line)
            },
            |port| line("ask", port).into(),
        );
    }
}

/// Where PostgreSQL's own programs live, which are on nobody's path.
fn postgresql() -> Option<std::path::PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    let folders = versions.flatten().map(|entry| entry.path().join("bin"));
    folders.filter(|folder| folder.join("pgbench").exists()).max()
}

/// A process for each connection, and a server that will not run as root.
#[test]
fn postgresql_serves_pgbench() {
    let test = "postgresql_serves_pgbench";
    if !deep() {
        skip(test, "a long one: `cargo xtask deep` runs it");
        return;
    }
    let Some(programs) = postgresql() else {
        skip(test, "PostgreSQL is not installed; `cargo xtask setup --deep` fetches it");
        return;
    };
    let user = is_root().then_some("postgres");
    let folder = tempfile::tempdir().unwrap();
    if let Some(user) = user {
        let mut give = Command::new("chown");
        assert!(give.arg(user).arg(folder.path()).status().unwrap().success());
        let beeline = beeline_verify_clients::program();
        let mut probe = Command::new("setpriv");
        probe.args(["--reuid", user, "--clear-groups", "--", "test", "-x"]).arg(beeline);
        if !probe.status().is_ok_and(|status| status.success()) {
            skip(test, "the user postgres may not run the program where it is");
            return;
        }
    }
    let program = |name: &str| programs.join(name).to_string_lossy().into_owned();
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let monitor = Monitor::start_for(user);
    let _ = monitor.run(false, &[&program("initdb"), "-D", &data, "-A", "trust", "--no-sync"]);
    drop(monitor);
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start_for(user);
        let port = free_port().to_string();
        let line = [&program("postgres"), "-D", &data, "-p", &port, "-c", "fsync=off", "-c"];
        let mut command = words(&monitor, server, &line.map(|word| word as &str));
        let running = Server::start(command.args([
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
        ]));
        let ask = |name: &str, more: &[&str]| {
            let first = program(name);
            let mut line = vec![first.as_str(), "-h", "127.0.0.1", "-p", &port];
            line.extend(more);
            line.push("postgres");
            let output = bounded(&mut words(&monitor, client, &line), PATIENCE);
            (output.status.success(), said(&output))
        };
        eventually("PostgreSQL", PATIENCE, || ask("psql", &["-c", "select 1"]).0.then_some(()));
        let pair = format!("server {server}, client {client}");
        for more in [
            &["-i", "-q", "-s", "1"][..],
            &["-c", "4", "-j", "2", "-t", "100"],
            &["-C", "-S", "-c", "4", "-t", "20"],
        ] {
            let (well, said) = ask("pgbench", more);
            let failed = !more.contains(&"-i") && !said.contains("failed transactions: 0 ");
            assert!(well && !failed, "{pair}: {said}");
        }
        let query = "select repeat('y', 5000) from generate_series(1, 2000)";
        let (well, said) = ask("psql", &["-tA", "-c", query]);
        assert!(well && said.matches('y').count() >= 10_000_000, "{pair}: {}", said.len());
        assert_eq!(server && client, monitor.paired() > 0, "{pair}");
        drop(running);
    }
}
