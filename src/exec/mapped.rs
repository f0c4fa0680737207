//! Makes the memory of a device executor's transfers reachable by its device, at the addresses it has there.

use std::sync::Arc;

use super::BoundTransfer;
use crate::error::Error;
use crate::gpu::DeviceId;
use crate::gpu::owner::{Device, Registration};
use crate::memory::rotating::Rotating;
use crate::plan::rotation::Layout;
use crate::region::{Address, Region, Space};

/// A buffer as the device sees it.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    start: Address,
    layout: Layout,
}

impl Slices {
    /// Where the n-th execution reads or writes.
    pub fn slice(&self, n: u64) -> Address {
        Address(self.start.0 + self.layout.slice_offset(n))
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Both sides of a transfer as the device sees them.
#[derive(Debug)]
pub struct Sides {
    pub srcs: Vec<Slices>,
    pub dsts: Vec<Slices>,
}

/// Keeps memory mapped, and host memory registered.
pub struct Reach {
    /// Before the regions: unregistered first.
    registrations: Vec<Registration>,
    regions: Vec<Region>,
}

impl Reach {
    /// # Errors
    /// If the device cannot reach one of the buffers; the message names it.
    pub fn new(transfers: &[BoundTransfer], device: &Arc<Device>) -> Result<(Reach, Vec<Sides>), Error> {
        let mut reach = Reach { registrations: Vec::new(), regions: Vec::new() };
        let mut sides = Vec::with_capacity(transfers.len());
        for transfer in transfers {
            let mut side = |name: &str, buffers: &[Rotating]| {
                let slices = buffers.iter().enumerate().map(|(ordinal, buffer)| {
                    let name = || {
                        format!("reach {name} {ordinal} of transfer {} ({})", transfer.index, buffer.layout().total())
                    };
                    reach.add(buffer, device).map_err(|err| err.context(name()))
                });
                slices.collect::<Result<Vec<Slices>, Error>>()
            };
            sides.push(Sides { srcs: side("source", &transfer.srcs)?, dsts: side("destination", &transfer.dsts)? });
        }
        Ok((reach, sides))
    }

    fn add(&mut self, buffer: &Rotating, device: &Arc<Device>) -> Result<Slices, Error> {
        let region = buffer.region();
        let start = match region.space() {
            Space::Host => self.register(region, device)?,
            Space::Device { device: owner, .. } => {
                if owner != device.id().0 {
                    device.enable_peer(DeviceId(owner))?;
                }
                region.address()
            }
        };
        self.regions.push(region.clone());
        Ok(Slices { start, layout: *buffer.layout() })
    }

    /// A runtime registers a range once; transfers may share it.
    fn register(&mut self, region: &Region, device: &Arc<Device>) -> Result<Address, Error> {
        let same = |known: &&Registration| {
            (known.region().address(), known.region().bytes()) == (region.address(), region.bytes())
        };
        if let Some(known) = self.registrations.iter().find(same) {
            return Ok(known.address());
        }
        let registration = device.register(region)?;
        let address = registration.address();
        self.registrations.push(registration);
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Options;
    use crate::exec::{Executions, Ready, Work, copy_engine, kernel};
    use crate::fault::{Action, Faults};
    use crate::gpu::Driver;
    use crate::gpu::faulty::Faulty;
    use crate::gpu::host::HostDriver;
    use crate::place::{ExeKind, Executor, MemKind};
    use crate::plan::split::shares;
    use crate::units::{Bytes, Rank};

    const BYTES: Bytes = Bytes(4096);

    fn device(faults: Faults) -> Arc<Device> {
        let driver: Arc<dyn Driver> = Arc::new(Faulty::new(HostDriver::new(1, Bytes::mib(1)), faults));
        Device::all(&driver).unwrap().remove(0)
    }

    fn host(fill: u8) -> Rotating {
        let memory = Arc::new(vec![fill; BYTES.0 as usize]);
        let address = Address(memory.as_ptr().expose_provenance() as u64);
        let layout = Layout::new(BYTES, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO).unwrap();
        Rotating::new(Region::new(address, BYTES, Space::Host, memory), layout)
    }

    fn on_device(device: &Arc<Device>) -> Result<Rotating, Error> {
        let layout = Layout::new(BYTES, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO).unwrap();
        Ok(Rotating::new(device.allocate(MemKind::Device, BYTES, false)?.region(), layout))
    }

    fn work(kind: ExeKind, sides: &[(Vec<Rotating>, Vec<Rotating>)]) -> Work {
        let transfers = sides.iter().enumerate().map(|(index, (srcs, dsts))| BoundTransfer {
            index: index as u32,
            bytes: BYTES,
            srcs: srcs.clone(),
            dsts: dsts.clone(),
            shares: shares(BYTES, 2, Bytes(256)),
        });
        Work { exe: Executor { rank: Rank(0), kind, index: 0, sub_index: None }, transfers: transfers.collect() }
    }

    fn prepare(work: Work, device: &Arc<Device>) -> Result<Ready, Error> {
        match work.exe.kind {
            ExeKind::Kernel => kernel::Ready::new(work, &Options::default().gfx, device).map(Ready::Kernel),
            _ => copy_engine::Ready::new(work, device).map(Ready::CopyEngine),
        }
    }

    fn sample(ready: &mut Ready, first: u64) -> Result<(), Error> {
        ready.arm(Executions { first, count: 2 })?;
        ready.go()?;
        ready.wait()?;
        ready.times().map(|_| ())
    }

    fn refusal(kind: ExeKind, sides: (Vec<Rotating>, Vec<Rotating>)) -> String {
        let device = device(Faults::default());
        prepare(work(kind, &[sides]), &device).err().expect("the work is refused").to_string()
    }

    const KINDS: [ExeKind; 2] = [ExeKind::Kernel, ExeKind::CopyEngine];

    #[test]
    fn host_memory_is_read_and_written_and_then_let_go() {
        for kind in KINDS {
            let device = device(Faults::default());
            let (src, middle, dst) = (host(7), on_device(&device).unwrap(), host(0));
            let sides = [(vec![src.clone()], vec![middle.clone()]), (vec![src.clone()], vec![dst.clone()])];
            let mut ready = prepare(work(kind, &sides), &device).unwrap();
            sample(&mut ready, 0).unwrap();
            let mut seen = [0; BYTES.0 as usize];
            for buffer in [&middle, &dst] {
                device.read(buffer.slice(0), &mut seen).unwrap();
                assert_eq!(seen, [7; BYTES.0 as usize]);
            }
            drop(ready);
            assert!(device.read(dst.slice(0), &mut seen).is_err(), "still registered");
            device.register(dst.region()).unwrap();
        }
    }

    #[test]
    fn work_that_an_executor_cannot_do_is_refused() {
        let kernel = refusal(ExeKind::Kernel, ((0..9).map(host).collect(), vec![host(0)]));
        assert_eq!(kernel, "prepare R0G0: transfer 0 has 9 sources: a kernel takes at most 8");
        let kernel = refusal(ExeKind::Kernel, (vec![host(0)], (0..9).map(host).collect()));
        assert_eq!(kernel, "prepare R0G0: transfer 0 has 9 destinations: a kernel takes at most 8");
        let copies = refusal(ExeKind::CopyEngine, (vec![], vec![host(0)]));
        assert_eq!(copies, "prepare R0D0: transfer 0 has 0 sources: a copy engine takes exactly 1");
        let copies = refusal(ExeKind::CopyEngine, (vec![host(0), host(1)], vec![host(0)]));
        assert_eq!(copies, "prepare R0D0: transfer 0 has 2 sources: a copy engine takes exactly 1");
        let copies = refusal(ExeKind::CopyEngine, (vec![host(0)], vec![]));
        assert_eq!(copies, "prepare R0D0: transfer 0 has no destination: a copy engine needs one");
    }

    #[test]
    fn memory_that_cannot_be_reached_is_named() {
        let device = device(Faults::nth_of("register_host", 1, Action::Fail));
        let work = work(ExeKind::CopyEngine, &[(vec![host(0)], vec![host(1)])]);
        let err = prepare(work, &device).err().unwrap();
        let expected = "prepare R0D0: reach destination 0 of transfer 0 (4 KiB): injected fault";
        assert!(err.message().starts_with(expected), "{err}");
    }

    #[test]
    fn a_launch_that_did_not_happen_has_no_time() {
        let device = device(Faults::nth_of("launch", 1, Action::Drop));
        let sides = [(vec![on_device(&device).unwrap()], vec![on_device(&device).unwrap()])];
        let mut ready = prepare(work(ExeKind::Kernel, &sides), &device).unwrap();
        sample(&mut ready, 0).unwrap();
        let err = sample(&mut ready, 2).unwrap_err();
        assert!(err.message().contains("did not run"), "{err}");
        sample(&mut ready, 4).unwrap();
    }

    #[test]
    fn every_failing_call_is_reported_and_leaves_nothing_behind() {
        /// Two samples from device to host and device.
        fn run(device: &Arc<Device>, kind: ExeKind) -> Result<(), Error> {
            let sides = [(vec![on_device(device)?], vec![host(0), on_device(device)?])];
            let mut ready = prepare(work(kind, &sides), device)?;
            sample(&mut ready, 0)?;
            sample(&mut ready, 2)
        }
        for kind in KINDS {
            let counting = Faults::counting();
            let whole = device(counting.clone());
            let before = counting.calls();
            run(&whole, kind).unwrap();
            let calls = counting.calls() - before;
            assert!(calls > 20, "{calls} calls");
            let mut reported = 0;
            for nth in 0..calls {
                let device = device(Faults::nth(before + nth, Action::Fail));
                reported += u64::from(run(&device, kind).is_err());
                assert_eq!(device.memory_free(), Ok(Bytes::mib(1)), "call {nth} of {kind:?} failed");
            }
            // Only what the drops do can fail without an error: destroy for each stream,
            // destroy for each event, unregister, free.
            let drops = if kind == ExeKind::Kernel { 1 + 2 + 1 + 3 } else { 1 + 2 + 1 + 2 };
            assert_eq!(reported, calls - drops, "{kind:?}");
        }
    }
}
