//! An in-order queue of an emulated device: one worker thread that runs what was queued.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

use super::kernels;
use super::ledger::Ledger;
use crate::clock::now_ns;
use crate::error::Error;
use crate::gpu::{CheckArgs, DeviceId, LatchArgs, TransferArgs, TransferVariant};

/// A mark in a queue, stamped with the host's clock when it is passed.
#[derive(Debug)]
pub struct Mark {
    pub device: DeviceId,
    /// Recorded and not yet passed.
    pending: AtomicU32,
    passed_ns: AtomicU64,
}

impl Mark {
    pub fn new(device: DeviceId) -> Mark {
        Mark { device, pending: AtomicU32::new(0), passed_ns: AtomicU64::new(0) }
    }

    /// When the mark was passed, or `None` if it was not yet.
    pub fn passed_ns(&self) -> Option<u64> {
        if self.pending.load(Ordering::Acquire) != 0 {
            return None;
        }
        Some(self.passed_ns.load(Ordering::Acquire)).filter(|ns| *ns != 0)
    }

    fn pass(&self) {
        self.passed_ns.store(now_ns(), Ordering::Release);
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a queue runs. Addresses were checked against the ledger when they were queued, and stay
/// mapped: an address is given up only after every queue has been drained.
pub enum Operation {
    Copy { dst: u64, src: u64, bytes: usize },
    Fill { dst: u64, byte: u8, bytes: usize },
    Transfer { variant: TransferVariant, args: TransferArgs, blocks: u32 },
    Check { args: CheckArgs },
    Latch { args: LatchArgs },
    Mark(Arc<Mark>),
}

#[derive(Default)]
struct State {
    operations: VecDeque<Operation>,
    queued: u64,
    done: u64,
    closing: bool,
    /// The first since the last `wait`.
    failure: Option<Error>,
}

struct Shared {
    device: DeviceId,
    ledger: Arc<RwLock<Ledger>>,
    state: Mutex<State>,
    arrived: Condvar,
    finished: Condvar,
}

impl Shared {
    /// A poisoned state is still consistent: it is only changed by single steps.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some(operation) = state.operations.pop_front() {
                drop(state);
                // A panic that the hook lets live must not leave `wait` waiting.
                let result = catch_unwind(AssertUnwindSafe(|| self.run(operation)));
                let result = result.unwrap_or_else(|_| Err(Error::new("an emulated stream panicked")));
                state = self.state();
                state.done += 1;
                if let Err(err) = result {
                    state.failure.get_or_insert(err);
                }
                self.finished.notify_all();
            } else if state.closing {
                return;
            } else {
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn run(&self, operation: Operation) -> Result<(), Error> {
        match operation {
            Operation::Copy { dst, src, bytes } => {
                let src = std::ptr::with_exposed_provenance::<u8>(src as usize);
                let dst = std::ptr::with_exposed_provenance_mut::<u8>(dst as usize);
                // SAFETY: both ranges were found in the ledger when this was queued and stay mapped
                // until the queue is drained (see `Operation`); they may overlap.
                unsafe { std::ptr::copy(src, dst, bytes) };
                Ok(())
            }
            Operation::Fill { dst, byte, bytes } => {
                let dst = std::ptr::with_exposed_provenance_mut::<u8>(dst as usize);
                // SAFETY: as for a copy.
                unsafe { std::ptr::write_bytes(dst, byte, bytes) };
                Ok(())
            }
            Operation::Transfer { variant, args, blocks } => {
                kernels::transfer(&self.ledger, self.device, &variant, &args, blocks)
            }
            Operation::Check { args } => kernels::check(&self.ledger, self.device, &args),
            Operation::Latch { args } => kernels::latch(&self.ledger, self.device, &args),
            Operation::Mark(mark) => {
                mark.pass();
                Ok(())
            }
        }
    }
}

/// A stream. Closed and joined when dropped.
pub struct Queue {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    pub fn new(device: DeviceId, serial: u64, ledger: Arc<RwLock<Ledger>>) -> Result<Queue, Error> {
        let shared = Arc::new(Shared {
            device,
            ledger,
            state: Mutex::default(),
            arrived: Condvar::new(),
            finished: Condvar::new(),
        });
        let worker = std::thread::Builder::new().name(format!("device {} stream {serial}", device.0));
        let worker = worker.spawn({
            let shared = Arc::clone(&shared);
            move || shared.work()
        });
        let worker = worker.map_err(|err| Error::from(err).context("start the thread of an emulated stream"))?;
        Ok(Queue { shared, worker: Mutex::new(Some(worker)) })
    }

    pub fn device(&self) -> DeviceId {
        self.shared.device
    }

    /// # Errors
    /// If the queue was closed.
    pub fn push(&self, operation: Operation) -> Result<(), Error> {
        let mut state = self.shared.state();
        if state.closing {
            return Err(Error::new("the stream was destroyed"));
        }
        if let Operation::Mark(mark) = &operation {
            mark.pending.fetch_add(1, Ordering::AcqRel);
        }
        state.operations.push_back(operation);
        state.queued += 1;
        self.shared.arrived.notify_one();
        Ok(())
    }

    /// Waits for everything queued until now, and leaves its failures to `wait`.
    pub fn drain(&self) {
        drop(self.drained());
    }

    fn drained(&self) -> MutexGuard<'_, State> {
        let state = self.shared.state();
        let target = state.queued;
        self.shared.finished.wait_while(state, |state| state.done < target).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for everything queued until now.
    ///
    /// # Errors
    /// The first failure since the last wait.
    pub fn wait(&self) -> Result<(), Error> {
        self.drained().failure.take().map_or(Ok(()), Err)
    }

    /// Runs what is queued, takes nothing more, and ends the worker.
    pub fn close(&self) -> Result<(), Error> {
        self.shared.state().closing = true;
        self.shared.arrived.notify_one();
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if worker.is_some_and(|worker| worker.join().is_err()) {
            return Err(Error::new("the thread of an emulated stream panicked"));
        }
        self.shared.state().failure.take().map_or(Ok(()), Err)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Err(err) = self.close() {
            tracing::warn!("stream of device {}: {err}", self.device().0);
        }
    }
}
