//! What every driver must do; run for the emulated devices first.

mod executors;
mod kernels;
mod memory;

use std::sync::Arc;

use tb_mpi::gpu::Driver;
use tb_mpi::gpu::host::HostDriver;
use tb_mpi::gpu::owner::{Buffer, Device};
use tb_mpi::place::MemKind;
use tb_mpi::units::Bytes;

/// A fresh driver and its first device.
struct Rig {
    driver: Arc<dyn Driver>,
    devices: Vec<Arc<Device>>,
    new_driver: fn() -> Arc<dyn Driver>,
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
        Rig::new(self.new_driver)
    }

    fn new(new_driver: fn() -> Arc<dyn Driver>) -> Rig {
        let driver = new_driver();
        let devices = Device::all(&driver).unwrap();
        Rig { driver, devices, new_driver }
    }
}

/// Runs one test, which must leave all memory free.
fn run(new_driver: fn() -> Arc<dyn Driver>, test: fn(&Rig)) {
    let rig = Rig::new(new_driver);
    let free = |rig: &Rig| rig.devices.iter().map(|device| device.memory_free().unwrap()).collect::<Vec<Bytes>>();
    let before = free(&rig);
    test(&rig);
    assert_eq!(free(&rig), before, "the test left memory allocated");
}

macro_rules! tests {
    ($new_driver:path: $($area:ident::$test:ident),+ $(,)?) => {
        $(#[test]
        fn $test() {
            super::run($new_driver, super::$area::$test);
        })+
    };
}

/// The whole suite for the driver that `$new_driver` makes.
macro_rules! driver_suite {
    ($new_driver:path) => {
        tests!($new_driver:
            memory::devices_are_described,
            memory::allocations_are_accounted_for,
            memory::out_of_memory_names_the_bytes_asked_and_free,
            memory::data_survive_every_way_of_moving_them,
            memory::a_stream_works_in_order,
            memory::events_follow_the_order_of_their_stream,
            memory::an_event_that_was_not_recorded_has_no_time,
            memory::exported_memory_is_the_same_memory_elsewhere,
            memory::memory_of_its_own_is_not_imported,
            memory::an_import_is_checked_against_what_was_exported,
            memory::accesses_out_of_bounds_are_refused,
            memory::what_is_gone_cannot_be_freed_or_used,
            memory::freeing_waits_for_what_is_queued,
            memory::freeing_imported_memory_is_reported,
            kernels::the_transfer_kernel_adds_sources_into_every_destination,
            kernels::the_transfer_kernel_rotates_both_sides,
            kernels::the_transfer_kernel_reports_memory_that_it_may_not_touch,
            kernels::the_check_kernel_counts_differences_and_finds_the_first,
            kernels::the_latch_kernel_waits_for_its_flag_and_no_longer_than_told,
            executors::the_kernel_executor_rotates_over_samples_and_sub_iterations,
            executors::every_kernel_variant_moves_the_same_data,
            executors::the_copy_engine_rotates_over_samples_and_sub_iterations,
            executors::executors_read_memory_of_another_rank,
        );
    };
}

mod host {
    use super::*;
    use std::process::Command;
    use tb_mpi::gpu::ExportHandle;

    fn new_driver() -> Arc<dyn Driver> {
        Arc::new(HostDriver::new(2, Bytes::mib(16)))
    }

    driver_suite!(new_driver);

    /// Runs itself once more as the process that imports.
    #[test]
    fn another_process_imports_exported_memory() {
        const HANDLE: &str = "TB_TEST_HANDLE";
        let rig = Rig::new(new_driver);
        if let Ok(digits) = std::env::var(HANDLE) {
            let handle = digits.split(',').map(|byte| byte.parse().unwrap()).collect();
            let imported = rig.device().import(&ExportHandle(handle), Bytes(4096)).unwrap().region();
            let mut seen = [0; 4096];
            rig.device().read(imported.address(), &mut seen).unwrap();
            seen.iter_mut().for_each(|byte| *byte += 1);
            rig.device().write(imported.address(), &seen).unwrap();
            return;
        }
        let buffer = rig.device().allocate(MemKind::Device, Bytes(4096), true).unwrap();
        rig.device().write(buffer.address(), &[7; 4096]).unwrap();
        let digits: Vec<String> = buffer.export().unwrap().0.iter().map(u8::to_string).collect();
        let this = "driver_suite::host::another_process_imports_exported_memory";
        let mut importer = Command::new(std::env::current_exe().unwrap());
        let output = importer.args(["--exact", this]).env(HANDLE, digits.join(",")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let mut seen = [0; 4096];
        rig.device().read(buffer.address(), &mut seen).unwrap();
        assert_eq!(seen, [8; 4096]);
    }
}
