//! Reads what else went on while a test ran, and judges whether it touched the figures.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::exec::cpu::THREAD_NAME;
use crate::gpu::sensors::{self, SLOWDOWNS, Sensors};
use crate::world::machine::Machine;

/// More of the CPU time taken by other guests than this: a sample that lost it is off by more than
/// the precision that a summary of some ten samples has.
const STEAL_MAX: f64 = 0.01;

/// Clock ticks of steal below which the counter's own step (10 ms) is all that there is to see.
const STEAL_TICKS_MIN: u64 = 2;

/// Part of the time of executor threads that they waited for a CPU: the bound of steal, since it does
/// the same to a sample.
const WAIT_MAX: f64 = STEAL_MAX;

/// Involuntary switches a second that a host without contention has too, by the kernel's own threads.
/// Two threads that share a CPU are switched at every slice, which is some hundred times a second.
const SWITCHES_PER_SECOND_MAX: f64 = 50.0;

/// Samples that one switch each would have to touch before a summary of them is touched: the median
/// stands against a tenth, its interval just so.
const SAMPLES_PER_SWITCH: u64 = 10;

/// What one rank saw around the timed loop of a test; whatever could not be read is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Circumstances {
    pub rank: u32,
    /// Between the two readings.
    pub seconds: f64,
    pub devices: Vec<DeviceCircumstances>,
    /// Part of the time of the rank's CPUs that went to other guests of the hypervisor.
    pub steal: Option<f64>,
    /// The host's load average over a minute, before.
    pub load: Option<f64>,
    /// Of all threads of the process.
    pub involuntary_switches: Option<u64>,
    /// Those of threads of CPU executors among them.
    pub executor_switches: Option<u64>,
    /// Part of the time that threads of CPU executors could have run, and waited for a CPU.
    pub executor_wait: Option<f64>,
    /// Why transfers that this rank times by the host's clock are marked, if so.
    pub contended: Option<String>,
}

/// A device before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceCircumstances {
    pub device: u32,
    pub sm_mhz: [Option<u32>; 2],
    pub memory_mhz: [Option<u32>; 2],
    /// What held the clocks down before or after.
    pub reasons: Option<Vec<String>>,
    /// Why transfers that touch the device are marked, if so.
    pub throttled: Option<String>,
}

/// One reading of everything.
pub struct Reading {
    at: Instant,
    ticks: Option<Ticks>,
    load: Option<f64>,
    threads: Option<Threads>,
    devices: Vec<Sensors>,
}

type Threads = BTreeMap<u32, Thread>;

/// What the scheduler did to a thread so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Thread {
    /// Of a CPU executor.
    executor: bool,
    switches: u64,
    /// Nanoseconds on a CPU, and waiting for one, where the kernel counts them.
    ran_waited_ns: Option<[u64; 2]>,
}

/// Time of some CPUs, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    all: u64,
    steal: u64,
}

/// Costs some files and some calls of the vendor's library for each device; not for the timed part.
pub fn read(machine: &Machine) -> Reading {
    let root = Path::new("/");
    let text = |file: &str| fs::read_to_string(root.join(file)).ok();
    let cpus: BTreeSet<u32> = machine.inventory.cpus_allowed().into_iter().collect();
    Reading {
        at: Instant::now(),
        ticks: text("proc/stat").and_then(|text| ticks(&text, &cpus)),
        load: text("proc/loadavg").and_then(|text| load(&text)),
        threads: threads(root),
        devices: machine.inventory.devices.iter().map(sensors::read).collect(),
    }
}

/// What lies between two readings of one rank that took `samples` samples.
pub fn between(rank: u32, before: &Reading, after: &Reading, samples: u64) -> Circumstances {
    let seconds = (after.at - before.at).as_secs_f64();
    let ticks = before.ticks.zip(after.ticks).map(|(before, after)| Ticks {
        all: after.all.saturating_sub(before.all),
        steal: after.steal.saturating_sub(before.steal),
    });
    let threads: Option<Vec<Thread>> = before.threads.as_ref().zip(after.threads.as_ref()).map(|(before, after)| {
        // A thread that is gone took its counts along, and one that came since began at 0.
        let since = |(number, thread): (&u32, &Thread)| thread.since(before.get(number));
        after.iter().map(since).collect()
    });
    let executors: Option<Vec<Thread>> =
        threads.as_ref().map(|threads| threads.iter().copied().filter(|thread| thread.executor).collect());
    let switches = |threads: &Vec<Thread>| threads.iter().map(|thread| thread.switches).sum();
    let by_executors = executors.as_ref().map(switches);
    let wait = executors.as_deref().and_then(wait);
    let devices = before.devices.iter().zip(&after.devices).zip(0..);
    Circumstances {
        rank,
        seconds,
        devices: devices.map(|((before, after), device)| device_between(device, before, after)).collect(),
        steal: ticks.and_then(steal),
        load: before.load,
        involuntary_switches: threads.as_ref().map(switches),
        executor_switches: by_executors,
        executor_wait: wait,
        contended: contended(ticks, by_executors.map(|switches| (switches, wait)), seconds, samples),
    }
}

