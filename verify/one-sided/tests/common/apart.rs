//! A device that cannot reach the store's segments, as an RDMA device without on-demand paging
//! cannot reach memory of a DAX file system.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use beeline_fabric::{
    Access, CompletionQueue, Device, DeviceAttributes, FabricError, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairOptions, SharedReceiveQueue,
};
use beeline_os::MemoryObject;

type Own = Arc<Mutex<HashSet<usize>>>;

/// Registers memory it allocated itself, and no other.
#[derive(Debug)]
pub struct Apart {
    inner: Arc<dyn Device>,
    own: Own,
}

impl Apart {
    pub fn over(inner: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(Self { inner, own: Own::default() })
    }
}

impl Device for Apart {
    fn attributes(&self) -> &DeviceAttributes {
        self.inner.attributes()
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = self.inner.allocate_memory(length_bytes)?;
        self.own.lock().unwrap().insert(memory.base().addr().get());
        Ok(memory)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let inner = self.inner.allocate_protection_domain()?;
        Ok(Arc::new(ApartDomain { inner, own: Arc::clone(&self.own) }))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        self.inner.create_completion_queue(depth_entries)
    }
}

#[derive(Debug)]
struct ApartDomain {
    inner: Arc<dyn ProtectionDomain>,
    own: Own,
}

impl ProtectionDomain for ApartDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        if !self.own.lock().unwrap().contains(&memory.base().addr().get()) {
            let reason = "it is not this device's own";
            return Err(FabricError::CannotRegister { provider: "apart", access, reason });
        }
        self.inner.register(memory, access)
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        self.inner.create_shared_receive_queue(depth)
    }

    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        self.inner.create_queue_pair(send_queue, receive_queue, shared_receive_queue, options)
    }
}
