//! Reaches the bytes of a buffer that this rank owns: by the CPU, or through its device's driver.

use crate::error::Error;
use crate::fault::{Faults, Hit};
use crate::gpu::{DeviceId, Driver, StreamId};
use crate::memory::map;
use crate::region::{Address, Region};
use crate::units::Bytes;

/// A buffer and the way to its bytes. Every access has finished when it returns.
#[derive(Clone, Copy)]
pub struct Owned<'a> {
    region: &'a Region,
    device: Option<(&'a dyn Driver, DeviceId)>,
    faults: &'a Faults,
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub offset: u64,
    pub bytes: u64,
}

/// A copy within a buffer, from `from` to the start of `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCopy {
    pub to: Span,
    pub from: u64,
}

impl<'a> Owned<'a> {
    /// Memory that the CPU loads and stores, also of a device where it can.
    ///
    /// # Panics
    /// If the CPU cannot: who chose the way asked the region.
    pub fn by_cpu(region: &'a Region, faults: &'a Faults) -> Owned<'a> {
        assert!(region.cpu_can_access(), "the CPU reaches {region:?}");
        Owned { region, device: None, faults }
    }

    /// Memory of `device`, reached by copies.
    pub fn by_driver(region: &'a Region, driver: &'a dyn Driver, device: DeviceId, faults: &'a Faults) -> Owned<'a> {
        Owned { region, device: Some((driver, device)), faults }
    }

    pub fn bytes(&self) -> u64 {
        self.region.bytes().0
    }

    pub fn faults(&self) -> &'a Faults {
        self.faults
    }

    /// The address of a part that is inside.
    pub fn address(&self, span: Span) -> Address {
        self.region.part(span.offset, Bytes(span.bytes)).address()
    }

    /// Copies `bytes` to `offset`. Like every access, it passes the faults under the name `call`.
    ///
    /// # Errors
    /// What the driver says, or the injected failure.
    pub fn write(&self, call: &'static str, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        match self.faults.hit(call)? {
            Hit::Go => self.put(offset, bytes),
            Hit::Drop => Ok(()),
            Hit::Corrupt => self.put(offset, bytes).and_then(|()| self.flip(offset)),
        }
    }

    /// Copies from `offset` to fill `buf`.
    ///
    /// # Errors
    /// What the driver says, or the injected failure.
    pub fn read(&self, call: &'static str, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        match self.faults.hit(call)? {
            Hit::Go => self.get(offset, buf),
            Hit::Drop => Ok(()),
            Hit::Corrupt => {
                self.get(offset, buf)?;
                if let Some(byte) = buf.first_mut() {
                    *byte ^= 1;
                }
                Ok(())
            }
        }
    }

    /// Sets every byte of the spans.
    ///
    /// # Errors
    /// What the driver says, or the injected failure.
    pub fn fill(&self, call: &'static str, byte: u8, spans: impl IntoIterator<Item = Span>) -> Result<(), Error> {
        let spans = spans.into_iter().filter(|span| span.bytes > 0).map(|span| (span, span));
        self.queue(call, spans, |stream, span| match (self.device, stream) {
            (Some((driver, _)), Some(stream)) => driver.fill(stream, self.address(span), byte, Bytes(span.bytes)),
            _ => {
                map::fill(self.region, span.offset, Bytes(span.bytes), byte);
                Ok(())
            }
        })
    }

    /// Copies one after the other, each seeing what the ones before it wrote.
    ///
    /// # Errors
    /// What the driver says, or the injected failure.
    pub fn copy(&self, call: &'static str, copies: impl IntoIterator<Item = SpanCopy>) -> Result<(), Error> {
        let copies = copies.into_iter().map(|copy| (copy.to, copy));
        self.queue(call, copies, |stream, SpanCopy { to, from }| match (self.device, stream) {
            (Some((driver, _)), Some(stream)) => {
                let source = self.address(Span { offset: from, bytes: to.bytes });
                driver.copy(stream, self.address(to), source, Bytes(to.bytes))
            }
            _ => {
                let bytes = Bytes(to.bytes);
                map::copy(&self.region.part(to.offset, bytes), &self.region.part(from, bytes), bytes);
                Ok(())
            }
        })
    }

    /// Does all of `work`, each with what it writes, in order; on one stream for device memory.
    fn queue<T>(
        &self,
        call: &'static str,
        work: impl Iterator<Item = (Span, T)>,
        step: impl Fn(Option<StreamId>, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut corrupted = None;
        self.on_stream(|stream| {
            for (written, item) in work {
                match self.faults.hit(call)? {
                    Hit::Go => {}
                    Hit::Drop => continue,
                    Hit::Corrupt => corrupted = Some(written.offset),
                }
                step(stream, item)?;
            }
            Ok(())
        })?;
        corrupted.map_or(Ok(()), |offset| self.flip(offset))
    }

    fn on_stream(&self, work: impl FnOnce(Option<StreamId>) -> Result<(), Error>) -> Result<(), Error> {
        let Some((driver, device)) = self.device else { return work(None) };
        let stream = driver.stream_create(device)?;
        let worked = work(Some(stream));
        // What was queued before a failure still writes: it is waited for on that path too.
        let waited = driver.stream_wait(stream);
        let destroyed = driver.stream_destroy(stream);
        worked.and(waited).and(destroyed)
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        match self.device {
            Some((driver, device)) => {
                driver.write(device, self.address(Span { offset, bytes: bytes.len() as u64 }), bytes)
            }
            None => {
                map::write(self.region, offset, bytes);
                Ok(())
            }
        }
    }

    fn get(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        match self.device {
            Some((driver, device)) => driver.read(device, self.address(Span { offset, bytes: buf.len() as u64 }), buf),
            None => {
                map::read(self.region, offset, buf);
                Ok(())
            }
        }
    }

    fn flip(&self, offset: u64) -> Result<(), Error> {
        let mut byte = [0];
        self.get(offset, &mut byte)?;
        self.put(offset, &[byte[0] ^ 1])
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::fault::Action;
    use crate::gpu::{CopyBatch, DeviceInfo, EventId, ExportHandle, KernelId, KernelName, KernelSpec};
    use crate::place::MemKind;
    use crate::region::Space;

    #[derive(Clone, Copy)]
    #[repr(align(256))]
    struct Chunk(#[allow(dead_code, reason = "only its bytes are used, by address")] [u8; 256]);

    /// Zeroed memory that starts at a multiple of 256.
    pub(crate) fn region(bytes: u64, space: Space) -> Region {
        let mut chunks = vec![Chunk([0; 256]); (bytes as usize).div_ceil(256)];
        let address = Address(chunks.as_mut_ptr() as u64);
        Region::new(address, Bytes(bytes), space, Arc::new(chunks))
    }

    /// A device whose memory is the host's and whose streams do everything at once.
    #[derive(Default)]
    pub(crate) struct Fake {
        memory: Mutex<BTreeMap<u64, Region>>,
        live: AtomicU64,
        pub(crate) copies: AtomicU64,
        pub(crate) launches: AtomicU64,
        /// Kernels do nothing.
        idle: bool,
    }

    impl Fake {
        pub(crate) fn idle() -> Fake {
            Fake { idle: true, ..Fake::default() }
        }

        /// Memory known to the driver and, as far as the region tells, out of the CPU's reach.
        pub(crate) fn region(&self, bytes: u64) -> Region {
            let cpu = region(bytes, Space::Host);
            let (address, owner) = (cpu.address(), Arc::new(cpu.clone()));
            self.memory.lock().unwrap().insert(address.0, cpu);
            Region::new(address, Bytes(bytes), Space::Device { device: 0, cpu: false }, owner)
        }

        pub(crate) fn with(&self, address: Address) -> (Region, u64) {
            let memory = self.memory.lock().unwrap();
            let (start, region) = memory.range(..=address.0).next_back().expect("known memory");
            (region.clone(), address.0 - start)
        }

        /// Streams and scratch memory not given back.
        pub(crate) fn live(&self) -> u64 {
            self.live.load(Ordering::Relaxed)
        }

        fn bytes(&self, address: u64, count: u64) -> Vec<u8> {
            let (region, offset) = self.with(Address(address));
            let mut buf = vec![0; count as usize];
            map::read(&region, offset, &mut buf);
            buf
        }
    }

    impl Driver for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }
        fn devices(&self) -> Result<Vec<DeviceInfo>, Error> {
            unreachable!()
        }
        fn memory_free(&self, _: DeviceId) -> Result<Bytes, Error> {
            unreachable!()
        }
        fn enable_peer(&self, _: DeviceId, _: DeviceId) -> Result<(), Error> {
            unreachable!()
        }
        fn allocate(&self, _: DeviceId, _: MemKind, bytes: Bytes, _: bool) -> Result<Address, Error> {
            self.live.fetch_add(1, Ordering::Relaxed);
            Ok(self.region(bytes.0).address())
        }
        fn free(&self, _: DeviceId, address: Address) -> Result<(), Error> {
            self.live.fetch_sub(1, Ordering::Relaxed);
            self.memory.lock().unwrap().remove(&address.0).expect("allocated memory");
            Ok(())
        }
        fn export(&self, _: DeviceId, _: Address) -> Result<ExportHandle, Error> {
            unreachable!()
        }
        fn import(&self, _: DeviceId, _: &ExportHandle, _: Bytes) -> Result<Address, Error> {
            unreachable!()
        }
        fn close_import(&self, _: DeviceId, _: Address) -> Result<(), Error> {
            unreachable!()
        }
        fn register_host(&self, _: DeviceId, _: Address, _: Bytes) -> Result<Address, Error> {
            unreachable!()
        }
        fn unregister_host(&self, _: DeviceId, _: Address) -> Result<(), Error> {
            unreachable!()
        }
        fn stream_create(&self, _: DeviceId) -> Result<StreamId, Error> {
            self.live.fetch_add(1, Ordering::Relaxed);
            Ok(StreamId(1))
        }
        fn stream_destroy(&self, _: StreamId) -> Result<(), Error> {
            self.live.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }
        fn stream_wait(&self, _: StreamId) -> Result<(), Error> {
            Ok(())
        }
        fn event_create(&self, _: DeviceId) -> Result<EventId, Error> {
            unreachable!()
        }
        fn event_destroy(&self, _: EventId) -> Result<(), Error> {
            unreachable!()
        }
        fn event_record(&self, _: EventId, _: StreamId) -> Result<(), Error> {
            unreachable!()
        }
        fn event_elapsed_ns(&self, _: EventId, _: EventId) -> Result<f64, Error> {
            unreachable!()
        }
        fn copy(&self, _: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
            self.copies.fetch_add(1, Ordering::Relaxed);
            let ((dst, to), (src, from)) = (self.with(dst), self.with(src));
            map::copy(&dst.part(to, bytes), &src.part(from, bytes), bytes);
            Ok(())
        }
        fn copy_batch(&self, _: StreamId, _: &CopyBatch) -> Result<(), Error> {
            unreachable!("preparation copies one by one")
        }

        fn fill(&self, _: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
            let (dst, to) = self.with(dst);
            map::fill(&dst, to, bytes, byte);
            Ok(())
        }
        fn write(&self, _: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
            let (dst, to) = self.with(dst);
            map::write(&dst, to, src);
            Ok(())
        }
        fn read(&self, _: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
            let (src, from) = self.with(src);
            map::read(&src, from, dst);
            Ok(())
        }
        fn load_kernel(&self, _: DeviceId, kernel: &KernelSpec) -> Result<KernelId, Error> {
            assert_eq!(kernel.name(), KernelName::Check);
            Ok(KernelId(1))
        }
        fn launch(&self, _: StreamId, _: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
            assert!(blocks > 0 && threads > 0);
            assert_eq!(args.len(), size_of::<crate::gpu::CheckArgs>());
            self.launches.fetch_add(1, Ordering::Relaxed);
            if self.idle {
                return Ok(());
            }
            let [actual, expected, bytes, result] =
                std::array::from_fn(|i| u64::from_ne_bytes(args[i * 8..][..8].try_into().unwrap()));
            let (actual, expected) = (self.bytes(actual, bytes), self.bytes(expected, bytes));
            let differ: Vec<u64> = (0..bytes).filter(|&i| actual[i as usize] != expected[i as usize]).collect();
            let before = self.bytes(result, 16);
            let word = |i: usize| u64::from_ne_bytes(before[i * 8..][..8].try_into().unwrap());
            let after = [word(0) + differ.len() as u64, word(1).min(differ.first().copied().unwrap_or(u64::MAX))];
            let (region, offset) = self.with(Address(result));
            map::write(&region, offset, &after.map(u64::to_ne_bytes).concat());
            Ok(())
        }
        fn ns_per_tick(&self, _: DeviceId) -> Result<f64, Error> {
            unreachable!()
        }
    }

    fn check(owned: Owned<'_>) {
        let mut buf = [0; 8];
        owned.write("w", 0, &[1, 2, 3, 4]).unwrap();
        owned.copy("c", [SpanCopy { to: Span { offset: 4, bytes: 4 }, from: 0 }]).unwrap();
        owned.fill("f", 9, [Span { offset: 1, bytes: 2 }, Span { offset: 7, bytes: 0 }]).unwrap();
        owned.read("r", 0, &mut buf).unwrap();
        assert_eq!(buf, [1, 9, 9, 4, 1, 2, 3, 4]);
    }

    #[test]
    fn host_and_device_memory_are_reached_alike() {
        let (faults, fake) = (Faults::default(), Fake::default());
        check(Owned::by_cpu(&region(8, Space::Host), &faults));
        check(Owned::by_driver(&fake.region(8), &fake, DeviceId(0), &faults));
        assert_eq!(fake.live(), 0);
    }

    #[test]
    fn faults_fail_drop_and_corrupt_the_named_call() {
        let region = region(8, Space::Host);
        let fill = |faults: &Faults| {
            let owned = Owned::by_cpu(&region, faults);
            map::fill(&region, 0, Bytes(8), 0);
            owned.fill("f", 6, [Span { offset: 0, bytes: 4 }, Span { offset: 4, bytes: 4 }]).map(|()| {
                let mut buf = [0; 8];
                map::read(&region, 0, &mut buf);
                buf
            })
        };
        assert!(fill(&Faults::nth_of("f", 1, Action::Fail)).is_err());
        assert_eq!(fill(&Faults::nth_of("f", 1, Action::Drop)).unwrap(), [6, 6, 6, 6, 0, 0, 0, 0]);
        assert_eq!(fill(&Faults::nth_of("f", 1, Action::Corrupt)).unwrap(), [6, 6, 6, 6, 7, 6, 6, 6]);
        let faults = Faults::nth_of("r", 0, Action::Corrupt);
        let mut buf = [0; 2];
        Owned::by_cpu(&region, &faults).read("r", 0, &mut buf).unwrap();
        assert_eq!(buf, [7, 6]);
    }

    #[test]
    fn streams_are_given_back_on_failure() {
        let (fake, faults) = (Fake::default(), Faults::nth_of("f", 1, Action::Fail));
        let region = fake.region(8);
        let owned = Owned::by_driver(&region, &fake, DeviceId(0), &faults);
        assert!(owned.fill("f", 1, [Span { offset: 0, bytes: 1 }, Span { offset: 1, bytes: 1 }]).is_err());
        assert_eq!(fake.live(), 0);
    }

    #[test]
    #[should_panic(expected = "the CPU reaches")]
    fn memory_out_of_the_cpus_reach_is_not_taken() {
        let fake = Fake::default();
        Owned::by_cpu(&fake.region(8), &Faults::default());
    }
}
