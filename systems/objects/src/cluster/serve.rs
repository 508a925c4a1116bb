//! Threads that let peers take objects, one a connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device, Role};

use super::shelf::StoreShelf;
use super::{Answer, Shared, patience};
use crate::transfer::{Line, Serving};

/// Most peers served at once.
const MOST: u64 = 1024;
/// How often a sleeping server looks whether it should stop.
const NAP: Duration = Duration::from_millis(250);
/// A peer that asks for nothing in this time is let go; it dials again when it wants something.
const IDLE: Duration = Duration::from_secs(600);
/// And before its first message: one that died while it dialled may never be noticed otherwise.
const FIRST: Duration = Duration::from_secs(10);

pub(super) fn start(
    shared: &Arc<Shared>,
    device: Arc<dyn Device>,
    peer: ConnectInfo,
    answer: Answer,
) {
    if shared.figures.serving.fetch_add(1, Ordering::AcqRel) >= MOST {
        shared.figures.serving.fetch_sub(1, Ordering::AcqRel);
        return answer(Err("too many peers are served; try again".to_owned()));
    }
    let of_thread = Arc::clone(shared);
    let spawned = std::thread::Builder::new().name("objects-serve".to_owned()).spawn(move || {
        of_thread.settle_thread();
        run(&of_thread, &device, &peer, answer);
        of_thread.figures.serving.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(error) = spawned {
        shared.figures.serving.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(%error, "a peer cannot be served");
    }
}

fn run(shared: &Shared, device: &Arc<dyn Device>, peer: &ConnectInfo, answer: Answer) {
    let prepared = shared.context(device).and_then(|context| {
        let shelf = StoreShelf::new(shared, &context).map_err(|error| error.to_string())?;
        let line = Line::new(&context).map_err(|error| error.to_string())?;
        let info = line.info();
        let channel = line.connect(peer, Role::Passive, None).map_err(|error| error.to_string())?;
        Ok((shelf, info, channel))
    });
    let (mut shelf, info, channel) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return answer(Err(reason)),
    };
    answer(Ok(info));
    let mut serving = Serving::new(channel);
    let mut last = Instant::now();
    // The transfer under way, and since when.
    let mut transfer = (None, last);
    let mut idle = FIRST;
    while !shared.stops() && last.elapsed() < idle {
        let under_way = serving.under_way();
        if under_way.map(|(number, _)| number) != transfer.0 {
            transfer = (under_way.map(|(number, _)| number), Instant::now());
        }
        // The object is held for the peer until then, and no longer.
        let most = patience::whole(shared.options.patience, under_way.map_or(0, |(_, size)| size));
        if under_way.is_some() && transfer.1.elapsed() > most {
            tracing::warn!(?most, "a peer does not finish taking an object");
            return;
        }
        match serving.progress(&mut shelf, NAP) {
            Ok(0) => {}
            Ok(_) => (last, idle) = (Instant::now(), IDLE),
            Err(error) => {
                tracing::debug!(%error, "a peer of the object store is gone");
                return;
            }
        }
    }
}
