//! Interrupts of a shared-memory device between virtual machines (`ivshmem-doorbell`), through the
//! kernel's vfio-pci: the device is bound to that driver, and each doorbell has a vector that raises an eventfd, as far
//! as the device has vectors. One program of a host can have them.
//!
//! Registers of BAR 0: at 8 this machine's number, at 12 the doorbell: the number of a machine in
//! the upper half, the vector to raise there in the lower. Each end finds the other's number and vectors in the
//! [directory](crate::directory): an end raises the vectors that its own device and the other one have.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};

use crate::directory::{Interrupted, Portion, interrupted_in};
use crate::window::{Bells, Inbound};

const OWN_NUMBER_AT: u64 = 8;
const DOORBELL_AT: u64 = 12;

// Of the kernel's interface, linux/vfio.h.
const CHECK_EXTENSION: libc::c_ulong = 0x3b65;
const SET_IOMMU: libc::c_ulong = 0x3b66;
const GROUP_GET_STATUS: libc::c_ulong = 0x3b67;
const GROUP_SET_CONTAINER: libc::c_ulong = 0x3b68;
const GROUP_GET_DEVICE: libc::c_ulong = 0x3b6a;
const DEVICE_GET_REGION: libc::c_ulong = 0x3b6c;
const DEVICE_GET_IRQ_INFO: libc::c_ulong = 0x3b6d;
const DEVICE_SET_IRQS: libc::c_ulong = 0x3b6e;
const TYPE1_IOMMU: libc::c_ulong = 1;
const GROUP_IS_VIABLE: u32 = 1;
const CONFIGURATION_REGION: u32 = 7;
const MSIX: u32 = 2;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_TRIGGER: u32 = 1 << 5;

/// Of the PCI configuration space.
const COMMAND_AT: u64 = 4;
const BUS_MASTER: u16 = 1 << 2;

#[repr(C)]
struct GroupStatus {
    bytes: u32,
    flags: u32,
}

