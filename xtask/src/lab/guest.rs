//! One virtual machine: its QEMU process, its console, and a shell in it that runs commands.
//!
//! The guest's root file system is the host's, read only over 9p, under a layer in the guest's
//! memory: whatever was built or installed here runs there with the libraries it has here. Nothing
//! a guest writes reaches the host's files, except through an NVDIMM or a shared window.
//!
//! QEMU ends with the guest: by its own process id when the guest is dropped, and through
//! `setpriv --pdeathsig` should this program end first.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::archive::Archive;
use super::error::LabError;
use super::kernel::Kernel;
use crate::root;

/// The first stage of a guest.
const INIT: &str = include_str!("guest/init.sh");
/// The second stage.
const GUEST: &str = include_str!("guest/guest.sh");
/// What the first stage needs to reach the host's files and to talk.
const MODULES: &[&str] = &["virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"];
/// How long a guest has to come up; unloaded it takes four seconds.
const BOOT: Duration = Duration::from_secs(180);
/// What ends a command's output.
const END: &str = "\u{1e}END ";

/// Where a guest's wire leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nowhere: a card whose packets only it sees.
    Alone,
    /// To the guest that calls this socket.
    Listen(PathBuf),
    /// To the guest that listens on this socket.
    Call(PathBuf),
}

/// A file of the host's that a guest sees as memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The file; made if it is not there.
    pub path: PathBuf,
    /// Its size.
    pub mebibytes: u64,
}

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its number; its address is 10.9.0.(number + 1).
    pub number: usize,
    /// Virtual processors.
    pub processors: u32,
    /// Main memory.
    pub mebibytes: u64,
    /// The wire of its network card.
    pub link: Link,
    /// A soft-RoCE device on the card.
    pub rdma: bool,
    /// An NVDIMM with a DAX file system at `/mnt/dax`.
    pub nvdimm: Option<Memory>,
    /// A disk with a file system at `/mnt/disk`, which loses what was not synchronised when the
    /// power is cut.
    pub disk: Option<Memory>,
    /// A shared memory window on the PCI bus.
    pub window: Option<Memory>,
    /// The same with interrupts, of the server at this socket.
    pub bell: Option<PathBuf>,
    /// Where its commands' output goes as it comes.
    pub echo: Echo,
}

impl Options {
    /// A guest with two processors and nothing else.
    pub fn plain() -> Self {
        Self {
            number: 0,
            processors: 2,
            mebibytes: 1024,
            link: Link::Alone,
            rdma: false,
            nvdimm: None,
            disk: None,
            window: None,
            bell: None,
            echo: Echo::Nowhere,
        }
    }
}

/// What to do with output besides keeping it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Echo {
    /// Nothing.
    Nowhere,
    /// Pass it on to our own streams.
    Through,
    /// Pass it on line by line, each with these words before it.
    Named(String),
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Its exit status; 128 and the signal's number after a signal.
    pub status: i32,
    /// What it wrote to standard output.
    pub output: String,
    /// What it wrote to standard error.
    pub errors: String,
}

/// What the reading threads leave.
#[derive(Debug, Default)]
struct Heard {
    control: Vec<String>,
    output: Vec<u8>,
    errors: Vec<u8>,
    output_ends: u64,
    errors_ends: u64,
    /// Of output and errors, how many have come to their end.
    closed: u32,
    gone: bool,
}

type Shared = Arc<(Mutex<Heard>, Condvar)>;

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    number: usize,
    child: Child,
    control: UnixStream,
    monitor: UnixStream,
    heard: Shared,
    commands: u64,
    running: String,
    /// How much of output and errors had been heard when the command was started.
    begun: (usize, usize),
    /// Sockets and the console's log.
    folder: TempDir,
}

