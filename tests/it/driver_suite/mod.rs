//! What every driver must do; for emulated devices, and for real ones where they are.

mod executors;
mod kernels;
mod memory;
mod peaks;
mod processes;

use std::sync::Arc;

use tb_mpi::gpu::Driver;
use tb_mpi::gpu::owner::{Buffer, Device};
use tb_mpi::place::MemKind;
use tb_mpi::units::Bytes;

/// How a suite makes a driver, and what it may assume of it.
#[derive(Clone, Copy)]
struct Kind {
    new_driver: fn() -> Arc<dyn Driver>,
    /// Free memory that may be gone after a test: a runtime's own pools, and other users of a device.
    slack: Bytes,
}

/// A fresh driver and its first device.
struct Rig {
    driver: Arc<dyn Driver>,
    devices: Vec<Arc<Device>>,
    kind: Kind,
}

impl Rig {
    fn device(&self) -> &Arc<Device> {
        &self.devices[0]
    }

    fn buffer(&self, bytes: u64) -> Buffer {
        self.device().allocate(MemKind::Device, Bytes(bytes), false).unwrap()
    }

    /// The driver of another rank.
    fn neighbour(&self) -> Rig {
        Rig::new(self.kind)
    }

    fn new(kind: Kind) -> Rig {
        let driver = (kind.new_driver)();
        let devices = Device::all(&driver).unwrap();
        Rig { driver, devices, kind }
    }

    fn free(&self) -> Vec<Bytes> {
        self.devices.iter().map(|device| device.memory_free().unwrap()).collect()
    }

    #[track_caller]
    fn assert_free(&self, before: &[Bytes]) {
        for (now, before) in self.free().into_iter().zip(before) {
            assert!(now.0.abs_diff(before.0) <= self.kind.slack.0, "{now} are free, {before} were");
        }
    }
}

/// Runs one test, which must leave all memory free.
fn run(kind: Kind, test: fn(&Rig)) {
    let rig = Rig::new(kind);
    let before = rig.free();
    test(&rig);
    rig.assert_free(&before);
}

macro_rules! test {
    ($kind:path, [$($attribute:tt)*], $area:ident::$test:ident) => {
        #[test]
        $($attribute)*
        fn $test() {
            super::run($kind, super::$area::$test);
        }
    };
}

macro_rules! tests {
    ($kind:path, $attributes:tt: $($area:ident::$test:ident),+ $(,)?) => {
        $(test!($kind, $attributes, $area::$test);)+
    };
}

/// What every driver must do.
macro_rules! driver_suite {
    ($kind:path, [$($attribute:tt)*]) => {
        tests!($kind, [$($attribute)*]:
            memory::devices_are_described,
            memory::allocations_are_accounted_for,
            memory::out_of_memory_names_the_bytes_asked_and_free,
            memory::every_kind_of_memory_is_usable,
            memory::host_memory_of_the_runtime_is_reached_by_all,
            memory::data_survive_every_way_of_moving_them,
            memory::host_memory_is_copied_where_it_is_registered,
            memory::a_stream_works_in_order,
            memory::events_follow_the_order_of_their_stream,
            memory::an_event_that_was_not_recorded_has_no_time,
            memory::exported_memory_is_the_same_memory_elsewhere,
            memory::memory_of_its_own_is_not_imported,
            memory::an_import_is_checked_against_what_was_exported,
            memory::what_is_gone_cannot_be_freed_or_used,
            memory::freeing_waits_for_what_is_queued,
            kernels::the_transfer_kernel_adds_sources_into_every_destination,
            kernels::the_transfer_kernel_rotates_both_sides,
            kernels::a_launch_that_makes_no_sense_is_refused,
            kernels::the_check_kernel_counts_differences_and_finds_the_first,
            kernels::the_latch_kernel_waits_for_its_flag_and_no_longer_than_told,
            executors::the_kernel_executor_rotates_over_samples_and_sub_iterations,
            executors::every_kernel_variant_moves_the_same_data,
            executors::the_copy_engine_rotates_over_samples_and_sub_iterations,
            executors::the_batched_copy_engine_moves_every_share,
            executors::bulk_copies_rotate_over_samples_and_sub_iterations,
            executors::bulk_copies_into_one_place_keep_their_order,
            executors::the_kernel_executor_runs_on_the_xcc_that_is_asked_for,
            executors::the_kernel_executor_keeps_to_a_mask_where_there_are_masks,
            executors::the_copy_engine_copies_without_compute_units_where_it_can,
            executors::executors_read_memory_of_another_rank,
            executors::a_flush_reads_all_of_its_scratch_memory_again_and_again,
        );

        #[test]
        $($attribute)*
        fn another_process_imports_exported_memory() {
            let this = concat!(module_path!(), "::another_process_imports_exported_memory");
            super::processes::import_in_another_process($kind, this);
        }
    };
}

mod host {
    use super::*;
    use tb_mpi::gpu::host::HostDriver;

    const HOST: Kind = Kind { new_driver, slack: Bytes::ZERO };

    fn new_driver() -> Arc<dyn Driver> {
        Arc::new(HostDriver::new(2, Bytes::mib(256)))
    }

    driver_suite!(HOST, []);

    // What only emulated devices notice: real ones corrupt memory, or break.
    tests!(HOST, []:
        memory::accesses_out_of_bounds_are_refused,
        memory::freeing_imported_memory_is_reported,
        kernels::the_transfer_kernel_reports_memory_that_it_may_not_touch,
        peaks::nothing_is_claimed,
    );
}

/// On the machine's AMD devices, or on emulated ones under AMD's own runtime, by `ci/run`: started
/// with the folder of a stand-in for the driver interface (`libhsakmt.so.1`) in LD_LIBRARY_PATH.
#[cfg(feature = "hip")]
mod hip {
    use super::*;
    use tb_mpi::gpu::hip::HipDriver;

    const HIP: Kind = Kind { new_driver, slack: Bytes::mib(64) };

    fn new_driver() -> Arc<dyn Driver> {
        Arc::new(HipDriver::open().expect("these tests need an AMD device, or ci/run with TB_HIP_EMULATOR"))
    }

    driver_suite!(HIP, [#[ignore = "needs an AMD device or a stand-in for its driver: ci/run with TB_HIP_EMULATOR"]]);
}

/// On the machine's NVIDIA devices, by `ci/gpu`.
mod cuda {
    use super::*;
    use tb_mpi::gpu::cuda::CudaDriver;

    const CUDA: Kind = Kind { new_driver, slack: Bytes::mib(160) };

    fn new_driver() -> Arc<dyn Driver> {
        Arc::new(CudaDriver::open().expect("these tests need an NVIDIA device: run them by ci/gpu"))
    }

    driver_suite!(CUDA, [#[ignore = "needs an NVIDIA device: ci/gpu"]]);

    tests!(CUDA, [#[ignore = "needs an NVIDIA device: ci/gpu"]]: peaks::limits_and_clocks_are_known);
}
