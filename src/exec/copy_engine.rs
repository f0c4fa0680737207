//! Executors of copy engines, one stream a transfer; as executor `D`, with one copy a destination.

use std::sync::Arc;

use super::batch::Batch;
use super::mapped::{Reach, Sides, Slices};
use super::{BoundTransfer, Clock, Executions, SampleTimes, TransferTime, Window, Work};
use crate::clock::now_ns;
use crate::error::Error;
use crate::gpu::owner::{Device, Event, Stream};
use crate::units::Bytes;

/// A copy-engine executor ready to run samples.
pub struct Ready {
    /// First, so that its streams are waited for before what they use is given up.
    lanes: Vec<Lane>,
    no_cu: bool,
    sample: Executions,
    window: Window,
    _reach: Reach,
}

/// One transfer.
struct Lane {
    stream: Stream,
    start: Event,
    stop: Event,
    bytes: Bytes,
    src: Slices,
    dsts: Vec<Slices>,
    /// None: a call for each destination.
    batch: Option<Batch>,
}

impl Ready {
    /// Executor `D`.
    ///
    /// # Errors
    /// If a transfer has not one source and at least one destination, or the device cannot reach them.
    pub fn new(work: Work, device: &Arc<Device>) -> Result<Ready, Error> {
        Ready::with(work, device, |_| None)
    }

    /// `batch` says what a transfer moves in one call, if it does.
    pub(super) fn with(
        work: Work,
        device: &Arc<Device>,
        batch: impl Fn(&BoundTransfer) -> Option<Batch>,
    ) -> Result<Ready, Error> {
        let context = |err: Error| err.context(format!("prepare {}", work.exe));
        let (reach, sides) = Reach::new(&work.transfers, device).map_err(context)?;
        let lanes = work
            .transfers
            .iter()
            .zip(sides)
            .map(|(transfer, sides)| Lane::new(transfer, sides, batch(transfer), device));
        Ok(Ready {
            lanes: lanes.collect::<Result<_, _>>().map_err(context)?,
            no_cu: false,
            sample: Executions::default(),
            window: Window { start_ns: 0, end_ns: 0 },
            _reach: reach,
        })
    }

    /// Copies that compute units never do instead.
    pub fn without_compute_units(self) -> Ready {
        Ready { no_cu: true, ..self }
    }

    pub fn arm(&mut self, sample: Executions) -> Result<(), Error> {
        self.sample = sample;
        Ok(())
    }

    /// Queues execution by execution over all transfers, so that the last transfer does not start
    /// after the first one has ended.
    pub fn go(&mut self) -> Result<(), Error> {
        self.window.start_ns = now_ns();
        let Executions { first, count } = self.sample;
        for execution in 0..u64::from(count) {
            for lane in &mut self.lanes {
                if execution == 0 {
                    lane.stream.record(&lane.start)?;
                }
                lane.execute(first + execution, self.no_cu)?;
                if execution + 1 == u64::from(count) {
                    lane.stream.record(&lane.stop)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for every transfer, also after one has failed.
    pub fn wait(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        for lane in &self.lanes {
            result = result.and(lane.stream.wait());
        }
        self.window.end_ns = now_ns();
        result
    }

    pub fn times(&mut self) -> Result<SampleTimes, Error> {
        let transfers = self.lanes.iter().map(|lane| {
            let duration_ns = lane.stop.ns_since(&lane.start)?;
            Ok(TransferTime { duration_ns, window: self.window })
        });
        Ok(SampleTimes { executor: self.window, transfers: transfers.collect::<Result<_, Error>>()? })
    }

    pub fn clock(&self) -> Clock {
        Clock::DeviceEvent
    }
}

impl Lane {
    fn new(transfer: &BoundTransfer, sides: Sides, batch: Option<Batch>, device: &Arc<Device>) -> Result<Lane, Error> {
        let [src] = sides.srcs[..] else {
            return Err(Error::new(format!(
                "transfer {} has {} sources: a copy engine takes exactly 1",
                transfer.index,
                sides.srcs.len()
            )));
        };
        if sides.dsts.is_empty() {
            return Err(Error::new(format!("transfer {} has no destination: a copy engine needs one", transfer.index)));
        }
        Ok(Lane {
            stream: device.stream()?,
            start: device.event()?,
            stop: device.event()?,
            bytes: transfer.bytes,
            src,
            dsts: sides.dsts,
            batch,
        })
    }

    fn execute(&mut self, n: u64, no_cu: bool) -> Result<(), Error> {
        let src = self.src.slice(n);
        if let Some(batch) = &mut self.batch {
            return self.stream.copy_batch(batch.of(src, self.dsts.iter().map(|dst| dst.slice(n))));
        }
        self.dsts.iter().try_for_each(|dst| match no_cu {
            false => self.stream.copy(dst.slice(n), src, self.bytes),
            true => self.stream.copy_no_cu(dst.slice(n), src, self.bytes),
        })
    }
}
