//! The bridge from local steps to collective ones: all ranks go on, or all get the same failure.

use super::{Communicator, wire};
use crate::error::{Error, Failure, Phase, RankError};
use crate::units::Rank;

/// Ends a local step. If any rank failed, every rank gets the same `Failure`; a rank that
/// succeeded then drops its value, so values that need a collective end go through `session`.
pub fn agree<T>(comm: &dyn Communicator, phase: Phase, result: Result<T, Error>) -> Result<T, Failure> {
    let mine = result.as_ref().err();
    match (failure(comm, phase, mine), result) {
        (None, Ok(value)) => Ok(value),
        (None, Err(error)) => unreachable!("a failed rank makes a failure: {error}"),
        (Some(failure), _) => Err(failure),
    }
}

/// The failure that all ranks share, if any rank brings an error.
pub fn failure(comm: &dyn Communicator, phase: Phase, mine: Option<&Error>) -> Option<Failure> {
    let host = comm.watch().host().to_owned();
    let parts = wire::gather(comm, &mine.map(|error| (host, error.clone())));
    let failure = parts.map(|parts| {
        let ranks: Vec<RankError> = parts
            .into_iter()
            .enumerate()
            .filter_map(|(rank, part)| part.map(|(host, error)| RankError { rank: Rank(rank as u32), host, error }))
            .collect();
        (!ranks.is_empty()).then_some(Failure { phase, ranks })
    });
    wire::broadcast(comm, failure)
}

/// A step that only rank 0 takes; the others wait for its outcome.
pub fn on_rank_0<T>(
    comm: &dyn Communicator,
    phase: Phase,
    step: impl FnOnce() -> Result<T, Error>,
) -> Result<Option<T>, Failure> {
    let result = if comm.rank().0 == 0 { step().map(Some) } else { Ok(None) };
    agree(comm, phase, result)
}
