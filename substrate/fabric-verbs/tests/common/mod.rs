//! Two ends on the RDMA device of this machine, for tests of the provider.

use std::io::Write as _;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, Device, LocalData, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairOptions, Role, WorkCompletion,
};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice, VerbsError};

pub const BOUND: Duration = Duration::from_secs(30);

/// One at a time: some take the port down.
static TURN: Mutex<()> = Mutex::new(());

/// The device, and the turn; `None` where there is no device.
pub fn device() -> Option<(Arc<dyn Device>, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match VerbsDevice::open(VerbsConfig::default()) {
        Ok(device) => Some((device, turn)),
        Err(VerbsError::Missing(missing)) => {
            let _ = writeln!(std::io::stderr(), "skipped: {missing}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub struct End {
    pub domain: Arc<dyn ProtectionDomain>,
    pub device: Arc<dyn Device>,
    pub queue: Rc<dyn CompletionQueue>,
    pub pair: Box<dyn QueuePair>,
}

impl End {
    pub fn new(device: &Arc<dyn Device>, options: QueuePairOptions) -> Self {
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(256).unwrap();
        let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        Self { domain, device: Arc::clone(device), queue, pair }
    }

    pub fn region(&self, length: usize) -> MemoryRegion {
        let memory = self.device.allocate_memory(length).unwrap();
        self.domain.register(memory, Access::all()).unwrap()
    }

    pub fn one(&self) -> WorkCompletion {
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(self.queue.wait(&mut one, BOUND).unwrap(), 1, "a completion in time");
        one[0]
    }
}

pub fn join(a: &mut dyn QueuePair, b: &mut dyn QueuePair) {
    b.connect(&a.connect_info(), Role::Passive).unwrap();
    a.connect(&b.connect_info(), Role::Active).unwrap();
    a.wait_connected(BOUND).unwrap();
    b.wait_connected(BOUND).unwrap();
}

pub fn linked(options: QueuePairOptions) -> Option<(End, End, MutexGuard<'static, ()>)> {
    let (near, turn) = device()?;
    let far = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let (mut a, mut b) = (End::new(&near, options), End::new(&far, options));
    join(a.pair.as_mut(), b.pair.as_mut());
    Some((a, b, turn))
}

pub fn write(target: &MemoryRegion, bytes: &'static [u8]) -> Operation<'static> {
    Operation::Write { local: LocalData::Inline(bytes), remote: target.remote_address(0) }
}
