//! The rules that the text of the project keeps, as ARCHITECTURE.md states them under "Invariants".

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Phases of a run: each may use itself, the earlier ones and the foundation.
const PHASES: &[&str] = &["config", "world", "plan", "memory", "exec", "prepare", "measure", "verify", "report"];

/// Used by every phase, uses none.
const FOUNDATION: &[&str] = &["comm", "gpu", "stats", "region", "place", "clock", "units", "error", "fault"];

/// May use everything: the pipeline, and the edge of the process that starts it.
const TOP: &[&str] = &["main", "lib", "cli", "session"];

/// Where the order is broken on purpose: who, what, why.
const EXCEPTIONS: &[(&str, &str, &str)] =
    &[("world", "memory::map", "ranks find out by opening each other's memory whether they share it")];

/// Modules that do no I/O, read no clock, and see neither communicator nor driver.
const PURE: &[&str] = &["config", "plan", "stats", "report", "units"];

/// The part of a pure module that writes, since someone has to.
const WRITERS: &[&str] = &["src/report/write.rs"];

/// What a pure module may not name.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "Instant",
    "SystemTime",
    "println",
    "eprintln",
    "Communicator",
    "Driver",
];

/// Modules where `unsafe` lives: device runtimes, host mappings, CPU copy loops, MPI windows.
const UNSAFE: &[&str] = &["src/gpu", "src/memory/map", "src/exec/cpu/loops", "src/comm/window"];

/// Files of tests and of what tests are fed with, by name; compiled for tests only.
const TEST_FILES: &[&str] = &["/tests.rs", "/fixtures.rs"];

/// Crates that one file, or one folder, wraps for all others.
const WRAPPED: &[(&str, &str)] = &[
    ("mpi", "src/comm/mpi.rs"),
    ("bincode", "src/comm/wire.rs"),
    ("hip_sys", "src/gpu/hip/ffi.rs"),
    ("cudarc", "src/gpu/cuda/ffi.rs"),
    ("libloading", "src/gpu/"),
];

/// A file that has outgrown one idea.
const LINES_MAX: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|err| panic!("{path}: {err}"))
}

/// Every Rust file under `folder`, relative to the root.
fn rust_files(folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).expect("the folder is there") {
            let entry = entry.expect("the folder can be read");
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                files.push(path.to_str().expect("names are UTF-8").to_owned());
            }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "{folder} holds no Rust file");
    files
}

/// The code of a file without its tests: a path (`std::fs::File`) or a word, each with its line.
///
/// A group in a `use` gives one path for each member.
struct Names(Vec<(String, usize)>);

impl Names {
    fn of(file: &str) -> Names {
        if TEST_FILES.iter().any(|name| file.ends_with(name)) {
            return Names(Vec::new());
        }
        let code: TokenStream = read(file).parse().unwrap_or_else(|err| panic!("{file} is not Rust: {err}"));
        Names::of_code(code)
    }

    fn of_code(code: TokenStream) -> Names {
        let mut names = Names(Vec::new());
        names.collect(code, "");
        names
    }

    /// `prefix` is the path that the members of a group continue.
    fn collect(&mut self, code: TokenStream, prefix: &str) {
        let tokens: Vec<TokenTree> = code.into_iter().collect();
        let (mut i, mut path) = (0, prefix.to_owned());
        while let Some(token) = tokens.get(i) {
            if let Some(length) = test_item(&tokens[i..]) {
                i += length;
                continue;
            }
            let continues = is_colons(&tokens[i + 1..]);
            match token {
                TokenTree::Ident(word) => {
                    path.push_str(&word.to_string());
                    if !continues {
                        self.0.push((std::mem::replace(&mut path, prefix.to_owned()), word.span().start().line));
                    }
                }
                TokenTree::Group(group) => {
                    self.collect(group.stream(), &path);
                    path = prefix.to_owned();
                }
                _ => path = prefix.to_owned(),
            }
            if continues && matches!(token, TokenTree::Ident(_)) {
                path.push_str("::");
                i += 2;
            }
            i += 1;
        }
    }

    /// Lines where `name` stands: as a whole path, or as its beginning, or as its last part.
    fn lines_of(&self, name: &str) -> Vec<usize> {
        let is_it =
            |path: &str| path == name || path.starts_with(&format!("{name}::")) || path.ends_with(&format!("::{name}"));
        self.0.iter().filter(|(path, _)| is_it(path)).map(|(_, line)| *line).collect()
    }
}

fn is_colons(tokens: &[TokenTree]) -> bool {
    let colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == ':');
    colon(tokens.first()) && colon(tokens.get(1))
}

