//! The plan as text: what would run, transfer by transfer.

use super::table::{clean, left, right, table};
use crate::plan::split::shares;
use crate::plan::{Plan, PlannedTest, Transfer};
use crate::units::Bytes;

pub fn render(plan: &Plan) -> String {
    plan.tests().iter().map(test).collect()
}

fn test(test: &PlannedTest) -> String {
    let count = test.transfers.len();
    let total: u64 = test.transfers.iter().flat_map(Transfer::buffers).map(|(_, _, layout)| layout.total().0).sum();
    let options = &test.options;
    let length = match options.seconds {
        Some(seconds) => format!("{seconds} s"),
        None => format!("{} iterations", options.iterations),
    };
    let mut text = format!(
        "\n{}   {count} transfer{} of {}   {} warm-ups, {length} of {} executions   {} of buffers\n",
        clean(&if test.repeats { format!("{}, twice the footprint", test.name) } else { test.name.clone() }),
        if count == 1 { "" } else { "s" },
        test.bytes,
        options.warmups,
        options.sub_iterations,
        Bytes(total)
    );
    let columns = [
        right("#"),
        left("transfer"),
        right("bytes"),
        right("sub-executors"),
        right("K"),
        right("K x stride"),
        right("dst K"),
        right("largest cache"),
    ];
    let rows: Vec<Vec<String>> = test
        .transfers
        .iter()
        .map(|transfer| {
            let busy = shares(transfer.bytes, transfer.sub_executors, options.block_bytes).len();
            vec![
                transfer.index.to_string(),
                transfer.to_string(),
                transfer.bytes.to_string(),
                busy.to_string(),
                if transfer.srcs.is_empty() { String::new() } else { transfer.src.slices.to_string() },
                if transfer.srcs.is_empty() { String::new() } else { transfer.src.footprint().to_string() },
                if transfer.dsts.is_empty() { String::new() } else { transfer.dst.slices.to_string() },
                if transfer.cache == Bytes::ZERO { String::new() } else { transfer.cache.to_string() },
            ]
        })
        .collect();
    text += &table(&columns, &rows);
    for warning in &test.warnings {
        text += &format!("   warning: {}\n", clean(warning));
    }
    text
}
