//! The thread that brings a processor's pairs to other servers; it starts with the first batch.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use beeline_kv_direct::mover::{Carried, Mover, Watch};
use beeline_kv_direct::processor::moves::MoveBatch;

use crate::processor::Shared;
use crate::service::{Connector, Delivery};

/// See the module's documentation.
pub(crate) struct Carrier {
    index: u32,
    connector: Option<Connector>,
    deliveries: Sender<Delivery>,
    shared: Arc<Shared>,
    running: Option<(Sender<MoveBatch>, JoinHandle<()>)>,
}

/// Stops a batch when the service ends, or the map it was made for.
struct Look<'a> {
    state: u32,
    shared: &'a Shared,
    deliveries: &'a Sender<Delivery>,
}

impl Look<'_> {
    fn deliver(&self, delivery: Delivery) {
        // A processor that has ended does not want it any more.
        let _ = self.deliveries.send(delivery);
        self.shared.waker.wake();
    }
}

impl Watch for Look<'_> {
    fn goes_on(&mut self) -> bool {
        !self.shared.stopping.load(Ordering::Acquire)
            && self.shared.map_state.load(Ordering::Acquire) == self.state
    }

    fn held_up(&mut self, note: &str) {
        self.deliver(Delivery::HeldUp(note.to_owned()));
    }
}

impl Carrier {
    pub(crate) fn new(
        index: u32,
        connector: Option<Connector>,
        deliveries: Sender<Delivery>,
        shared: &Arc<Shared>,
    ) -> Self {
        Self { index, connector, deliveries, shared: Arc::clone(shared), running: None }
    }

    /// Hands a batch to the thread; how it ended comes as a delivery.
    pub(crate) fn carry(&mut self, batch: MoveBatch) {
        let state = batch.state;
        if let Err(note) = self.hand_over(batch) {
            let carried = Carried { adopted: Vec::new(), note };
            let look = Look { state, shared: &self.shared, deliveries: &self.deliveries };
            look.deliver(Delivery::Carried(state, carried));
        }
    }

    fn hand_over(&mut self, batch: MoveBatch) -> Result<(), String> {
        if self.running.is_none() {
            self.running = Some(self.start()?);
        }
        let sent = self.running.as_ref().is_some_and(|(batches, _)| batches.send(batch).is_ok());
        if !sent {
            self.running = None;
            return Err("the thread that moves pairs ended; it is started anew".to_owned());
        }
        Ok(())
    }

    fn start(&self) -> Result<(Sender<MoveBatch>, JoinHandle<()>), String> {
        let connector = self.connector.clone();
        let connector = connector.ok_or("this server was started without a way to reach others")?;
        let (batches, receiver) = mpsc::channel::<MoveBatch>();
        let (deliveries, shared) = (self.deliveries.clone(), Arc::clone(&self.shared));
        let run = move || {
            let mut mover = Mover::new((connector.0)(), sender());
            while let Ok(batch) = receiver.recv() {
                let state = batch.state;
                let mut look = Look { state, shared: &shared, deliveries: &deliveries };
                if let Some(carried) = mover.carry(&batch, &mut look) {
                    look.deliver(Delivery::Carried(state, carried));
                }
            }
        };
        let builder = std::thread::Builder::new().name(format!("direct-move-{}", self.index));
        let thread =
            builder.spawn(run).map_err(|error| format!("no thread to move pairs: {error}"))?;
        Ok((batches, thread))
    }

    /// Ends the thread; its batch under way is given up at its next try.
    pub(crate) fn stop(&mut self) {
        if let Some((batches, thread)) = self.running.take() {
            drop(batches);
            if thread.join().is_err() {
                tracing::error!("a thread that moves pairs of the direct store panicked");
            }
        }
    }
}

/// A number that no other mover has while its packets are remembered.
fn sender() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id())
}