/// Tokens of an item under `#[cfg(test)]`, if one starts here.
fn test_item(tokens: &[TokenTree]) -> Option<usize> {
    let [TokenTree::Punct(hash), TokenTree::Group(attribute), rest @ ..] = tokens else { return None };
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    if hash.as_char() != '#' || text != "cfg(test)" {
        return None;
    }
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(body) => body.delimiter() == Delimiter::Brace,
        TokenTree::Punct(end) => end.as_char() == ';',
        _ => false,
    };
    Some(2 + rest.iter().position(ends).map_or(rest.len(), |last| last + 1))
}

/// The top-level module that a file of `src` belongs to.
fn module_of(file: &str) -> &str {
    let inside = file.strip_prefix("src/").expect("a file of src");
    inside.split_once('/').map_or_else(|| inside.trim_end_matches(".rs"), |(module, _)| module)
}

/// Whether code of module `user` may name `path` (without `crate::`).
fn may_use(user: &str, path: &str) -> bool {
    let used = path.split("::").next().unwrap_or(path);
    let place = |module| PHASES.iter().position(|phase| *phase == module);
    let foundation = |module| FOUNDATION.contains(&module);
    let excepted = EXCEPTIONS
        .iter()
        .any(|(who, what, _)| *who == user && (path == *what || path.starts_with(&format!("{what}::"))));
    if user == used || TOP.contains(&user) || foundation(used) || excepted {
        return true;
    }
    matches!((place(user), place(used)), (Some(user), Some(used)) if used < user)
}