fn device_between(device: u32, before: &Sensors, after: &Sensors) -> DeviceCircumstances {
    let mask = match (before.reasons, after.reasons) {
        (None, None) => None,
        (before, after) => Some(before.unwrap_or(0) | after.unwrap_or(0)),
    };
    let mut slowed: BTreeSet<&str> = mask.into_iter().flat_map(sensors::slowdowns).collect();
    // A slowdown that began and ended in between.
    for (before, after) in before.slowdown_ns.iter().zip(&after.slowdown_ns) {
        let counted = SLOWDOWNS.iter().zip(before.iter().zip(after));
        slowed.extend(counted.filter(|(_, (before, after))| after > before).map(|(word, _)| *word));
    }
    DeviceCircumstances {
        device,
        sm_mhz: [before.sm_mhz, after.sm_mhz],
        memory_mhz: [before.memory_mhz, after.memory_mhz],
        reasons: mask.map(sensors::words),
        throttled: (!slowed.is_empty()).then(|| slowed.into_iter().collect::<Vec<_>>().join(", ")),
    }
}

impl Thread {
    fn since(&self, before: Option<&Thread>) -> Thread {
        let before = before.copied().unwrap_or_default();
        let [ran_before, waited_before] = before.ran_waited_ns.unwrap_or_default();
        let times = |[ran, waited]: [u64; 2]| [ran.saturating_sub(ran_before), waited.saturating_sub(waited_before)];
        Thread {
            executor: self.executor,
            switches: self.switches.saturating_sub(before.switches),
            ran_waited_ns: self.ran_waited_ns.map(times),
        }
    }
}

/// Waiting over running and waiting; none where nothing is told, or nothing ran.
fn wait(threads: &[Thread]) -> Option<f64> {
    let times: Vec<[u64; 2]> = threads.iter().map(|thread| thread.ran_waited_ns).collect::<Option<_>>()?;
    let sum = |which: usize| times.iter().map(|times| times[which] as f64).sum::<f64>();
    let (ran, waited) = (sum(0), sum(1));
    (ran + waited > 0.0).then(|| waited / (ran + waited))
}

fn steal(ticks: Ticks) -> Option<f64> {
    (ticks.all > 0).then(|| ticks.steal as f64 / ticks.all as f64)
}

/// Whether others took enough of the CPUs to be seen in the figures, and what tells it. `switched`
/// are involuntary switches of executor threads, with the part of their time that they waited.
fn contended(ticks: Option<Ticks>, switched: Option<(u64, Option<f64>)>, seconds: f64, samples: u64) -> Option<String> {
    let mut reasons = Vec::new();
    if let Some(ticks) = ticks
        && let Some(part) = steal(ticks).filter(|part| *part > STEAL_MAX && ticks.steal >= STEAL_TICKS_MIN)
    {
        reasons.push(format!("{:.1} % of the CPU time went to other guests", part * 100.0));
    }
    if let Some((switches, wait)) = switched
        && switches > 1
        && switches.saturating_mul(SAMPLES_PER_SWITCH) >= samples
        && switches as f64 > SWITCHES_PER_SECOND_MAX * seconds
        // Giving the CPU away while waiting for the start counts as a switch, and costs no time.
        && wait.is_none_or(|part| part > WAIT_MAX)
    {
        let waited = wait.map(|part| format!(", waiting for a CPU {:.1} % of their time", part * 100.0));
        let waited = waited.unwrap_or_default();
        reasons.push(format!("{switches} involuntary switches of its threads in {seconds:.3} s{waited}"));
    }
    // A rank that timed nothing has nothing that could be touched.
    (samples > 0 && !reasons.is_empty()).then(|| reasons.join(", "))
}

/// `/proc/stat` (proc_stat(5)): `cpu3 user nice system idle iowait irq softirq steal guest guest_nice`;
/// the last two are part of the first two.
fn ticks(stat: &str, cpus: &BTreeSet<u32>) -> Option<Ticks> {
    const STEAL: usize = 7;
    let mut sum = Ticks::default();
    let mut found = false;
    for line in stat.lines() {
        let mut words = line.split_ascii_whitespace();
        let number = words.next().and_then(|word| word.strip_prefix("cpu")?.parse().ok());
        if number.is_some_and(|number| cpus.contains(&number)) {
            let fields: Vec<u64> = words.take(STEAL + 1).filter_map(|word| word.parse().ok()).collect();
            sum.steal += fields.get(STEAL)?;
            sum.all += fields.iter().sum::<u64>();
            found = true;
        }
    }
    found.then_some(sum)
}

