//! A graph that runs between interfaces while a test plays with it.

#![allow(clippy::unwrap_used, clippy::panic, dead_code)]

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ir::graph::Graph;
use beeline_nf::live::{LiveError, Passed, SPIN, Surroundings, run};
use beeline_nf::load::compile;
use beeline_nf::sides::{LinkOptions, native};

/// A counter between an input and an output.
pub const COUNTER: &str = ".input in\n.output out\nCount :: c @\nin -> c -> out\n";

/// Compiles a text that must compile.
pub fn graph(text: &str) -> Graph {
    let loaded = compile("test.np", text.to_owned(), None);
    assert!(!loaded.diagnostics.failed(), "{}", loaded.diagnostics.render(&loaded.sources));
    loaded.compiled.graph
}

/// Reads and compiles the file of a reload.
fn load(path: &Path) -> Result<Graph, String> {
    let loaded = beeline_nf::load::load(path).map_err(|error| error.to_string())?;
    if loaded.diagnostics.failed() {
        return Err(loaded.diagnostics.render(&loaded.sources));
    }
    Ok(loaded.compiled.graph)
}

/// A run under way.
pub struct Scene<'a> {
    /// Its socket.
    pub control: PathBuf,
    /// What it told.
    pub heard: &'a Mutex<Vec<String>>,
    over: &'a (dyn Fn() -> bool + Sync),
}

impl Scene<'_> {
    /// Waits for something generously, as long as the run goes on.
    pub fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !done() {
            assert!(!(self.over)(), "the run ended before: {what}");
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for a word of the run.
    pub fn hears(&self, part: &str) {
        self.until(part, || self.heard.lock().unwrap().iter().any(|text| text.contains(part)));
    }

    /// True where the run told something.
    pub fn heard(&self, part: &str) -> bool {
        self.heard.lock().unwrap().iter().any(|text| text.contains(part))
    }

    /// True where the run has ended.
    pub fn is_over(&self) -> bool {
        (self.over)()
    }
}

/// Runs a graph on at most so many threads with `commands` before the first packet, has the test play
/// with it, and ends it; also where the test fails.
pub fn playing(
    graph: &Graph,
    ports: &[(&str, String)],
    (commands, threads): (&[String], usize),
    play: impl FnOnce(&Scene<'_>),
) -> Result<Passed, LiveError> {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports: Vec<(String, String)> =
        ports.iter().map(|(port, what)| ((*port).to_owned(), what.clone())).collect();
    let (stop, heard) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let notify = |text: &str| heard.lock().unwrap().push(text.to_owned());
    let around = Surroundings {
        control: Some(&control),
        commands,
        notify: &notify,
        stop: &stop,
        link: LinkOptions { threads, ..LinkOptions::default() },
        spin: SPIN,
        load: Some(&load),
    };
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around));
        {
            let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
            let over = || runner.is_finished();
            let scene = Scene { control: control.clone(), heard: &heard, over: &over };
            let deadline = Instant::now() + Duration::from_secs(120);
            while !control.exists() && !scene.is_over() {
                assert!(Instant::now() < deadline, "the graph did not start");
                std::thread::sleep(Duration::from_millis(5));
            }
            if !scene.is_over() {
                play(&scene);
            }
        }
        runner.join().unwrap()
    })
}

/// Does something at the end of a scope, also where a test fails.
pub struct AtEnd<F: Fn()>(pub F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
