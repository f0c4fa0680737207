//! Shows that the ranks are one job of one build, before anything is decoded.

use super::Communicator;
use super::launcher::Launcher;
use super::wire;
use crate::error::{Error, Failure, Phase, RankError};
use crate::units::Rank;

/// Fixed layout for all versions: magic, wire version, processes, launcher's count, expected
/// ranks (0 = not said), what is to be done, then three texts padded with zeros.
const TEXTS: [usize; 3] = [32, 32, 64];
const NUMBERS: usize = 5;
const MAGIC: &[u8; 8] = b"tb-mpi\0\n";
const SIZE: usize = MAGIC.len() + NUMBERS * 4 + TEXTS[0] + TEXTS[1] + TEXTS[2];

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub wire: u32,
    /// Processes in this process's own view.
    pub processes: u32,
    /// What the launcher's environment says, 0 = nothing.
    pub launched: u32,
    /// `--expect-ranks`, 0 = not given.
    pub expected: u32,
    /// 0 = run, 1 = plan: ranks that were asked for different things would wait for each other.
    pub command: u32,
    pub version: String,
    pub git: String,
    pub host: String,
}

impl Hello {
    pub fn of_this_build(
        host: &str,
        processes: u32,
        launcher: Option<&Launcher>,
        expected: Option<u32>,
        command: u32,
    ) -> Hello {
        Hello {
            wire: wire::VERSION,
            processes,
            launched: launcher.map_or(0, |launcher| launcher.size),
            expected: expected.unwrap_or(0),
            command,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git: env!("TB_GIT").to_owned(),
            host: host.to_owned(),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [self.wire, self.processes, self.launched, self.expected, self.command] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for (text, room) in [&self.version, &self.git, &self.host].into_iter().zip(TEXTS) {
            let mut padded = text.as_bytes()[..text.len().min(room)].to_vec();
            padded.resize(room, 0);
            bytes.extend_from_slice(&padded);
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Hello> {
        if bytes.len() != SIZE || !bytes.starts_with(MAGIC) {
            return None;
        }
        let mut rest = &bytes[MAGIC.len()..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head
        };
        let mut number = || u32::from_le_bytes(take(4).try_into().expect("four bytes"));
        let (wire, processes, launched, expected, command) = (number(), number(), number(), number(), number());
        let mut text = |room| String::from_utf8_lossy(take(room)).trim_end_matches('\0').to_owned();
        Some(Hello {
            wire,
            processes,
            launched,
            expected,
            command,
            version: text(TEXTS[0]),
            git: text(TEXTS[1]),
            host: text(TEXTS[2]),
        })
    }

    fn build(&self) -> String {
        format!("tb-mpi {} ({}, wire {})", self.version, self.git, self.wire)
    }
}

/// Says hello; on success every rank knows every rank's host name.
///
/// # Errors
/// The same on every rank: builds differ, or the job is not the one that was launched.
pub fn greet(comm: &dyn Communicator, mine: &Hello, launcher: Option<&Launcher>) -> Result<Vec<String>, Failure> {
    // An answer is raw bytes too: a zero and the encoded host names, or the text of the refusal.
    let answer = comm.gather(mine.to_bytes()).map(|all| {
        let hellos: Vec<Option<Hello>> = all.iter().map(|bytes| Hello::from_bytes(bytes)).collect();
        match refusal(&hellos, launcher) {
            Some(text) => text.into_bytes(),
            None => {
                let hosts: Vec<String> = hellos.into_iter().flatten().map(|hello| hello.host).collect();
                [vec![0], wire::encode(&hosts)].concat()
            }
        }
    });
    let answer = comm.broadcast(answer.unwrap_or_default());
    match answer.split_first() {
        Some((0, hosts)) => Ok(wire::decode(hosts).expect("ranks of one build understand each other")),
        _ => {
            let error = Error::rejected(String::from_utf8_lossy(&answer).into_owned());
            Err(Failure {
                phase: Phase::Hello,
                ranks: vec![RankError { rank: Rank(0), host: mine.host.clone(), error }],
            })
        }
    }
}

/// Why the job cannot run, seen from rank 0.
fn refusal(hellos: &[Option<Hello>], launcher: Option<&Launcher>) -> Option<String> {
    let Some(first) = hellos[0].as_ref() else { return Some("error: rank 0 does not understand itself".into()) };
    let mut others: Vec<String> = Vec::new();
    for (rank, hello) in hellos.iter().enumerate() {
        match hello {
            None => others.push(format!("  rank {rank}: not a tb-mpi that this build understands")),
            Some(hello) if hello.build() != first.build() => {
                others.push(format!("  {}   rank {rank} ({})", hello.build(), hello.host));
            }
            Some(_) => {}
        }
    }
    if !others.is_empty() {
        const SHOWN: usize = 8;
        let more = others.len().saturating_sub(SHOWN);
        others.truncate(SHOWN);
        let more = if more > 0 { format!("\n  and {more} more ranks") } else { String::new() };
        return Some(format!(
            "error: ranks run different builds (hello)\n  {}   rank 0 ({})\n{}{more}\n  help: start the same file on every host",
            first.build(),
            first.host,
            others.join("\n"),
        ));
    }
    let name = match launcher {
        Some(launcher) => format!("{} ({} = {})", launcher.name, launcher.variable, launcher.size),
        None => "the launcher".to_owned(),
    };
    if first.launched != 0 && first.launched != first.processes {
        return Some(format!(
            "error: {name} started {} processes, but this job has {} (hello)\n  help: {}",
            first.launched,
            first.processes,
            if first.processes == 1 {
                "the launcher belongs to another MPI than this program, so every process believes to be alone: use the mpirun of the MPI it was built with, or srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); with --ranks N start a single process"
            } else {
                "start the program once per rank"
            }
        ));
    }
    if let Some(rank) = hellos.iter().flatten().position(|hello| hello.command != first.command) {
        return Some(format!("error: rank {rank} was asked for another command than rank 0 (run or plan) (hello)"));
    }
    if let Some(hello) =
        hellos.iter().flatten().find(|hello| hello.expected != 0 && hello.expected != hellos.len() as u32)
    {
        let ranks = if hellos.len() == 1 { "rank" } else { "ranks" };
        return Some(format!(
            "error: --expect-ranks {}, but the job has {} {ranks} (hello)",
            hello.expected,
            hellos.len()
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello::of_this_build("n1", 2, None, None, 0)
    }

    #[test]
    fn hellos_survive_the_wire() {
        let hello = Hello { launched: 3, expected: 4, ..hello() };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello.clone()));
        assert_eq!(hello.to_bytes().len(), SIZE);
        let long = Hello { host: "x".repeat(200), ..hello };
        assert_eq!(Hello::from_bytes(&long.to_bytes()).unwrap().host.len(), 64);
    }

    #[test]
    fn different_builds_are_named_by_version() {
        let other = Hello { version: "9.9.9".into(), host: "n2".into(), wire: 7, ..hello() };
        let text = refusal(&[Some(hello()), Some(other)], None).unwrap();
        assert!(text.contains("tb-mpi 9.9.9") && text.contains("rank 1 (n2)") && text.contains("wire 7"), "{text}");
        assert!(text.contains(env!("CARGO_PKG_VERSION")), "{text}");
    }

    #[test]
    fn a_hello_of_another_layout_is_refused_without_decoding() {
        let text = refusal(&[Some(hello()), Hello::from_bytes(b"something else")], None).unwrap();
        assert!(text.contains("rank 1"), "{text}");
    }

    #[test]
    fn single_rank_jobs_of_one_launch_are_refused() {
        let alone = Hello { processes: 1, launched: 4, ..hello() };
        let text =
            refusal(&[Some(alone)], Some(&Launcher { name: "srun", variable: "SLURM_NTASKS", size: 4 })).unwrap();
        assert!(text.contains("srun (SLURM_NTASKS = 4) started 4 processes, but this job has 1"), "{text}");
        assert_eq!(refusal(&[Some(Hello { processes: 1, launched: 1, ..hello() })], None), None);
    }

    #[test]
    fn the_expected_count_is_compared() {
        assert!(refusal(&[Some(Hello { expected: 3, ..hello() }), Some(hello())], None).is_some());
        assert!(refusal(&[Some(Hello { expected: 2, ..hello() }), Some(hello())], None).is_none());
    }
}
