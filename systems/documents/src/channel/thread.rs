//! The thread that polls all channels of fabric clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use beeline_documents_channel::numbers::ByNumber;
use beeline_documents_channel::{ChannelId, ChannelServer, ProcMeters, ServerCounters};
use beeline_env::SystemClock;
use beeline_fabric::Device;
use beeline_os::poller::{Interest, Poller};

use super::execute::{Executive, Executor, Key, Peer};
use super::{
    ChannelOptions, Delivery, FIRST_CONNECTION, FabricClient, FabricWelcome, Origin, Shared, WAKER,
};

const FIRST_SERVER: u64 = 1;
/// Turns that only poll between two looks at everything else.
const TURNS_PER_LOOK: u32 = 64;
/// How often figures are published while there is work.
const PUBLISHED: Duration = Duration::from_millis(1);
/// How often deadlines are looked at while there are some.
const EXPIRY: Duration = Duration::from_millis(500);
/// How often channels are looked at whose peers may have gone without a word.
const LOOK: Duration = Duration::from_secs(10);

struct Served {
    server: ChannelServer,
    token: u64,
    failed: bool,
}

/// See the module's documentation.
pub(super) struct Thread {
    shared: Arc<Shared>,
    deliveries: Receiver<Delivery>,
    poller: Poller,
    served: Vec<Served>,
    next_token: u64,
    options: ChannelOptions,
    armed: bool,
    peers: ByNumber<Key, Peer>,
    connections: i32,
    found: Vec<u8>,
    executive: Arc<Executive>,
    /// Channels whose next command begins once the reply to the last one is written.
    unwritten: Vec<Key>,
    /// Counters of servers that are gone.
    gone: ServerCounters,
    sleeps: u64,
    looked: Instant,
}

/// A handler of one server, of fields that are not that server's.
macro_rules! executor {
    ($thread:ident, $token:expr) => {
        Executor {
            token: $token,
            executive: &$thread.executive,
            peers: &mut $thread.peers,
            connections: &mut $thread.connections,
            found: &mut $thread.found,
            began: None,
        }
    };
}

impl Thread {
    pub(super) fn new(
        shared: Arc<Shared>,
        deliveries: Receiver<Delivery>,
        poller: Poller,
        options: ChannelOptions,
        executive: Arc<Executive>,
    ) -> Self {
        Self {
            shared,
            deliveries,
            poller,
            served: Vec::new(),
            next_token: FIRST_SERVER,
            options,
            armed: false,
            peers: ByNumber::default(),
            connections: FIRST_CONNECTION,
            found: Vec::new(),
            executive,
            unwritten: Vec::new(),
            gone: ServerCounters::default(),
            sleeps: 0,
            looked: Instant::now(),
        }
    }