/// `/proc/loadavg`: the average over a minute comes first.
fn load(text: &str) -> Option<f64> {
    text.split_ascii_whitespace().next()?.parse().ok().filter(|load: &f64| load.is_finite())
}

/// Every thread: `nonvoluntary_ctxt_switches` of its status (proc_pid_status(5); waiting by
/// `sched_yield` counts where another thread was there to run), and its `schedstat` (Linux,
/// Documentation/scheduler/sched-stats.rst: nanoseconds on a CPU, waiting for one, and time slices).
fn threads(root: &Path) -> Option<Threads> {
    let mut threads = BTreeMap::new();
    for entry in fs::read_dir(root.join("proc/self/task")).ok()?.flatten() {
        let text = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
        // A thread may end while its turn comes.
        let Some(status) = text("status") else { continue };
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let name = value("Name:").and_then(|name| name.strip_prefix(THREAD_NAME));
        let switches = value("nonvoluntary_ctxt_switches:").and_then(|n| n.parse().ok());
        if let (Ok(number), Some(switches)) = (entry.file_name().to_string_lossy().parse(), switches) {
            let executor = name.is_some_and(|rest| rest.starts_with(' '));
            let ran_waited_ns = text("schedstat").and_then(|text| ran_waited_ns(&text));
            threads.insert(number, Thread { executor, switches, ran_waited_ns });
        }
    }
    (!threads.is_empty()).then_some(threads)
}