impl Guest {
    /// Boots a guest and waits until it takes commands.
    pub fn boot(options: &Options) -> Result<Self, LabError> {
        let kernel = Kernel::find()?;
        // Socket names are short; the workspace's path may not be.
        let folder = tempfile::Builder::new()
            .prefix("beeline-lab-")
            .tempdir()
            .map_err(LabError::host("making a folder for a guest"))?;
        initial_ramdisk(&folder.path().join("initrd"), &kernel, options)?;
        let mut listeners = Vec::new();
        for name in ["control", "output", "errors", "monitor"] {
            let path = folder.path().join(name);
            let listener = UnixListener::bind(&path).map_err(LabError::host("listening"))?;
            listener.set_nonblocking(true).map_err(LabError::host("listening"))?;
            listeners.push(listener);
        }
        let mut child = machine(folder.path(), &kernel, options)?;
        let started = Instant::now();
        let mut streams = Vec::new();
        for listener in &listeners {
            match accept(listener, &mut child, started) {
                Ok(stream) => streams.push(stream),
                Err(error) => {
                    let problem = format!("{error}: {}", text(&folder.path().join("qemu")));
                    end(&mut child);
                    return Err(LabError::Boot {
                        guest: options.number,
                        problem,
                        console: String::new(),
                    });
                }
            }
        }
        let heard = Shared::default();
        let [control, output, errors, monitor] = <[UnixStream; 4]>::try_from(streams)
            .unwrap_or_else(|_| unreachable!("four listeners give four streams"));
        let mut guest = Self {
            number: options.number,
            child,
            control,
            monitor,
            heard: Arc::clone(&heard),
            commands: 0,
            running: String::new(),
            begun: (0, 0),
            folder,
        };
        let reading = guest.control.try_clone().map_err(LabError::host("reading"))?;
        listen_control(reading, Arc::clone(&heard));
        listen_output(output, Arc::clone(&heard), options.echo.clone(), false);
        listen_output(errors, heard, options.echo.clone(), true);
        guest.greet()?;
        Ok(guest)
    }

    fn greet(&mut self) -> Result<(), LabError> {
        let deadline = Instant::now() + BOOT;
        let ready = self.wait_until(deadline, |heard| {
            heard.control.iter().any(|line| line == "ready").then_some(())
        });
        let heard = self.lock();
        let troubles: Vec<&str> =
            heard.control.iter().filter_map(|line| line.strip_prefix("trouble ")).collect();
        let problem = match ready {
            Ok(()) if troubles.is_empty() => None,
            Ok(()) => Some(troubles.join("; ")),
            Err(LabError::Gone { .. }) => Some("QEMU ended".to_owned()),
            Err(_) => Some(format!("not up after {BOOT:?}")),
        };
        drop(heard);
        match problem {
            None => Ok(()),
            Some(problem) => Err(LabError::Boot {
                guest: self.number,
                problem: format!("{problem} {}", text(&self.folder.path().join("qemu"))),
                console: self.console(),
            }),
        }
    }