#[repr(C)]
struct Region {
    bytes: u32,
    flags: u32,
    index: u32,
    capabilities: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
struct IrqInfo {
    bytes: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
struct Vectors {
    bytes: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    eventfds: [i32; crate::directory::BELLS],
}

/// The device, open for interrupts.
#[derive(Debug)]
pub(crate) struct Interrupts {
    device: File,
    /// Where BAR 0 lies in `device`.
    registers: u64,
    /// Of the vectors from 0 on: bit 0 of the bells has the first.
    rung: Vec<OwnedFd>,
    number: u16,
    /// Where the other end says its number.
    page: Inbound,
    portion: Portion,
    // Closed last: the device belongs to the group, the group to the container.
    _group: File,
    _container: File,
}

fn call<T>(file: &File, request: libc::c_ulong, argument: *mut T) -> io::Result<i32> {
    // SAFETY: each caller passes what the request takes (linux/vfio.h), valid for the call: a
    // number, or a structure that says its own length.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn number(value: libc::c_ulong) -> *mut libc::c_void {
    std::ptr::without_provenance_mut(value as usize)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn other(what: &str) -> io::Error {
    io::Error::other(what.to_owned())
}

fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

fn region(device: &File, index: u32) -> io::Result<u64> {
    let bytes = size::<Region>();
    let mut region = Region { bytes, flags: 0, index, capabilities: 0, size: 0, offset: 0 };
    call(device, DEVICE_GET_REGION, &raw mut region)?;
    Ok(region.offset)
}

impl Interrupts {
    /// The interrupts of the device that has `resource` among its files, for `bells` doorbells of `portion`, whose other
    /// end writes `page`; `None` where another driver than vfio-pci, or none, has the device.
    ///
    /// Errors: the kernel's, from a device bound to vfio-pci that cannot be had (another program
    /// has it, no right to its group).
    pub(crate) fn open(
        resource: &Path,
        bells: usize,
        (page, portion): (Inbound, Portion),
    ) -> io::Result<Option<Self>> {
        let resource = resource.canonicalize()?;
        let Some(device) = resource.parent() else { return Ok(None) };
        let driver = std::fs::read_link(device.join("driver")).unwrap_or_default();
        let (true, Some(name)) = (driver.ends_with("vfio-pci"), device.file_name()) else {
            return Ok(None);
        };
        let group = std::fs::read_link(device.join("iommu_group"))?;
        let group = group.file_name().ok_or_else(|| other("a group without a name"))?;
        let group = open(&Path::new("/dev/vfio").join(group))?;
        let container = open(Path::new("/dev/vfio/vfio"))?;
        if call(&container, CHECK_EXTENSION, number(TYPE1_IOMMU))? == 0 {
            return Err(other("vfio has no type 1 IOMMU here"));
        }
        let mut status = GroupStatus { bytes: size::<GroupStatus>(), flags: 0 };
        call(&group, GROUP_GET_STATUS, &raw mut status)?;
        if status.flags & GROUP_IS_VIABLE == 0 {
            return Err(other("other devices of its IOMMU group have other drivers"));
        }
        let mut descriptor = container.as_raw_fd();
        call(&group, GROUP_SET_CONTAINER, &raw mut descriptor)?;
        call(&container, SET_IOMMU, number(TYPE1_IOMMU))?;
        let mut text = name.as_encoded_bytes().to_vec();
        text.push(0);
        let device = call(&group, GROUP_GET_DEVICE, text.as_mut_ptr())?;
        // SAFETY: the call gave us this descriptor, and nobody else knows it.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(device) });
        let registers = region(&device, 0)?;
        // An interrupt is a write by the device.
        let configuration = region(&device, CONFIGURATION_REGION)?;
        let mut command = [0; 2];
        device.read_exact_at(&mut command, configuration + COMMAND_AT)?;
        let command = u16::from_le_bytes(command) | BUS_MASTER;
        device.write_all_at(&command.to_le_bytes(), configuration + COMMAND_AT)?;
        let mut info = IrqInfo { bytes: size::<IrqInfo>(), flags: 0, index: MSIX, count: 0 };
        call(&device, DEVICE_GET_IRQ_INFO, &raw mut info)?;
        let count = bells.min(info.count as usize).min(crate::directory::BELLS);
        let fresh = |_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let rung = (0..count).map(fresh).collect::<Result<Vec<_>, _>>()?;
        let mut vectors = Vectors {
            bytes: size::<Vectors>(),
            flags: DATA_EVENTFD | ACTION_TRIGGER,
            index: MSIX,
            start: 0,
            count: u32::try_from(count).unwrap_or(0),
            eventfds: [-1; crate::directory::BELLS],
        };
        for (place, eventfd) in vectors.eventfds.iter_mut().zip(&rung) {
            *place = eventfd.as_raw_fd();
        }
        call(&device, DEVICE_SET_IRQS, &raw mut vectors)?;
        let mut own = [0; 4];
        device.read_exact_at(&mut own, registers + OWN_NUMBER_AT)?;
        let number = u16::try_from(u32::from_le_bytes(own))
            .map_err(|_| other("the device has no number yet: its server is not there"))?;
        let (_group, _container) = (group, container);
        Ok(Some(Self { device, registers, rung, number, page, portion, _group, _container }))
    }

    /// How this end is interrupted, for the other one.
    pub(crate) fn interrupted(&self) -> Interrupted {
        let vectors = u8::try_from(self.rung.len()).unwrap_or(0);
        Interrupted { number: self.number, vectors }
    }

    /// Doorbells that have a vector.
    pub(crate) fn vectors(&self) -> usize {
        self.rung.len()
    }
}

impl Bells for Interrupts {
    fn ring(&self, bit: usize) {
        // Another end that names another machine has that one look in vain.
        let Some(peer) = interrupted_in(&self.page, self.portion) else { return };
        // A device knows no more vectors of another one than it has itself.
        if bit >= self.rung.len() {
            return;
        }
        let word = u32::from(peer.number) << 16 | u32::try_from(bit).unwrap_or(0);
        let written = self.device.write_all_at(&word.to_le_bytes(), self.registers + DOORBELL_AT);
        if let Err(error) = written {
            tracing::debug!(%error, "the doorbell's register");
        }
    }

    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>> {
        Some(self.rung.get(bit)?.as_fd())
    }

    fn clear(&self, bit: usize) {
        if let Some(rung) = self.rung.get(bit) {
            let _ = rustix::io::read(rung, &mut [0_u8; 8]);
        }
    }

    fn is_rung(&self, bit: usize) -> bool {
        // Another end with interrupts can raise this one's, as far as it has vectors itself.
        let other = interrupted_in(&self.page, self.portion);
        bit < self.rung.len() && other.is_some_and(|other| bit < usize::from(other.vectors))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::directory::{Directory, Kind, PAGE_BYTES};
    use crate::window::{Mapped, Outbound};

    #[test]
    fn a_bell_is_rung_only_where_the_other_end_has_its_vector_too() {
        let memory = Arc::new(beeline_os::Mapping::anonymous(2 * PAGE_BYTES).unwrap());
        let part = |at| Inbound::new(Arc::clone(&memory), at, PAGE_BYTES);
        let file = || tempfile::tempfile().unwrap();
        let vectors = |count| {
            let fresh = |_| eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            Interrupts {
                device: file(),
                registers: 0,
                rung: (0..count).map(fresh).collect(),
                number: 7,
                page: part(0),
                portion: Portion::WHOLE,
                _group: file(),
                _container: file(),
            }
        };
        let (near, far) = (vectors(9), vectors(2));
        assert!(!near.is_rung(0), "the other end is not there yet");
        let announce = |by| {
            let far = Outbound::new(Arc::new(Mapped::new(Arc::clone(&memory), 0, PAGE_BYTES)));
            Directory::new(part(PAGE_BYTES), far, Kind::Sockets, Portion::WHOLE, by).announce();
        };
        let rung = |near: &Interrupts| (0..10).filter(|&bit| near.is_rung(bit)).count();
        announce(Some(far.interrupted()));
        assert_eq!(rung(&near), 2, "as many vectors as the other end has");
        announce(Some(vectors(16).interrupted()));
        assert_eq!(rung(&near), 9, "as many as this end has");
        announce(None);
        assert_eq!(rung(&near), 0, "the other end begins anew, without interrupts");
    }

    #[test]
    fn a_device_without_the_driver_has_no_interrupts_and_one_that_cannot_be_had_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let resource = folder.path().join("resource2");
        std::fs::write(&resource, "").unwrap();
        let memory = Arc::new(beeline_os::Mapping::anonymous(4096).unwrap());
        let open = |resource: &Path| {
            let page = Inbound::new(Arc::clone(&memory), 0, 4096);
            Interrupts::open(resource, 1, (page, Portion::WHOLE))
        };
        assert!(open(&resource).unwrap().is_none());
        let drivers = folder.path().join("drivers/vfio-pci");
        std::fs::create_dir_all(&drivers).unwrap();
        std::os::unix::fs::symlink(&drivers, folder.path().join("driver")).unwrap();
        assert!(open(&resource).is_err(), "it has no group");
        std::os::unix::fs::symlink("/nowhere/999999", folder.path().join("iommu_group")).unwrap();
        assert!(open(&resource).is_err(), "its group cannot be opened");
    }
}
