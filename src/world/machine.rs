//! Opens what this rank will work with: the device runtime that the settings ask for, and its devices.

use std::sync::Arc;

use super::meet::Seat;
use super::{Inventory, ShareVia, host};
use crate::config::options::{Backend, Options};
use crate::error::Error;
#[cfg(not(feature = "hip"))]
use crate::error::ExitCode;
use crate::fault::Faults;
use crate::gpu::Driver;
use crate::gpu::cuda::CudaDriver;
use crate::gpu::faulty::Faulty;
use crate::gpu::host::HostDriver;
use crate::gpu::owner::Device;
use crate::units::Bytes;

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
        let (driver, absent) = open_driver(options, &faults)?;
        let devices = driver.map_or(Ok(Vec::new()), |driver| Device::all(&driver))?;
        inventory.devices_absent = devices.is_empty().then_some(absent);
        inventory.devices = devices.iter().map(|device| device.info().clone()).collect();
        // Alone until the ranks have met.
        let seat = Seat { via: ShareVia::Memfd, position: 0, neighbours: 1 };
        Ok(Machine { inventory, devices, faults, seat })
    }

    /// Takes what `meet` has found: the seat, and the devices that are this rank's (positions in
    /// `devices`, in order).
    pub fn seated(mut self, seat: Seat, kept: &[u32]) -> Machine {
        self.inventory.keep(kept);
        let mut position = 0..;
        self.devices.retain(|_| position.next().is_some_and(|position| kept.contains(&position)));
        Machine { seat, ..self }
    }

    /// By device: memory that is free, or all of it where the runtime does not tell. Asking makes a
    /// context on a device, so only a rank that keeps it asks.
    pub fn devices_free(&self) -> Vec<Bytes> {
        let free = |device: &Arc<Device>| {
            let total = device.info().memory_total;
            // A device that no test uses may be out of order.
            device.memory_free().unwrap_or_else(|err| {
                tracing::warn!(
                    "free memory of device {}: {err}; counting with all that it has, {total}",
                    device.id().0
                );
                total
            })
        };
        self.devices.iter().map(free).collect()
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

type Opened = (Option<Arc<dyn Driver>>, String);

/// The driver of the backend, or none where "auto" finds nothing; and why there may be no device.
fn open_driver(options: &Options, faults: &Faults) -> Result<Opened, Error> {
    match options.backend {
        // The emulated driver is never chosen silently.
        Backend::Auto => {
            let mut reasons = Vec::new();
            for open in [cuda, hip] {
                match open(faults) {
                    Ok(driver) => return Ok((Some(driver), String::new())),
                    Err(err) => reasons.push(err.to_string()),
                }
            }
            let reasons = reasons.join("; ");
            Ok((None, format!("{reasons}; backend = \"host\" emulates devices")))
        }
        Backend::Cuda => named("cuda", cuda(faults)),
        Backend::Hip => named("hip", hip(faults)),
        Backend::Host => {
            let driver = HostDriver::new(options.host_devices, options.host_memory);
            Ok((Some(Arc::new(Faulty::new(driver, faults.clone()))), "host.devices is 0".to_owned()))
        }
    }
}

fn named(name: &str, driver: Result<Arc<dyn Driver>, Error>) -> Result<Opened, Error> {
    let driver = driver.map_err(|err| err.context(format!("backend = \"{name}\"")))?;
    Ok((Some(driver), String::new()))
}

fn cuda(faults: &Faults) -> Result<Arc<dyn Driver>, Error> {
    Ok(Arc::new(Faulty::new(CudaDriver::open()?, faults.clone())))
}

#[cfg(feature = "hip")]
fn hip(faults: &Faults) -> Result<Arc<dyn Driver>, Error> {
    Ok(Arc::new(Faulty::new(crate::gpu::hip::HipDriver::open()?, faults.clone())))
}

#[cfg(not(feature = "hip"))]
fn hip(_: &Faults) -> Result<Arc<dyn Driver>, Error> {
    let message = "this build lacks HIP: build it with --features hip";
    Err(Error::new(message).with_exit(ExitCode::NothingRan))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_keeps_the_devices_that_are_its_own() {
        let options = Options { backend: Backend::Host, host_devices: 4, ..Options::default() };
        let machine = Machine::open(&options, Faults::default()).unwrap();
        let alone = Seat { via: ShareVia::Memfd, position: 0, neighbours: 1 };
        let machine = machine.seated(alone, &[1, 3]);
        let ids: Vec<u32> = machine.devices.iter().map(|device| device.id().0).collect();
        assert_eq!(ids, [1, 3]);
        assert_eq!(machine.device(1).info(), &machine.inventory.devices[1]);
        assert_eq!(machine.inventory.devices_absent, None);
        let machine = machine.seated(alone, &[]);
        assert!(machine.inventory.devices_absent.unwrap().contains("ranks.gpus"));
    }
}
