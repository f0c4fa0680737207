//! Compares a slice with its expected data where it lies: on the device.

use std::sync::Arc;

use crate::error::Error;
use crate::fault::{Faults, Hit};
use crate::gpu::{CheckArgs, DeviceId, Driver, KernelId, KernelName, StreamId};
use crate::place::MemKind;
use crate::prepare::data::BLOCK;
use crate::prepare::owned::{Owned, Span};
use crate::region::Address;
use crate::units::Bytes;

use super::compare::{Expected, Wanted};

/// Launches between two waits, each with a result of its own; few in tests, so that they exceed it.
const BATCH: usize = if cfg!(test) { 2 } else { 256 };
/// Bytes of a result: mismatching bytes, first offset.
const RESULT: usize = 16;
const THREADS: u32 = 256;
/// The kernel strides over its grid, so this is a limit of blocks, not of bytes.
const BLOCKS_MAX: u64 = 4096;

/// The check kernel of a device, with the memory it needs.
pub struct DeviceCheck {
    kernel: KernelId,
    stream: Stream,
    expected: Scratch,
    results: Scratch,
}

/// A comparison in flight: where its block lies and how it must begin.
struct Launched {
    span: Span,
    begin: [u8; 4],
    hit: Hit,
}

impl DeviceCheck {
    /// For slices of at most `largest` bytes; takes as much of the device, at most 4 MiB, until it is dropped.
    ///
    /// # Errors
    /// No kernel, no memory, or the injected failure of `prepare_check`.
    pub fn new(
        driver: Arc<dyn Driver>,
        device: DeviceId,
        largest: Bytes,
        faults: &Faults,
    ) -> Result<DeviceCheck, Error> {
        let prepare = || {
            faults.hit("prepare_check")?;
            Ok(DeviceCheck {
                kernel: driver.load_kernel(device, &KernelName::Check.into())?,
                stream: Stream { id: driver.stream_create(device)?, driver: driver.clone() },
                expected: Scratch::new(&driver, device, largest.min(Bytes(BLOCK)))?,
                results: Scratch::new(&driver, device, Bytes((BATCH * RESULT) as u64))?,
            })
        };
        prepare().map_err(|err: Error| err.context(format!("prepare the check kernel of device {}", device.0)))
    }

    /// Wrong bytes in `bytes` bytes at `offset`, as far as the kernel sees; 0 = all is right.
    ///
    /// A kernel that did not run must not pass for one that found nothing. So the first element
    /// of every expected block is uploaded inverted: the kernel must count its 4 bytes, and the
    /// host compares that one element itself.
    pub(super) fn compare(
        &self,
        memory: Owned<'_>,
        expected: &mut Expected<'_>,
        wanted: Wanted,
        offset: u64,
        bytes: Bytes,
    ) -> Result<u64, Error> {
        let block = expected.block();
        let mut launched = Vec::with_capacity(BATCH);
        let mut wrong = 0;
        for at in (0..bytes.0).step_by(block as usize) {
            let span = Span { offset: offset + at, bytes: block.min(bytes.0 - at) };
            let (data, fresh) = expected.get(wanted, at / 4, span.bytes);
            let begin: [u8; 4] = data[..4].try_into().expect("an element has four bytes");
            if fresh || launched.len() == BATCH {
                // Kernels in flight still read the block that comes next.
                wrong += self.collect(memory, &mut launched)?;
            }
            if fresh {
                self.expected.write(data)?;
                self.expected.write(&begin.map(|byte| !byte))?;
            }
            if launched.is_empty() {
                let empty = [0u64.to_ne_bytes(), u64::MAX.to_ne_bytes()].concat();
                self.results.write(&empty.repeat(BATCH))?;
            }
            let hit = memory.faults().hit("check")?;
            if hit != Hit::Drop {
                self.launch(memory.address(span), span.bytes, launched.len())?;
            }
            launched.push(Launched { span, begin, hit });
        }
        Ok(wrong + self.collect(memory, &mut launched)?)
    }

    fn launch(&self, actual: Address, bytes: u64, slot: usize) -> Result<(), Error> {
        let args = CheckArgs {
            actual: actual.0,
            expected: self.expected.address.0,
            bytes,
            result: self.results.address.0 + (slot * RESULT) as u64,
        };
        let blocks = bytes.div_ceil(u64::from(THREADS) * 16).clamp(1, BLOCKS_MAX) as u32;
        self.stream.driver.launch(self.stream.id, self.kernel, blocks, THREADS, &args_bytes(&args))
    }

    /// Waits for what is in flight; wrong bytes in it.
    fn collect(&self, memory: Owned<'_>, launched: &mut Vec<Launched>) -> Result<u64, Error> {
        if launched.is_empty() {
            return Ok(0);
        }
        self.stream.driver.stream_wait(self.stream.id)?;
        let mut results = vec![0; launched.len() * RESULT];
        self.results.read(&mut results)?;
        let mut wrong = 0;
        for (Launched { span, begin, hit }, result) in launched.drain(..).zip(results.chunks_exact(RESULT)) {
            let count = u64::from_ne_bytes(result[..8].try_into().expect("a count has eight bytes"));
            let count = if hit == Hit::Corrupt { count ^ 1 } else { count };
            let mut actual = [0; 4];
            memory.read("read_first", span.offset, &mut actual)?;
            wrong += match (actual == begin, count) {
                (true, 0) => return Err(Error::new("the check kernel counted nothing: it did not run")),
                (true, 4) => 0,
                (true, count) => count.abs_diff(4),
                (false, count) => count.max(1),
            };
        }
        Ok(wrong)
    }
}

/// The struct as it lies in memory: four u64, no padding.
fn args_bytes(args: &CheckArgs) -> Vec<u8> {
    let CheckArgs { actual, expected, bytes, result } = *args;
    [actual, expected, bytes, result].map(u64::to_ne_bytes).concat()
}

struct Stream {
    id: StreamId,
    driver: Arc<dyn Driver>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Err(err) = self.driver.stream_destroy(self.id) {
            tracing::warn!("stream of the check kernel: {err}");
        }
    }
}

struct Scratch {
    address: Address,
    device: DeviceId,
    driver: Arc<dyn Driver>,
}

impl Scratch {
    fn new(driver: &Arc<dyn Driver>, device: DeviceId, bytes: Bytes) -> Result<Scratch, Error> {
        let address = driver.allocate(device, MemKind::Device, bytes, false)?;
        Ok(Scratch { address, device, driver: driver.clone() })
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        self.driver.write(self.device, self.address, bytes)
    }

    fn read(&self, buf: &mut [u8]) -> Result<(), Error> {
        self.driver.read(self.device, self.address, buf)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(err) = self.driver.free(self.device, self.address) {
            tracing::warn!("scratch memory of the check kernel: {err}");
        }
    }
}
