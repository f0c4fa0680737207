//! Compares every rank's own settings with rank 0's, and words the disagreement.

use std::collections::BTreeMap;

use super::options::find;
use super::settings::{Difference, Settings};
use crate::units::Rank;

/// One message about the first key that differs, or nothing. `others` are by rank, rank 0 included.
pub fn disagreement(reference: &Settings, others: &[(String, Vec<Difference>)]) -> Option<String> {
    // Each rank lists its keys with `src_rotate_bytes` first: it sizes every rank's buffers.
    let mut differing: Vec<&str> = Vec::new();
    for difference in others.iter().flat_map(|(_, list)| list) {
        if !differing.contains(&difference.key.as_str()) {
            differing.push(&difference.key);
        }
    }
    let rotation = differing.iter().position(|key| *key == "data.src_rotate_bytes").unwrap_or(0);
    if rotation > 0 {
        differing.swap(0, rotation);
    }
    let key = *differing.first()?;
    let setting = reference.get(key);

    // Rank 0's value first, then one line for each other value.
    let mut lines: Vec<((String, String), Vec<Rank>)> =
        vec![((setting.value.clone(), setting.from.to_string()), vec![])];
    for (rank, (_, list)) in others.iter().enumerate() {
        let theirs = list.iter().find(|difference| difference.key == key);
        let line = theirs
            .map_or_else(|| lines[0].0.clone(), |theirs| (theirs.mine.value.clone(), theirs.mine.from.to_string()));
        match lines.iter_mut().find(|(known, _)| *known == line) {
            Some((_, ranks)) => ranks.push(Rank(rank as u32)),
            None => lines.push((line, vec![Rank(rank as u32)])),
        }
    }
    let who: Vec<String> = lines.iter().map(|(_, ranks)| describe_ranks(ranks, others)).collect();
    let value_width = lines.iter().map(|((value, _), _)| value.chars().count()).max().unwrap_or(0);
    let who_width = who.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    let name = key.rsplit('.').next().unwrap_or(key);
    let mut text = format!("error: ranks disagree on {name} (settle, before any allocation)\n");
    for (((value, from), _), who) in lines.iter().zip(&who) {
        text.push_str(&format!("  {value:value_width$}  {who:who_width$}  from {from}\n"));
    }
    let also: Vec<&str> = differing[1..].to_vec();
    if !also.is_empty() {
        text.push_str(&format!("  they also differ in: {}\n", also.join(", ")));
    }
    let variable = find(key).map_or(key, |opt| opt.env);
    text.push_str(&format!(
        "  help: set it in the config file, or pass the variable to every rank (Open MPI: -x {variable})"
    ));
    Some(text)
}

/// "rank 0 (n1)", "ranks 1-7 (n2..n8)", "ranks 1, 3, 5-6 (n2)".
fn describe_ranks(ranks: &[Rank], others: &[(String, Vec<Difference>)]) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank.0 => *last = rank.0,
            _ => spans.push((rank.0, rank.0)),
        }
    }
    let spans: Vec<String> =
        spans.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    let mut hosts: BTreeMap<&str, usize> = BTreeMap::new();
    for rank in ranks {
        let next = hosts.len();
        hosts.entry(others[rank.0 as usize].0.as_str()).or_insert(next);
    }
    let mut hosts: Vec<_> = hosts.into_iter().collect();
    hosts.sort_by_key(|(_, order)| *order);
    let hosts = match hosts.as_slice() {
        [(only, _)] => (*only).to_owned(),
        [(first, _), .., (last, _)] => format!("{first}..{last}"),
        [] => String::new(),
    };
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {} ({hosts})", spans.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::{FileLayer, differences, effective};

    /// Settings by rank, as one variable each.
    fn check(variables: &[(&str, &str)]) -> Option<String> {
        let settings: Vec<Settings> = variables
            .iter()
            .map(|(name, value)| {
                let env = |asked: &str| (asked == *name).then(|| (*value).to_owned());
                effective(&FileLayer::default(), &env, &[]).unwrap()
            })
            .collect();
        let others: Vec<_> =
            settings.iter().enumerate().map(|(rank, s)| (format!("n{rank}"), differences(s, &settings[0]))).collect();
        disagreement(&settings[0], &others)
    }

    #[test]
    fn equal_settings_are_no_disagreement() {
        assert_eq!(check(&[("SRC_ROTATE_BYTES", "64M"), ("SRC_ROTATE_BYTES", "65536K")]), None);
    }

    #[test]
    fn both_values_ranks_and_hosts_are_named() {
        let variables = [("SRC_ROTATE_BYTES", "64M"), ("SRC_ROTATE_BYTES", "128M"), ("SRC_ROTATE_BYTES", "128M")];
        insta::assert_snapshot!(check(&variables).unwrap(), @r"
        error: ranks disagree on src_rotate_bytes (settle, before any allocation)
          64 MiB   rank 0 (n0)         from environment SRC_ROTATE_BYTES=64M
          128 MiB  ranks 1-2 (n1..n2)  from environment SRC_ROTATE_BYTES=128M
          help: set it in the config file, or pass the variable to every rank (Open MPI: -x SRC_ROTATE_BYTES)
        ");
    }

    #[test]
    fn a_variable_that_one_rank_lacks_is_shown_as_the_default() {
        let text = check(&[("HOME", "/"), ("NUM_ITERATIONS", "7")]).unwrap();
        assert!(text.contains("from default") && text.contains("from environment NUM_ITERATIONS=7"), "{text}");
    }
}
