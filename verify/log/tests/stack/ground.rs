//! Memory, chance, threads and addresses of a site, all from the seed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use beeline_fabric::ConnectInfo;
use beeline_pmem::{CrashImage, CrashKind, CrashLimits, PmemError, Pool, PoolOptions, SimDevice};
use beeline_replicated_log::ground::Job;
use beeline_replicated_log::{Boot, Ground, Handle, Jobs, Node, Transport, TransportError};
use beeline_replicated_service::Machine;

enum Media {
    Live(SimDevice),
    Left(CrashImage),
}

/// Simulated pools by path, which outlive processes and in part losses of power.
#[derive(Default)]
pub struct SimGround {
    media: Mutex<BTreeMap<PathBuf, Media>>,
    drawn: Mutex<u64>,
}

impl fmt::Debug for SimGround {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SimGround")
    }
}

impl SimGround {
    pub fn new(seed: u64) -> Self {
        Self { drawn: Mutex::new(seed << 8 | 1), ..Self::default() }
    }

    /// The process ends now; with `power`, what was not written back is there in part.
    pub fn crash(&self, power: bool, seed: u64) {
        for media in self.media.lock().unwrap().values_mut() {
            let Media::Live(device) = media else { continue };
            let kind = if power { CrashKind::Power } else { CrashKind::Process };
            let limits = CrashLimits { kind, images_per_point: 2, points: 1, seed };
            let image = if power {
                let mut images = device.crash_images(device.position(), &limits);
                let chosen = seed as usize % images.len();
                images.swap_remove(chosen)
            } else {
                device.image_of_everything()
            };
            *media = Media::Left(image);
        }
    }
}

impl Ground for SimGround {
    fn create_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError> {
        let (pool, device) = Pool::simulated(options)?;
        self.media.lock().unwrap().insert(path.to_owned(), Media::Live(device));
        Ok(pool)
    }

    fn open_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError> {
        let mut media = self.media.lock().unwrap();
        let media = media.get_mut(path).unwrap();
        let image = match media {
            Media::Live(device) => device.image_of_everything(),
            Media::Left(image) => image.clone(),
        };
        let (pool, device) = Pool::open_image(&image, options)?;
        *media = Media::Live(device);
        Ok(pool)
    }

    fn draw(&self) -> io::Result<u64> {
        let mut drawn = self.drawn.lock().unwrap();
        *drawn += 1;
        Ok(*drawn)
    }

    fn boot(&self) -> Boot {
        Boot::named("simulated")
    }
}

/// Jobs that wait for the world to run them.
#[derive(Default)]
pub struct SimJobs(pub Mutex<Vec<Job>>);

impl fmt::Debug for SimJobs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SimJobs")
    }
}

impl Jobs for SimJobs {
    fn run(&self, _name: &str, job: Job) -> io::Result<()> {
        self.0.lock().unwrap().push(job);
        Ok(())
    }
}

/// A member, as others find it.
pub type Found = (Rc<RefCell<Node<Machine>>>, Handle);

/// Which member answers at an address, which links are cut, and what time it is.
#[derive(Default)]
pub struct Directory {
    pub sites: BTreeMap<u16, Found>,
    pub cut: BTreeSet<(u16, u16)>,
    pub paused: BTreeSet<u16>,
    pub now_ns: u64,
    pub errors: Vec<String>,
}

impl Directory {
    pub fn passes(&self, from: u16, to: u16) -> bool {
        !self.cut.contains(&(from.min(to), from.max(to))) && !self.paused.contains(&to)
    }
}

thread_local! {
    /// A transport is called on threads, and nodes stay on theirs: here both are this one.
    pub static DIRECTORY: RefCell<Directory> = RefCell::default();
}

/// Leads to the other sites of this thread.
#[derive(Debug)]
pub struct SimTransport(pub u16);

impl Transport for SimTransport {
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError> {
        let to: u16 = address.parse().unwrap();
        let found = DIRECTORY.with_borrow(|directory| {
            let site = directory.sites.get(&to).filter(|_| directory.passes(self.0, to));
            site.map(|(node, handle)| (Rc::clone(node), handle.clone(), directory.now_ns))
        });
        let unreachable = |reason: &str| TransportError::Unreachable {
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let (node, handle, now_ns) = found.ok_or_else(|| unreachable("not there"))?;
        let answer = Arc::new(Mutex::new(None));
        let told = Arc::clone(&answer);
        handle.accept(info.clone(), hello.to_vec(), move |said| *told.lock().unwrap() = Some(said));
        if let Err(error) = node.borrow_mut().turn(now_ns) {
            DIRECTORY.with_borrow_mut(|directory| directory.errors.push(error.to_string()));
        }
        let said = answer.lock().unwrap().take();
        said.ok_or_else(|| unreachable("no answer"))?
            .map_err(|reason| TransportError::Refused { address: address.to_owned(), reason })
    }
}
