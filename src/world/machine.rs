//! Opens what this rank will work with: the device runtime that the settings ask for, and its devices.

use std::sync::Arc;

use super::meet::Seat;
use super::{Inventory, ShareVia, host};
use crate::config::options::{Backend, Options};
use crate::error::{Error, ExitCode};
use crate::fault::Faults;
use crate::gpu::Driver;
use crate::gpu::faulty::Faulty;
use crate::gpu::host::HostDriver;
use crate::gpu::owner::Device;

/// A rank's own machine: what it has, and the handles to use it.
pub struct Machine {
    pub inventory: Inventory,
    /// By `DeviceId`.
    pub devices: Vec<Arc<Device>>,
    pub faults: Faults,
    seat: Seat,
}

impl Machine {
    /// # Errors
    /// If the host cannot be read, or a backend that was asked for by name is not there (exit 7).
    pub fn open(options: &Options, faults: Faults) -> Result<Machine, Error> {
        let mut inventory = host::inventory()?;
        let devices = match open_driver(options, &faults)? {
            Some(driver) => Device::all(&driver)?,
            None => Vec::new(),
        };
        if devices.is_empty() {
            inventory.devices_absent = Some(match options.backend {
                Backend::Host => "host.devices is 0".to_owned(),
                _ => "this build has no GPU driver; backend = \"host\" emulates devices".to_owned(),
            });
        }
        inventory.devices = devices.iter().map(|device| device.info().clone()).collect();
        // Alone until the ranks have met.
        let seat = Seat { via: ShareVia::Memfd, position: 0, neighbours: 1 };
        Ok(Machine { inventory, devices, faults, seat })
    }

    /// Takes the seat that `meet` has found.
    pub fn seated(self, seat: Seat) -> Machine {
        Machine { seat, ..self }
    }

    /// How host memory is shared with the other ranks of the host.
    pub fn via(&self) -> ShareVia {
        self.seat.via
    }

    /// CPUs that a CPU executor of a node pins its threads to, in this order. Ranks that may use
    /// the same CPUs start at different ones, so that they do not meet on the first.
    pub fn cpus_for_threads(&self, node: u32) -> Vec<u32> {
        let mut cpus = self.inventory.numa[node as usize].cpus_allowed.clone();
        let start = cpus.len() * self.seat.position as usize / self.seat.neighbours as usize;
        cpus.rotate_left(start);
        cpus
    }

    /// The device behind a number of the notation, which planning has checked.
    pub fn device(&self, index: u32) -> &Arc<Device> {
        &self.devices[index as usize]
    }
}

fn open_driver(options: &Options, faults: &Faults) -> Result<Option<Arc<dyn Driver>>, Error> {
    let absent = |name: &str| {
        Err(Error::new(format!(
            "backend = \"{name}\": this build has no {name} driver; use backend = \"auto\" (host memory) or \"host\" (emulated devices)"
        ))
        .with_exit(ExitCode::NothingRan))
    };
    match options.backend {
        // The emulated driver is never chosen silently.
        Backend::Auto => Ok(None),
        Backend::Hip => absent("hip"),
        Backend::Cuda => absent("cuda"),
        Backend::Host => {
            let driver = HostDriver::new(options.host_devices, options.host_memory);
            Ok(Some(Arc::new(Faulty::new(driver, faults.clone()))))
        }
    }
}
