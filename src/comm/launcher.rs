//! What the launcher's environment says about the job: how many processes it thinks it started.

/// A launcher seen in the environment of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    pub name: &'static str,
    /// The variable that says so.
    pub variable: &'static str,
    /// Processes that it started together.
    pub size: u32,
}

/// Launchers by what they set, most specific first: an `mpirun` inside a Slurm step knows better.
const LAUNCHERS: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_SIZE", "Open MPI mpirun"),
    ("PMI_SIZE", "a PMI launcher (MPICH mpirun, srun --mpi=pmi2)"),
    ("PALS_SIZE", "PALS"),
    ("FLUX_JOB_SIZE", "Flux"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
];

/// Reads the environment through `env`.
pub fn seen(env: &dyn Fn(&str) -> Option<String>) -> Option<Launcher> {
    let number = |name: &str| env(name).and_then(|value| value.trim().parse::<u32>().ok());
    for (variable, name) in LAUNCHERS {
        if let Some(size) = number(variable) {
            return Some(Launcher { name, variable, size });
        }
    }
    // Older Slurm sets only the job's count; without a step this is a batch script or a shell.
    match (number("SLURM_NTASKS"), env("SLURM_STEP_ID").or_else(|| env("SLURM_STEPID"))) {
        (Some(size), Some(_)) => Some(Launcher { name: "srun", variable: "SLURM_NTASKS", size }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(env: &[(&str, &str)], expected: Option<u32>) {
        let get = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        assert_eq!(seen(&get).map(|launcher| launcher.size), expected, "{env:?}");
    }

    #[test]
    fn the_innermost_launcher_counts() {
        check(&[], None);
        check(&[("OMPI_COMM_WORLD_SIZE", "4"), ("SLURM_STEP_NUM_TASKS", "1")], Some(4));
        check(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "2"), ("SLURM_JOB_ID", "1"), ("SLURM_STEP_ID", "0")], Some(4));
        check(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "1")], None);
        check(&[("PMI_SIZE", "8"), ("PMI_RANK", "1")], Some(8));
        check(&[("PMI_SIZE", "many")], None);
    }
}
