//! Hosts of many members as real processes: idle, stopped, killed.
//!
//! `BEELINE_GROUPS=n` runs n clusters.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use beeline_verify_clients::free_port;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

/// Nothing takes longer; many clusters take a while to begin.
const LIMIT: Duration = Duration::from_secs(60);
/// An item that the leader of every cluster appends.
const MARK: u32 = 4711;

struct Process {
    child: Child,
    talk: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Process {
    fn ask(&self, line: &str) -> String {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        talk.0.write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        talk.1.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }

    /// The numbers of an answer.
    fn numbers(&self, line: &str) -> Vec<u64> {
        let answer = self.ask(line);
        let words = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{line}: {answer}"));
        words.split_whitespace().map(|word| word.parse().unwrap()).collect()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Process {
    /// Lets it open so many more files; what it may at the most without a number.
    fn let_open(&self, more: Option<u64>) {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count();
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let current = more.map(|more| open as u64 + more).or(maximum);
        prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Hosts {
    clusters: usize,
    provider: &'static str,
    home: tempfile::TempDir,
    addresses: Vec<String>,
    processes: Vec<Option<Process>>,
}

fn eventually<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Hosts {
    fn new(provider: &'static str, clusters: usize) -> Self {
        let home = tempfile::tempdir().unwrap();
        let addresses = (0..3).map(|_| format!("127.0.0.1:{}", free_port())).collect();
        let processes = (0..3).map(|_| None).collect();
        let mut hosts = Self { clusters, provider, home, addresses, processes };
        for host in 0..3 {
            hosts.start(host);
        }
        hosts.all_led(&[0, 1, 2]);
        hosts
    }

    fn start(&mut self, host: usize) {
        let list: Vec<_> =
            self.addresses.iter().zip(1..).map(|(at, id)| format!("{id}={at}")).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_beeline-log-host"));
        command.arg(self.home.path().join(host.to_string())).arg((host + 1).to_string());
        command.args([self.provider, &self.addresses[host], &self.clusters.to_string()]);
        command.arg(list.join(","));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let out = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut ready = String::new();
        answers.read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n", "host {host}");
        self.processes[host] = Some(Process { child, talk: Mutex::new((out, answers)) });
    }

    fn process(&self, host: usize) -> &Process {
        self.processes[host].as_ref().unwrap()
    }

    fn numbers(&self, host: usize) -> Vec<u64> {
        self.process(host).numbers("threads")
    }

    /// Of how many clusters a host is the leader.
    fn leads(&self, host: usize) -> u64 {
        self.process(host).numbers("leads")[0]
    }

    /// Waits until these hosts lead all clusters; how long that took.
    fn all_led(&self, hosts: &[usize]) -> Duration {
        let start = Instant::now();
        loop {
            let led: u64 = hosts.iter().map(|host| self.leads(*host)).sum();
            if led >= self.clusters as u64 {
                return start.elapsed();
            }
            let late = start.elapsed() >= LIMIT;
            let roles = |host: &usize| (self.process(*host).ask("roles"), self.numbers(*host));
            assert!(!late, "{led} are led: {:#?}", hosts.iter().map(roles).collect::<Vec<_>>());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn append(&self, hosts: &[usize], cluster: usize, item: u32) {
        let line = format!("append {cluster} {item}");
        eventually("an append", || {
            hosts.iter().find_map(|host| {
                let answer = self.process(*host).ask(&line);
                assert!(!answer.starts_with("fail"), "{answer}");
                (answer == "ok").then_some(())
            })
        });
    }

    /// Has the leader of every cluster append an item, and waits until a host has it in all; how long that took.
    fn all_held(&self, hosts: &[usize], host: usize, item: u32) -> Duration {
        let start = Instant::now();
        let count = |host: &usize, what: &str| self.process(*host).numbers(what)[0];
        let (all, mut led, mut held, mut looks) = (self.clusters as u64, 0, 0, 0);
        while held < all {
            assert!(start.elapsed() < LIMIT, "{led} appended, host {host} has {held}");
            // A leader of the moment before may have been counted, and its successor not.
            if led < all || looks % 20 == 0 {
                led = hosts.iter().map(|host| count(host, &format!("lead {item}"))).sum();
            }
            held = count(&host, &format!("hold {item}"));
            looks += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        start.elapsed()
    }

    /// Open descriptors of each process.
    fn descriptors(&self) -> Vec<usize> {
        let open = |process: &Process| {
            std::fs::read_dir(format!("/proc/{}/fd", process.child.id())).unwrap().count()
        };
        self.processes.iter().flatten().map(open).collect()
    }

    /// A host has this item, once or, where an answer was lost, twice.
    fn has(&self, host: usize, cluster: usize, item: u32) -> bool {
        let answer = self.process(host).ask(&format!("list {cluster}"));
        answer.trim_start_matches("ok ").split(',').any(|word| word == item.to_string())
    }

    fn rest(&self) {
        eventually("all rest", || {
            let rests = |process: &Process| {
                let numbers = process.numbers("threads");
                numbers[0] == numbers[1]
            };
            self.processes.iter().flatten().all(rests).then_some(())
        });
    }

    /// Two seconds in which every member of every host rests: what each host did and took.
    fn idle(&self) -> Vec<Vec<u64>> {
        for _ in 0..20 {
            self.rest();
            let ask = || self.processes.iter().flatten().map(|process| process.numbers("threads"));
            let (before, begun): (Vec<_>, _) = (ask().collect(), Instant::now());
            std::thread::sleep(Duration::from_secs(2));
            let after: Vec<_> = ask().collect();
            let spent = |(before, after): (&Vec<u64>, &Vec<u64>)| -> Vec<u64> {
                before
                    .iter()
                    .zip(after)
                    .map(|(before, after)| after.saturating_sub(*before))
                    .collect()
            };
            // On a loaded machine a host may stand still for so long that others take it for dead, or the two
            // seconds become more of them.
            let in_time = begun.elapsed() < Duration::from_millis(2500);
            let rest = after.iter().all(|numbers| numbers[0] == numbers[1]);
            let spent: Vec<_> = before.iter().zip(&after).map(spent).collect();
            if in_time && rest && spent.iter().all(|spent| spent[4] == 0) {
                return spent;
            }
        }
        panic!("no two seconds of rest");
    }
}

#[test]
fn clusters_on_three_processes_rest_and_survive_hosts_that_stop_and_die() {
    let clusters = std::env::var("BEELINE_GROUPS").ok().and_then(|number| number.parse().ok());
    let clusters = clusters.unwrap_or(30);
    let mut hosts = Hosts::new("shm", clusters);
    let all = [0, 1, 2];
    // One control connection to each of the other hosts, or two where both made one at once, for all clusters.
    for host in all {
        let lines = hosts.numbers(host)[7];
        assert!((2..=4).contains(&lines), "host {host} has {lines} control connections");
    }
    // The hosts started one after the other, and none leads all that it found without a leader.
    hosts.rest();
    let led = all.map(|host| hosts.leads(host));
    println!("{clusters} clusters at rest, led by {led:?}; descriptors: {:?}", hosts.descriptors());
    assert!(led.iter().all(|led| *led >= clusters as u64 / 5), "{led:?}");
    for spent in hosts.idle() {
        let [_, _, wakeups, turns, _, ran_ns, waits, _] = spent[..] else { panic!("{spent:?}") };
        let ran_ms = ran_ns as f64 / 1e6;
        println!(
            "{clusters} clusters idle for 2 s: {wakeups} wake-ups, {turns} turns, {waits} waits, \
             {ran_ms:.1} ms"
        );
        assert!(wakeups <= 300 && turns <= 300 && waits <= 600, "{spent:?}");
    }
    let some = clusters / 3;
    hosts.append(&all, some, 1);
    for host in all {
        eventually("all three have it", || hosts.has(host, some, 1).then_some(()));
    }
    // One stands still while all rest. Its memory answers, and says that its leaders rest.
    hosts.rest();
    let stopped = all.into_iter().max_by_key(|host| hosts.leads(*host)).unwrap();
    let led = hosts.leads(stopped);
    let others: Vec<_> = all.into_iter().filter(|host| *host != stopped).collect();
    hosts.process(stopped).signal(Signal::STOP);
    let took = hosts.all_led(&others);
    println!(
        "a host that led {led} of {clusters} clusters was stopped: {took:.1?} until all were led"
    );
    hosts.append(&others, some, 2);
    hosts.process(stopped).signal(Signal::CONT);
    eventually("it is back", || hosts.has(stopped, some, 2).then_some(()));
    let took = hosts.all_held(&all, stopped, MARK);
    println!("it went on: {took:.1?} until it was up to date in all {clusters} clusters");
    // One is killed while all rest.
    let start = Instant::now();
    hosts.rest();
    println!("{:.1?} until all rest; descriptors: {:?}", start.elapsed(), hosts.descriptors());
    let killed = all.into_iter().max_by_key(|host| hosts.leads(*host)).unwrap();
    let led = hosts.leads(killed);
    let others: Vec<_> = all.into_iter().filter(|host| *host != killed).collect();
    hosts.process(killed).signal(Signal::KILL);
    let took = hosts.all_led(&others);
    println!(
        "a host that led {led} of {clusters} clusters was killed: {took:.1?} until all were led"
    );
    hosts.append(&others, some, 3);
    hosts.start(killed);
    eventually("it is back", || hosts.has(killed, some, 3).then_some(()));
    let took = hosts.all_held(&all, killed, MARK + 1);
    println!("it was started again: {took:.1?} until it was up to date in all {clusters} clusters");
    hosts.rest();
    println!("descriptors: {:?}", hosts.descriptors());
}

/// What its members lack comes from the limit alone: none of them ends for it, and none stays behind once it is
/// raised.
#[test]
fn hosts_that_ran_out_of_descriptors_are_whole_again_when_they_may_have_some() {
    let clusters = 30;
    let hosts = Hosts::new("shm", clusters);
    let all = [0, 1, 2];
    hosts.rest();
    let stopped = all.into_iter().max_by_key(|host| hosts.leads(*host)).unwrap();
    let others: Vec<_> = all.into_iter().filter(|host| *host != stopped).collect();
    // Some elections succeed, and each takes descriptors for good.
    all.iter().for_each(|host| hosts.process(*host).let_open(Some(20)));
    hosts.process(stopped).signal(Signal::STOP);
    // What they know of roles, terms and leaders.
    let known = || others.iter().map(|host| hosts.process(*host).ask("roles")).collect::<Vec<_>>();
    let before = known();
    eventually("they try to lead its clusters", || (known() != before).then_some(()));
    hosts.process(stopped).signal(Signal::CONT);
    // The hosts try in vain for a while.
    std::thread::sleep(Duration::from_secs(3));
    all.iter().for_each(|host| hosts.process(*host).let_open(None));
    hosts.all_led(&all);
    for host in all {
        assert_eq!(hosts.numbers(host)[0], clusters as u64, "a member of host {host} has ended");
    }
    eventually("each leader appends", || {
        let done: u64 = all.iter().map(|host| hosts.process(*host).numbers("lead 7")[0]).sum();
        (done == clusters as u64).then_some(())
    });
    for host in all {
        eventually("every member is up to date", || {
            (hosts.process(host).numbers("hold 7")[0] == clusters as u64).then_some(())
        });
    }
}