    /// Until it is told to stop.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut last_work = Instant::now();
        let mut published = last_work;
        let (mut turns, mut worked) = (0_u32, false);
        loop {
            let completions = self.poll();
            turns = turns.wrapping_add(1);
            if completions > 0 {
                self.armed = false;
                worked = true;
            }
            if !turns.is_multiple_of(TURNS_PER_LOOK) {
                if completions == 0 {
                    std::hint::spin_loop();
                }
                continue;
            }
            if shared.stopping.load(Ordering::Acquire) {
                break;
            }
            let now = Instant::now();
            let outside = self.look_outside();
            self.expire(now);
            if std::mem::take(&mut worked) || outside {
                last_work = now;
                if now.duration_since(published) >= PUBLISHED {
                    published = now;
                    self.publish();
                }
                continue;
            }
            if now.duration_since(last_work) < self.options.spin {
                // Where more threads want to run than there are cores, one that only polls is last.
                std::thread::yield_now();
                continue;
            }
            if !self.arm() {
                // Freshly armed: what came before produces no event, so one more look.
                turns = TURNS_PER_LOOK - 1;
                continue;
            }
            self.sleeps += 1;
            self.publish();
            self.sleep();
            last_work = Instant::now();
        }
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            served.server.shut_down(&mut executor);
        }
        self.publish();
    }

    fn poll(&mut self) -> usize {
        let mut completions = 0;
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            match served.server.poll(&mut executor) {
                Ok(count) => completions += count,
                Err(error) => {
                    tracing::error!(%error, "a completion queue of the document store failed");
                    served.failed = true;
                }
            }
        }
        completions
    }

    fn expire(&mut self, now: Instant) {
        if now.duration_since(self.looked) < EXPIRY {
            return;
        }
        self.looked = now;
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            served.server.expire(&mut executor);
        }
    }

    /// New clients, replies of workers, servers that failed; whether there was any.
    fn look_outside(&mut self) -> bool {
        let mut any = false;
        while let Ok(delivery) = self.deliveries.try_recv() {
            any = true;
            match delivery {
                Delivery::Client(client) => self.meet(*client),
                Delivery::Done { origin, bytes, finishes } => {
                    self.answer(origin, |server, (channel, index), executor| {
                        server.respond(channel, index, &bytes, executor);
                    });
                    if finishes {
                        self.unwritten.push((origin.0, origin.1));
                    }
                }
                Delivery::Keep { origin, bytes } => {
                    self.answer(origin, |server, (channel, index), executor| {
                        server.keep(channel, index, &bytes, executor);
                    });
                    self.unwritten.push((origin.0, origin.1));
                }
                Delivery::Release(origin) => {
                    self.answer(origin, |server, (channel, index), executor| {
                        server.release(channel, index, executor);
                    });
                }
                Delivery::Optime(origin, newest) => {
                    self.answer(origin, |server, (channel, index), executor| {
                        server.respond_optime(channel, index, newest, executor);
                    });
                }
            }
        }
        if !self.unwritten.is_empty() {
            self.go_on();
        }
        let lost = |served: &Served| {
            served.failed || served.server.device().is_lost() && served.server.channels() == 0
        };
        if self.served.iter().any(lost) {
            for served in self.served.iter_mut().filter(|served| lost(served)) {
                let mut executor = executor!(self, served.token);
                served.server.shut_down(&mut executor);
                add(&mut self.gone, served.server.counters());
                // Closing would not do: a peer may hold the descriptor open.
                let _ = self.poller.remove(served.server.event_descriptor());
            }
            self.served.retain(|served| !lost(served));
        }
        any
    }

    /// Has a server do something for a request, unless it is gone.
    fn answer(
        &mut self,
        (token, channel, index): Origin,
        act: impl FnOnce(&mut ChannelServer, (ChannelId, u32), &mut Executor<'_>),
    ) {
        if let Some(served) = self.served.iter_mut().find(|served| served.token == token) {
            let mut executor = executor!(self, token);
            act(&mut served.server, (channel, index), &mut executor);
        }
    }

    /// Lets workers go on with the channels whose last replies are written.
    fn go_on(&mut self) {
        let (served, executive) = (&self.served, &self.executive);
        let most = self.options.server.most_unsent;
        self.unwritten.retain(|(token, channel)| {
            let server = served.iter().find(|served| served.token == *token);
            let waits = server.is_some_and(|served| served.server.unsent(*channel) >= most);
            if !waits {
                executive.jobs.finish((*token, *channel));
            }
            waits
        });
    }

    fn meet(&mut self, client: FabricClient) {
        let known =
            self.served.iter().position(|one| Arc::ptr_eq(one.server.device(), &client.device));
        let index = match known.map_or_else(|| self.serve(&client.device), Ok) {
            Ok(index) => index,
            Err(reason) => return (client.reply)(Err(reason)),
        };
        self.armed = false;
        let (info, payload) = self.served[index].server.accept(&client.peer, &client.payload);
        (client.reply)(Ok(FabricWelcome { info, payload }));
    }

    fn serve(&mut self, device: &Arc<dyn Device>) -> Result<usize, String> {
        let mut options = self.options.server.clone();
        if options.rnic.dev_name.is_empty() {
            options.rnic = (self.options.rnic)(device.attributes().provider);
        }
        let server = ChannelServer::new(
            Arc::clone(device),
            options,
            Arc::new(SystemClock),
            Box::new(ProcMeters::default()),
        )
        .map_err(|error| error.to_string())?;
        let token = self.next_token;
        self.poller
            .add(server.event_descriptor(), token, Interest::READ)
            .map_err(|error| error.to_string())?;
        self.next_token += 1;
        self.served.push(Served { server, token, failed: false });
        Ok(self.served.len() - 1)
    }

    /// Asks for events; true when they had been asked for before and nothing came since.
    fn arm(&mut self) -> bool {
        if self.armed || self.served.is_empty() {
            return true;
        }
        for served in &mut self.served {
            if let Err(error) = served.server.arm() {
                tracing::error!(%error, "a completion queue of the document store cannot be armed");
                served.failed = true;
            }
        }
        self.armed = true;
        false
    }

    fn sleep(&mut self) {
        let expects = self.served.iter().any(|served| served.server.expects());
        let serves = self.served.iter().any(|served| served.server.channels() > 0);
        let limit = if expects { Some(EXPIRY) } else { serves.then_some(LOOK) };
        let events = match self.poller.wait(limit) {
            Ok(events) => events,
            Err(error) => {
                tracing::error!(%error, "epoll_wait failed in the document store");
                std::thread::sleep(Duration::from_millis(100));
                return;
            }
        };
        self.armed = false;
        for index in 0..events {
            let token = self.poller.readiness(index).token;
            if token == WAKER {
                // Before the deliveries are taken: one that comes later wakes this thread again.
                self.shared.waker.clear();
            }
            let served = self.served.iter_mut().find(|served| served.token == token);
            if let Some(served) = served
                && let Err(error) = served.server.acknowledge()
            {
                tracing::error!(%error, "cannot clear a fabric event of the document store");
                served.failed = true;
            }
        }
        self.look_outside();
    }

    fn publish(&mut self) {
        let mut sum = self.gone;
        let (mut channels, mut registered, mut kept) = (0, 0, 0);
        for served in &self.served {
            add(&mut sum, served.server.counters());
            channels += served.server.channels() as u64;
            registered += served.server.registered_bytes();
            kept += served.server.kept_bytes() as u64;
        }
        let figures = &self.shared.figures;
        let set = |figure: &AtomicU64, value: u64| figure.store(value, Ordering::Relaxed);
        set(&figures.channels, channels);
        set(&figures.requests, sum.requests);
        set(&figures.request_bytes, sum.request_bytes);
        set(&figures.reply_bytes, sum.reply_bytes);
        set(&figures.staged_bytes, sum.staged_bytes);
        set(&figures.refused, sum.refused);
        set(&figures.ended, sum.ended);
        set(&figures.protocol_errors, sum.protocol_errors);
        set(&figures.registrations, sum.registrations);
        set(&figures.registered_bytes, registered);
        set(&figures.kept_bytes, kept);
        set(&figures.parked, sum.parked);
        set(&figures.overrun, sum.overrun);
        set(&figures.dropped_replies, sum.dropped_replies);
        set(&figures.sleeps, self.sleeps);
    }
}

fn add(sum: &mut ServerCounters, more: ServerCounters) {
    sum.accepted += more.accepted;
    sum.refused += more.refused;
    sum.ended += more.ended;
    sum.protocol_errors += more.protocol_errors;
    sum.requests += more.requests;
    sum.request_bytes += more.request_bytes;
    sum.reply_bytes += more.reply_bytes;
    sum.staged_bytes += more.staged_bytes;
    sum.registrations += more.registrations;
    sum.parked += more.parked;
    sum.overrun += more.overrun;
    sum.dropped_replies += more.dropped_replies;
}