/// Fails with every broken rule at once.
#[track_caller]
fn expect_none(broken: Vec<String>) {
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

/// Checks every file of `src` by its names.
#[track_caller]
fn check_sources(broken_by: impl Fn(&str, &Names) -> Vec<String>) {
    expect_none(rust_files("src").iter().flat_map(|file| broken_by(file, &Names::of(file))).collect());
}

#[test]
fn names_are_found_in_code_and_not_in_tests_or_text() {
    let code = r#"
        //! std::env
        use crate::{memory::{self, Address}, plan::MemKind};
        #[cfg(test)] use crate::report::Results;
        fn f() -> std::fs::File { crate::comm::hello(); "unsafe"; g::<crate::exec::Clock>() }
        #[cfg(test)] mod tests { fn g() { unsafe { mpi::initialize() } } }
        fn h(x: mpi::Rank) {}
    "#;
    let names = Names::of_code(code.parse().expect("it is Rust"));
    let used: Vec<&str> = names.0.iter().filter_map(|(path, _)| path.strip_prefix("crate::")).collect();
    assert_eq!(used, ["memory::self", "memory::Address", "plan::MemKind", "comm::hello", "exec::Clock"]);
    assert_eq!(names.lines_of("std::fs").len(), 1);
    assert_eq!(names.lines_of("mpi").len(), 1);
    for absent in ["unsafe", "std::env", "Results", "crate::mpi", "fs"] {
        assert!(names.lines_of(absent).is_empty(), "{absent}");
    }
}

#[test]
fn the_order_of_the_phases_is_told_apart() {
    assert!(may_use("plan", "config::options::Options"));
    assert!(may_use("plan", "units::Bytes"));
    assert!(may_use("session", "report::text"));
    assert!(may_use("world", "memory::map::HostMap"));
    assert!(!may_use("plan", "exec::Clock"));
    assert!(!may_use("units", "config::Config"));
    assert!(!may_use("gpu", "memory::map::Mapping"));
    assert!(!may_use("report", "session::run"));
}

#[test]
fn every_source_file_says_its_one_idea_first() {
    let files = rust_files("src").into_iter().chain(rust_files("tests")).chain(["build.rs".to_owned()]);
    let idea =
        |file: &String| read(file).lines().next().is_some_and(|line| line.starts_with("//! ") && line.len() > 12);
    expect_none(
        files.filter(|file| !idea(file)).map(|file| format!("{file}: the first line is not `//! ...`")).collect(),
    );
}

#[test]
fn no_file_has_outgrown_one_idea() {
    let files = rust_files("src").into_iter().chain(rust_files("tests"));
    let lines = files.map(|file| (read(&file).lines().count(), file));
    expect_none(lines.filter(|(n, _)| *n > LINES_MAX).map(|(n, file)| format!("{file}: {n} lines")).collect());
}

#[test]
fn modules_use_earlier_phases_and_the_foundation_only() {
    check_sources(|file, names| {
        let user = module_of(file);
        let known = [PHASES, FOUNDATION, TOP].iter().any(|list| list.contains(&user));
        let mut broken = Vec::new();
        if !known {
            broken.push(format!("{file}: {user} has no place in the map of modules"));
        }
        for (path, line) in &names.0 {
            let used = path.strip_prefix("crate::").or_else(|| path.strip_prefix("tb_mpi::"));
            if let Some(used) = used.filter(|used| !may_use(user, used)) {
                broken.push(format!("{file}:{line}: {user} may not use {used}"));
            }
        }
        broken
    });
}

#[test]
fn no_path_climbs_out_of_its_module() {
    check_sources(|file, names| {
        // In src/a/mod.rs one `super` is the crate, in src/a/b.rs two are.
        let folders = file.matches('/').count();
        let depth = if file.ends_with("/mod.rs") { folders - 1 } else { folders };
        let climb = "super::".repeat(depth.max(1));
        let climbs = names.0.iter().filter(|(path, _)| path.starts_with(&climb));
        climbs.map(|(path, line)| format!("{file}:{line}: write {path} as crate::...")).collect()
    });
}

#[test]
fn every_exception_has_a_user() {
    let all: Vec<(String, Names)> =
        rust_files("src").into_iter().map(|file| (file.clone(), Names::of(&file))).collect();
    let used = |who: &str, what: &str| {
        let mut files = all.iter().filter(|(file, _)| module_of(file) == who);
        files.any(|(_, names)| !names.lines_of(&format!("crate::{what}")).is_empty())
    };
    let unused = EXCEPTIONS.iter().filter(|(who, what, _)| !used(who, what));
    expect_none(unused.map(|(who, what, _)| format!("{who} does not use {what}: take the exception out")).collect());
}

#[test]
fn one_file_names_each_wrapped_crate() {
    check_sources(|file, names| {
        let foreign = WRAPPED.iter().filter(|(_, home)| !file.starts_with(home));
        let begins = |name: &str| {
            let path = format!("{name}::");
            let found = names.0.iter().find(|(used, _)| used.starts_with(&path));
            found.map(|(used, line)| format!("{file}:{line}: {used} is for the file that wraps {name}"))
        };
        foreign.filter_map(|(name, _)| begins(name)).collect()
    });
}

#[test]
fn unsafe_stays_inside_its_fence() {
    check_sources(|file, names| {
        let inside = |rest: &str| rest == ".rs" || rest.starts_with('/');
        let fenced = UNSAFE.iter().any(|module| file.strip_prefix(module).is_some_and(inside));
        let lines = if fenced { Vec::new() } else { names.lines_of("unsafe") };
        lines.into_iter().map(|line| format!("{file}:{line}: unsafe outside its fence")).collect()
    });
}

#[test]
fn pure_modules_do_no_io_and_read_no_clock() {
    check_sources(|file, names| {
        if !PURE.contains(&module_of(file)) || WRITERS.contains(&file) {
            return Vec::new();
        }
        let found = IMPURE.iter().flat_map(|name| names.lines_of(name).into_iter().map(move |line| (name, line)));
        found.map(|(name, line)| format!("{file}:{line}: {name} in a pure module")).collect()
    });
}

#[test]
fn errors_are_not_unwrapped() {
    check_sources(|file, names| {
        let lines = names.lines_of("unwrap").into_iter();
        lines.map(|line| format!("{file}:{line}: unwrap: say with expect which invariant holds")).collect()
    });
}

/// What stands at the top level, ignored files aside.
fn top_level() -> BTreeSet<String> {
    let git = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let listed = Command::new("git").args(git).current_dir(root()).output();
    if let Some(out) = listed.ok().filter(|out| out.status.success()) {
        let names = String::from_utf8(out.stdout).expect("names are UTF-8");
        let there = |name: &&str| root().join(name).exists();
        return names.lines().filter(there).filter_map(|name| name.split('/').next()).map(str::to_owned).collect();
    }
    // A copy of the files without its history.
    let ignored = format!(".git\n{}", read(".gitignore"));
    let entries = fs::read_dir(root()).expect("the root can be read").flatten();
    let names = entries.map(|entry| entry.file_name().into_string().expect("names are UTF-8"));
    names.filter(|name| !ignored.lines().any(|line| line.trim_matches('/') == name)).collect()
}

#[test]
fn the_map_names_the_top_level_and_every_folder() {
    let map = read("ARCHITECTURE.md");
    let mut broken = Vec::new();
    for name in top_level() {
        let folder = format!("`{name}/");
        if !map.contains(&format!("`{name}`")) && !map.contains(&folder) {
            broken.push(format!("{name}: ARCHITECTURE.md does not name it at the top level"));
        }
    }
    for file in rust_files("src").into_iter().filter(|file| !TEST_FILES.iter().any(|name| file.ends_with(name))) {
        let folder = Path::new(&file).parent().expect("a file has a folder");
        let folder = folder.strip_prefix("src").expect("a file of src").display().to_string();
        if !folder.is_empty() && !map.contains(&format!("`{folder}/`")) {
            broken.push(format!("src/{folder}/: ARCHITECTURE.md does not name it"));
        }
    }
    broken.dedup();
    expect_none(broken);
}
