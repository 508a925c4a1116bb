//! A whole service: a door that greets each caller, started and stopped as `beeline serve` does.
//! `docs/services.md` walks through it.
//!
//! ```console
//! $ cargo run -p beeline-greeter -- 127.0.0.1:7000
//! greeter      127.0.0.1:7000
//! ```

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use beeline_observe::MetricSet;
use beeline_service::{Fact, Opening, Service, Services};

beeline_observe::metrics! {
    /// What the greeter counts.
    pub struct GreeterMetrics in "beeline" {
        counter greeter_callers: Count, "Callers greeted.";
    }
}

/// The running service.
#[derive(Debug)]
struct Greeter {
    address: SocketAddr,
    metrics: Arc<GreeterMetrics>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Greeter {
    /// Binds the door, then starts the thread behind it.
    fn open(address: SocketAddr, greeting: String) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let (metrics, stopping) = (Arc::<GreeterMetrics>::default(), Arc::<AtomicBool>::default());
        let (counted, stop) = (Arc::clone(&metrics), Arc::clone(&stopping));
        let thread = std::thread::spawn(move || {
            for caller in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                // A caller that went away is its own loss.
                let greeted = caller.and_then(|mut caller| writeln!(caller, "{greeting}"));
                counted.greeter_callers.add(u64::from(greeted.is_ok()));
            }
        });
        Ok(Self { address, metrics, stopping, thread })
    }
}

impl Service for Greeter {
    fn name(&self) -> &'static str {
        "greeter"
    }

    fn facts(&self) -> Vec<Fact> {
        vec![Fact::new("greeter", self.address.to_string())]
    }

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        vec![self.metrics.clone()]
    }

    fn health(&self) -> Result<(), String> {
        match self.thread.is_finished() {
            false => Ok(()),
            true => Err("its thread has ended; start the node anew".to_owned()),
        }
    }

    fn stop(self: Box<Self>) {
        self.stopping.store(true, Ordering::Release);
        // The thread sleeps in accept; one more caller wakes it.
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.join();
    }
}

/// What `apps/beeline/src/serve/services.rs` holds for each service.
fn opening(address: SocketAddr, greeting: String) -> Opening {
    let open = move || Ok(Box::new(Greeter::open(address, greeting)?) as Box<dyn Service>);
    Opening { name: "greeter", after: &[], open: Box::new(open) }
}

/// Serves until standard input ends.
fn serve(address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut services = Services::open(vec![opening(address.parse()?, "hello".to_owned())])?;
    for fact in services.iter().flat_map(Service::facts) {
        writeln!(std::io::stdout(), "{:<12} {}", fact.name, fact.value)?;
    }
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    services.stop();
    Ok(())
}

fn main() -> ExitCode {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let Err(error) = serve(&address) else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stderr(), "{error}");
    ExitCode::FAILURE
}
