//! From the `[objects]` table to the running object store.

use std::path::PathBuf;
use std::time::Duration;

use beeline_objects::{Alone, NAME, ObjectService, StoreOptions};
use beeline_service::{Opening, Service};

use crate::config::ServeConfig;
use crate::config::values::{Auto, Size};

/// Longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Where the store of a node with this configuration listens.
pub fn socket(config: &ServeConfig) -> PathBuf {
    match &config.objects.socket {
        Auto::Set(path) => path.clone(),
        Auto::Detect => config.data.join("objects.sock"),
    }
}

/// The service.
pub fn opening(config: &ServeConfig) -> Opening {
    let options = options(config);
    let open = move || {
        let length = options.socket.as_os_str().len();
        if length > LONGEST_SOCKET {
            let path = options.socket.display();
            return Err(format!(
                "the socket's path {path} has {length} bytes, of which the kernel takes \
                 {LONGEST_SOCKET}; choose a shorter one with --objects-socket"
            )
            .into());
        }
        if let Some(folder) = options.socket.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let service = ObjectService::open(options, |handle| Box::new(Alone(handle)), Vec::new())?;
        Ok(Box::new(service) as Box<dyn Service>)
    };
    Opening { name: NAME, after: &[], open: Box::new(open) }
}

fn options(config: &ServeConfig) -> StoreOptions {
    let objects = &config.objects;
    let memory_bytes = match objects.memory {
        Auto::Set(Size(bytes)) => bytes,
        Auto::Detect => super::plan::memory_bytes() / 4,
    };
    let spill_bytes = match objects.disk {
        Auto::Set(Size(bytes)) => bytes,
        Auto::Detect => {
            let place = crate::doctor::existing(&config.data);
            let free = crate::doctor::free_bytes(&place).unwrap_or(0);
            (free / 2).min(memory_bytes.saturating_mul(4))
        }
    };
    StoreOptions {
        socket: socket(config),
        socket_mode: objects.socket_mode.0,
        memory_bytes,
        spill_directory: config.data.join("objects-spilled"),
        spill_bytes,
        spin: Duration::from_micros(objects.spin_us.0.into()),
        max_clients: objects.max_clients.0 as usize,
    }
}
