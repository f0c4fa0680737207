//! Writes a table: the one place that aligns columns, by the width of the data and nothing else.

use comfy_table::{CellAlignment, ContentArrangement, Table as Grid, presets};

/// Blanks in front of every line of a test.
pub const INDENT: &str = "   ";

/// Blanks between two columns.
const GAP: u16 = 3;

/// A column: its header, and on which side its cells are flush.
pub struct Column {
    header: String,
    side: CellAlignment,
}

pub fn left(header: impl Into<String>) -> Column {
    Column { header: header.into(), side: CellAlignment::Left }
}

pub fn right(header: impl Into<String>) -> Column {
    Column { header: header.into(), side: CellAlignment::Right }
}

/// Indented lines of the table; columns without any cell are left out, with their header.
pub fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    for row in rows {
        assert_eq!(row.len(), columns.len(), "a cell for every column");
    }
    let used: Vec<usize> = (0..columns.len()).filter(|&c| rows.iter().any(|row| !row[c].is_empty())).collect();
    if used.is_empty() {
        return String::new();
    }
    let mut grid = Grid::new();
    grid.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    grid.set_header(used.iter().map(|&c| clean(&columns[c].header)).collect::<Vec<_>>());
    grid.add_rows(rows.iter().map(|row| used.iter().map(|&c| clean(&row[c])).collect::<Vec<_>>()));
    for (column, &c) in grid.column_iter_mut().zip(&used) {
        column.set_padding((0, GAP));
        column.set_cell_alignment(columns[c].side);
    }
    grid.trim_fmt().lines().map(|line| format!("{INDENT}{line}\n")).collect()
}

/// Cells of two parts whose first parts stand flush right among each other.
pub fn paired(cells: &[(String, String)]) -> Vec<String> {
    let width = cells.iter().map(|(first, _)| first.chars().count()).max().unwrap_or(0);
    cells.iter().map(|(first, second)| format!("{first:>width$}  {second}").trim_end().to_owned()).collect()
}

/// Text of others (names, messages) without what would break a line or steer a terminal.
pub fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { clean.extend(c.escape_default()) } else { clean.push(c) }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    #[test]
    fn columns_are_as_wide_as_their_data() {
        let rows = [row(&["1 MiB", "18.9", "x"]), row(&["caf\u{e9} \u{2013}", "9.00", ""])];
        let text = table(&[left("size"), right("GB/s"), left("")], &rows);
        assert_eq!(text, "   size     GB/s\n   1 MiB    18.9   x\n   caf\u{e9} \u{2013}   9.00\n");
    }

    #[test]
    fn nothing_is_cut_or_wrapped() {
        let long = "x".repeat(5000);
        assert_eq!(table(&[left("a"), left("b")], &[row(&[&long, "end"])]).lines().count(), 2);
        assert!(table(&[left("a"), left("b")], &[row(&[&long, "end"])]).contains(&format!("{long}   end")));
    }

    #[test]
    fn columns_without_data_vanish() {
        assert_eq!(table(&[left("a"), left("b"), left("c")], &[row(&["1", "", "3"])]), "   a   c\n   1   3\n");
        assert_eq!(table(&[left("a")], &[]), "");
    }

    #[test]
    fn a_name_cannot_break_the_table() {
        assert_eq!(table(&[left("a")], &[row(&["x\ny\u{1b}[2J"])]), "   a\n   x\\ny\\u{1b}[2J\n");
    }

    #[test]
    fn pairs_stand_flush() {
        let cells = [
            ("100".to_owned(), "a".to_owned()),
            ("9.5".to_owned(), String::new()),
            ("1000".to_owned(), "b".to_owned()),
        ];
        assert_eq!(paired(&cells), [" 100  a", " 9.5", "1000  b"]);
    }
}