    /// Starts a command line of the shell; `finish` waits for it.
    pub fn start(&mut self, command: &str) -> Result<(), LabError> {
        if command.contains('\n') {
            return Err(LabError::Command { command: command.to_owned() });
        }
        let (output, errors) = {
            let heard = self.lock();
            (heard.output.len(), heard.errors.len())
        };
        self.begun = (output, errors);
        self.commands += 1;
        command.clone_into(&mut self.running);
        let line = format!("{} {command}\n", self.commands);
        match self.control.write_all(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.gone()),
        }
    }

    /// Waits until the command that was started last has ended.
    pub fn finish(&mut self, limit: Duration) -> Result<Finished, LabError> {
        let number = self.commands;
        let prefix = format!("exit {number} ");
        let (output, errors) = self.begun;
        let done = self.wait_until(Instant::now() + limit, |heard| {
            if heard.output_ends < number || heard.errors_ends < number {
                return None;
            }
            let status = heard.control.iter().find_map(|line| line.strip_prefix(&prefix))?;
            Some(Finished {
                status: status.parse().unwrap_or(-1),
                output: String::from_utf8_lossy(&heard.output[output..]).into_owned(),
                errors: String::from_utf8_lossy(&heard.errors[errors..]).into_owned(),
            })
        });
        done.map_err(|error| match error {
            LabError::Late { guest, command, .. } => LabError::Late { guest, limit, command },
            other => other,
        })
    }

    /// Runs a command line of the shell to its end.
    pub fn run(&mut self, command: &str, limit: Duration) -> Result<Finished, LabError> {
        self.start(command)?;
        self.finish(limit)
    }

    /// A mark in the output, for [`Guest::output_after`].
    pub fn mark(&self) -> usize {
        self.lock().output.len()
    }

    /// Waits until the output after `mark`, commands left in the background included, satisfies
    /// `enough`; returns it.
    pub fn output_after(
        &self,
        mark: usize,
        limit: Duration,
        what: &str,
        enough: impl Fn(&str) -> bool,
    ) -> Result<String, LabError> {
        let found = self.wait_until(Instant::now() + limit, |heard| {
            let text = String::from_utf8_lossy(&heard.output[mark..]);
            enough(&text).then(|| text.into_owned())
        });
        found.map_err(|error| match error {
            LabError::Late { guest, .. } => {
                let heard = self.lock();
                let errors = String::from_utf8_lossy(&heard.errors).into_owned();
                LabError::Unheard { guest, limit, what: what.to_owned(), errors }
            }
            other => other,
        })
    }

    /// Pulls the network card's virtual cable, or plugs it in again.
    pub fn cable(&mut self, plugged: bool) -> Result<(), LabError> {
        let word = if plugged { "on" } else { "off" };
        let line = format!("set_link card {word}\n");
        match self.monitor.write_all(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.gone()),
        }
    }

    /// Ends the machine, as a power cut would; it stays ended.
    pub fn kill(&mut self) {
        end(&mut self.child);
    }

    /// Cuts the power: QEMU ends at once, nothing is synchronised. Returns all that commands had
    /// written to standard output by then.
    pub fn cut_power(mut self) -> String {
        end(&mut self.child);
        let _ = self
            .wait_until(Instant::now() + Duration::from_secs(10), |heard| heard.gone.then_some(()));
        String::from_utf8_lossy(&self.lock().output).into_owned()
    }

    /// The end of the console's log.
    pub fn console(&self) -> String {
        let log = text(&self.folder.path().join("console"));
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn gone(&self) -> LabError {
        LabError::Gone { guest: self.number, console: self.console() }
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until<T>(
        &self,
        deadline: Instant,
        mut enough: impl FnMut(&Heard) -> Option<T>,
    ) -> Result<T, LabError> {
        let mut heard = self.lock();
        loop {
            if let Some(value) = enough(&heard) {
                return Ok(value);
            }
            if heard.gone {
                drop(heard);
                return Err(self.gone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let command = self.running.clone();
                return Err(LabError::Late { guest: self.number, limit: left, command });
            }
            let woken = self.heard.1.wait_timeout(heard, left);
            heard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn text(path: &Path) -> String {
    std::fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned())
        .unwrap_or_default()
}

fn accept(
    listener: &UnixListener,
    child: &mut Child,
    started: Instant,
) -> std::io::Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if child.try_wait()?.is_some() {
            return Err(std::io::Error::other("QEMU ended"));
        }
        if started.elapsed() > BOOT {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        // QEMU calls within milliseconds; there is nothing to wait on but the listener.
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn initial_ramdisk(path: &Path, kernel: &Kernel, options: &Options) -> Result<(), LabError> {
    let shell = ["/bin/busybox", "/usr/bin/busybox"];
    let shell = shell.iter().find_map(|path| std::fs::read(path).ok());
    let shell = shell.ok_or_else(|| LabError::Missing {
        what: "busybox".to_owned(),
        remedy: "run `cargo xtask lab setup`".to_owned(),
    })?;
    let mut archive = Archive::default();
    for name in ["bin", "proc", "sys", "dev", "run", "host", "layer", "whole", "modules"] {
        archive.directory(name);
    }
    archive.file("bin/busybox", &shell);
    archive.file("init", INIT.as_bytes());
    archive.file("guest.sh", GUEST.as_bytes());
    archive.file("settings", settings(kernel, options).as_bytes());
    let mut order = String::new();
    for module in kernel.closure(MODULES)? {
        let doing = format!("reading {}", module.display());
        let bytes = std::fs::read(&module).map_err(LabError::host(doing))?;
        let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.file(&format!("modules/{name}"), &bytes);
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", order.as_bytes());
    archive.finish(path).map_err(LabError::host("writing the initial ramdisk"))
}

/// What the second stage reads: shell variables, empty for no.
fn settings(kernel: &Kernel, options: &Options) -> String {
    let yes = |there: bool| if there { "1" } else { "" };
    let number = options.number;
    let peer = number ^ 1;
    format!(
        "LAB_GUEST={number}\nLAB_SELF=10.9.0.{}\nLAB_PEER=10.9.0.{}\nLAB_MODULES={}\n\
         LAB_RDMA={}\nLAB_NVDIMM={}\nLAB_DISK={}\nLAB_IVSHMEM={}\nLAB_BELL={}\n",
        number + 1,
        peer + 1,
        quoted(&kernel.modules.to_string_lossy()),
        yes(options.rdma),
        yes(options.nvdimm.is_some()),
        yes(options.disk.is_some()),
        yes(options.window.is_some() || options.bell.is_some()),
        yes(options.bell.is_some()),
    )
}

/// `word` as the shell reads it back.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn machine(folder: &Path, kernel: &Kernel, options: &Options) -> Result<Child, LabError> {
    // A comma ends an option's value for QEMU, two are one.
    let path = |path: &Path| path.to_string_lossy().replace(',', ",,");
    let inside = |name: &str| path(&folder.join(name));
    let mut words: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| {
        words.push(format!("-{name}"));
        words.push(value);
    };
    let memory = options.mebibytes;
    // A device's interrupts reach a program through an IOMMU, which the older machine has not.
    let (machine, more) = match options.bell {
        // Nor does its kernel take a host that was busy for ten ticks for a timer that does not work, and end.
        Some(_) => ("q35", " intel_iommu=on no_timer_check"),
        None => ("pc", ""),
    };
    option("machine", format!("{machine},nvdimm=on,nvdimm-persistence=mem-ctrl"));
    if options.bell.is_some() {
        option("device", "intel-iommu".to_owned());
    }
    option("accel", "tcg,thread=multi".to_owned());
    option("cpu", "max".to_owned());
    option("smp", options.processors.to_string());
    option("m", format!("{memory}M,slots=2,maxmem={}M", memory + 16384));
    option("kernel", path(&kernel.image));
    option("initrd", inside("initrd"));
    option("append", format!("console=ttyS0 panic=-1 quiet mitigations=off{more}"));
    option("display", "none".to_owned());
    option("serial", format!("file:{}", inside("console")));
    option("fsdev", "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap".into());
    option("device", "virtio-9p-pci,fsdev=files,mount_tag=host".to_owned());
    // What a guest wrote has left it when its write returns: no event waits for a thread of QEMU's.
    option("device", "virtio-serial-pci,ioeventfd=off".to_owned());
    for (at, name) in ["control", "output", "errors"].iter().enumerate() {
        option("chardev", format!("socket,id={name},path={}", inside(name)));
        option("device", format!("virtserialport,chardev={name},name={name},nr={}", at + 1));
    }
    option("chardev", format!("socket,id=monitor,path={}", inside("monitor")));
    option("mon", "chardev=monitor,mode=readline".to_owned());
    let wire = |server: &str, socket: &Path| {
        format!("stream,id=wire,server={server},addr.type=unix,addr.path={}", path(socket))
    };
    option(
        "netdev",
        match &options.link {
            Link::Alone => "user,id=wire,restrict=on".to_owned(),
            Link::Listen(socket) => wire("on", socket),
            Link::Call(socket) => wire("off", socket),
        },
    );
    let card = options.number + 1;
    let mac = format!("mac=52:54:00:be:e1:{card:02x}");
    option("device", format!("virtio-net-pci,id=card,netdev=wire,{mac},romfile=,host_mtu=4200"));
    for (memory, device, id) in
        [(&options.nvdimm, "nvdimm", "dimm"), (&options.window, "ivshmem-plain", "window")]
    {
        let Some(memory) = memory else { continue };
        make_file(memory)?;
        let file = path(&memory.path);
        let size = memory.mebibytes;
        let object = format!("memory-backend-file,id={id},share=on,mem-path={file},size={size}M");
        option("object", object);
        option("device", format!("{device},memdev={id},id={id}-device"));
    }
    if let Some(socket) = &options.bell {
        option("chardev", format!("socket,id=bell,path={}", path(socket)));
        option("device", format!("ivshmem-doorbell,chardev=bell,vectors={}", super::bell::VECTORS));
    }
    if let Some(disk) = &options.disk {
        make_file(disk)?;
        let file = path(&disk.path);
        let drive = "if=none,id=disk,format=raw,cache=writeback,discard=unmap,file=";
        option("drive", format!("{drive}{file}"));
        option("device", "virtio-blk-pci,drive=disk".to_owned());
    }

    let log = std::fs::File::create(folder.join("qemu")).map_err(LabError::host("a log file"))?;
    let errors = log.try_clone().map_err(LabError::host("a log file"))?;
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(&words)
        .current_dir(root())
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .map_err(|_| LabError::Missing {
            what: "setpriv (util-linux)".to_owned(),
            remedy: "run `cargo xtask lab setup`".to_owned(),
        })
}

/// Makes the file behind a memory, with its size but nothing in it; one of the right size stays.
fn make_file(memory: &Memory) -> Result<(), LabError> {
    let doing = || format!("making {}", memory.path.display());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&memory.path)
        .map_err(LabError::host(doing()))?;
    let length = file.metadata().map_err(LabError::host(doing()))?.len();
    if length != memory.mebibytes << 20 {
        file.set_len(memory.mebibytes << 20).map_err(LabError::host(doing()))?;
    }
    Ok(())
}

fn update(heard: &Shared, change: impl FnOnce(&mut Heard)) {
    change(&mut heard.0.lock().unwrap_or_else(PoisonError::into_inner));
    heard.1.notify_all();
}

fn listen_control(stream: UnixStream, heard: Shared) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            update(&heard, |heard| heard.control.push(line));
        }
        update(&heard, |heard| heard.gone = true);
    });
}

