//! Memory windows: one device of this process for each end, and how a client finds the window that
//! leads to a service.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use beeline_fabric::{Device, FabricError};
use beeline_fabric_ntb::{
    FixedWindow, NodeName, NtbConfig, NtbDevice, Port, Portion, Side, announced, detect,
};
use serde::{Deserialize, Serialize};

use crate::error::OpenError;
use crate::providers::ntb_config;
use crate::url::{WindowFile, split};

/// What a service says of its end of a memory window, so that a client finds the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowEnd {
    /// How it announces itself there.
    pub node: NodeName,
    /// Which end it has: 0 or 1.
    pub side: u8,
    /// Which part of the window, and of how many.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub part: (u8, u8),
}

fn whole() -> (u8, u8) {
    Portion::WHOLE.numbers()
}

fn is_whole(part: &(u8, u8)) -> bool {
    *part == whole()
}

impl WindowEnd {
    /// The client's end.
    fn other(&self) -> Side {
        if self.side == 0 { Side::Second } else { Side::First }
    }

    /// Its part of the window; the whole of it for nonsense.
    fn portion(&self) -> Portion {
        Portion::new(self.part.0, self.part.1).unwrap_or_default()
    }
}

/// A memory window to serve clients through.
#[derive(Clone, Debug)]
pub struct ServedWindow {
    /// To offer.
    pub device: Arc<dyn Device>,
    /// For [`crate::BootstrapConfig::window`]; `None` for the emulation, which needs no finding.
    pub end: Option<WindowEnd>,
}

/// Fixed windows this process has open: all of its clients share an end.
static OPEN: Mutex<Vec<(FixedWindow, Weak<NtbDevice>)>> = Mutex::new(Vec::new());

/// The device over `config`'s port; over a fixed window, the one that is open already if there is
/// one.
pub(crate) fn device(config: NtbConfig) -> Result<Arc<NtbDevice>, FabricError> {
    let Port::Fixed(fixed) = config.port.clone() else { return NtbDevice::open(config) };
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|(_, device)| device.strong_count() > 0);
    let known = open.iter().find(|(known, _)| *known == fixed);
    if let Some(device) = known.and_then(|(_, device)| device.upgrade()) {
        return Ok(device);
    }
    let device = NtbDevice::open(config)?;
    open.push((fixed, Arc::downgrade(&device)));
    Ok(device)
}

/// Opens a window to serve clients through: `ntb://` (the emulation) or `ntb:///FILE?…`, of which
/// this is side 0 unless it says otherwise.
///
/// Errors: [`OpenError::Url`], [`OpenError::Fabric`].
pub fn open_window(url: &str) -> Result<ServedWindow, OpenError> {
    let bad = |reason| OpenError::Url { url: url.to_owned(), reason };
    let Some(("ntb", rest)) = split(url) else { return Err(bad("a window is served by ntb://")) };
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let has_side = query.split('&').any(|pair| pair.starts_with("side="));
    let rest = match (path, has_side) {
        ("", _) | (_, true) => rest.to_owned(),
        (path, false) => format!("{path}?side=0&{query}"),
    };
    let config = ntb_config(&rest).map_err(bad)?;
    let place = match &config.port {
        Port::Fixed(fixed) => Some((u8::from(fixed.side == Side::Second), fixed.portion.numbers())),
        Port::Emulated { .. } => None,
    };
    let device = device(config)?;
    let end = place.map(|(side, part)| WindowEnd { node: device.node(), side, part });
    Ok(ServedWindow { device, end })
}

/// Files of this host that may be windows.
fn candidates(sys: &Path) -> Vec<PathBuf> {
    detect::devices(sys).into_iter().filter_map(|device| device.window).collect()
}

/// True when there is a window to offer.
pub(crate) fn is_there(named: Option<&WindowFile>) -> bool {
    named.is_some() || !candidates(Path::new("/sys")).is_empty()
}

fn port_config(fixed: FixedWindow) -> NtbConfig {
    NtbConfig { port: Port::Fixed(fixed), ..NtbConfig::default() }
}

/// The device towards a service that has `end`, or emulates.
///
/// Errors: [`FabricError`]; a window that leads elsewhere is not opened, because opening writes.
pub(crate) fn towards(
    end: Option<&WindowEnd>,
    named: Option<&WindowFile>,
) -> Result<Arc<NtbDevice>, FabricError> {
    let elsewhere = |what: &str| FabricError::System {
        action: "finding the memory window that leads to the service",
        source: std::io::Error::new(std::io::ErrorKind::NotFound, what.to_owned()),
    };
    let Some(end) = end else {
        return match named {
            None => device(NtbConfig::default()),
            Some(_) => Err(elsewhere("the service emulates its window; name none")),
        };
    };
    let shows = |fixed: &FixedWindow| {
        let seen = announced(fixed, &port_config(fixed.clone()));
        seen.map(|node| node == Some(end.node))
    };
    if let Some(named) = named {
        let fixed = FixedWindow {
            inbound: named.inbound.clone(),
            outbound: named.outbound.clone(),
            side: named.side.unwrap_or(end.other()),
            portion: end.portion(),
        };
        return match shows(&fixed)? {
            true => device(port_config(fixed)),
            false => Err(elsewhere("the service is not seen in the one the address names")),
        };
    }
    for inbound in candidates(Path::new("/sys")) {
        let (side, portion) = (end.other(), end.portion());
        let fixed = FixedWindow { inbound, outbound: None, side, portion };
        match shows(&fixed) {
            Ok(true) => return device(port_config(fixed)),
            Ok(false) => {}
            Err(error) => {
                let file = fixed.inbound.display();
                tracing::debug!(%error, %file, "a device that is no window for us");
            }
        }
    }
    Err(elsewhere("the service is seen in none of this host's; an address names one by ?window="))
}