/// All zeros is what a kernel writes that does not count.
fn ran_waited_ns(schedstat: &str) -> Option<[u64; 2]> {
    let mut numbers = schedstat.split_ascii_whitespace().map(str::parse);
    let (ran, waited, slices) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
    (slices > 0u64).then_some([ran, waited])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded on a virtual machine with two CPUs.
    const STAT: &str = "cpu  1200 0 300 8000 20 0 10 70 5 0\n\
        cpu0 700 0 100 4000 10 0 5 20 5 0\n\
        cpu1 500 0 200 4000 10 0 5 50 0 0\n\
        intr 12345 0 0\nctxt 99\nbtime 1\n";

    #[test]
    fn ticks_are_those_of_the_ranks_own_cpus() {
        let of = |cpus: &[u32]| ticks(STAT, &cpus.iter().copied().collect());
        assert_eq!(of(&[0]), Some(Ticks { all: 4835, steal: 20 }));
        assert_eq!(of(&[0, 1]), Some(Ticks { all: 9600, steal: 70 }));
        assert_eq!(of(&[7]), None);
        assert_eq!(ticks("cpu0 1 2 3 4\n", &BTreeSet::from([0])), None, "no steal in kernels that old");
    }

    #[test]
    fn the_load_is_that_of_the_last_minute() {
        assert_eq!(load("0.52 1.20 3.40 2/345 6789\n"), Some(0.52));
        assert_eq!(load(""), None);
    }

    fn thread(executor: bool, switches: u64, ran_waited_ns: Option<[u64; 2]>) -> Thread {
        Thread { executor, switches, ran_waited_ns }
    }

    #[test]
    fn threads_are_read_as_the_kernel_writes_them() {
        let root = tempfile::tempdir().unwrap();
        for (number, switches, name, schedstat) in
            [(17, 3, "tb-mpi", "0 0 0\n"), (18, 40, "cpu 0", "90499 120 7\n"), (19, 1, "cpuset", "5\n")]
        {
            let folder = root.path().join(format!("proc/self/task/{number}"));
            fs::create_dir_all(&folder).unwrap();
            let status =
                format!("Name:\t{name}\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t{switches}\n");
            fs::write(folder.join("status"), status).unwrap();
            fs::write(folder.join("schedstat"), schedstat).unwrap();
        }
        let expected =
            [(17, thread(false, 3, None)), (18, thread(true, 40, Some([90499, 120]))), (19, thread(false, 1, None))];
        assert_eq!(threads(root.path()), Some(BTreeMap::from(expected)));
        assert_eq!(threads(&root.path().join("nowhere")), None);
        assert!(threads(Path::new("/")).is_some(), "this machine tells");
    }

    #[test]
    fn waiting_is_a_part_of_what_could_have_run() {
        let busy = |ran, waited| thread(true, 0, Some([ran, waited]));
        assert_eq!(wait(&[busy(90, 10), busy(100, 0)]), Some(0.05));
        assert_eq!(wait(&[busy(90, 10), thread(true, 0, None)]), None);
        assert_eq!(wait(&[]), None);
        assert_eq!(wait(&[busy(0, 0)]), None);
    }

    fn steal_of(all: u64, steal: u64) -> Option<Ticks> {
        Some(Ticks { all, steal })
    }

    #[test]
    fn contention_needs_more_than_a_trace() {
        let check = |ticks, switches, seconds, samples| contended(ticks, switches, seconds, samples);
        assert_eq!(check(None, None, 1.0, 10), None);
        assert_eq!(check(steal_of(1000, 10), None, 10.0, 10), None, "1 % is the limit");
        let said = check(steal_of(1000, 31), None, 10.0, 10).unwrap();
        assert_eq!(said, "3.1 % of the CPU time went to other guests");
        assert_eq!(check(steal_of(10, 1), None, 0.1, 10), None, "one tick is the step of the counter");

        assert_eq!(check(None, Some((300, None)), 10.0, 10), None, "30 a second are the kernel's own");
        let said = check(None, Some((1200, None)), 2.0, 100).unwrap();
        assert_eq!(said, "1200 involuntary switches of its threads in 2.000 s");
        assert_eq!(check(None, Some((1200, Some(0.01))), 2.0, 100), None, "they hardly waited");
        let said = check(None, Some((1200, Some(0.123))), 2.0, 100).unwrap();
        assert!(said.ends_with(", waiting for a CPU 12.3 % of their time"), "{said}");
        assert_eq!(check(None, Some((1, None)), 0.001, 5), None, "one is an accident");
        assert_eq!(check(None, Some((9, None)), 0.1, 100), None, "nine of a hundred samples at most");
        assert!(check(None, Some((10, None)), 0.1, 100).is_some());
        assert_eq!(check(steal_of(1000, 500), Some((1200, None)), 2.0, 0), None, "nothing was timed");
    }

    fn reading(at: Instant, ticks: Ticks, threads: &[(u32, Thread)], device: Sensors) -> Reading {
        let threads = Some(threads.iter().copied().collect());
        Reading { at, ticks: Some(ticks), load: Some(1.5), threads, devices: vec![device] }
    }

    #[test]
    fn two_readings_make_circumstances() {
        let start = Instant::now();
        let idle = Sensors { sm_mhz: Some(345), memory_mhz: Some(3201), reasons: Some(0x1), slowdown_ns: None };
        let busy = Sensors { sm_mhz: Some(1980), reasons: Some(0x4), ..idle.clone() };
        let before = reading(
            start,
            Ticks { all: 100, steal: 5 },
            &[(1, thread(true, 10, Some([100, 5]))), (2, thread(false, 7, None))],
            idle,
        );
        let end = start + std::time::Duration::from_secs(2);
        let after = reading(
            end,
            Ticks { all: 500, steal: 6 },
            &[(1, thread(true, 12, Some([190, 15]))), (3, thread(false, 4, None))],
            busy,
        );
        let found = between(3, &before, &after, 10);
        assert_eq!((found.rank, found.seconds, found.load), (3, 2.0, Some(1.5)));
        assert_eq!((found.steal, found.involuntary_switches), (Some(0.0025), Some(6)));
        assert_eq!((found.executor_switches, found.executor_wait), (Some(2), Some(0.1)));
        assert_eq!(found.contended, None);
        let device = &found.devices[0];
        assert_eq!(device.sm_mhz, [Some(345), Some(1980)]);
        assert_eq!(device.reasons.as_deref().unwrap(), ["idle", "software power cap"]);
        assert_eq!(device.throttled, None, "a power cap and idleness are no throttling");
    }

    #[test]
    fn heat_before_after_or_in_between_throttles() {
        let sensors = |reasons, slowdown_ns| Sensors { reasons, slowdown_ns, ..Sensors::default() };
        let check = |before, after| device_between(0, &before, &after).throttled;
        let cool = || sensors(Some(0), Some([5, 5, 5]));
        assert_eq!(check(cool(), cool()), None);
        assert_eq!(check(sensors(Some(0x40), None), cool()).unwrap(), "hardware thermal slowdown");
        assert_eq!(
            check(cool(), sensors(Some(0xa0), None)).unwrap(),
            "hardware power brake, software thermal slowdown"
        );
        assert_eq!(check(cool(), sensors(Some(0), Some([5, 9, 5]))).unwrap(), "hardware thermal slowdown");
        let unknown = device_between(0, &Sensors::default(), &Sensors::default());
        assert_eq!((unknown.reasons, unknown.throttled), (None, None));
    }
}