fn listen_output(stream: UnixStream, heard: Shared, echo: Echo, errors: bool) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            // At most a page at a time: a command may write a long line.
            let mut bounded = (&mut reader).take(1 << 20);
            if !matches!(bounded.read_until(b'\n', &mut line), Ok(length) if length > 0) {
                update(&heard, |heard| heard.closed += 1);
                return;
            }
            let end = line.windows(END.len()).position(|window| window == END.as_bytes());
            let payload = &line[..end.unwrap_or(line.len())];
            pass_on(&echo, payload, errors);
            update(&heard, |heard| {
                let (kept, ends) = if errors {
                    (&mut heard.errors, &mut heard.errors_ends)
                } else {
                    (&mut heard.output, &mut heard.output_ends)
                };
                kept.extend_from_slice(payload);
                if end.is_some() {
                    *ends += 1;
                }
            });
        }
    });
}

fn pass_on(echo: &Echo, bytes: &[u8], errors: bool) {
    if bytes.is_empty() {
        return;
    }
    let mut line = Vec::new();
    match echo {
        Echo::Nowhere => return,
        Echo::Through => {}
        Echo::Named(name) => line.extend_from_slice(name.as_bytes()),
    }
    line.extend_from_slice(bytes);
    // Nobody reading is no reason to stop.
    if errors {
        let _ = std::io::stderr().lock().write_all(&line);
    } else {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&line);
        let _ = out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_from_the_shell_as_they_were() -> std::io::Result<()> {
        for word in ["plain", "", "two words", "it's", "$HOME `date` \"x\" \\", "a;b|c&d"] {
            let line = format!("printf %s {}", quoted(word));
            let output = Command::new("sh").args(["-c", &line]).output()?;
            assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        }
        Ok(())
    }

    #[test]
    fn output_ends_at_the_mark_and_not_before() -> std::io::Result<()> {
        let (mut theirs, ours) = UnixStream::pair()?;
        let heard = Shared::default();
        listen_output(ours, Arc::clone(&heard), Echo::Nowhere, false);
        theirs.write_all(b"one\ntwo without a newline\x1eEND 1\nthree\n")?;
        drop(theirs);
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut kept = heard.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !kept.output.ends_with(b"three\n") && Instant::now() < deadline {
            let woken = heard.1.wait_timeout(kept, Duration::from_millis(100));
            kept = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        assert_eq!(kept.output, b"one\ntwo without a newlinethree\n");
        assert_eq!((kept.output_ends, kept.errors_ends), (1, 0));
        Ok(())
    }
}
